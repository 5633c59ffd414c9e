"""The whole tape kept: a plain loop, for when it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from encore.bptt.actions import Action, Reverse, Tape, TimeSchedule


class KeepTape(TimeSchedule):
    """One forward a step."""

    name: ClassVar[str] = "keep"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.slots = 0
        self.block = steps

    def forward(self) -> Iterator[Action]:
        if self.steps:
            yield Tape(0, self.steps)

    def backward(self, steps: int) -> Iterator[Action]:
        if steps:
            yield Reverse(0, steps)
