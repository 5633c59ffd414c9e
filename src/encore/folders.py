"""The folders in which Encore keeps files between processes, and whether it trusts them.

The cache holds code: sources that are executed and libraries that are loaded. It is trusted only if the directory,
every directory above it and the folders in it belong to this user or to root, and no other user may write to them (a
sticky directory such as `/tmp` may be above it). Otherwise, or if there can be no cache, the process uses a private
directory, which is removed at its end, and warns once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import grp
import os
import pwd
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

CACHE_VARIABLE = "ENCORE_CACHE_DIR"
OWN = 0o700
"""Mode of directories that Encore creates: other users may not read them."""
NOWHERE = Path(os.devnull) / "encore"
"""A path that can be neither read nor written: the cache of a process without any place for files."""


def cache_directory() -> Path:
    """Measurements and compiled code: `$ENCORE_CACHE_DIR`, else `$XDG_CACHE_HOME/encore`, else `~/.cache/encore`.

    The directory exists and is trusted; it may still be full or read-only.
    """
    try:
        return _trusted_or_private(_chosen_directory())
    except RuntimeError as error:  # from Path.home()
        return _private_cache(f"there is no home directory for a cache ({error})")


def cache_folder(name: str) -> Path:
    """A folder of the cache, created if it is missing, and trusted by the same rules as the cache."""
    return _folder_of(cache_directory(), name)


def _chosen_directory() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "encore"


@functools.cache
def _trusted_or_private(chosen: Path) -> Path:
    try:
        directory = Path(os.path.realpath(chosen))
        _make(directory)
        why = reason_for_distrust(directory) or next(
            (reason for above in directory.parents if (reason := reason_for_distrust(above, sticky=True))), ""
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte
        return _private_cache(f"there can be no cache in {shown(chosen)} ({error})")
    if why:
        return _private_cache(f"the cache in {shown(chosen)} is not trusted, since {why}")
    return directory


@functools.cache
def _folder_of(cache: Path, name: str) -> Path:
    folder = cache / name
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(OWN)
        why = reason_for_distrust(folder)
    except OSError:
        return folder  # reads and writes there fail, and are reported then
    if not why:
        return folder
    folder = _private_cache(f"the cache in {shown(folder)} is not trusted, since {why}") / name
    with contextlib.suppress(OSError):
        folder.mkdir(OWN, exist_ok=True)
    return folder


def _make(directory: Path) -> None:
    for missing in reversed([folder for folder in (directory, *directory.parents) if not folder.exists()]):
        missing.mkdir(OWN, exist_ok=True)  # another process may do the same
    if not directory.is_dir():
        raise NotADirectoryError("it is a file")


def reason_for_distrust(folder: Path, *, sticky: bool = False) -> str:
    """Return why other users could change the contents of a folder; empty if they cannot. In a sticky one they may add
    names but not change those of others, which is enough for a directory above (`sticky=True`)."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{shown(folder)} is not a directory"
    if sticky and found.st_mode & stat.S_ISVTX and found.st_uid in _trusted_users():
        return ""
    return reason_of_status(folder, found)


def reason_of_status(path: Path, found: os.stat_result) -> str:
    """Return why other users could change a file or directory of this status; empty if they cannot."""
    if found.st_uid not in _trusted_users():
        return f"{shown(path)} belongs to the user {found.st_uid}"
    by_group = found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid)
    if by_group or found.st_mode & stat.S_IWOTH:
        return f"other users may write to {shown(path)} (its mode is {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _trusted_users() -> tuple[int, ...]:
    """This user and root. In a container that maps only some users, root's directories belong to the overflow user."""
    return (os.geteuid(), 0, *_unmapped_user())


@functools.cache
def _unmapped_user() -> tuple[int, ...]:
    try:
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
        return () if mapped >= 2**32 - 1 else (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    except (OSError, ValueError, IndexError):
        return ()


def _is_private(group: int) -> bool:
    """Return whether this user is the only member of a group. Many systems give each user such a group, and let it
    write."""
    try:
        user = pwd.getpwuid(os.geteuid())
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_uid != 0 and user.pw_gid == group and found.gr_name == user.pw_name and not (
        set(found.gr_mem) - {user.pw_name}
    )  # fmt: skip


@functools.cache
def _private_cache(why: str) -> Path:
    """Warn, and return the private directory."""
    warnings.warn(
        f"encore: {why}; kernels and measurements of this process go to a private directory, which is removed at its "
        f"end. Set {CACHE_VARIABLE} to a directory that only you can write to",
        stacklevel=2,
    )
    try:
        return private_directory()
    except OSError:
        return NOWHERE


def private_directory() -> Path:
    """A directory of this process and its forks, removed when the process ends."""
    return _private_directory()


@functools.cache
def _private_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="encore-"))
    atexit.register(_remove, directory, os.getpid())
    return directory


def _remove(directory: Path, maker: int) -> None:
    if os.getpid() == maker:  # not in a fork
        shutil.rmtree(directory, ignore_errors=True)


def shown(path: Path) -> str:
    """A path for a message: quoted, with bytes that are no text escaped."""
    return repr(os.fsencode(path).decode(errors="backslashreplace"))
