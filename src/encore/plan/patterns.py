"""Plans without sizes: what becomes of the values of each role, to be carried over to other graphs of the structure.

A role is what a value is made by: a module without its numbers, a line, an operator, and a layout without sizes. The
values of a role are in the order in which forward makes them. In a graph of the same structure a role has as many, so
each gets the fate of its number. An unrolled loop of another length has more of them, or fewer: where all shared a
fate, or every second one had it, but for the first and the last, the same holds again; otherwise runs of equal fates
grow or shrink in proportion.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from encore.fates import Fate, Recompute
from encore.graph import Graph
from encore.graph.structure import place_of_module, value_structure
from encore.plan.candidate import Candidate
from encore.plan.methods import Methods

ALTERNATING = 4
"""Values from which on every second one is a pattern."""

Role = tuple[str, str, str, int, str]
Fates = tuple[tuple[str, str], ...]
"""The fates of one value, each by kind and label."""


@dataclass(frozen=True)
class PlanPattern:
    """One plan, by role."""

    fates: Mapping[Role, Sequence[Fates]]
    lean: bool
    slices: int
    found_with: frozenset[Methods]

    @classmethod
    def of(cls, values_of: Mapping[Role, Sequence[int]], candidate: Candidate) -> PlanPattern:
        """The pattern of a candidate for the graph with these roles."""
        decided: dict[int, list[tuple[str, str]]] = {}
        for fate in candidate.fates:
            decided.setdefault(fate.value, []).append((fate.kind, fate.label))
        known = {value: tuple(sorted(fates)) for value, fates in decided.items()}
        fates = {
            role: tuple(known.get(value, ()) for value in values)
            for role, values in values_of.items()
            if not known.keys().isdisjoint(values)
        }
        return cls(fates, candidate.lean, candidate.slices, frozenset(candidate.found_with))

    def recomputed(self, values_of: Mapping[Role, Sequence[int]]) -> list[int]:
        """The values that another graph recomputes by this pattern."""
        return [value for value, fates in self._in(values_of) if any(kind == Recompute.kind for kind, _ in fates)]

    def others(self, values_of: Mapping[Role, Sequence[int]], candidates: Iterable[Fate]) -> list[Fate]:
        """Of the fates that a value may have there, those of this pattern."""
        by_value: dict[int, list[Fate]] = {}
        for one in candidates:
            by_value.setdefault(one.value, []).append(one)
        found = []
        for value, fates in self._in(values_of):
            for kind, label in fates:
                alike = [one for one in by_value.get(value, ()) if one.kind == kind]
                found += [one for one in alike if one.label == label][:1] or alike[:1]
        return found

    def _in(self, values_of: Mapping[Role, Sequence[int]]) -> Iterable[tuple[int, Fates]]:
        for role, fates in self.fates.items():
            values = values_of.get(role, ())
            yield from zip(values, stretched(fates, len(values)), strict=True)

    @functools.cached_property
    def labels(self) -> frozenset[str]:
        """The labels of its fates; the name of a codec is a word of one."""
        return frozenset(label for fates in self.fates.values() for one in fates for _, label in one)

    @property
    def only_recomputes(self) -> bool:
        return all(kind == Recompute.kind for fates in self.fates.values() for one in fates for kind, _ in one)


def stretched(fates: Sequence[Fates], count: int) -> list[Fates]:
    """What becomes of `count` values if it became `fates` of others of the role."""
    known = len(fates)
    if known == count:
        return [*fates]
    for edge in (0, 1):  # the first and the last step of a loop may be special
        core = fates[edge : known - edge]
        if core and count >= 2 * edge and _is_even(core):
            middle = [core[number % min(2, len(core))] for number in range(count - 2 * edge)]
            return [*fates[:edge], *middle, *fates[known - edge :]]
    return _by_runs(fates, count)


def _is_even(fates: Sequence[Fates]) -> bool:
    """Return whether all share a fate, or every second one does."""
    return len(set(fates)) == 1 or (len(fates) >= ALTERNATING and fates[2:] == fates[:-2])


def _by_runs(fates: Sequence[Fates], count: int) -> list[Fates]:
    """Runs of equal fates, in proportion; none vanishes as long as there are enough values."""
    runs = [(one, len(list(group))) for one, group in itertools.groupby(fates)]
    found: list[Fates] = []
    passed = 0
    for number, (one, length) in enumerate(runs, 1):
        passed += length
        end = max(len(found) + 1, round(passed * count / len(fates)))
        end = min(end, count - (len(runs) - number)) if count >= len(runs) else min(end, count)
        found += [one] * (end - len(found))
    return found


def roles_of(graph: Graph) -> dict[Role, list[int]]:
    """The values that forward makes, by role."""
    found: dict[Role, list[int]] = {}
    for op in graph.ops:
        if op.forward:
            for place, value in enumerate(op.writes):
                if value is not None:
                    layout = value_structure(graph, graph.values[value])
                    role = (place_of_module(op.module), op.source, str(op.target), place, layout)
                    found.setdefault(role, []).append(value)
    return found
