"""The suite `bptt`: an LSTM cell over longer and longer sequences, in the memory of about sixty-four states.

Four ways to the same gradients: the loop written out, where that fits; PyTorch's checkpoints around pieces of time;
Revolve in memory; states on disk. Inputs are made when they are asked for, so that nothing but the loop's own memory
grows. A way goes through all lengths and back again, so that they are compared minutes apart at most. Peaks come from
runs of their own, since watching every allocation takes time. The record of all allocations
takes memory itself, so that of long sequences it is added up and begun again after every few thousand runs of a step;
there, the way to disk alone is measured. The growth of the whole process is reported at every length.
With dropout in the step the same ways run once more, at the shortest length. Revolve's counts, for as many states as
the budget has and a step a tape, are taken along its schedule at every length, without training, and compared with the
closed formula of Griewank and Walther, and against the schedules of the package `checkpoint_schedules` where that is
installed. Activations on disk follow (`offload.py`).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.differences import largest_difference
from benchmarks.offload import OPTIONS, WORKLOADS, OffloadRow, offload_rows
from benchmarks.schema import Layout, Written
from encore.bptt import ScanReport, scan
from encore.bptt.actions import Advance, Tape
from encore.bptt.revolve import Revolve
from encore.bptt.run import ScanRun
from encore.cost import measure
from encore.cost.torch_private import AllocatorEvents
from encore.machine import Machine, this_machine
from encore.terminal import progress

BATCH, HIDDEN = 16, 128
STATE_BYTES = 2 * BATCH * HIDDEN * 4
SLOTS = 64
BUDGET = SLOTS * STATE_BYTES
LENGTHS, QUICK_LENGTHS = (1_000, 10_000, 100_000), (1_000, 4_000)
LONG = 20_000
"""From here on, the record of allocations is cut into windows."""
WINDOW = 2_000
"""Runs of a step in one."""
REPEATS = {1_000: 5}
"""Runs in a row of those that are over soon."""
WARM_UP = 200
"""Steps that every way takes before its time is taken."""
DROPOUT = 0.1
PLAIN_LIMIT = 4 << 30
"""The loop written out is not run where its tape would take more."""
TAPE_STATES = 3.5
"""What a step leaves for backward, in states."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

State = tuple[Tensor, Tensor]


class Inputs:
    """Inputs that are made when they are asked for, from a few that are kept."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        generator = torch.Generator().manual_seed(1)
        self.few = torch.randn(64, BATCH, HIDDEN, generator=generator).unbind(0)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Tensor:
        return self.few[step % 64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way at one length."""

    system: str
    steps: int
    seconds: float
    """A step, forward and backward: the median of the rounds."""
    rounds: int
    peak: int | None
    """Most bytes at once above what was there before, gradients of parameters included, by the allocator; `None` where
    it was not measured."""
    resident: int
    """How much the process grew at most, with Python and the allocator's leftovers, in the first round."""
    forwards: float
    """Runs of a step, over steps."""
    predicted_forwards: float | None
    gradient_difference: float
    """From the first way of this length."""
    late: int = 0
    """States that went to disk at another step than was planned, which changes the runs a little."""


@dataclass(frozen=True, slots=True)
class BpttSuite(Written):
    """One run of the suite."""

    layout = Layout("encore_bench_bptt", 6)

    machine: Machine
    quick: bool
    budget: int
    state_bytes: int
    gradient_bytes: int
    """Of the parameters, which every way allocates."""
    outcomes: tuple[Outcome, ...]
    published: dict[int, float]
    """By length: forwards a step of Revolve with a step a tape and as many states as the budget has."""
    counted: dict[int, float]
    """The same, counted along Revolve's schedule."""
    dropout_differences: dict[str, float]
    """By system: how far gradients are from those of the first, with dropout in the step; 0.0 means every bit."""
    offloaded: tuple[OffloadRow, ...] = ()
    theirs: dict[int, float] | None = None
    """The same as `counted`, along the schedule of `checkpoint_schedules`; `None` where it is not installed."""
    seconds: float = 0.0
    """What all of it took."""

    def of(self, system: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.system == system]


def _resident() -> int:
    """Bytes of this process in memory, at most, since `_forget_resident`."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _forget_resident() -> int:
    """Let the highest be what it is now; how much that is."""
    CLEAR.write_text("5")
    return _resident()


class _Model:
    """The cell, and the ways to train it."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.cell = nn.LSTMCell(HIDDEN, HIDDEN)
        self.dropout = dropout
        self.report = ScanReport()
        self.runs = 0
        self.window: Callable[[int], None] = lambda runs: None

    def step(self, state: State, x: Tensor) -> tuple[State, None]:
        self.runs += 1
        self.window(self.runs)
        h, c = self.cell(x, state)
        return (nn.functional.dropout(h, self.dropout) if self.dropout else h, c), None

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.cell.parameters() if parameter.grad is not None]

    def start(self) -> State:
        return torch.zeros(BATCH, HIDDEN), torch.zeros(BATCH, HIDDEN)

    def plain(self, xs: Inputs) -> State:
        state = self.start()
        for step in range(len(xs)):
            state, _ = self.step(state, xs[step])
        return state

    def checkpoints(self, xs: Inputs) -> State:
        """Pieces as long as makes their tape as large as all states between them."""
        piece = math.ceil(math.sqrt(len(xs) / TAPE_STATES))

        def run(state: State, start: int) -> State:
            for step in range(start, min(start + piece, len(xs))):
                state, _ = self.step(state, xs[step])
            return state

        state = self.start()
        for start in range(0, len(xs), piece):
            state = checkpoint(run, state, start, use_reentrant=False)
        return state

    def scanned(self, xs: Inputs, **options: Any) -> State:
        self.report = ScanReport()
        state, _ = scan(self.step, self.start(), xs, budget=BUDGET, report=self.report, **options)
        return state


LOOP = "loop written out"
SYSTEMS: dict[str, Callable[[_Model, Inputs], State]] = {
    LOOP: _Model.plain,
    "checkpoint a piece": _Model.checkpoints,
    "encore.scan, Revolve": lambda model, xs: model.scanned(xs, schedule="revolve"),
    "encore.scan, disk": lambda model, xs: model.scanned(xs, schedule="multistage", tiers="disk"),
}


LONG_SYSTEMS = ("encore.scan, disk",)
"""Whose peaks are measured over long sequences, too."""


def run_bptt(*, quick: bool = False) -> BpttSuite:
    """Measure everything, reporting progress on stderr."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    outcomes = _outcomes(lengths)
    parameters = sum(parameter.nbytes for parameter in _Model().cell.parameters())
    published = {steps: Revolve.forwards(steps, SLOTS) / steps for steps in lengths}
    counted = {steps: _counted(steps) / steps for steps in lengths}
    with progress("with dropout", len(SYSTEMS)) as advance:
        dropped = _with_dropout(lengths[0], advance)
    with progress("to disk", len(WORKLOADS) * (len(OPTIONS) + 1)) as advance:
        offloaded = offload_rows(quick=quick, advance=advance)
    return BpttSuite(
        this_machine(), quick, BUDGET, STATE_BYTES, parameters, tuple(outcomes), published, counted, dropped,
        tuple(offloaded), _counted_by_others(lengths),
    )  # fmt: skip


def _counted(steps: int) -> int:
    """Runs of a step along Revolve's schedule, with as many states as the budget has and a step a tape."""
    schedule = Revolve(steps, SLOTS)
    actions = (action for stream in (schedule.forward(), schedule.backward(steps)) for action in stream)
    return sum(action.stop - action.start for action in actions if isinstance(action, Advance | Tape))


def _counted_by_others(lengths: Sequence[int]) -> dict[int, float] | None:
    """By length: runs of a step over steps, along the binomial schedule of `checkpoint_schedules`. There, too, the
    first state takes one of the slots."""
    try:
        import checkpoint_schedules as theirs
    except ImportError:
        return None
    found = {}
    for steps in lengths:
        runs = 0
        for action in theirs.MultistageCheckpointSchedule(steps, SLOTS, 0):
            if isinstance(action, theirs.Forward):
                runs += action.n1 - action.n0
            elif isinstance(action, theirs.EndReverse):
                break
        found[steps] = runs / steps
    return found


def _with_dropout(steps: int, advance: Callable[[str], None]) -> dict[str, float]:
    """How far the gradients of every way are from those of the first."""
    found: dict[str, list[Tensor]] = {}
    for system in SYSTEMS:
        model = _Model(DROPOUT)
        _train(model, system, Inputs(steps))
        found[system] = model.gradients()
        advance(system)
    first = next(iter(found.values()))
    return {system: largest_difference(gradients, first) for system, gradients in found.items()}


@dataclass(slots=True)
class _Runs:
    """What one way took over one length."""

    seconds: list[float]
    """A step, of each run."""
    grown: int = 0
    model: _Model | None = None
    """Of the latest run."""


def _outcomes(lengths: Sequence[int]) -> list[Outcome]:
    """All ways at all lengths that they can be run at."""
    found = {
        steps: {
            system: _Runs([]) for system in SYSTEMS if system != LOOP or _plain_bytes(steps) <= PLAIN_LIMIT
        }
        for steps in lengths
    }  # fmt: skip
    with progress("interleaved", sum(len(ways) for ways in found.values())) as advance:
        for system in SYSTEMS:
            there = [steps for steps in lengths if system in found[steps]]
            _train(_Model(), system, Inputs(WARM_UP))
            for steps in [*there, *there[-2::-1]]:
                for _ in range(REPEATS.get(steps, 1)):
                    _run(system, steps, found[steps][system])
            for steps in there:
                advance(
                    f"{system}, {steps:,} steps: {statistics.median(found[steps][system].seconds) * 1e6:.0f} us each"
                )
    outcomes = []
    for steps, ways in found.items():
        with progress(f"peaks of {steps:,}", len(ways)) as advance:
            for system, runs in ways.items():
                outcomes.append(_outcome(system, steps, runs, next(iter(ways.values()))))
                advance(system)
    return outcomes


def _run(system: str, steps: int, runs: _Runs) -> None:
    model = _Model()
    gc.collect()
    before = _forget_resident()
    began = time.perf_counter()
    _train(model, system, Inputs(steps))
    runs.seconds.append((time.perf_counter() - began) / steps)
    runs.grown = runs.grown or _resident() - before
    runs.model = model


def _outcome(system: str, steps: int, runs: _Runs, first: _Runs) -> Outcome:
    """The figures of the runs, gradients compared with those of the first way; and the peak, from one more run."""
    assert runs.model is not None
    assert first.model is not None
    xs, report = Inputs(steps), runs.model.report
    predicted = report.predicted_forwards
    return Outcome(
        system,
        steps,
        statistics.median(runs.seconds),
        len(runs.seconds),
        _peak(system, xs) if steps < LONG else _long_peak(system, xs) if system in LONG_SYSTEMS else None,
        runs.grown,
        (report.counts.forwards or runs.model.runs) / steps,
        None if predicted is None else predicted / steps,
        largest_difference(runs.model.gradients(), first.model.gradients()),
        report.late_stores,
    )


def _peak(system: str, xs: Inputs) -> int:
    model = _Model()
    return measure(lambda: _train(model, system, xs)).step_peak


class _Windows:
    """Allocations added up window by window, so that no record grows with the length."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._events = AllocatorEvents()

    def __enter__(self) -> None:
        self._events.start()

    def __exit__(self, *exception: object) -> None:
        for event in self._events.stop():
            self.live += event.bytes
            self.peak = max(self.peak, self.live)

    def after(self, runs: int) -> None:
        """To be called with the number of runs so far, between two operators."""
        if runs % WINDOW == 0:
            self.__exit__()
            self.__enter__()


def _long_peak(system: str, xs: Inputs) -> int:
    """As `_peak`, for a scan. The profiler's state belongs to a thread, and autograd has its own while a node runs: so
    windows are opened and closed within forward, and within the scan's own node of backward. What they miss is the sum
    of the last state, a few bytes."""
    model, windows = _Model(), _Windows()
    model.window = windows.after
    backward = ScanRun.backward

    def watched(run: ScanRun, *gradients: Any) -> Any:
        with windows:
            return backward(run, *gradients)

    gc.collect()
    with windows:
        h, c = SYSTEMS[system](model, xs)
    with mock.patch.object(ScanRun, "backward", watched):
        (h.sum() + c.sum()).backward()
    return windows.peak


def _train(model: _Model, system: str, xs: Inputs) -> None:
    h, c = SYSTEMS[system](model, xs)
    (h.sum() + c.sum()).backward()


def _plain_bytes(steps: int) -> float:
    return steps * TAPE_STATES * STATE_BYTES
