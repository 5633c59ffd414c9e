"""Encore beside what people would use instead: the suites `echo`, `gist` and `rnn`.

In one process for each workload, in turns, on the same seed and batch: eager; `torch.compile`, by itself and with
`activation_memory_budget` at several settings; `torch.utils.checkpoint` around each block; `save_on_cpu`; Encore with
everything kept, at its default, as small as eager's time allows, at the peak of the checkpointed model, and at its
floor. A system that fails is shown with its error.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

import encore
from encore.bench import systems
from encore.bench.compare import WARM_UP, Trainee, gradients, median_ratio, relative_distance, times_in_turns
from encore.bench.machine import Machine, this_machine
from encore.progress import progress
from encore.workloads import TINY_SIZES, Workload, build

ROUNDS, QUICK_ROUNDS = 5, 2
TRIAL_ROUNDS = 3
MARGIN = 0.85
"""How much of the time that eager takes longer may go into recomputation; the rest is for noise."""
BY_HAND = "checkpoint per block"
WITHIN_BUDGET = "activation_memory_budget"
KEPT, DEFAULT, FLOOR = "Encore, everything kept", "Encore", "Encore, budget='min'"
AS_FAST, AS_SMALL = "Encore, as fast as eager", "Encore at the checkpoints' peak"


@dataclass(frozen=True, slots=True)
class Entry:
    """A workload, at a size where feature maps outweigh the gradients, and what its peers need to know of it."""

    blocks: tuple[str, ...]
    """The classes of modules that a user would put a checkpoint around; none where layers follow one another."""
    sizes: dict[str, int] = field(default_factory=dict)
    settings: tuple[float, ...] = (0.5, 0.1)
    """Of `activation_memory_budget`."""
    compiles: bool = True
    """Is `torch.compile` by itself tried as well? Each compilation of an unrolled loop takes minutes."""


SUITES: dict[str, dict[str, Entry]] = {
    "echo": {
        "transformer": Entry(("Block",), {"batch_size": 32}),
        "resnet": Entry(("Bottleneck",), {"batch_size": 32}),
        "nmt": Entry(("LSTMCell", "AdditiveAttention"), {"batch_size": 256, "steps": 20}, (0.1,), compiles=False),
        "speech": Entry(("LSTM",), settings=(0.1,)),
    },
    "gist": {
        "alexnet": Entry((), settings=(0.1,)),
        "nin": Entry((), settings=(0.1,)),
        "overfeat": Entry((), settings=(0.1,)),
        "vgg16": Entry((), settings=(0.1,)),
        "inception": Entry(("Inception",), settings=(0.1,)),
        "resnet": Entry(("Bottleneck",), {"batch_size": 32}, (0.1,)),
    },
    "rnn": {
        "lm": Entry(("LSTMCell",), settings=(0.1,), compiles=False),
        "nmt": Entry(("LSTMCell", "AdditiveAttention"), {"steps": 20}, (0.1,), compiles=False),
        "deepspeech2": Entry(("BidirectionalLayer",), settings=(0.1,)),
        "speech": Entry(("LSTM",), settings=(0.1,)),
    },
}
"""Echo's four kinds of network; Gist's image classifiers; recurrent networks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One system on one workload. Bytes and seconds; the ratio is the median over the rounds."""

    system: str
    seconds: float = 0.0
    quietest: float = 0.0
    """The fastest step of all rounds: what it takes when nobody disturbs it, which is what Encore predicts."""
    against_eager: float = 0.0
    peak: int = 0
    reduction: float = 0.0
    """Eager's peak over this one's."""
    predicted: int | None = None
    predicted_seconds: float | None = None
    plan_seconds: float | None = None
    first_step: float = 0.0
    gradient_difference: float = 0.0
    """Distance of all gradients from eager's, relative to those."""
    failure: str = ""

    @property
    def is_encore(self) -> bool:
        return self.system.startswith("Encore")


@dataclass(frozen=True, slots=True)
class ContestSuite:
    """One run of a suite."""

    suite: str
    machine: Machine
    quick: bool
    rounds: int
    outcomes: dict[str, tuple[Outcome, ...]]
    """By workload."""
    gradients: dict[str, int]
    """Bytes of the gradients themselves, by workload: no plan takes those away."""

    def to_json(self) -> str:
        """Everything as JSON; `encore_contest` is the version of its layout."""
        return json.dumps({"encore_contest": 1, **asdict(self)}, indent=2)


def run_contest(suite: str, *, quick: bool = False) -> ContestSuite:
    """Measure everything, telling on stderr how far it is. `quick` takes tiny sizes and fewer peers."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    outcomes, gradient_bytes = {}, {}
    for name, entry in SUITES[suite].items():
        make = functools.partial(build, name, **(TINY_SIZES[name] if quick else entry.sizes))
        outcomes[name] = tuple(_compare(name, entry, make, rounds=rounds, quick=quick))
        gradient_bytes[name] = sum(parameter.nbytes for parameter in make().model.parameters())
        torch.compiler.reset()
        gc.collect()
    return ContestSuite(suite, this_machine(), quick, rounds, outcomes, gradient_bytes)


class _Contest:
    """The systems that take part on one workload, each with its first step behind it."""

    def __init__(self, make: Callable[[], Workload], tell: Callable[[str], None]) -> None:
        self.make = make
        self.tell = tell
        self.batch = make().batch(0)
        self.trainees: dict[str, Trainee] = {}
        self.first: dict[str, float] = {}
        self.failures: dict[str, str] = {}

    def enter(self, system: str, compile_: Callable[[nn.Module], Any]) -> Trainee | None:
        """Take the first step and warm up; a system that cannot is out, with its reason."""
        try:
            trainee = Trainee(compile_(self.make().model), self.batch)
            started = time.perf_counter()
            trainee.timed()
            self.first[system] = time.perf_counter() - started
            for _ in range(WARM_UP):
                trainee.timed()
        except Exception as error:  # whatever a peer throws is what is shown
            self.failures[system] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            self.tell(f"{system}: failed")
            return None
        self.trainees[system] = trainee
        self.tell(f"{system}: first step and warm-up")
        return trainee


def _peers(entry: Entry, *, quick: bool) -> Iterator[tuple[str, Callable[[nn.Module], Any]]]:
    yield "eager", systems.eager
    if entry.blocks:
        yield BY_HAND, functools.partial(systems.checkpointed, classes=entry.blocks)
    yield "save_on_cpu", systems.SavedOnCpu
    if entry.compiles and not quick:
        yield "torch.compile", systems.compiled
    for setting in entry.settings[-1:] if quick else entry.settings:
        yield f"{WITHIN_BUDGET} {setting}", functools.partial(systems.within_budget, setting=setting)


def _compare(name: str, entry: Entry, make: Callable[[], Workload], *, rounds: int, quick: bool) -> Iterator[Outcome]:
    peers = dict(_peers(entry, quick=quick))
    with progress(f"{name:<11}", len(peers) + 6) as tell:
        contest = _Contest(make, tell)
        for system, compile_ in peers.items():
            contest.enter(system, compile_)
        contest.enter(KEPT, functools.partial(encore.compile, overhead=0.0))
        contest.enter(DEFAULT, encore.compile)
        contest.enter(AS_FAST, functools.partial(encore.compile, overhead=_slack(contest)))
        if BY_HAND in contest.trainees:
            resident = encore.report(contest.trainees[DEFAULT].model).resident
            budget = resident + contest.trainees[BY_HAND].measured().step_peak
            contest.enter(AS_SMALL, functools.partial(encore.compile, budget=budget))
        contest.enter(FLOOR, functools.partial(encore.compile, budget="min"))
        seconds = times_in_turns(contest.trainees, rounds)
        tell("rounds in turns")
    eager_peak = contest.trainees["eager"].measured().step_peak
    truth = gradients(contest.trainees["eager"].model)
    for system in contest.trainees:
        yield _outcome(contest, system, seconds[system], seconds["eager"], eager_peak, truth)
    yield from (Outcome(system, failure=why) for system, why in contest.failures.items())


def _slack(contest: _Contest) -> float:
    """The overhead that makes Encore as slow as eager, by a short trial."""
    rivals = {system: contest.trainees[system] for system in ("eager", KEPT)}
    trial = times_in_turns(rivals, TRIAL_ROUNDS)
    return max(0.0, MARGIN * (median_ratio(trial["eager"], trial[KEPT]) - 1))


def _outcome(
    contest: _Contest,
    system: str,
    mine: Sequence[float],
    eager: Sequence[float],
    eager_peak: int,
    truth: Sequence[torch.Tensor],
) -> Outcome:
    trainee = contest.trainees[system]
    peak = trainee.measured().step_peak
    report = encore.report(trainee.model) if system.startswith("Encore") else None
    return Outcome(
        system=system,
        seconds=statistics.median(mine),
        quietest=min(mine),
        against_eager=median_ratio(mine, eager),
        peak=peak,
        reduction=eager_peak / peak,
        predicted=None if report is None else report.planned.step_peak,
        predicted_seconds=None if report is None or not report.planned.seconds else report.planned.seconds,
        plan_seconds=None if report is None else report.first_step["plan"],
        first_step=contest.first[system],
        gradient_difference=relative_distance(gradients(trainee.model), truth),
    )
