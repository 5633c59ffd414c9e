"""Measurements kept on disk, per machine and torch version, so that each is made once.

One record in `cache_directory()`, with the name of the machine in it. It is replaced as a whole, so a reader never sees
half a file; two processes that write at once lose at most each other's newest entries, which are measured again. A file
that is damaged or not trusted, or that another machine has written, is ignored with one warning. Entries that cannot be
measurements (NaN, infinite, negative) are neither written nor read.
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
from encore.folders import cache_directory

MACHINE, MEASUREMENTS = "machine", "measurements"
LAYOUT = 2
"""Of the file. The first had no hash."""
MOST = 2**63
"""No number of bytes, seconds or bytes a second reaches this."""


class MachineCache:
    """A dictionary of numbers that survives the process."""

    def __init__(self, path: Path, machine: str | None = None) -> None:
        self.path = path
        self.machine = machine or machine_key()
        self._entries: dict[str, float] | None = None
        self._unsaved = False
        self._complained = False
        self._lock = threading.Lock()

    def get(self, key: str) -> float | None:
        with self._lock:
            return self._loaded().get(key)

    def put(self, key: str, number: float) -> None:
        with self._lock:
            self._loaded()[key] = number
            self._unsaved = True

    def matching(self, prefixes: tuple[str, ...]) -> dict[str, float]:
        """The entries whose keys begin in one of these ways."""
        with self._lock:
            return {key: number for key, number in self._loaded().items() if key.startswith(prefixes)}

    def save(self) -> None:
        """Write new entries, keeping those another process has added meanwhile."""
        with self._lock:
            if not self._unsaved:
                return
            merged = {**self._read(), **self._loaded()}
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_record(self.path, {MACHINE: self.machine, MEASUREMENTS: _sound(merged)})
            except OSError as error:
                warnings.warn(f"encore: measurements could not be kept in {self.path}: {error}", stacklevel=2)
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
            return self._ignored("does not hold measurements")
        if found.get(MACHINE) != self.machine:
            return self._ignored("holds measurements of another machine")
        return _sound(entries)

    def _ignored(self, why: str) -> dict[str, float]:
        if not self._complained:
            warnings.warn(f"encore: {self.path} {why}; measuring again", stacklevel=2)
        self._complained = True
        return {}


def _sound(entries: Mapping[str, Any]) -> dict[str, float]:
    """Those that can be measurements."""
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
    """A name for what measurements depend on: processor, its vector units, devices, torch."""
    facts: list[Any] = [platform.machine(), _processor(), torch.backends.cpu.get_cpu_capability(), torch.__version__]
    if torch.cuda.is_available():
        facts += [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
