"""Which sizes of a structure were compiled, and when the next ones become a kernel with symbols.

The first sizes of a structure in a process are compiled for themselves: models of fixed sizes have kernels of fixed
sizes, whatever ran on this machine before. When others come later, symbols take the place of what differs from the most
similar sizes before; sizes for which that kernel is not right become another one, up to a few. Beyond these, and where
a structure has failed, sizes are compiled for themselves, and the oldest are forgotten.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

from encore.cached_files import CachedFileError, warn_unwritable, write_record
from encore.lower.records import StructureRecord
from encore.schedule.kernel import Kernel

MOST_SYMBOLIC = 6
"""Kernels with symbols of one structure."""
MOST_FAILURES = 2
AT_ONCE = 3
"""Sizes of a new structure that are compiled for themselves, if they come together (layers of several widths)."""
MOST_SAMPLES = 8
"""Sizes of a structure that are remembered. Records of kernels that were compiled for older ones are removed."""

Sizes = tuple[int, ...]


class Structures:
    """The structures of the kernels in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, StructureRecord] = {}
        self._changed: set[str] = set()
        self._seen: defaultdict[str, deque[Sizes]] = defaultdict(lambda: deque(maxlen=MOST_SAMPLES))
        """Sizes that have come to this process before the latest `begin`."""
        self._latest: list[Kernel] = []
        """Those that have come since."""
        self._together: defaultdict[str, list[Sizes]] = defaultdict(list)
        """Sizes that are being compiled for themselves."""

    def __getitem__(self, structure: str) -> StructureRecord:
        if structure not in self._known:
            self._known[structure] = self._read(structure)
        return self._known[structure]

    def begin(self) -> None:
        """Begin a compilation: kernels that came together so far are earlier ones now."""
        for kernel in self._latest:
            self._seen[kernel.structure].append(kernel.sizes)
        self._latest.clear()
        self._together.clear()

    def see(self, kernel: Kernel) -> None:
        """Note a kernel that came to this process for the first time."""
        self._latest.append(kernel)

    def samples(self, kernel: Kernel) -> list[Sizes]:
        """The sizes to which a kernel with symbols is to be fitted, its own the last; none if it is to be compiled for
        its own sizes."""
        known, seen, together = self[kernel.structure], self._seen[kernel.structure], self._together[kernel.structure]
        enough = len(known.symbolic) >= MOST_SYMBOLIC or known.failures >= MOST_FAILURES
        earlier = [sizes for sizes in (*seen, *together) if sizes != kernel.sizes]
        if kernel.devices != {"cpu"} or enough or not earlier or not (seen or len(together) >= AT_ONCE):
            return []
        nearest = min(earlier, key=lambda sizes: _distance(sizes, kernel.sizes))
        agreed = {position for position, pair in enumerate(zip(nearest, kernel.sizes, strict=True)) if len({*pair}) < 2}
        kept = [sizes for _, sizes in known.samples if len(sizes) == len(kernel.sizes) and sizes != kernel.sizes]
        others = dict.fromkeys((*earlier, *kept))
        similar = [sizes for sizes in others if all(sizes[one] == kernel.sizes[one] for one in agreed)]
        return [*similar, kernel.sizes]

    def expect(self, kernel: Kernel) -> None:
        """Note the sizes of a kernel that is about to be compiled for them."""
        self._together[kernel.structure].append(kernel.sizes)

    def add_sample(self, kernel: Kernel) -> None:
        """Remember the sizes of a kernel that had to be compiled."""
        known = self[kernel.structure]
        samples = (*(sample for sample in known.samples if sample[0] != kernel.key), (kernel.key, kernel.sizes))
        self._change(dataclasses.replace(known, samples=samples))

    def add_symbolic(self, structure: str, key: str) -> None:
        """Remember a kernel with symbols."""
        known = self[structure]
        self._change(dataclasses.replace(known, symbolic=tuple(dict.fromkeys((*known.symbolic, key)))))

    def drop_symbolic(self, structure: str, key: str) -> None:
        """Forget a kernel with symbols that cannot be loaded."""
        known = self[structure]
        self._known[structure] = dataclasses.replace(known, symbolic=tuple(one for one in known.symbolic if one != key))

    def add_failure(self, structure: str) -> None:
        """Remember that a kernel with symbols could not be compiled."""
        known = self[structure]
        self._change(dataclasses.replace(known, failures=known.failures + 1))

    def save(self) -> None:
        """Write what has changed, joined with what other processes have written meanwhile."""
        for structure in self._changed:
            record = self._known[structure] = self._bounded(_joined(self._read(structure), self._known[structure]))
            try:
                write_record(self._path(structure), dataclasses.asdict(record))
            except OSError as error:
                warn_unwritable(self.folder, error)
        self._changed.clear()

    def _change(self, record: StructureRecord) -> None:
        self._known[record.structure] = record
        self._changed.add(record.structure)

    def _bounded(self, record: StructureRecord) -> StructureRecord:
        for key, _ in record.samples[:-MOST_SAMPLES]:
            with contextlib.suppress(OSError):
                (self.folder / f"{key}.json").unlink(missing_ok=True)
        return dataclasses.replace(record, samples=record.samples[-MOST_SAMPLES:])

    def _path(self, structure: str) -> Path:
        return self.folder / f"{structure}.structure"

    def _read(self, structure: str) -> StructureRecord:
        try:
            return StructureRecord.read(self._path(structure), structure)
        except CachedFileError:
            return StructureRecord(structure)


def _joined(theirs: StructureRecord, ours: StructureRecord) -> StructureRecord:
    return StructureRecord(
        ours.structure,
        tuple({**dict(theirs.samples), **dict(ours.samples)}.items()),
        tuple(dict.fromkeys((*theirs.symbolic, *ours.symbolic))),
        max(theirs.failures, ours.failures),
    )


def _distance(one: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """How many different changes there are between two kernels' sizes, and how many sizes change."""
    changes = [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]
    return len(set(changes)), len(changes)
