"""Let PyTorch's CUDA build load where CUDA's libraries are not installed.

The package registry's plain wheel of PyTorch is the CUDA build, which links to gigabytes of libraries. For tests on the
CPU, libraries of the same names with the same symbols take their place, next to PyTorch's own: every function says that
there is no device.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)\w*\.so[.\d]*")
CUDA_NAME = re.compile(r"(__)?(cu|nccl|nv)[A-Za-z]\w*")
RETURNS_TEXT = re.compile(r"\w*GetErrorString|cudaGetErrorName|ncclGetLastError")
NO_DEVICE = 100
"""`cudaErrorNoDevice`, and the driver's `CUDA_ERROR_NO_DEVICE`."""


def lines(*command: object) -> Iterator[str]:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    yield from done.stdout.splitlines()


def linked(library: Path) -> set[str]:
    """The libraries that one is linked to."""
    found = (re.search(r"\(NEEDED\).*\[(.*)\]", line) for line in lines("readelf", "-d", library))
    return {match[1] for match in found if match}


def versions(library: Path) -> Iterator[tuple[str, str]]:
    """Each version of a library's symbols that one is linked to, after that library's name."""
    file = ""
    for line in lines("readelf", "-V", "-W", library):
        if named := re.search(r"File: (\S+)", line):
            file = named[1]
        elif version := re.search(r"Name: (\S+) +Flags", line):
            yield file, version[1]


def wanted(library: Path) -> Iterator[tuple[str, str]]:
    """Names of CUDA's that a library takes from others, with their version, which is empty if there is none."""
    for line in lines("nm", "-D", "--undefined-only", library):
        name, _, version = line.split()[-1].partition("@")
        if CUDA_NAME.fullmatch(name) or "nvshmem" in name:
            yield name, version


def source(names: set[str]) -> str:
    texts = [name for name in sorted(names) if RETURNS_TEXT.fullmatch(name)]
    numbers = sorted(names - set(texts))
    return "\n".join(
        [f'const char *{name}() {{ return "CUDA is not installed"; }}' for name in texts]
        + [f"int {name}() {{ return {NO_DEVICE}; }}" for name in numbers]
    )


def write_library(path: Path, names: set[str], version: str | None) -> None:
    with tempfile.TemporaryDirectory() as made:
        code, versions = Path(made, "library.c"), Path(made, "versions")
        code.write_text(source(names))
        options = ["-w", "-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
        if version:
            versions.write_text(f"{version} {{ global: *; }};\n")
            options.append(f"-Wl,--version-script={versions}")
        subprocess.run(["cc", *options, str(code), "-o", str(path)], check=True)


def build(folder: Path) -> list[str]:
    """Write the libraries that are missing into the folder of PyTorch's own, and return their names."""
    own = list(folder.glob("lib*.so*"))
    missing = {name for path in own for name in linked(path) if CUDA_LIBRARY.fullmatch(name)} - {p.name for p in own}
    version_of = {file: version for path in own for file, version in versions(path) if file in missing}
    libraries = {version_of.get(name, ""): name for name in missing}
    symbols: dict[str, set[str]] = {name: set() for name in missing}
    for path in own:
        for name, version in wanted(path):
            symbols[libraries.get(version) or libraries[""]].add(name)
    for name, names in symbols.items():
        write_library(folder / name, names, version_of.get(name))
    return sorted(missing)


if __name__ == "__main__":
    print(*build(Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"))
