"""A model and its batch: one training step, timed and measured, and how far gradients are from others."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from encore.comparison import cotangent
from encore.cost import Measurement, measure
from encore.devices import default_generators
from encore.errors import OptionError
from encore.graph.torch_private import pytree

SEED = 0


@dataclass(frozen=True, slots=True)
class Trainee:
    """A model and its arguments. A step is forward and backward; old gradients are dropped before."""

    model: Any
    """A module or a function."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    closed_over: tuple[Tensor, ...] = ()
    """Tensors beyond parameters and arguments that receive gradients, of a function."""
    cotangents: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def step(self) -> None:
        """Call the model and run backward: from its scalar outputs or, where it returns no loss, from all outputs."""
        outputs = self.outputs()
        losses = [tensor for tensor in outputs if tensor.numel() == 1]
        if losses:
            torch.autograd.backward(losses)
        else:
            torch.autograd.backward(outputs, [self._cotangent(*pair) for pair in enumerate(outputs)])

    def outputs(self) -> list[Tensor]:
        """The outputs of a call that backward can start from."""
        with torch.enable_grad():
            found = pytree.tree_leaves(self.model(*self.args, **self.kwargs))
        outputs = [tensor for tensor in found if isinstance(tensor, Tensor) and tensor.requires_grad]
        if not outputs:
            raise OptionError("no output of this call depends on anything that needs a gradient; there is no step")
        return outputs

    def timed(self) -> float:
        """Seconds of one step."""
        self.drop_gradients()
        _wait_for_device()
        started = time.perf_counter()
        self.step()
        _wait_for_device()
        return time.perf_counter() - started

    def measured(self) -> Measurement:
        """What one step allocates, from a fixed random state."""
        self.drop_gradients()
        torch.manual_seed(SEED)
        return measure(self.step)

    def leaves(self) -> Iterator[Tensor]:
        """Tensors that receive gradients: parameters, arguments, and those that a function closes over."""
        if isinstance(self.model, nn.Module):
            yield from (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        given = pytree.tree_leaves((self.args, dict(self.kwargs)))
        yield from (tensor for tensor in given if isinstance(tensor, Tensor) and tensor.requires_grad)
        yield from self.closed_over

    def drop_gradients(self) -> None:
        for leaf in self.leaves():
            leaf.grad = None

    def gradients(self) -> list[Tensor]:
        """Those of the last step, in double precision."""
        return [leaf.grad.double() for leaf in self.leaves() if leaf.grad is not None]

    def _cotangent(self, index: int, output: Tensor) -> Tensor:
        """The gradient that backward starts from: the same numbers in every step, in memory of the step."""
        known = self.cotangents.get(index)
        if known is None or known.shape != output.shape or known.dtype != output.dtype:
            known = self.cotangents[index] = cotangent(output, index)
        return known.clone()


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def random_states() -> list[Tensor]:
    """The states of the default generators."""
    return [generator.get_state() for generator in default_generators()]


def interleaved_times(
    steps: Mapping[str, Callable[[], float]],
    rounds: int,
    advance: Callable[[str], None] = lambda note: None,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[float]]:
    """Step times of several systems, round by round; the one that begins changes every round. A system that raises an
    error goes to `failed`, if that is given, and has no times."""
    order = list(steps)
    seconds: dict[str, list[float]] = {system: [] for system in order}
    for number in range(rounds):
        first = number % max(1, len(order))
        for system in order[first:] + order[:first]:
            if system not in seconds:
                continue
            try:
                seconds[system].append(steps[system]())
            except Exception as error:
                if failed is None:
                    raise
                failed(system, error)
                del seconds[system]
        advance("interleaved rounds")
    return seconds


def median_ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    """One system's time over another's: the median of the rounds."""
    return statistics.median(one / other for one, other in zip(mine, others, strict=True))


def ratio_spread(mine: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest round of `median_ratio`."""
    ratios = [one / other for one, other in zip(mine, others, strict=True)]
    return min(ratios), max(ratios)


def relative_distance(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """How far all tensors together are from others, relative to the size of those; infinite where one has a NaN."""
    apart = sum(float((one - other).square().sum()) for one, other in zip(found, truth, strict=True))
    size = sum(float(other.square().sum()) for other in truth)
    if not apart and not size:
        return 0.0
    distance = (apart / size) ** 0.5 if size else math.inf
    return math.inf if math.isnan(distance) else distance
