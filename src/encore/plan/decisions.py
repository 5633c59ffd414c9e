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


@dataclass(frozen=True, slots=True)
class Encode:
    """Hold a code in its place, and decode it right before backward reads it."""

    codec: str
    bytes: int
    """What the code takes; the most it may take, where that depends on the data."""
    why: str
    seconds: float
    """What encoding it, and decoding it as often as backward asks, costs."""
    lossless: bool = True

    @property
    def action(self) -> str:
        return "encode"


@dataclass(frozen=True, slots=True)
class Stash:
    """Let the recurrent operator that makes it keep less, and build it again inside of its backward."""

    every: int
    """Steps between two states that are kept."""
    bytes: int
    """What is kept of it."""
    whole: tuple[int, tuple[int, ...]]
    """Its bytes and its shape, were it kept."""
    why: str
    seconds: float
    """What building gates again costs the operator."""

    @property
    def action(self) -> str:
        return "stash"


@dataclass(frozen=True, slots=True)
class Offload:
    """Move it to a tier after forward, and bring it back before backward reads it."""

    tier: str
    bytes: int
    """What moves."""
    why: str
    seconds: float
    """By which computing takes longer if it goes on beside its transfers, and what coding costs; what a step stands
    still for transfers is told for all of them together."""
    codec: str = ""
    """What it is held as in the tier, if not as it is."""
    lossless: bool = True

    @property
    def action(self) -> str:
        return "offload"


Decision = Keep | Recompute | Encode | Stash | Offload
