"""Which rows belong to which time step, and how the steps are cut into chunks.

A sequence lies in memory as rows, step after step: `[T, B]` flattened, or a `PackedSequence`'s data, where later steps
have fewer rows because shorter sequences have ended. A layer walks the steps forwards or, for the second direction of
a bidirectional one, backwards; "before" and "first" below are meant in the order of that walk. Work is done a chunk of
steps at a time, so that its workspace is bounded by the chunk.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.errors import OperandError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive steps of a walk."""

    first: int
    """Its first row in memory."""
    last: int
    """One beyond its last row."""
    times: tuple[int, ...]
    """Its time steps in the order of the walk."""
    row: Any
    """Where the rows of each step begin, from `first` on: an array of int64."""
    active: Any
    """How many rows each step has: an array of int64."""
    before_row: int
    """Where the rows begin of the step before its first."""
    before_active: int
    """How many those are; 0 for the first chunk of the walk."""
    kept: int
    """Where the states that enter it begin, among those kept at the start of every chunk but the first."""
    even: bool
    """Whether all of its steps have as many rows."""

    @property
    def reverse(self) -> bool:
        """Whether its first step lies behind its last one."""
        return self.times[0] > self.times[-1]

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def in_memory(self) -> slice:
        """Its rows."""
        return slice(self.first, self.last)

    def within(self, chunk: Chunk) -> slice:
        """Its rows, counted from the first of a chunk that it is a part of."""
        return slice(self.first - chunk.first, self.last - chunk.first)


@dataclass(frozen=True, slots=True)
class Walk:
    """One direction through a sequence."""

    steps: int
    batch: int
    rows: int
    reverse: bool
    chunks: tuple[Chunk, ...]
    active: tuple[int, ...]
    """Rows of each time step."""
    starts: tuple[int, ...]
    """First row of each time step."""
    kept: int
    """Rows of the states that enter its chunks, without the first one."""

    def single_steps(self, chunk: Chunk) -> tuple[Chunk, ...]:
        """The steps of a chunk as chunks of their own."""
        if len(chunk.times) == 1:
            return (chunk,)
        first = chunk.times[0]
        begin = self.steps - 1 - first if self.reverse else first
        return _single_steps(self.active, self.reverse, self.batch)[begin : begin + len(chunk.times)]

    def before(self, time: int) -> int:
        """The step that the walk did before this one; -1 for the first."""
        if self.reverse:
            return time + 1 if time + 1 < self.steps else -1
        return time - 1


def chunk_steps(steps: int, batch: int, keep: int, rows: int) -> int:
    """Steps of a chunk: those between two kept states, or as many as have `rows` rows."""
    wanted = keep or -(-rows // max(batch, 1))
    return max(1, min(wanted, steps))


def kept_rows(steps: int, batch: int, rows: int, keep: int) -> int:
    """A bound on the rows of states that are kept at the starts of chunks, from shapes alone."""
    if keep == 0:
        return rows
    if isinstance(keep, int) and isinstance(steps, int) and keep >= steps:
        return 0
    return torch.sym_min(rows, ((steps + keep - 1) // keep - 1) * batch)


@functools.lru_cache(maxsize=64)
def dense_walk(steps: int, batch: int, reverse: bool, a_chunk: int) -> Walk:
    return _walk((batch,) * steps, reverse, a_chunk, batch)


def can_walk(sizes: Sequence[int], batch: int, rows: int) -> bool:
    """Return whether these sizes fall from the batch to no less than one, and add up to the rows."""
    if not sizes or sum(sizes) != rows or sizes[0] != batch or sizes[-1] < 1:
        return False
    return all(before >= after for before, after in itertools.pairwise(sizes))


def steps_reached(sizes: Sequence[int], batch: int, rows: int) -> tuple[int, ...]:
    """Sizes without the steps that no sequence reaches, where the rows lie in a block (`packing.py`)."""
    reached = tuple(sizes)
    if rows == len(reached) * batch:
        while reached and reached[-1] == 0:
            reached = reached[:-1]
    return reached


def packed_walk(batch_sizes: Tensor, reverse: bool, a_chunk: int, batch: int, rows: int) -> Walk:
    """A walk through a packed batch, whose rows are `rows` or lie in a block of that many."""
    sizes = tuple(batch_sizes.tolist())
    reached = steps_reached(sizes, batch, rows)
    in_block = rows == len(sizes) * batch
    if not can_walk(reached, batch, sum(reached) if in_block else rows):
        raise OperandError(
            f"batch_sizes must fall from the batch of the initial state ({batch}) and add up to the {rows} rows of the "
            f"input, as pack_padded_sequence makes them; got {sizes[:8]}{'...' if len(sizes) > 8 else ''}"
        )
    return _walk(reached, reverse, a_chunk, batch)


def fill_sizes(batch_sizes: Tensor, rows: int, batch: int) -> Tensor:
    """Fill in batch sizes with that many rows, longest sequences first."""
    left = rows - len(batch_sizes)
    for step in range(len(batch_sizes)):
        more = max(0, min(left, batch - 1))
        batch_sizes[step] = 1 + more
        left -= more
    return batch_sizes


def _walk(active: tuple[int, ...], reverse: bool, a_chunk: int, batch: int) -> Walk:
    steps = len(active)
    starts = [0]
    for size in active:
        starts.append(starts[-1] + size)
    order = range(steps - 1, -1, -1) if reverse else range(steps)
    chunks: list[Chunk] = []
    kept = 0
    for begin in range(0, steps, a_chunk):
        times = tuple(order[begin : begin + a_chunk])
        low, high = min(times), max(times)
        numbers = ctypes.c_int64 * len(times)
        before = order[begin - 1] if begin else -1
        chunks.append(
            Chunk(
                first=starts[low],
                last=starts[high + 1],
                times=times,
                row=numbers(*(starts[time] - starts[low] for time in times)),
                active=numbers(*(active[time] for time in times)),
                before_row=starts[before] if begin else 0,
                before_active=active[before] if begin else 0,
                kept=kept,
                even=active[low] == active[high],
            )
        )
        kept += active[times[0]] if begin else 0
    return Walk(steps, batch, starts[-1], reverse, tuple(chunks), active, tuple(starts[:-1]), kept)


@functools.lru_cache(maxsize=16)
def _single_steps(active: tuple[int, ...], reverse: bool, batch: int) -> tuple[Chunk, ...]:
    return _walk(active, reverse, 1, batch).chunks


def previous_rows(walk: Walk, chunk: Chunk) -> list[tuple[int, int, int]]:
    """The states that the steps of a chunk find, in runs `(row in the chunk, row in the outputs, count)`.

    A row in the outputs of `-1 - b` means row `b` of the initial state: no step before has touched it.
    """
    runs: list[tuple[int, int, int]] = []

    def add(to: int, source: int, count: int) -> None:
        if count <= 0:
            return
        if runs and source >= 0 and runs[-1][0] + runs[-1][2] == to and runs[-1][1] >= 0:
            last_to, last_source, last_count = runs[-1]
            if last_source + last_count == source:
                runs[-1] = last_to, last_source, last_count + count
                return
        runs.append((to, source, count))

    for time in sorted(chunk.times):
        before = walk.before(time)
        to, count = walk.starts[time] - chunk.first, walk.active[time]
        found = min(count, walk.active[before]) if before >= 0 else 0
        add(to, walk.starts[before] if found else 0, found)
        add(to + found, -1 - found, count - found)
    return runs
