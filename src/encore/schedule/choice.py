"""What becomes of the values that a step does not keep as they are: the choice that a plan carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Encoded(NamedTuple):
    """A value that is held as a code."""

    value: int
    codec: str
    bytes: int
    """What the code takes; the most it may take, where that depends on the data."""


class Stashed(NamedTuple):
    """A recurrent operator that keeps less than its gates, and builds them again in backward."""

    output: int
    """The first result of the operator, by which it goes."""
    every: int
    """Steps between two states that are kept."""


class Offloaded(NamedTuple):
    """A value that leaves memory for a tier; where it is held as a code, the code leaves."""

    value: int
    tier: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Everything that is not kept, and how it comes back. Nothing is in two of them, but what is encoded may be
    offloaded, too."""

    recompute: frozenset[int] = frozenset()
    """Values that backward makes again as forward made them."""
    encode: frozenset[Encoded] = frozenset()
    """Values that backward decodes."""
    stash: frozenset[Stashed] = frozenset()
    """Operators whose own residue shrinks."""

    offload: frozenset[Offloaded] = frozenset()
    """Values that backward loads from a tier, themselves or as the code to decode."""

    def __bool__(self) -> bool:
        return bool(self.recompute or self.encode or self.stash or self.offload)

    @property
    def gone(self) -> frozenset[int]:
        """Values that forward lets go."""
        return self.recompute.union((one.value for one in self.encode), (one.value for one in self.offload))


KEEP_EVERYTHING = Choice()
