"""The instructions of a schedule through time. Each docstring says what one does.

State k is what goes into step k; the last one, n, comes out of the end. There is one *working* state at a time, one
tape at most, and the gradient stands at a step: at n when backward begins, at 0 when it is done.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

Level = Literal["memory", "tier"]


@dataclass(frozen=True, slots=True)
class Advance:
    """Run steps `start` to `stop` - 1 from the working state, which is `start`; keep nothing but the new state."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tape:
    """Run steps `start` to `stop` - 1 from the working state and keep what their backward needs."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Reverse:
    """Take the gradient from `stop` to `start` over the tape, and free the tape."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoreState:
    """Keep the working state, which is `step`, in a slot of memory or in the tier."""

    step: int
    level: Level = "memory"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to load state `step` from the tier."""

    step: int


@dataclass(frozen=True, slots=True)
class LoadState:
    """Make state `step` the working state; it stays where it is stored."""

    step: int
    level: Level = "memory"


@dataclass(frozen=True, slots=True)
class FreeState:
    """Forget the stored state `step`."""

    step: int
    level: Level = "memory"


Action = Advance | Tape | Reverse | StoreState | Prefetch | LoadState | FreeState


class TimeSchedule(abc.ABC):
    """Two streams, made as they are followed. Forward ends where the sequence does; backward is asked for once, when
    the number of steps is known."""

    name: ClassVar[str]
    slots: int
    """States that are in memory at once, at most, besides the working one."""
    block: int
    """Steps on the tape at once, at most."""
    late: int = 0
    """States that were stored at another step than was planned."""

    @abc.abstractmethod
    def forward(self) -> Iterator[Action]:
        """From state 0 to the end."""

    @abc.abstractmethod
    def backward(self, steps: int) -> Iterator[Action]:
        """From the end to state 0, after forward has done `steps` steps."""
