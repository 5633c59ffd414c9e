"""Files that are there whole or not at all, whatever comes between: a full disk, an interrupt, a power cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from encore.errors import OptionError, WriteError

PARTIAL = ".partial"


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write a file and return its path. What stood there before stays until the new content is complete."""
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
    """A file that takes its place whole, flushed to the disk, or leaves no trace. The system's errors come as they are.

    Until then it has a name of this process alone: two that write the same file do not write into each other's.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:  # an interrupt as well
        beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)  # the name, too, is to survive a power cut
    finally:
        os.close(directory)


def check_file(path: Path) -> None:
    """Could a file be written there? Asked before long work, whose result it is to hold."""
    if not path.parent.is_dir():
        raise OptionError(f"{path} cannot be written: there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name a file in it")
    _check_access(path, path.parent if _is_or_may_be_a_file(path) else path)


def check_folder(path: Path) -> None:
    """Could files be written into this folder, which `make_folder` makes where it is not there yet?"""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise OptionError(f"{path} cannot be a folder: {there} is a file; name another one")
    _check_access(path, there)


def make_folder(path: Path) -> Path:
    """The folder, made with all above it."""
    check_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def _is_or_may_be_a_file(path: Path) -> bool:
    """Not a pipe or a device, which nothing can take the place of."""
    return path.is_file() or not path.exists()


def _check_access(path: Path, place: Path) -> None:
    if not os.access(place, os.W_OK):
        raise OptionError(f"{path} cannot be written: {str(place)!r} may not be written to; name another place")


def _cannot_write(path: Path, error: OSError) -> WriteError:
    return WriteError(f"{path} cannot be written: {error.strerror or error}; make room, or name another place")
