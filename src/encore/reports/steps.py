"""A step that ran, as plain numbers: its measured peak, and the lines outside of the captured graphs behind it."""

from __future__ import annotations

from dataclasses import dataclass

from encore.units import bytes_text


@dataclass(frozen=True, slots=True)
class PlainLine:
    """Memory of one line outside of the captured graphs."""

    line: str
    """`file.py:12`, or `file.py:12-14` if the operator is somewhere between these lines; empty if unknown."""
    function: str
    operator: str
    bytes: int
    """Alive at the peak of the step."""

    def __str__(self) -> str:
        where = f"{self.line} in {self.function}" if self.line else "an unknown line"
        return f"{bytes_text(self.bytes):>11}  {where}{self.operator and f': {self.operator}'}"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The peak of a step, as the allocator gave it: of the captured graphs, and of the code around them."""

    number: int
    """Counted from 1."""
    resident: int
    step_peak: int
    limit: int | None
    """The budget in bytes."""
    plain: int | None = None
    """Bytes alive at the peak that code outside of the captured graphs allocated; None if lines were not recorded."""
    lines: tuple[PlainLine, ...] = ()
    """The lines that allocated these, largest first."""

    @property
    def taken(self) -> int:
        return self.resident + self.step_peak

    @property
    def excess(self) -> int:
        """Bytes above the budget."""
        return 0 if self.limit is None else max(0, self.taken - self.limit)
