"""What a plan is picked for: a bound on memory, or one on time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol


class Footprint(Protocol):
    """What budgets bound on a device whose allocator reserves memory."""

    @property
    def limit(self) -> int:
        """The bound, in bytes."""

    @property
    def limits(self) -> Mapping[str, int]:
        """The bound of each device."""

    def by_device(self, plans: Sequence[Any]) -> Mapping[str, int]:
        """What the graphs of a step take with these plans, of each device."""

    def alone(self) -> Footprint:
        """The same without the plans that were looked at."""

    def __call__(self, plans: Sequence[Any]) -> int:
        """What they take of the device that comes closest to its bound."""


@dataclass(frozen=True)
class Budget:
    """An upper bound on `resident + step_peak`: absolute, a share of the unplanned peak, or the lowest reachable. A
    share with bytes is one of a step that is known."""

    bytes: int | None = None
    share: float | None = None
    device: bool = False
    """Whether it is all that a device has."""
    footprint: Footprint | None = dataclasses.field(default=None, compare=False, repr=False)
    """What it bounds instead of allocated bytes, on a device whose allocator reserves memory."""

    @property
    def is_floor(self) -> bool:
        """Whether it is the lowest reachable peak, whatever that is."""
        return self.bytes is None and self.share is None and not self.device

    def resolve(self, unplanned: int) -> int:
        """The bound in bytes for a step that takes `unplanned` bytes as it is."""
        if self.footprint is not None:
            return self.footprint.limit
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None, "the floor is not known before the plans are"
        return math.floor(self.share * unplanned)

    def of_step(self, unplanned: int) -> Budget:
        """The same budget, in bytes if it is a share, for a step that takes `unplanned` bytes as it is."""
        return self if self.share is None else dataclasses.replace(self, bytes=math.floor(self.share * unplanned))

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share:.4g} of the largest unplanned step"
        if self.device:
            return "the whole device"
        return "min" if self.bytes is None else f"{self.bytes} bytes"


class Goal(Protocol):
    """The options that pick a plan."""

    @property
    def budget(self) -> Budget | None:
        """Upper bound on resident + step_peak."""

    @property
    def allowed_overhead(self) -> float:
        """Extra step time allowed without a budget, as a fraction."""

    @property
    def resident(self) -> int:
        """Bytes that count towards the budget in addition to what the step's graphs know of."""

    @property
    def tiers(self) -> Sized:
        """Where activations may be offloaded to."""
