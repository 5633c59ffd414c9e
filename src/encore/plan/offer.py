"""A plan on offer: what it holds and costs, told before anybody has built it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from encore.plan.plan import Plan

Fuse = Callable[[Plan], Plan]


@dataclasses.dataclass(eq=False)
class Offer:
    """A plan that could be had. `step_peak` is close; that of `plan`, which is made when asked for, is exact. The
    overhead is the one by which plans are compared, so a plan has that of its offer."""

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
        return dataclasses.replace(self.fuse(self.separate), overhead=self.overhead)

    @property
    def told(self) -> tuple[int, float]:
        """Step peak and overhead as numbers; the peak is exact if somebody has built the plan."""
        built: Plan | None = self.__dict__.get("plan")
        return self.step_peak if built is None else built.timeline.step_peak, self.overhead

    @classmethod
    def of(cls, plan: Plan) -> Offer:
        """A plan that is there already."""
        return cls(plan.timeline.step_peak, plan.overhead, lambda: plan)
