"""`python -m examples.demo`: a translator trained twice in step, in eager PyTorch and by Encore in half of the memory.

An LSTM encoder-decoder with attention learns to translate written-out numbers from English to German. Both sides have
the same seed, the same batches and the same optimizer, and take interleaved steps, so losses can be compared step
by step and times round by round. Encore is given half of the bytes that the step needs. What is shown is that the loss
curve is the same, that the trained model translates sentences it never saw, that the budget is kept and what was
predicted is what was measured; and a page to look at, with what people would use instead: a checkpoint around each
block, `save_on_cpu`, and `torch.compile` with an `activation_memory_budget`.

Fused kernels round elsewhere than eager's, and training magnifies roundings. A third run shows by how much: eager once
more, from weights that are one rounding away. A budget that was not kept, or losses further apart than that, are
problems, and the command fails with them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import encore
from benchmarks.pairs import PairedTimes
from benchmarks.save_on_cpu import SavedOnCpu
from benchmarks.schema import Layout
from benchmarks.workloads import Batch, Workload, build
from encore.cli.command_line import DONE, FAILED, CommandParser, run_command
from encore.compare import systems
from encore.compare.contest import reason
from encore.compare.trainee import Trainee, interleaved_times, median_ratio
from encore.errors import MissingPackageError
from encore.reports.points import Point
from encore.reports.report import Report
from encore.terminal import progress
from encore.units import bytes_text, seconds_text
from encore.whole_files import check_folder, make_folder

STEPS = 200
BUDGET = "50%"
DRIFTS = 3
"""Losses may be as far apart as so many times what one rounding of the weights does to eager's,"""
ROUNDINGS = 8 * torch.finfo(torch.float32).eps
"""or as this share of the largest loss: a few roundings of the sums that a loss is, however few the steps."""
SIZES: Mapping[str, int] = {"batch_size": 128, "hidden": 128, "layers": 1, "steps": 12}
BLOCKS = ("LSTMCell", "AdditiveAttention")
SHOWN_LOSSES = 6
SHOWN_REPORT_LINES = 12
ROUNDS = 5
FOLDER = Path("encore-demo")
SETTING = 0.5
PEERS: Mapping[str, Callable[[nn.Module], Any]] = {
    "checkpoint per block": functools.partial(systems.checkpointed, classes=BLOCKS),
    "save_on_cpu": SavedOnCpu,
    f"activation_memory_budget {SETTING}": functools.partial(systems.within_budget, setting=SETTING),
}
LAYOUT = Layout("encore_demo", 3)


class Learner:
    """A model with its optimizer and what became of its loss."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
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
    budget: str
    eager_losses: tuple[float, ...]
    encore_losses: tuple[float, ...]
    identical: bool
    """Every loss and every parameter after the last step has the same bits on both sides."""
    drift: float
    """How far eager's losses are from those of eager itself, from weights that are one rounding away."""
    eager_scores: Mapping[str, float]
    encore_scores: Mapping[str, float]
    sample: str
    """Held-out sentences and what the model that Encore trained makes of them."""
    eager_peak: int
    encore_peak: int
    predicted_peak: int
    limit: int
    """The budget in bytes, resident ones included."""
    times: PairedTimes = field(repr=False)
    peers: tuple[Point, ...]
    failures: Mapping[str, str]
    """Peers that could not run here, and why."""
    measured: tuple[Point, ...]
    first_step_seconds: float
    seconds: float
    report: Report = field(repr=False)

    @property
    def loss_gap(self) -> float:
        """Largest difference between the two sides' losses of a step."""
        return _apart(self.eager_losses, self.encore_losses)

    @property
    def tolerance(self) -> float:
        """How far two roundings of one curve may be apart."""
        return max(DRIFTS * self.drift, ROUNDINGS * max(self.eager_losses))

    @property
    def same_curve(self) -> bool:
        return self.loss_gap <= self.tolerance

    @property
    def prediction_error(self) -> float:
        return self.predicted_peak / self.encore_peak - 1

    @property
    def within_budget(self) -> bool:
        return self.report.resident + self.encore_peak <= self.limit

    @property
    def problems(self) -> list[str]:
        """What the demo promises and did not show."""
        found = []
        if not self.within_budget:
            held = bytes_text(self.report.resident + self.encore_peak)
            found.append(f"the budget of {bytes_text(self.limit)} was not kept: {held} were measured")
        if not self.same_curve:
            found.append(
                f"the loss curves are not the same: up to {self.loss_gap:.1e} apart, where roundings explain "
                f"{self.tolerance:.1e}"
            )
        return found

    def to_json(self) -> str:
        """The numbers as JSON; `encore_demo` is the version of its layout."""
        found: dict[str, Any] = {"sizes": dict(self.sizes), "steps": len(self.eager_losses)}
        found |= {"budget": self.budget, "limit": self.limit, "within_budget": self.within_budget}
        found |= {"eager_losses": self.eager_losses, "encore_losses": self.encore_losses}
        found |= {"identical": self.identical, "loss_gap": self.loss_gap, "drift": self.drift}
        found |= {"same_curve": self.same_curve, "problems": self.problems, "failures": dict(self.failures)}
        found |= {"eager_scores": dict(self.eager_scores), "encore_scores": dict(self.encore_scores)}
        found |= {"eager_peak": self.eager_peak, "encore_peak": self.encore_peak}
        found |= {"predicted_peak": self.predicted_peak, "prediction_error": self.prediction_error}
        found |= {"eager_seconds": self.times.seconds[0], "encore_seconds": self.times.seconds[1]}
        found |= {"ratio": self.times.ratio, "spread": self.times.spread}
        found |= {"first_step_seconds": self.first_step_seconds, "seconds": self.seconds}
        return LAYOUT.to_json(found | {"report": self.report.to_dict()})

    def write(self, folder: Path) -> list[Path]:
        """The page, the picture (where matplotlib is there to draw it) and the snapshot for PyTorch's viewer."""
        make_folder(folder)
        written = [self.report.to_html(folder / "report.html", measured=self.measured, peers=self.peers)]
        with contextlib.suppress(MissingPackageError):  # the page has the same picture
            written.append(self.report.to_png(folder / "timeline.png"))
        return [*written, self.report.to_snapshot(folder / "snapshot.pickle")]

    def __str__(self) -> str:
        return render(self)


def run(steps: int = STEPS, sizes: Mapping[str, int] = SIZES, budget: str = BUDGET) -> Demo:
    """Train both sides for `steps` steps (at least two: the first is not timed) and measure one more of each."""
    if steps < 2:
        raise encore.OptionError(f"--steps {steps} is too few: the first step compiles, so at least 2 are needed")
    started = time.perf_counter()
    make = functools.partial(build, "nmt", **sizes)
    workload = make()
    eager = Learner(workload.model, workload.learning_rate)
    planned = Learner(encore.compile(make().model, budget=budget), workload.learning_rate)
    times, first_step_seconds = _train(eager, planned, workload.batch, steps)
    drift = _apart(eager.losses, _nudged_losses(make(), steps))
    identical = eager.losses == planned.losses and _same_parameters(eager.model, planned.model)
    assert workload.sample is not None
    report = encore.report(planned.model)
    sides, failures = _sides(make, eager.model, planned.model, workload.batch(steps))
    peaks, ratios = _against_everything_kept(sides)
    points = [Point(name, ratios[name], peaks[name]) for name in sides if name != "kept"]
    unplanned = report.resident + report.unplanned.step_peak
    return Demo(
        sizes=dict(sizes),
        budget=budget,
        eager_losses=tuple(eager.losses),
        encore_losses=tuple(planned.losses),
        identical=identical,
        drift=drift,
        eager_scores=workload.score(eager.model),
        encore_scores=workload.score(planned.model),
        sample=workload.sample(planned.model),
        eager_peak=peaks["eager"],
        encore_peak=peaks["Encore"],
        predicted_peak=report.planned.step_peak,
        limit=report.budget if report.budget is not None else unplanned,
        times=times,
        peers=tuple(point for point in points if point.name in PEERS),
        failures=failures,
        measured=tuple(point for point in points if point.name not in PEERS),
        first_step_seconds=first_step_seconds,
        seconds=time.perf_counter() - started,
        report=report,
    )


def _train(eager: Learner, planned: Learner, batch: Callable[[int], Batch], steps: int) -> tuple[PairedTimes, float]:
    """Interleaved steps of both sides, beginning with the other one every step; the first step stands apart."""
    pairs = []
    with progress("training", steps) as advance:
        first = batch(0)
        eager.step(first)
        first_step_seconds = planned.step(first)
        advance(f"compiled in {seconds_text(first_step_seconds)}")
        for index in range(1, steps):
            data = batch(index)
            if index % 2:
                one = eager.step(data)
                pairs.append((one, planned.step(data)))
            else:
                other = planned.step(data)
                pairs.append((eager.step(data), other))
            advance(f"loss: eager {eager.losses[-1]:.4f}, Encore {planned.losses[-1]:.4f}")
    return PairedTimes(tuple(pairs)), first_step_seconds


def _nudged_losses(workload: Workload, steps: int) -> list[float]:
    """Eager's, from weights that are moved to the next number there is."""
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.copy_(parameter.nextafter(torch.full_like(parameter, torch.inf)))
    learner = Learner(workload.model, workload.learning_rate)
    with progress("one rounding", steps) as advance:
        for index in range(steps):
            learner.step(workload.batch(index))
            advance(f"loss: eager, nudged {learner.losses[-1]:.4f}")
    return learner.losses


def _apart(ones: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference; infinite where there is a NaN, which `max` ignores."""
    gaps = [abs(one - other) for one, other in zip(ones, others, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def _sides(
    make: Callable[[], Workload], eager: nn.Module, planned: nn.Module, batch: Batch
) -> tuple[dict[str, Trainee], dict[str, str]]:
    """What is drawn next to the plans, and the plan that keeps everything, by which all are measured: each with its
    first step behind it. And why peers are missing."""
    ours = {"eager": eager, "Encore": planned, "kept": encore.compile(make().model, overhead=0.0)}
    sides, failures = {name: Trainee(model, batch) for name, model in ours.items()}, {}
    with progress("first steps", len(ours) + len(PEERS)) as advance:
        for name, side in sides.items():
            advance(f"{name}: {seconds_text(side.timed())}")
        for name, peer in PEERS.items():
            try:
                side = Trainee(peer(make().model), batch)
                advance(f"{name}: {seconds_text(side.timed())}")
            except Exception as error:  # what people would use instead may not run here at all
                failures[name] = reason(error)
                advance(f"{name}: failed")
            else:
                sides[name] = side
    return sides, failures


def _against_everything_kept(sides: Mapping[str, Trainee]) -> tuple[dict[str, int], dict[str, float]]:
    """Measured peaks, and step times over that of the plan that keeps everything."""
    with progress("compared with others", ROUNDS) as advance:
        seconds = interleaved_times({name: side.timed for name, side in sides.items()}, ROUNDS, advance)
    peaks = {name: side.measured().step_peak for name, side in sides.items()}
    return peaks, {name: median_ratio(seconds[name], seconds["kept"]) for name in sides}


def _same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(itertools.starmap(torch.equal, zip(one.parameters(), other.parameters(), strict=True)))


def render(demo: Demo) -> str:
    """The result, ready to print."""
    steps = len(demo.eager_losses)
    sizes = ", ".join(f"{name} {size}" for name, size in demo.sizes.items())
    eager_seconds, encore_seconds = demo.times.seconds
    lowest, highest = demo.times.spread
    held = demo.report.resident + demo.encore_peak
    kept = "kept" if demo.within_budget else "NOT KEPT"
    return "\n".join(
        [
            f"An LSTM translator with attention ({sizes}), {steps} training steps, budget {demo.budget}",
            "",
            *_losses(demo),
            "",
            *(f"  {name:<16} eager {_score(demo.eager_scores[name])}, Encore {_score(demo.encore_scores[name])}"
              " on sentences that it never saw" for name in demo.eager_scores),
            "",
            *(f"  {line}" for line in demo.sample.splitlines()),
            "",
            f"  budget           {bytes_text(demo.limit)} with parameters: {kept}, {bytes_text(held)} measured",
            f"  measured peak    eager {bytes_text(demo.eager_peak)}, Encore {bytes_text(demo.encore_peak)}",
            f"  predicted peak   {bytes_text(demo.predicted_peak)}, {_error(demo)}",
            f"  time of a step   eager {seconds_text(eager_seconds)}, Encore {seconds_text(encore_seconds)}: "
            f"{demo.times.ratio:.2f}x (median of {steps - 1} interleaved steps; {lowest:.2f} to {highest:.2f})",
            f"  first step       {seconds_text(demo.first_step_seconds)}, compilation included",
            *(f"  {name}: failed: {why}" for name, why in demo.failures.items()),
            f"  the whole demo   {seconds_text(demo.seconds)}",
            "",
            "print(encore.report(model)) begins:",
            "",
            *str(demo.report).splitlines()[:SHOWN_REPORT_LINES],
        ]
    )  # fmt: skip


def _score(score: float) -> str:
    return f"{score:.3g}"


def _losses(demo: Demo) -> list[str]:
    last = len(demo.eager_losses) - 1
    shown = sorted({round(last * part / (SHOWN_LOSSES - 1)) for part in range(SHOWN_LOSSES)})
    lines = [f"  {'step':>6}  {'eager loss':>12}  {'Encore loss':>12}"]
    lines += [f"  {at + 1:>6}  {demo.eager_losses[at]:>12.7f}  {demo.encore_losses[at]:>12.7f}" for at in shown]
    if demo.identical:
        return [*lines, "  identical bit for bit: every loss, and every parameter after the last step"]
    rounding = f"one rounding of the weights moves eager's own by up to {demo.drift:.1e}"
    if demo.same_curve:
        why = "since fused kernels round elsewhere"
        return [*lines, f"  the same curve: losses differ by up to {demo.loss_gap:.1e}, {why};", f"  {rounding}"]
    return [*lines, f"  NOT the same curve: losses differ by up to {demo.loss_gap:.3g};", f"  {rounding}"]


def _error(demo: Demo) -> str:
    if demo.predicted_peak == demo.encore_peak:
        return "which is what was measured, to the byte"
    side = "above" if demo.predicted_peak > demo.encore_peak else "BELOW"
    return f"{abs(demo.prediction_error):.2%} {side} the measured one"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    return run_command(parser(), argv)


def parser() -> argparse.ArgumentParser:
    """The options of the demo."""
    summary = "Train a translator in eager and, in half of the memory, through Encore."
    top = CommandParser(prog="python -m examples.demo", description=summary)
    top.set_defaults(run=show)
    top.add_argument("--steps", type=int, metavar="N", help="training steps of either side (default: 200)")
    top.add_argument("--output", type=Path, metavar="FOLDER", help="where the page goes (default: encore-demo)")
    top.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return top


def show(arguments: argparse.Namespace) -> int:
    """Run the demo, print it and write its page."""
    folder = FOLDER if arguments.output is None else arguments.output
    check_folder(folder)  # a minute before it is needed
    found = run(STEPS if arguments.steps is None else arguments.steps)
    written = found.write(folder)
    print(found.to_json() if arguments.json else found)
    print(f"\nto look at: {', '.join(map(str, written))}", file=sys.stderr)
    for problem in found.problems:
        print(f"encore: {problem}", file=sys.stderr)
    return FAILED if found.problems else DONE


if __name__ == "__main__":
    sys.exit(main())
