"""A plan on offer: what it holds and costs, told before anybody has built it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

from encore.plan.methods import Methods
from encore.plan.plan import Plan

Fuse = Callable[[Plan], Plan]
LEAST_GAIN = 0.02
"""A slower plan must take at least this share off the peak to be worth offering."""


@dataclasses.dataclass(eq=False)
class Offer:
    """A plan that could be had. `step_peak` is close; that of `plan`, which is made when asked for, is exact. The
    overhead is the one by which plans are compared, so a plan has that of its offer."""

    step_peak: int
    overhead: float
    build: Callable[[], Plan]
    fuse: Fuse = lambda plan: plan
    found_with: set[Methods] = dataclasses.field(default_factory=set)
    """The sets of methods with which a search came upon it; none where no search was needed."""

    @functools.cached_property
    def separate(self) -> Plan:
        """The plan as separate operators."""
        return self.build()

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan as it will run."""
        return dataclasses.replace(self.fuse(self.separate), overhead=self.overhead)

    @property
    def told(self) -> tuple[int, float]:
        """Step peak and overhead as numbers; the peak is exact if somebody has built the plan."""
        built: Plan | None = self.__dict__.get("plan")
        return self.step_peak if built is None else built.timeline.step_peak, self.overhead

    def built(self, plan: Plan) -> Offer:
        """The same candidate, with its plan as it came out in the end."""
        separate = self.separate
        return dataclasses.replace(self, build=lambda: separate, fuse=lambda separate: plan)

    @classmethod
    def of(cls, plan: Plan) -> Offer:
        """A plan that is there already."""
        return cls(plan.timeline.step_peak, plan.overhead, lambda: plan)


def by_methods(offers: Sequence[Offer]) -> list[list[Offer]]:
    """The offers of each search; one that needed no search is among all of them."""
    searched = dict.fromkeys(methods for offer in offers for methods in offer.found_with)
    return [
        [offer for offer in offers if not offer.found_with or methods in offer.found_with] for methods in searched
    ] or [list(offers)]


def worth_having(offers: Iterable[Offer]) -> list[Offer]:
    """Of the offers those that are slower than the one before, and worth it by what they take off the peak."""
    found: list[Offer] = []
    for offer in sorted(offers, key=lambda offer: (offer.overhead, offer.step_peak)):
        if not found or offer.step_peak <= (1 - LEAST_GAIN) * found[-1].step_peak:
            found.append(offer)
    return found
