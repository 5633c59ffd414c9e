"""A candidate plan: an estimate of its peak and its time, before it is built."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

from encore.fates import Fate
from encore.plan.methods import Methods
from encore.plan.plan import Plan

Fuse = Callable[[Plan], Plan]
LEAST_GAIN = 0.02
"""A slower plan must take at least this share off the peak to be a candidate."""


@dataclasses.dataclass(eq=False)
class Candidate:
    """A plan that could be had. `step_peak` is close; that of `plan`, which is made when asked for, is exact. The
    overhead is the one by which plans are compared, so a plan has that of its candidate."""

    step_peak: int
    overhead: float
    build: Callable[[], Plan]
    fuse: Fuse = lambda plan: plan
    found_with: set[Methods] = dataclasses.field(default_factory=set)
    """The sets of methods with which a search came upon it; none where no search was needed."""
    fates: frozenset[Fate] = frozenset()
    """What becomes of the values that it does not keep."""
    slices: int = 1
    lean: bool = False
    """The form of the graph that it is a plan of."""

    @functools.cached_property
    def separate(self) -> Plan:
        """The plan as separate operators."""
        return self.build()

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan as it will run."""
        return dataclasses.replace(self.fuse(self.separate), overhead=self.overhead)

    @property
    def peak_and_overhead(self) -> tuple[int, float]:
        """Step peak and overhead; the peak is exact if the plan has been built."""
        built: Plan | None = self.__dict__.get("plan")
        return self.step_peak if built is None else built.timeline.step_peak, self.overhead

    def built(self, plan: Plan) -> Candidate:
        """The same candidate, with its plan as it came out in the end."""
        separate = self.separate
        return dataclasses.replace(self, build=lambda: separate, fuse=lambda separate: plan)

    @classmethod
    def of(cls, plan: Plan) -> Candidate:
        """A plan that is there already."""
        return cls(plan.timeline.step_peak, plan.overhead, lambda: plan)


def by_methods(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """The candidates of each search; one that needed no search is among all of them."""
    searched = dict.fromkeys(methods for candidate in candidates for methods in candidate.found_with)
    return [
        [candidate for candidate in candidates if not candidate.found_with or methods in candidate.found_with]
        for methods in searched
    ] or [list(candidates)]


def worth_having(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Of the candidates those that are slower than the one before, and worth it by what they take off the peak."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: (candidate.overhead, candidate.step_peak)):
        if not found or candidate.step_peak <= (1 - LEAST_GAIN) * found[-1].step_peak:
            found.append(candidate)
    return found
