"""Memory over a step as plain numbers: bytes by kind at every point, and what ran there."""

from __future__ import annotations

from dataclasses import dataclass

from encore.schedule import Kind

OUTSIDE = "around the calls"
"""Of a step of several calls: outputs, gradients and what code outside of captured graphs keeps, as observed."""
LAYERS: dict[str, tuple[Kind, ...]] = {
    "parameters": (Kind.PARAMETER,),
    "beside the step": (),
    "inputs": (Kind.INPUT,),
    "feature maps": (Kind.FEATURE_MAP,),
    "recomputed": (Kind.RECOMPUTED,),
    "gradients": (Kind.GRADIENT,),
    "outputs and temporaries": (Kind.OUTPUT, Kind.TEMPORARY),
    "workspaces": (Kind.WORKSPACE,),
    OUTSIDE: (),
}
"""What the memory of a step is there for, from what always stays to what is there for a moment. `resident=` and
`optimizer=` count as beside the step."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Bytes alive over one step, parameters and inputs included. Columns have one entry a point."""

    moments: int
    """How many moments the step has: after every operator, kernel and release."""
    at: tuple[int, ...]
    """The moment of each point."""
    backward: int
    """The first moment after forward."""
    what: tuple[str, ...]
    """What ran, with module and source line."""
    bytes: dict[str, tuple[int, ...]]
    """A column for every one of `LAYERS`."""
    peak: int
    """The point of the peak."""

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.bytes.values(), strict=True)))
