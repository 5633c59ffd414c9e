"""How much of a row, or of how many rows, a program takes. Both follow from the width of a row alone."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 1024
"""Elements of a tile."""
WIDEST = 256
"""Of them in a row, at most."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and units of a row; both powers of two, as Triton wants them."""

    rows: int
    units: int

    def grid(self, rows: int, width: int) -> tuple[int, int]:
        """Programs that cover a matrix."""
        return -(-rows // self.rows), -(-width // self.units)


def tile_for(width: int) -> Tile:
    """The tile for matrices of this width."""
    units = min(WIDEST, power_of_two(width))
    return Tile(TILE // units, units)


def power_of_two(least: int) -> int:
    """The smallest one that is not below."""
    return 1 << max(0, least - 1).bit_length()
