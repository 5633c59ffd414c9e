"""The machine that numbers were measured on: what is needed to judge them, and nothing private."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from encore.devices import device_names
from encore.measurements import processor_name
from encore.units import bytes_text

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
COMPILERS = ("c++", "g++", "clang++")
REPOSITORY = Path(__file__).resolve().parents[2]
CODE = ("src", "benchmarks", "examples")
"""The folders of the repository that a number depends on."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Versions, hardware and day. No host name, no path."""

    encore: str
    commit: str
    """The commit of the repository that the package is run from, with a plus sign if files have changed since; empty
    for an installed package."""
    date: str
    """The day, in UTC."""
    torch: str
    python: str
    system: str
    processor: str
    cpu_capability: str
    """The widest vector units that PyTorch uses."""
    cores: int
    threads: int
    """How many of them PyTorch uses."""
    memory: int
    """Bytes this process may use: the machine's, or its container's if that is less."""
    compiler: str | None
    """The C++ compiler's name and version, or None."""
    cuda: tuple[str, ...]
    """Names of the CUDA devices."""


def this_machine() -> Machine:
    """Return the facts about this machine."""
    from encore import __version__

    return Machine(
        encore=__version__,
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        processor=processor_name() or platform.processor() or "unknown",
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory=_memory(),
        compiler=_compiler(),
        cuda=device_names(),
    )


def _commit() -> str:
    """The commit of the package's own repository; an installed package may be in a folder of another one."""
    if not (REPOSITORY / ".git").exists():
        return ""
    head, changes = _git("rev-parse", "--short=10", "HEAD"), _git("status", "--porcelain", "--", *CODE)
    return "" if head is None else f"{head.strip()}{'+' if changes else ''}"


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _memory() -> int:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
    return min(installed, int(limit)) if limit.isdigit() else installed


def _compiler() -> str | None:
    """The compiler of `torch.utils.cpp_extension`: CXX if it is set, else the usual names."""
    chosen = os.environ.get("CXX")
    found = next((path for name in ((chosen,) if chosen else COMPILERS) if (path := shutil.which(name))), None)
    if found is None:
        return None
    try:
        output = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else Path(found).name


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """Name and value of every fact, as text."""
    return [
        ("encore", machine.encore),
        ("commit", machine.commit or "unknown: an installed package"),
        ("date", machine.date),
        ("torch", machine.torch),
        ("python", machine.python),
        ("system", machine.system),
        ("processor", machine.processor),
        ("cpu capability", machine.cpu_capability),
        ("cores", f"{machine.cores}, {machine.threads} threads in PyTorch"),
        ("memory", bytes_text(machine.memory)),
        ("C++ compiler", machine.compiler or "none found"),
        ("CUDA devices", ", ".join(machine.cuda) or "none"),
    ]
