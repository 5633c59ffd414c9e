"""PyTorch's vector headers, precompiled once a machine: otherwise each file of kernels takes seconds longer.

The compiled header is in a folder named after all that it depends on, with a record of its hash. One that is truncated
or damaged is compiled again. If it cannot be written, kernels are compiled with the header as text.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import tempfile
import threading
from pathlib import Path

from encore.cached_files import (
    CachedFileError,
    file_digest,
    is_intact,
    locked,
    read_record,
    take_place,
    warn_unwritable,
    write_cached,
    write_record,
)  # fmt: skip
from encore.folders import cache_folder, private_directory
from encore.lower import torch_private
from encore.lower.extension import HEADER, LoweringError
from encore.measurements import machine_key

NAME, COMPILED, RECORD = "kernels.h", "kernels.h.gch", "kernels.h.json"
_checked: set[Path] = set()
_checking = threading.Lock()


def kernel_header() -> Path:
    """The path of the header that files of kernels include, precompiled if that is possible on this machine."""
    command = torch_private.header_command(Path(NAME))
    if COMPILED not in command:  # clang's compiled headers are of no use once they are moved
        return _as_text()
    facts = "\n".join((HEADER, *command, torch_private.compiler_version()))
    folder = cache_folder(f"header-{machine_key()}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}")
    with _checking:  # hashing takes a moment: once a process is enough
        if folder not in _checked and not _is_whole(folder):
            with locked(folder / "kernels.h.lock"):
                if not _is_whole(folder) and not _compile(folder):
                    return _as_text()
        _checked.add(folder)
    return folder / NAME


def _is_whole(folder: Path) -> bool:
    """Return whether both forms are there, as they were written."""
    try:
        record = read_record(folder / RECORD)
    except CachedFileError:
        return False
    return all(is_intact(folder / name, str(record.get(name))) for name in (NAME, COMPILED))


def _compile(folder: Path) -> bool:
    """Compile the header; return whether that worked."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            source = Path(temporary) / NAME
            source.write_text(HEADER)
            command = torch_private.header_command(source)
            made = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if made.returncode:
                if "No space left" in made.stderr:
                    raise OSError(0, "no space left")
                return False
            take_place(source.with_name(COMPILED), folder / COMPILED)
            take_place(source, folder / NAME)
        write_record(folder / RECORD, {name: file_digest(folder / name) for name in (NAME, COMPILED)})
    except (OSError, CachedFileError) as error:
        warn_unwritable(folder, error)
        return False
    return True


def _as_text() -> Path:
    """The header, not compiled, in the private directory."""
    try:
        header = private_directory() / NAME
        with contextlib.suppress(FileNotFoundError):
            if header.read_text() == HEADER:
                return header
        write_cached(header, HEADER.encode())
    except OSError as error:
        raise LoweringError(f"its source cannot be written ({error})") from error
    return header
