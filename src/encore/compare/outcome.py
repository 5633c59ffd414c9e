"""What one system did on one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FAR = 0.1
"""A relative distance of gradients beyond this is no rounding of full-precision numbers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One system on one model. Bytes and seconds; ratios are NaN where eager failed."""

    system: str
    seconds: float = 0.0
    """The median of the rounds."""
    quietest: float = 0.0
    """The fastest step of all rounds: a step that nothing disturbs, which is what Encore predicts."""
    against_eager: float = 0.0
    """Step time over eager's in the same round: the median of the rounds."""
    lowest: float = 0.0
    """Of the rounds' ratios to eager."""
    highest: float = 0.0
    peak: int = 0
    reduction: float = 0.0
    """Eager's peak over this one's."""
    predicted: int | None = None
    predicted_seconds: float | None = None
    plan_seconds: float | None = None
    first_step: float = 0.0
    gradient_difference: float = 0.0
    """Distance of all gradients from eager's, relative to those."""
    gradient_error: float | None = None
    """The same from those of a float64 copy of the model; None if there is none."""
    own_draws: bool = False
    """The model draws random numbers, and the system draws others than eager: gradients cannot be compared."""
    failure: str = ""
    left_out: str = ""
    """Why it was not tried."""

    @property
    def ran(self) -> bool:
        return not (self.failure or self.left_out)

    @property
    def is_encore(self) -> bool:
        return self.system.startswith("Encore")

    @property
    def is_far_off(self) -> bool:
        """Return whether gradients differ from eager's by more than rounding explains."""
        return not self.own_draws and (math.isinf(self.gradient_difference) or self.gradient_difference > FAR)


def finite(value: Any) -> Any:
    """The same value for JSON, which has no infinity and no NaN: these are None."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: finite(part) for key, part in value.items()}
        case str():
            return value
        case Sequence():
            return [finite(part) for part in value]
    return value
