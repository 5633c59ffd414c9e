"""Measurements cached on disk, per machine and torch version.

They are one record in `cache_directory()`, with a key of the machine. It is replaced atomically; two processes that
write at once lose at most each other's newest entries, which are measured again. A file that is damaged or not trusted,
or that another machine has written, is ignored with one warning. Entries that cannot be measurements (NaN, infinite,
negative) are neither written nor read.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from encore.cached_files import CachedFileError, read_record, write_record
from encore.devices import device_names
from encore.folders import cache_directory

MACHINE, MEASUREMENTS = "machine", "measurements"
LAYOUT = 2
"""The version of the file's layout. The first had no hash."""
MOST = 2**63
"""More than any number of bytes, seconds or bytes a second."""


class MachineCache:
    """A dictionary of numbers that is kept on disk."""

    def __init__(self, path: Path, machine: str | None = None) -> None:
        self.path = path
        self.machine = machine or machine_key()
        self._entries: dict[str, float] | None = None
        self._unsaved = False
        self._warned = False
        self._lock = threading.Lock()

    def get(self, key: str) -> float | None:
        with self._lock:
            return self._loaded().get(key)

    def put(self, key: str, number: float) -> None:
        with self._lock:
            self._loaded()[key] = number
            self._unsaved = True

    def matching(self, prefixes: tuple[str, ...]) -> dict[str, float]:
        """The entries whose keys begin with one of these prefixes."""
        with self._lock:
            return {key: number for key, number in self._loaded().items() if key.startswith(prefixes)}

    def save(self) -> None:
        """Write new entries, and keep those that another process has added meanwhile."""
        with self._lock:
            if not self._unsaved:
                return
            merged = {**self._read(), **self._loaded()}
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_record(self.path, {MACHINE: self.machine, MEASUREMENTS: _sound(merged)})
            except OSError as error:
                warnings.warn(
                    f"encore: measurements cannot be written to {self.path} ({error}), so that other processes measure "
                    "again; free space there, or set ENCORE_CACHE_DIR to another directory",
                    stacklevel=2,
                )
            self._unsaved = False

    def _loaded(self) -> dict[str, float]:
        if self._entries is None:
            self._entries = self._read()
        return self._entries

    def _read(self) -> dict[str, float]:
        if not os.path.lexists(self.path):
            return {}
        try:
            found = read_record(self.path)
        except CachedFileError as error:
            return self._ignored(f"cannot be used ({error})")
        entries = found.get(MEASUREMENTS)
        if not isinstance(entries, dict):
            return self._ignored("has no measurements")
        if found.get(MACHINE) != self.machine:
            return self._ignored("has measurements of another machine")
        return _sound(entries)

    def _ignored(self, why: str) -> dict[str, float]:
        if not self._warned:
            warnings.warn(f"encore: {self.path} {why}; measuring again", stacklevel=2)
        self._warned = True
        return {}


def _sound(entries: Mapping[str, Any]) -> dict[str, float]:
    """The entries that can be measurements."""
    return {key: number for key, number in entries.items() if _is_measurement(number)}


def _is_measurement(number: Any) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return 0 <= number < MOST  # False for NaN


@functools.cache
def _open_cache(path: Path) -> MachineCache:
    return MachineCache(path)


def machine_cache() -> MachineCache:
    """The cache of this machine and torch version."""
    return _open_cache(cache_directory() / f"measurements-{LAYOUT}-{machine_key()}.json")


@functools.cache
def machine_key() -> str:
    """A hash of what measurements depend on: processor, its vector units, devices, torch."""
    facts: list[Any] = [
        platform.machine(),
        processor_name(),
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
    ]
    facts += device_names()
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def processor_name() -> str:
    """The name of the processor, as the system reports it; empty if it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
