"""The exceptions of Encore. Every message says what happened, why, and what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class EncoreError(Exception):
    """The base class of the exceptions that Encore raises."""


class OptionError(EncoreError, ValueError):
    """An argument is not accepted; the message names what is."""


class OperandError(OptionError, RuntimeError):
    """Tensors do not fit together. PyTorch raises a `RuntimeError` for some of these and a `ValueError` for others:
    this is both."""


class RanksDisagreeError(EncoreError):
    """Processes of a distributed run cannot run the same plan."""


class PlanError(EncoreError):
    """A saved plan cannot be read, or is for another graph."""


class MissingPackageError(EncoreError, ImportError):
    """An optional feature needs a package that is not installed; the message names the extra."""


class UnsupportedTorchError(EncoreError, ImportError):
    """The PyTorch that is installed is older or newer than those that Encore works with."""


class NeverRunError(EncoreError):
    """No training step has run yet."""


class VerificationError(EncoreError, AssertionError):
    """A planned step and plain eager PyTorch disagree; the message names the first difference."""


class CheckError(EncoreError, AssertionError):
    """`ENCORE_CHECK=1` found a step that is not what it should be: a bug in Encore. The message names the operator and
    the value, or the first number that differs from eager's."""


class WriteError(EncoreError, OSError):
    """A file that the system did not let be written: no room, no right, a broken disk."""


class TierError(EncoreError, OSError):
    """Bytes cannot be stored or loaded: no space, an I/O error, or other bytes than were stored."""


class ReplayError(EncoreError):
    """A step that is recomputed does something else than the first time, so that its gradients would be wrong."""


class DoubleBackwardError(EncoreError, RuntimeError):
    """A gradient that a compiled model computed is differentiated again."""


class IllegalGraphError(EncoreError):
    """A graph or schedule broke a rule of `encore.graph.verify`, `encore.schedule.replayer` or `encore.bptt.replayer`:
    a bug in Encore."""


@dataclass(frozen=True)
class Pin:
    """A tensor that is alive at the lowest reachable peak."""

    name: str
    module: str
    source: str
    shape: tuple[int, ...]
    bytes: int


LIKE_OUT_OF_MEMORY = (
    "batch-size finders handle this error like 'CUDA out of memory.' or 'DefaultCPUAllocator: can't allocate memory'"
)
"""The texts by which accelerate's `find_executable_batch_size` and Lightning's `BatchSizeFinder` recognize an error
after which a smaller batch is tried (accelerate/utils/memory.py, lightning/pytorch/utilities/memory.py)."""


class BudgetError(EncoreError, torch.OutOfMemoryError):
    """The budget lies below the lowest peak Encore can reach. It is a `torch.OutOfMemoryError` for code
    that catches that and tries a smaller batch."""

    def __init__(self, message: str, *, floor: int, pins: Sequence[Pin] = (), remedies: Sequence[str] = ()) -> None:
        super().__init__(f"{message}\n{LIKE_OUT_OF_MEMORY}")
        self.message = message
        self.floor = floor
        """Lowest reachable `resident + step_peak`, in bytes."""
        self.pins = tuple(pins)
        """The largest tensors alive at that peak."""
        self.remedies = tuple(remedies)
        """What would lower the floor, cheapest first."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        again = functools.partial(type(self), floor=self.floor, pins=self.pins, remedies=self.remedies)
        return again, (self.message,)


class BudgetExceededError(BudgetError):
    """With `strict=True`: a step that is over took more memory than its budget. `floor` is what it took, if planning
    cannot lower that."""


def listed(names: Iterable[object]) -> str:
    """Names for an error message: sorted and quoted."""
    return ", ".join(repr(str(name)) for name in sorted(names, key=str))
