"""Workspaces at sizes that were not probed, from those that were.

A workspace is a multiple of an operand or a result plus a constant, as long as the same kernel runs. So a law is used
only where it predicts all probed calls of one structure to the byte, at `POINTS` different sizes at least, and only
between sizes that were probed: a kernel that is chosen from some size on is not met there. Everything else is probed.
"""

from __future__ import annotations

from collections.abc import Iterator

from encore.graph import Graph, Op

POINTS = 3
"""Sizes at which a law must hold."""

Sizes = tuple[int, ...]


class FittedWorkspaces:
    """What was probed in this process, by structure of the call."""

    def __init__(self) -> None:
        self._probed: dict[str, dict[Sizes, int]] = {}

    def note(self, structure: str, sizes: Sizes, workspace: int) -> None:
        """Note the workspace of a call that was probed."""
        self._probed.setdefault(structure, {})[sizes] = workspace

    def at(self, structure: str, sizes: Sizes) -> int | None:
        """The workspace of a call of these sizes; None where no law is certain."""
        probed = self._probed.get(structure, {})
        if len(probed) < POINTS or not _is_between(sizes, list(probed)):
            return None
        found = set(_laws(probed, sizes))
        return found.pop() if len(found) == 1 else None


def sizes_of_call(graph: Graph, op: Op) -> Sizes:
    """The bytes of every operand and result, and every dimension of the operands."""
    values = [graph.values[value] for value in (*op.reads, *op.writes) if value is not None]
    return (*(value.bytes for value in values), *(size for value in values for size in value.shape))


def _is_between(sizes: Sizes, probed: list[Sizes]) -> bool:
    """Return whether every size lies within those that were probed."""
    return all(min(known) <= size <= max(known) for size, *known in zip(sizes, *probed, strict=True))


def _laws(probed: dict[Sizes, int], sizes: Sizes) -> Iterator[int]:
    """What each law predicts that holds for all calls that were probed."""
    if len(set(probed.values())) == 1:
        yield next(iter(probed.values()))
        return
    for place, size in enumerate(sizes):
        points = {known[place]: workspace for known, workspace in probed.items()}
        if len(points) < POINTS:
            continue
        (first, low), *_, (last, high) = sorted(points.items())
        rise, run = high - low, last - first
        holds = all((workspace - low) * run == rise * (known[place] - first) for known, workspace in probed.items())
        if holds and rise * (size - first) % run == 0:
            yield low + rise * (size - first) // run
