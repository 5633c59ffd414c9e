"""`encore demo`: one small language model, trained twice in step, in eager PyTorch and through Encore.

A two-layer LSTM written as a Python loop learns the characters of made-up English. Both sides have the same seed, the
same batches and the same optimizer, and take their steps in turns, so losses can be compared step by step and times
round by round. Encore looks for the smallest peak that costs at most five percent more time: what is shown is that
its step holds less, computes the same numbers, and holds what was predicted.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import encore
from encore.bench.compare import Trainee, Turns
from encore.bench.table import seconds_text
from encore.progress import progress
from encore.report.report import Report
from encore.units import bytes_text
from encore.workloads import Batch, build

STEPS = 300
ROUNDING = 1e-3
"""Losses further apart than this are not two roundings of one curve."""
SIZES: Mapping[str, int] = {"batch_size": 32, "hidden": 128, "steps": 32}
LEARNING_RATE = 3e-3
SHOWN_LOSSES = 6
SHOWN_REPORT_LINES = 12


class Learner:
    """A model with its optimizer and what became of its loss."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        self.losses: list[float] = []

    def step(self, batch: Batch) -> float:
        """One training step; its seconds."""
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        seconds = time.perf_counter() - started
        self.losses.append(loss.item())
        return seconds


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo found."""

    sizes: Mapping[str, int]
    eager_losses: tuple[float, ...]
    encore_losses: tuple[float, ...]
    identical: bool
    """Every loss and every parameter after the last step has the same bits on both sides."""
    eager_peak: int
    encore_peak: int
    predicted_peak: int
    turns: Turns = field(repr=False)
    first_step_seconds: float
    seconds: float
    report: Report = field(repr=False)

    @property
    def loss_gap(self) -> float:
        """Largest difference between the two sides' losses of a step."""
        return max(abs(one - other) for one, other in zip(self.eager_losses, self.encore_losses, strict=True))

    @property
    def prediction_error(self) -> float:
        return self.predicted_peak / self.encore_peak - 1

    def to_json(self) -> str:
        """The numbers as JSON; `encore_demo` is the version of its layout."""
        found: dict[str, Any] = {"encore_demo": 1, "sizes": dict(self.sizes), "steps": len(self.eager_losses)}
        found |= {"eager_losses": self.eager_losses, "encore_losses": self.encore_losses}
        found |= {"identical": self.identical, "loss_gap": self.loss_gap}
        found |= {"eager_peak": self.eager_peak, "encore_peak": self.encore_peak}
        found |= {"predicted_peak": self.predicted_peak, "prediction_error": self.prediction_error}
        found |= {"eager_seconds": self.turns.seconds[0], "encore_seconds": self.turns.seconds[1]}
        found |= {"ratio": self.turns.ratio, "spread": self.turns.spread}
        found |= {"first_step_seconds": self.first_step_seconds, "seconds": self.seconds}
        return json.dumps(found | {"report": self.report.to_dict()}, indent=2)

    def __str__(self) -> str:
        return render(self)


def run(steps: int = STEPS, sizes: Mapping[str, int] = SIZES) -> Demo:
    """Train both sides for `steps` steps (at least two: the first is not timed) and measure one more of each."""
    if steps < 2:
        raise encore.OptionError(f"--steps {steps} is too few: the first step compiles, so at least 2 are needed")
    started = time.perf_counter()
    workload = build("lm", **sizes)
    eager = Learner(workload.model)
    planned = Learner(encore.compile(build("lm", **sizes).model))
    turns, first_step_seconds = _train(eager, planned, workload.batch, steps)
    batch = workload.batch(steps)
    eager_peak = Trainee(eager.model, batch).measured().step_peak
    encore_peak = Trainee(planned.model, batch).measured().step_peak
    report = encore.report(planned.model)
    return Demo(
        sizes=dict(sizes),
        eager_losses=tuple(eager.losses),
        encore_losses=tuple(planned.losses),
        identical=eager.losses == planned.losses and _same_parameters(eager.model, planned.model),
        eager_peak=eager_peak,
        encore_peak=encore_peak,
        predicted_peak=report.planned.step_peak,
        turns=turns,
        first_step_seconds=first_step_seconds,
        seconds=time.perf_counter() - started,
        report=report,
    )


def _train(eager: Learner, planned: Learner, batch: Callable[[int], Batch], steps: int) -> tuple[Turns, float]:
    """Both sides in turns, beginning with the other one every step; the first step stands apart."""
    pairs = []
    with progress("training", steps) as tell:
        first = batch(0)
        eager.step(first)
        first_step_seconds = planned.step(first)
        tell(f"compiled in {seconds_text(first_step_seconds)}")
        for index in range(1, steps):
            data = batch(index)
            if index % 2:
                one = eager.step(data)
                pairs.append((one, planned.step(data)))
            else:
                other = planned.step(data)
                pairs.append((eager.step(data), other))
            tell(f"loss: eager {eager.losses[-1]:.4f}, Encore {planned.losses[-1]:.4f}")
    return Turns(tuple(pairs)), first_step_seconds


def _same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(itertools.starmap(torch.equal, zip(one.parameters(), other.parameters(), strict=True)))


def render(demo: Demo) -> str:
    """The result, ready to print."""
    steps = len(demo.eager_losses)
    sizes = ", ".join(f"{name} {size}" for name, size in demo.sizes.items())
    eager_seconds, encore_seconds = demo.turns.seconds
    lowest, highest = demo.turns.spread
    return "\n".join(
        [
            f"A two-layer LSTM language model, written as a Python loop ({sizes}), {steps} training steps",
            "",
            *_losses(demo),
            "",
            f"  measured peak    eager {bytes_text(demo.eager_peak)}, Encore {bytes_text(demo.encore_peak)}",
            f"  predicted peak   {bytes_text(demo.predicted_peak)}, {_error(demo)}",
            f"  time of a step   eager {seconds_text(eager_seconds)}, Encore {seconds_text(encore_seconds)}: "
            f"{demo.turns.ratio:.2f}x (median of {steps - 1} in turns; {lowest:.2f} to {highest:.2f})",
            f"  first step       {seconds_text(demo.first_step_seconds)}, compilation included",
            f"  the whole demo   {seconds_text(demo.seconds)}",
            "",
            "print(encore.report(model)) begins:",
            "",
            *str(demo.report).splitlines()[:SHOWN_REPORT_LINES],
        ]
    )


def _losses(demo: Demo) -> list[str]:
    last = len(demo.eager_losses) - 1
    shown = sorted({round(last * part / (SHOWN_LOSSES - 1)) for part in range(SHOWN_LOSSES)})
    lines = [f"  {'step':>6}  {'eager loss':>12}  {'Encore loss':>12}"]
    lines += [f"  {at + 1:>6}  {demo.eager_losses[at]:>12.7f}  {demo.encore_losses[at]:>12.7f}" for at in shown]
    if demo.identical:
        return [*lines, "  identical bit for bit: every loss, and every parameter after the last step"]
    if demo.loss_gap <= ROUNDING:
        return [
            *lines,
            f"  the same curve: losses differ by up to {demo.loss_gap:.1e}, since fused kernels round elsewhere",
        ]
    return [*lines, f"  NOT the same curve: losses differ by up to {demo.loss_gap:.3g}"]


def _error(demo: Demo) -> str:
    if demo.predicted_peak == demo.encore_peak:
        return "which is what was measured, to the byte"
    side = "above" if demo.predicted_peak > demo.encore_peak else "BELOW"
    return f"{abs(demo.prediction_error):.2%} {side} the measured one"
