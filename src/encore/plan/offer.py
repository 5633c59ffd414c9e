"""A plan on offer: what it holds and costs, told before anybody has built it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from encore.plan.plan import Plan

Fuse = Callable[[Plan], Plan]


@dataclasses.dataclass(eq=False)
class Offer:
    """A plan that could be had. `step_peak` and `overhead` are close; `plan` is exact, and made when asked for."""

    step_peak: int
    overhead: float
    build: Callable[[], Plan]
    fuse: Fuse = lambda plan: plan

    @functools.cached_property
    def separate(self) -> Plan:
        """The plan as separate operators."""
        return self.build()

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan as it will run."""
        return self.fuse(self.separate)

    @classmethod
    def of(cls, plan: Plan) -> Offer:
        """A plan that is there already."""
        return cls(plan.timeline.step_peak, plan.overhead, lambda: plan)
