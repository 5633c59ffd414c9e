"""What a callback does in any host's loop: compile the model in place, and compare one step with its prediction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from encore.api import compile, compiled_call, report
from encore.cost import Meter, start_meter
from encore.errors import NeverRunError
from encore.options import make_options, optimizer_bytes
from encore.units import bytes_text

SETTLED = 4
"""The first step that may be measured, counted from 0: steps of several calls are observed and planned again before."""


class PlannedTraining:
    """A model that a host trains through Encore's plans, and the predicted and measured peaks of one of its steps. It
    is the first step from `SETTLED` on that compiles nothing, and comes after one that did not."""

    def __init__(self, options: dict[str, Any]) -> None:
        make_options(options)  # errors belong to where the callback is made
        self.options = options
        self.predicted: int | None = None
        """Predicted peak of a step in bytes, resident bytes included: of the first, then of the one measured."""
        self.measured: int | None = None
        """The measured peak of a step, counted in the same way."""
        self._model: nn.Module | None = None
        self._accumulated = 0
        self._steps = 0
        self._compiled = 0
        self._meter: Meter | None = None

    def begin(self, model: nn.Module, optimizers: Iterable[Optimizer], *, accumulates: bool) -> None:
        """Compile the model in place. Resident are the optimizers' state and, if gradients are accumulated, gradients:
        they stay allocated while a step runs."""
        self._stop_meter()
        self._accumulated = sum(
            parameter.nbytes for parameter in model.parameters() if accumulates and parameter.requires_grad
        )
        state = sum(optimizer_bytes(optimizer) for optimizer in optimizers) if "optimizer" not in self.options else 0
        resident = self.options.get("resident", 0) + state + self._accumulated
        compile(model, **{**self.options, "resident": resident})
        self._model, self._steps, self._compiled = model, 0, 0
        self.predicted = self.measured = None

    def begin_step(self) -> None:
        """Begin to measure, if this may be the step to be measured."""
        if self._steps >= SETTLED and self.measured is None and self._compiled == self.forms:
            self._stop_meter()
            self._meter = start_meter()
        self._compiled = self.forms

    def end_step(self) -> dict[str, int]:
        """Return peaks by their names in logs, if this step tells any."""
        above = self._stop_meter()
        self._steps += 1
        settled = above is not None and self._compiled == self.forms
        if self._steps != 1 and not settled:
            return {}
        try:
            found = report(self._model)  # type: ignore[arg-type]
        except NeverRunError:  # it ran as plain PyTorch, and a warning said why
            return {}
        self.predicted = found.resident + found.planned.step_peak
        if above is None or not settled:
            return {"encore_predicted_peak": self.predicted}
        self.measured = found.resident - self._accumulated + above
        return {"encore_predicted_peak": self.predicted, "encore_measured_peak": self.measured}

    @property
    def forms(self) -> int:
        """How many graphs, shapes and modes have been planned."""
        return 0 if self._model is None else compiled_call(self._model).session.captured_so_far

    def _stop_meter(self) -> int | None:
        running, self._meter = self._meter, None
        return None if running is None else running.stop()[0]

    @property
    def summary(self) -> str:
        """The peaks in a sentence."""
        assert self.predicted is not None
        measured = "" if self.measured is None else f", measured {bytes_text(self.measured)}"
        return f"encore: peak of a step: predicted {bytes_text(self.predicted)}{measured}, resident bytes included"
