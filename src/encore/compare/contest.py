"""Systems that train the same model on the same batch in one process: first steps, peaks, gradients, and step times in
interleaved rounds. A machine that slows down slows all of them, so ratios within a round hold where seconds do not."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from encore import api
from encore.compare import systems
from encore.compare.outcome import Outcome
from encore.compare.trainee import (
    SEED,
    Trainee,
    interleaved_times,
    median_ratio,
    random_states,
    ratio_spread,
    relative_distance,
)
from encore.errors import BudgetError, EncoreError
from encore.graph.torch_private import pytree
from encore.reports.report import Report
from encore.terminal import Advance

EAGER = "eager"
WARM_UP = 2
SLOW = 2.0
"""Seconds of a step from which on no step but the first two warms up."""
LONGEST_REASON = 100
NO_TIME = "no time for it in the minutes that were given"


class Contest:
    """The systems that are compared on one model. The first one that runs, eager if it can, is the reference."""

    def __init__(
        self,
        fresh: Callable[[], Trainee],
        advance: Advance,
        *,
        rounds: int,
        until: float | None = None,
        like: Callable[[str], str] = lambda system: EAGER,
        always: Sequence[str] = (EAGER,),
    ) -> None:
        self.fresh = fresh
        """Make the model, which no system has prepared yet, with its batch."""
        self.advance = advance
        self.rounds = rounds
        self.until = until
        """When it should be over, by the clock of `time.perf_counter`; `None`: it may take any time."""
        self.like = like
        """The system whose first step takes about as long as that of another."""
        self.always = always
        """Systems that run however little time there is."""
        self.trainees: dict[str, Trainee] = {}
        self.first: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self.distances: dict[str, float] = {}
        """Of all gradients from eager's."""
        self.errors: dict[str, float] = {}
        """Of all gradients from those of a float64 copy."""
        self.truth: list[Tensor] = []
        self.exact: list[Tensor] = []
        """Gradients of the float64 copy, if there is one."""
        self.failures: dict[str, str] = {}
        self.budget_error: BudgetError | None = None
        self.left_out: dict[str, str] = {}
        self.slow = False
        """Whether a step of eager takes long."""
        self.draws = False
        """Whether a step of eager draws random numbers."""
        self.own_draws: set[str] = set()
        """Systems that draw other numbers than eager."""

    def enter(self, system: str, prepare: Callable[[Any], Any]) -> Trainee | None:
        """Take the first step, a second one to measure the peak, and warm up; a system that fails is out, with its
        reason. Eager comes first: others are compared with it."""
        if not self._has_time(system):
            self.leave_out(system, NO_TIME)
            return None
        try:
            fresh = self.fresh()
            trainee = dataclasses.replace(fresh, model=prepare(fresh.model), cotangents={})
            started = time.perf_counter()
            trainee.timed()
            self.first[system] = time.perf_counter() - started
            self.peaks[system] = trainee.measured().step_peak
            self._compare_gradients(system, trainee, prepare)
            self.slow = self.slow or (system == EAGER and self.first[system] > SLOW)
            for _ in range(0 if self.slow else WARM_UP - 1):
                trainee.timed()
        except Exception as error:  # a system may raise anything; its row shows it
            self.failed(system, error)
            self.advance(f"{system}: failed")
            return None
        self.trainees[system] = trainee
        self.advance(f"{system}: first step and warm-up")
        return trainee

    def _compare_gradients(self, system: str, trainee: Trainee, prepare: Callable[[Any], Any]) -> None:
        """Of the step that was just measured, from `SEED`."""
        found = trainee.gradients()
        if system == EAGER:
            after = random_states()
            torch.manual_seed(SEED)
            self.draws = not all(map(torch.equal, after, random_states()))
            self.truth = found
        if self.draws and systems.draws_its_own(prepare):
            self.own_draws.add(system)
        self.distances[system] = relative_distance(found, self.truth) if self.truth else math.nan
        if self.exact:
            self.errors[system] = relative_distance(found, self.exact)

    def compare_with_float64(self) -> None:
        """Take one step of a float64 copy, whose gradients all others are compared with, eager's first. Without effect
        for a model that draws random numbers or that has no float64 step."""
        if self.draws or EAGER not in self.trainees:
            return
        try:
            exact = _in_float64(self.fresh())
            torch.manual_seed(SEED)
            exact.step()
            self.exact = exact.gradients()
            self.errors[EAGER] = relative_distance(self.truth, self.exact)
        except Exception:  # operators without float64, buffers of a fixed type
            self.exact = []

    def _has_time(self, system: str) -> bool:
        """Return whether there is time for its first step, which takes about as long as that of its like, and for all
        rounds."""
        if self.until is None or system in self.always:
            return True
        step = self.first.get(EAGER, 0.0)
        expected = self.first.get(self.like(system), step) + 2 * step + self.rounds * step * (len(self.trainees) + 1)
        return time.perf_counter() + expected < self.until

    def leave_out(self, system: str, why: str) -> None:
        self.left_out[system] = why
        self.advance(f"{system}: left out")

    def failed(self, system: str, error: Exception) -> None:
        """The system is out, even if it took part until now."""
        self.trainees.pop(system, None)
        self.failures[system] = reason(error)
        if isinstance(error, BudgetError):
            self.budget_error = error.with_traceback(None)
        gc.collect()  # what the failed step allocated is in the frames of its exception

    def times(self, names: Sequence[str], rounds: int, advance: Advance = lambda note: None) -> dict[str, list[float]]:
        """Interleaved step times of those systems that do not fail."""
        steps = {system: self.trainees[system].timed for system in names}
        return interleaved_times(steps, rounds, advance, self.failed)

    def outcomes(self, seconds: dict[str, list[float]]) -> list[Outcome]:
        """A row for every system: those that ran, those that failed, and those that were left out."""
        found = [self._outcome(system, seconds[system], seconds.get(EAGER)) for system in self.trainees]
        found += [Outcome(system, failure=why) for system, why in self.failures.items()]
        return found + [Outcome(system, left_out=why) for system, why in self.left_out.items()]

    def report(self, system: str) -> Report | None:
        """Encore's report; None for other systems, and if Encore left the model to plain PyTorch."""
        if not system.startswith("Encore"):
            return None
        try:
            return api.report(self.trainees[system].model)
        except EncoreError:
            return None

    def _outcome(self, system: str, mine: Sequence[float], eager: Sequence[float] | None) -> Outcome:
        report = self.report(system)
        lowest, highest = ratio_spread(mine, eager) if eager else (math.nan, math.nan)
        return Outcome(
            system=system,
            seconds=statistics.median(mine),
            quietest=min(mine),
            against_eager=median_ratio(mine, eager) if eager else math.nan,
            lowest=lowest,
            highest=highest,
            peak=self.peaks[system],
            reduction=self.peaks[EAGER] / self.peaks[system] if eager else math.nan,
            predicted=None if report is None else report.planned.step_peak,
            predicted_seconds=None if report is None or not report.planned.seconds else report.planned.seconds,
            plan_seconds=None if report is None else report.first_step["plan"],
            first_step=self.first[system],
            gradient_difference=self.distances[system],
            gradient_error=self.errors.get(system),
            own_draws=system in self.own_draws,
        )


def _in_float64(trainee: Trainee) -> Trainee:
    def widen(tensor: Tensor) -> Tensor:
        wide = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
        return wide.requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (trainee.args, dict(trainee.kwargs)))
    return Trainee(copy.deepcopy(trainee.model).double(), args, kwargs)


def reason(error: Exception) -> str:
    """An exception in a cell of a table: its class and the first line of its message."""
    said = str(error).strip().partition("\n")[0].rstrip()[:LONGEST_REASON]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
