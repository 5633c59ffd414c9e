"""Files that are written atomically: a full disk, an interrupt or a power cut leaves the old file or the new one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from encore.errors import OptionError, WriteError

PARTIAL = ".partial"


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write a file and return its path. An existing file is replaced once the new content is complete."""
    target = Path(path)
    check_file(target)
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_or_may_be_a_file(target):
            with replacing(target.resolve()) as file:  # where a link leads to: the link stays
                file.write(data)
        else:
            target.write_bytes(data)
    except OSError as error:
        raise _cannot_write(target, error) from error
    return target


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end, flushed to the disk, or is removed after an exception.

    Its name has the number of the process, so that two processes can write the same file. Raises the system's errors
    unchanged.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # an interrupt as well
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)  # the rename, too, survives a power cut
    finally:
        os.close(directory)


def check_file(path: Path) -> None:
    """Raise `OptionError` if a file cannot be written there: called before long work whose result it will have."""
    if not path.parent.is_dir():
        raise OptionError(f"{path} cannot be written: there is no folder {str(path.parent)!r}; create it first")
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name a file in it")
    _check_access(path, path.parent if _is_or_may_be_a_file(path) else path)


def check_folder(path: Path) -> None:
    """Raise `OptionError` if files cannot be written into this folder, which `make_folder` creates if it is missing."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise OptionError(f"{path} cannot be a folder: {there} is a file; name another one")
    _check_access(path, there)


def make_folder(path: Path) -> Path:
    """Create a folder with all above it, and return it."""
    check_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def _is_or_may_be_a_file(path: Path) -> bool:
    """Return False for a pipe or a device, which cannot be replaced."""
    return path.is_file() or not path.exists()


def _check_access(path: Path, place: Path) -> None:
    if not os.access(place, os.W_OK):
        raise OptionError(f"{path} cannot be written: {str(place)!r} may not be written to; name another place")


def _cannot_write(path: Path, error: OSError) -> WriteError:
    return WriteError(f"{path} cannot be written: {error.strerror or error}; make room, or name another place")
