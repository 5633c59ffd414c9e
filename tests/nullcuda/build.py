"""Build the null device for this environment's PyTorch, and print what the environment of a process needs to have it:
`env $(python tests/nullcuda/build.py FOLDER) python ...`."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
PARTS = ("memory", "streams", "order", "kernels", "libraries")
ASKING = ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cpu.so")
"""PyTorch's libraries that call CUDA's."""
CUDA_NAME = re.compile(r"(__)?cuda[A-Z]\w*|cublas\w+|cudnn\w+|cu[A-Z]\w+")
OWN_LIBRARIES = re.compile(r"cu(Solver|File|Rand|Fft|Sparse|pti)\w*|cudaProfiler\w*")
COMPUTES = re.compile(
    r"cublas\w*([gG]em[mv]|[dD]ot|[tT]rsm|[gG]etr[fs]|[gG]els|[gG]eqrf)\w*"
    r"|cudnn(Convolution(Forward|Backward)|RNN(Forward|Backward)|BatchNormalization(Forward|Backward)|CTCLoss)\w*"
)
"""Functions of which one call is one launch on the stream of the handle, which comes first."""


def packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def symbols(library: Path, *options: str) -> set[str]:
    done = subprocess.run(["nm", *options, str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line}


def asked_for() -> set[str]:
    """What PyTorch's libraries link to, and everything that the driver's header declares: PyTorch and Triton ask the
    driver for functions by name."""
    folder = packages() / "torch" / "lib"
    linked = set().union(*(symbols(folder / name, "-D", "--undefined-only") for name in ASKING))
    header = (packages() / "nvidia" / "cu13" / "include" / "cuda.h").read_text()
    driver = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header))
    versions = {f"{name}_v2" for name in driver}
    names = {name for name in linked if CUDA_NAME.fullmatch(name) and not OWN_LIBRARIES.fullmatch(name)}
    return names | driver | versions


def generated(names: Iterable[str]) -> str:
    """Functions that succeed."""
    lines = ["#include <atomic>", '#include "device.h"', 'extern "C" {']
    for name in sorted(names):
        arguments, body = ("void** handle", "launched_by(handle)") if COMPUTES.fullmatch(name) else ("", "0")
        lines.append(f'__attribute__((visibility("default"))) int {name}({arguments}) {{ return {body}; }}')
    return "\n".join([*lines, "}"])


def build(folder: Path) -> Path:
    """Compile the library, if this PyTorch and this source have not been compiled to the folder before."""
    folder.mkdir(parents=True, exist_ok=True)
    library, newest = folder / "libnullcuda.so", max(path.stat().st_mtime for path in HERE.iterdir())
    if library.exists() and library.stat().st_mtime > newest:
        return library
    include = packages() / "nvidia"
    flags = ["-std=c++17", "-O1", "-fPIC", "-w", "-fvisibility=hidden", f"-I{HERE}"]
    flags += [f"-I{include / 'cu13' / 'include'}", f"-I{include / 'cudnn' / 'include'}"]
    objects = [folder / f"{part}.o" for part in PARTS]
    for part, made in zip(PARTS, objects, strict=True):
        subprocess.run(["g++", *flags, "-c", str(HERE / f"{part}.cpp"), "-o", str(made)], check=True)
    answered = set().union(*(symbols(made, "--defined-only") for made in objects))
    rest = folder / "generated.cpp"
    rest.write_text(generated(asked_for() - answered))
    linked = [*map(str, objects), str(rest), "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run(["g++", *flags, "-shared", *linked], check=True)
    for name in ("libcuda.so", "libcuda.so.1"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)
    return library


def environment(library: Path) -> dict[str, str]:
    """cuDNN's newer interface describes whole graphs, which this device does not read: PyTorch uses the older one."""
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TORCH_CUDNN_V8_API_DISABLED": "1",
    }


if __name__ == "__main__":
    for key, text in environment(build(Path(sys.argv[1]).resolve())).items():
        print(f"{key}={text}")
