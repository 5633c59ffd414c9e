"""The gradient error of a step with lossy codecs, measured while the model trains.

A step that is checked runs once more right after its backward, as it was planned and with the same kernels, but with
activations in the place of their lossy codes; the two sets of gradients are compared (`cost/gradient_error.py`). Steps
1, 10, 100, 1000, ... of a plan are always checked, with the gradients of the real loss; others every `lossy_check=`
steps. A step whose error exceeds the bound gets the exact gradients, and the model is planned again before the next
one, with the gradients of the loss and the present weights. Unless the step is the first, a warning has the error.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from encore.capture.torch_private import real_tensors
from encore.cost.gradient_error import (
    GradientError,
    Gradients,
    compare_gradients,
    extra_bytes,
    gradient_bytes,
    lossy_codec,
    lower_in_memory,
    run_gradients,
    why_unmeasurable,
)
from encore.cost.probe import device_of_step
from encore.cost.room import step_has_room
from encore.devices import default_generators
from encore.graph import Role
from encore.lower import Lowered
from encore.lower.kernels import CompiledKernel
from encore.plan import Plan

log = logging.getLogger("encore")


class LossyCheck:
    """Checks steps of one graph whose plan has lossy codecs."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        kernels: Mapping[str, CompiledKernel],
        *,
        bound: float | None,
        every: int,
        planned: GradientError | None = None,
        plan_again: Callable[[list[torch.Tensor]], bool] = lambda tangents: False,
    ) -> None:
        self.name, self.plan, self.kernels = name, plan, kernels
        self.bound = bound
        """The share of the bound that is this graph's."""
        self.every = every
        self.planned = planned
        """The error that was measured while the plan was chosen."""
        self.plan_again = plan_again
        """Requests another plan for the given gradients of the outputs; returns whether there will be one."""
        self.measured: dict[int, GradientError] = {}
        """Errors by step, counted from 0."""
        self.why_not = ""
        """Why the last check could not be made."""
        self.warned = False
        """Whether a warning was given that the model cannot be planned again."""
        self.steps = 0
        self._looked = False
        self._exact: Lowered | None = None
        self._pending: tuple[tuple[int, ...], list[Any], Any, int] | None = None

    @property
    def error(self) -> GradientError | None:
        """The largest error so far, of real steps if one has been measured."""
        return max(self.measured.values(), key=lambda one: one.relative, default=self.planned)

    def forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a forward; for a step that will be checked, keep its arguments."""
        step, self.steps = self.steps, self.steps + 1
        due = not self._looked or _is_power_of_ten(self.steps) or (self.every > 0 and step % self.every == 0)
        if not due:
            return run(args)
        self._pending = None
        graph = self.plan.schedule.graph
        self.why_not = why_unmeasurable(graph, args)
        if self.why_not:
            self._looked = True
            return run(args)
        # Parameters change at the optimizer's step, after backward; buffers and inputs may change before.
        given = [
            arg.detach() if graph.values[value].role is Role.PARAMETER else arg.detach().clone()
            for value, arg in zip(graph.primals, args, strict=True)
        ]
        state = _generator_states()
        results = run(args)
        saved = results[len(graph.outputs) :]
        self._pending = (_places(saved), given, state, step)
        return results

    def backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a backward; if its step is checked, run the step again without loss and compare."""
        saved = len(self.plan.schedule.saved)
        if self._pending is None or self._pending[0] != _places(args[:saved]):
            return run(args)
        (_, given, state, step), self._pending = self._pending, None
        self._looked = True
        tangents = list(args[saved:])
        gradients = run(args)
        exact = self._exact_gradients(given, tangents, state)
        if exact is None:
            return gradients
        found = compare_gradients(self.plan.schedule.graph, exact, gradients)
        if math.isnan(found.relative):
            self.why_not = f"the exact gradients of step {step} are not finite"
            return gradients
        self.measured[step] = found
        log.info("%s: gradient error of lossy codecs at step %d: %.3g", self.name, step, found.relative)
        if self.bound is None or found.relative <= self.bound:
            return gradients
        again = self.plan_again(tangents)
        if len(self.measured) > 1 or not again:
            self._warn(step, found.relative, again)
        return tuple(exact)

    def _exact_gradients(self, given: list[Any], tangents: Sequence[torch.Tensor], state: Any) -> Gradients | None:
        graph = self.plan.schedule.graph
        need = self.plan.timeline.step_peak + extra_bytes(graph) + gradient_bytes(graph)
        if not step_has_room(need, device_of_step(graph)):
            self.why_not = "there is too little free memory to run the step a second time"
            return None
        if self._exact is None:
            self._exact = lower_in_memory(self.plan.schedule, exact=True, kernels=self.kernels)
        now = _generator_states()
        with real_tensors():
            _set_generators(state)
            try:
                return run_gradients(graph, self._exact, given, tangents)
            finally:
                _set_generators(now)

    def _warn(self, step: int, error: float, again: bool) -> None:
        if self.warned:
            return
        self.warned = not again
        rest = (
            "steps since the last check may have exceeded it too. The next step is planned with other codecs, for the "
            "present weights. To see such errors earlier, check more often (lossy_check=)"
            if again
            else "steps that are not checked do not. Compile the model again to choose codecs for the present weights, "
            "give a lower bound (lossy=), or check more often (lossy_check=)"
        )
        warnings.warn(
            f"encore: the lossy codecs of {self.name} cause a gradient error of {error:.3g} at step {step}, over the "
            f"bound of {self.bound:.3g} that they were chosen for. This step takes the exact gradients; {rest}",
            stacklevel=2,
        )


def _is_power_of_ten(number: int) -> bool:
    return number == 10 ** (len(str(number)) - 1)


def has_lossy_codes(plan: Plan) -> bool:
    return any(lossy_codec(op) is not None for op in plan.schedule.graph.ops) if plan.encodings else False


def _places(tensors: Sequence[Any]) -> tuple[int, ...]:
    """The addresses of saved tensors, by which a backward finds its forward."""
    return tuple(one.data_ptr() if isinstance(one, torch.Tensor) else 0 for one in tensors)


def _generator_states() -> list[tuple[torch.Generator, torch.Tensor]]:
    return [(generator, generator.get_state()) for generator in default_generators()]


def _set_generators(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)
