"""Compile a C++ source of this folder on first use, and keep the result on disk for the next process.

The file name is a hash of everything the machine code depends on: the source, the headers next to it, the command,
torch's version and the processor's flags. One process compiles, others wait at a lock. A record next to the library has
its hash: a truncated or damaged one is compiled again instead of loaded. If the cache cannot be written, the
library is compiled into a private directory of the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from encore.cached_files import (
    CachedFileError,
    file_digest,
    is_intact,
    locked,
    read_record,
    warn_unwritable,
    write_cached,
    write_record,
)  # fmt: skip
from encore.folders import cache_folder, private_directory

VECTOR_FLAGS = {
    "AVX512": ("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    "AVX2": ("-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
}
"""Without them PyTorch's vector headers fall back to loops over arrays."""


class BuildError(Exception):
    """A source could not be compiled or loaded; the message says why."""


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The compiled form of `name`.cpp; raises `BuildError` without a compiler, or if it fails."""
    source = Path(__file__).with_name(f"{name}.cpp")
    command = compile_command()
    texts = (file.read_text() for file in (source, *sorted(source.parent.glob("*.h"))))
    facts = "\n".join((*texts, *command, torch.__version__, _processor_flags()))
    target = cache_folder("native") / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    try:
        if not _is_whole(target):
            with locked(target.with_suffix(".lock")):
                if not _is_whole(target):
                    target = _compile(source, command, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"{target} cannot be made or loaded: {error}") from error


def _is_whole(target: Path) -> bool:
    """Return whether the library exists, is trusted, and is as it was written."""
    try:
        record = read_record(target.with_suffix(".json"))
    except CachedFileError:
        return False
    return record.get("library") == target.name and is_intact(target, str(record.get("of_library")))


def compile_command() -> list[str]:
    """The compiler and its flags, without source and target."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    compiler = chosen or [next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), "")]
    if not compiler[0] or not shutil.which(compiler[0]):
        raise BuildError(f"there is no C++ compiler ({compiler[0] or 'c++, g++ or clang++'} is not on the path)")
    vector = VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())
    from torch.utils import cpp_extension  # here: it imports setuptools

    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    flags = ["-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-w", *vector]
    return [*compiler, *flags, *includes, *libraries, "-ltorch_cpu", "-lc10"]


def _compile(source: Path, command: list[str], target: Path) -> Path:
    """Compile a source, and keep the result as `target`, or else in the private directory; returns where it is."""
    made = Path(tempfile.mkdtemp(dir=private_directory())) / target.name
    line = [*command[:1], str(source), *command[1:], "-o", str(made)]
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        message = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise BuildError(f"the C++ compiler rejected {source.name}: {message}")
    try:
        write_cached(target, made.read_bytes())
        write_record(target.with_suffix(".json"), {"library": target.name, "of_library": file_digest(target)})
    except (OSError, CachedFileError) as error:
        warn_unwritable(target.parent, error)
        return made
    shutil.rmtree(made.parent, ignore_errors=True)
    return target


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
