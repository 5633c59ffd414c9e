"""The answers to "what becomes of this feature map until backward needs it?": frozen values, never strings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keep:
    """Hold it in memory."""

    why: str = "nothing to gain: the step fits as it is"

    @property
    def action(self) -> str:
        return "keep"


Decision = Keep
