"""How much room the machine has: memory under cgroup limits, and disk space."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
NO_LIMIT = 1 << 60
"""Without a limit, version 1 reports the largest possible number of pages."""


class _Names(NamedTuple):
    """The file names of one version of cgroups."""

    tree: str
    limit: str
    used: str
    cached: str


VERSION_2 = _Names("", "memory.max", "memory.current", "inactive_file")
VERSION_1 = _Names("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory() -> int | None:
    """Bytes that this process may still allocate, by the machine and every cgroup above it; `None` if unknown."""
    rooms = [room for room in (_machine_room(), *_cgroup_rooms()) if room is not None]
    return min(rooms, default=None)


def free_disk(descriptor: int) -> int:
    """Bytes an ordinary user may still write to the file system of an open file."""
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize


def lies_in_memory(descriptor: int) -> bool:
    """Return whether an open file is in a file system whose bytes are the machine's memory, and count in its cgroup."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    kinds = (mount[mount.index("-") + 1] for mount in mounts if mount[2] == number)
    return next(kinds, "") in IN_MEMORY


def _machine_room() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_rooms() -> list[int | None]:
    """Of the group we are in and of those around it. Version 2 has one tree for everything, version 1 one for memory;
    in a container its own group may be mounted as the root of either."""
    try:
        lines = [line.split(":", 2) for line in OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return []
    rooms = []
    for _, kinds, own in (line for line in lines if len(line) == 3):
        names = VERSION_2 if kinds == "" else VERSION_1 if "memory" in kinds.split(",") else None
        if names is not None:
            inner = Path(own.lstrip("/"))
            rooms += [_cgroup_room(CGROUP / names.tree / folder, names) for folder in (inner, *inner.parents)]
    return rooms


def _cgroup_room(folder: Path, names: _Names) -> int | None:
    try:
        limit = (folder / names.limit).read_text().strip()
        used = int((folder / names.used).read_text())
        pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= NO_LIMIT:
        return None
    return max(0, int(limit) - used + int(pages.get(names.cached, 0)))  # cached files give way
