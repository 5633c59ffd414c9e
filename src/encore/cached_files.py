"""Files of the cache: read only if no other user could have written them, written atomically, and checked by a hash.

A record is a JSON object with the SHA-256 of its other fields in one field. A library or header has its SHA-256 in a
record. So a file that is truncated, mixed up or damaged is treated as missing. Processes share the cache without
waiting for each other: a file is replaced by a rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from encore.folders import reason_of_status, shown
from encore.whole_files import PARTIAL

SHA256 = "sha256"


class CachedFileError(Exception):
    """A file of the cache is missing, damaged or not trusted; its content must be recomputed."""


def read_record(path: Path) -> dict[str, Any]:
    """Read a record that `write_record` wrote; raise `CachedFileError` for anything else."""
    with _opened(path) as descriptor, _opened_file(descriptor) as file:
        content = file.read()
    try:
        found = json.loads(content)
        intact = isinstance(found, dict) and found.pop(SHA256, None) == digest(found)
    except (ValueError, RecursionError) as error:
        raise CachedFileError(f"{shown(path)} is not a record ({error})") from error
    if not intact:
        raise CachedFileError(f"{shown(path)} is damaged")
    return found


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record of strings, numbers, lists and dictionaries. Raises the system's errors unchanged."""
    write_cached(path, json.dumps({**record, SHA256: digest(record)}).encode())


def digest(record: Mapping[str, Any]) -> str:
    """The hash of a record, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def write_cached(path: Path, content: bytes) -> None:
    """Write a file that only this user can read and write. Raises the system's errors unchanged."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        take_place(Path(partial), path)
    except BaseException:  # an interrupt as well
        with contextlib.suppress(OSError):
            Path(partial).unlink()
        raise


def take_place(made: Path, path: Path) -> None:
    """Rename a finished file to its final path, once its content is on the disk. The rename may be lost in a power
    cut."""
    descriptor = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)  # compilers follow the umask
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    made.replace(path)


def file_digest(path: Path) -> str:
    """The hash of a file that no other user could have written; raises `CachedFileError` if there is no such file."""
    with _opened(path) as descriptor, _opened_file(descriptor) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_intact(path: Path, sha256: str) -> bool:
    """Return whether a file is trusted and has this hash."""
    try:
        return file_digest(path) == sha256
    except CachedFileError:
        return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a trusted file: the file that is checked is the one that is read, even if its path changes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise CachedFileError(f"{shown(path)} cannot be read ({error})") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CachedFileError(f"{shown(path)} is not a file")
        why = reason_of_status(path, found)
        if why:
            warn_once(f"encore: {shown(path)} is not trusted, since {why}; it is recomputed")
            raise CachedFileError(why)
        yield descriptor
    except OSError as error:
        raise CachedFileError(f"{shown(path)} cannot be read ({error})") from error
    finally:
        os.close(descriptor)


def _opened_file(descriptor: int) -> Any:
    return os.fdopen(descriptor, "rb", closefd=False)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time in; without locks in the file system, all of them."""
    with contextlib.ExitStack() as open_files:
        with contextlib.suppress(OSError):
            file = open_files.enter_context(path.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def warn_once(message: str) -> None:
    """Give the same warning once in a process."""
    warnings.warn(message, stacklevel=3)


def warn_unwritable(folder: Path, error: Exception) -> None:
    """Warn once that a folder of the cache cannot be written to."""
    why = getattr(error, "strerror", None) or str(error)
    warn_once(
        f"encore: compiled code cannot be written to {shown(folder)} ({why}); this process compiles it for itself. "
        "Free space there, or set ENCORE_CACHE_DIR to another directory"
    )
