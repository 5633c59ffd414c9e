"""The answers to "what becomes of this feature map until backward needs it?": frozen values, never strings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keep:
    """Hold it in memory."""

    why: str = "nothing to gain: the step fits as it is"
    seconds: float = 0.0

    @property
    def action(self) -> str:
        return "keep"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Let it go after forward and compute it again right before backward reads it."""

    why: str
    seconds: float
    """What computing it again costs."""

    @property
    def action(self) -> str:
        return "recompute"


Decision = Keep | Recompute
