"""What the way to a tier takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What the way to a tier takes, next to a step that computes."""

    store: float
    """Seconds a byte on the way out."""
    load: float
    """Seconds a byte on the way back."""
    call: float
    """Seconds that every transfer takes besides."""
    pace: float
    """How fast computing goes on during a transfer, as a share of its pace without."""
    depth: int
    """Transfers that may be on their way at a time."""

    def store_seconds(self, size: int) -> float:
        return self.call + size * self.store

    def load_seconds(self, size: int) -> float:
        return self.call + size * self.load

    def lost_seconds(self, size: int) -> float:
        """What computing loses to a store and a load of so many bytes, if it goes on during all of them."""
        return (1 - self.pace) * (self.store_seconds(size) + self.load_seconds(size))
