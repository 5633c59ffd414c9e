"""Encore beside what people would use instead: the suites `echo`, `gist` and `rnn-workloads`.

In one process for each workload, in turns, on the same seed and batch: eager; `torch.compile`, by itself and with
`activation_memory_budget` at several settings; `torch.utils.checkpoint` around each block; `save_on_cpu`; Encore with
everything kept, at its default, as small as eager's time allows, at the peak of the checkpointed model, and at its
floor. In `gist` there is instead each method by itself and both together, within a tenth more than eager's time, and
both once more within the memory of the better of the two. A system that fails, in its first step or later, is shown
with its error, and one that is left out with the reason; where eager fails, that is all there is of its workload.
Whoever interrupts a suite is shown the workloads that were done; nothing of them is written.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

import encore
from benchmarks import systems
from benchmarks.compare import (
    SEED,
    WARM_UP,
    Trainee,
    gradients,
    median_ratio,
    ratio_spread,
    relative_distance,
    times_in_turns,
)
from benchmarks.schema import Layout
from benchmarks.workloads import TINY_SIZES, Batch, Workload, build
from encore.machine import Machine, this_machine
from encore.terminal import Advance, progress

ROUNDS, QUICK_ROUNDS = 5, 2
FEWER_ROUNDS = {"gist": 3}
"""Where a step takes seconds and there are many systems."""
SLOW = 2.0
"""Seconds of a step from which on nothing is warmed up beyond the first two steps."""
TRIAL_ROUNDS = 3
MARGIN = 0.85
"""How much of the time that eager takes longer may go into recomputation; the rest is for noise."""
LONGEST_REASON = 100
BY_HAND = "checkpoint per block"
WITHIN_BUDGET = "activation_memory_budget"
SETTINGS = (0.5, 0.1)
"""Of it."""
NO_BLOCKS = "the network has no blocks: its layers follow one another"
KEPT, DEFAULT, FLOOR = "Encore, everything kept", "Encore", "Encore, budget='min'"
AS_FAST, AS_SMALL = "Encore, as fast as eager", "Encore at the checkpoints' peak"
ENCODING, RECOMPUTING, BOTH = "Encore, encoding alone", "Encore, recomputing alone", "Encore, both"
LOSSY_ENCODING, LOSSY_BOTH = f"{ENCODING}, lossy", f"{BOTH}, lossy"
AT_ITS_PEAK = "Encore, both at the better's peak"
ALWAYS = ("eager", BY_HAND, "torch.compile", f"{WITHIN_BUDGET} {min(SETTINGS)}", KEPT, DEFAULT, AS_FAST, BOTH)
"""Systems that run however little time there is."""
NO_TIME = "no time for it in the minutes that the suite was given"
NO_SPEED = f"how much slower it may be is told by {KEPT!r}, which failed"


@dataclass(frozen=True, slots=True)
class Entry:
    """A workload, at a size where feature maps outweigh the gradients, and what its peers need to know of it."""

    blocks: tuple[str, ...]
    """The classes of modules that a user would put a checkpoint around; none where layers follow one another."""
    sizes: dict[str, int] = field(default_factory=dict)
    one_setting: str = ""
    """Why `activation_memory_budget` is tried at its smallest setting alone, where it is."""


SLOW_STEPS = "every system more takes minutes where a step takes seconds"
UNROLLED = "every compilation of an unrolled loop takes minutes"
QUICK = "in a quick run one setting must do: each is a compilation more"

SUITES: dict[str, dict[str, Entry]] = {
    "echo": {
        "transformer": Entry(("Block",), {"batch_size": 32}),
        "resnet": Entry(("Bottleneck",), {"batch_size": 32}),
        "nmt": Entry(("LSTMCell", "AdditiveAttention"), {"batch_size": 256, "steps": 20}),
        "speech": Entry(("LSTM",)),
    },
    "gist": {
        "alexnet": Entry((), one_setting=SLOW_STEPS),
        "nin": Entry((), {"batch_size": 32}, SLOW_STEPS),
        "overfeat": Entry((), one_setting=SLOW_STEPS),
        "vgg16": Entry((), {"batch_size": 32}, SLOW_STEPS),
        "inception": Entry(("Inception",), one_setting=SLOW_STEPS),
        "resnet": Entry(("Bottleneck",), {"batch_size": 32}, SLOW_STEPS),
    },
    "rnn-workloads": {
        "lm": Entry(("LSTMCell",), one_setting=UNROLLED),
        "nmt": Entry(("LSTMCell", "AdditiveAttention"), {"steps": 20}, UNROLLED),
        "deepspeech2": Entry(("BidirectionalLayer",)),
        "speech": Entry(("LSTM",)),
    },
}
"""Echo's four kinds of network; Gist's image classifiers; recurrent networks."""

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "gist": {
        ENCODING: {"methods": "encode"},
        LOSSY_ENCODING: {"methods": "encode", "lossy": True},
        RECOMPUTING: {"methods": "recompute"},
        BOTH: {},
        LOSSY_BOTH: {"lossy": True},
    },
}
"""Methods by themselves, by suite: options of `encore.compile`."""
A_TENTH_MORE = 1.10
"""Of eager's time, within which they are compared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One system on one workload. Bytes and seconds; the ratio is the median over the rounds."""

    system: str
    seconds: float = 0.0
    quietest: float = 0.0
    """The fastest step of all rounds: what it takes when nobody disturbs it, which is what Encore predicts."""
    against_eager: float = 0.0
    lowest: float = 0.0
    """Of the rounds' ratios to eager."""
    highest: float = 0.0
    peak: int = 0
    reduction: float = 0.0
    """Eager's peak over this one's."""
    predicted: int | None = None
    predicted_seconds: float | None = None
    plan_seconds: float | None = None
    first_step: float = 0.0
    gradient_difference: float = 0.0
    """Distance of all gradients from eager's, relative to those."""
    own_draws: bool = False
    """The model draws, and the system draws other numbers than eager: gradients cannot be compared."""
    failure: str = ""
    left_out: str = ""
    """Why it was not tried."""

    @property
    def ran(self) -> bool:
        return not (self.failure or self.left_out)

    @property
    def is_encore(self) -> bool:
        return self.system.startswith("Encore")


LAYOUT = Layout("encore_contest", 3)


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
    """Bytes of the gradients themselves, by workload that eager ran: no plan takes those away."""
    interrupted: bool = False
    """Workloads are missing: somebody did not wait for them."""
    seconds: float = 0.0
    """What all of it took."""

    def to_json(self) -> str:
        """Everything as JSON; `encore_contest` is the version of its layout."""
        return LAYOUT.to_json(asdict(self))


def run_contest(suite: str, *, quick: bool = False, minutes: float | None = None) -> ContestSuite:
    """Measure everything, telling on stderr how far it is. `quick` takes tiny sizes, fewer rounds and one
    setting of `activation_memory_budget`. With `minutes`, every workload has an equal share of the time that is left,
    and systems that would take longer are left out; those of `ALWAYS` are not, and no row has fewer rounds."""
    ends = None if minutes is None else time.perf_counter() + 60 * minutes
    rounds = QUICK_ROUNDS if quick else FEWER_ROUNDS.get(suite, ROUNDS)
    outcomes: dict[str, tuple[Outcome, ...]] = {}
    gradient_bytes: dict[str, int] = {}
    interrupted = False
    for number, (name, entry) in enumerate(SUITES[suite].items()):
        now = time.perf_counter()
        until = None if ends is None else now + (ends - now) / (len(SUITES[suite]) - number)
        make = functools.partial(build, name, **(TINY_SIZES[name] if quick else entry.sizes))
        try:
            found = tuple(_compare(name, entry, make, METHODS.get(suite, {}), rounds=rounds, quick=quick, until=until))
            if found[0].ran:  # eager's, without which there is nothing
                gradient_bytes[name] = sum(parameter.nbytes for parameter in make().model.parameters())
        except KeyboardInterrupt:
            if not outcomes:
                raise
            interrupted = True
            break
        outcomes[name] = found
        torch.compiler.reset()
        gc.collect()
    return ContestSuite(suite, this_machine(), quick, rounds, outcomes, gradient_bytes, interrupted)


class _Contest:
    """The systems that take part on one workload, each with its first step behind it."""

    def __init__(
        self, make: Callable[[], Workload], tell: Advance, rounds: int = ROUNDS, until: float | None = None
    ) -> None:
        self.make = make
        self.tell = tell
        self.rounds = rounds
        self.until = until
        """When it should be over, by the clock of `time.perf_counter`; `None` where it may take any time."""
        self.trainees: dict[str, Trainee] = {}
        self.first: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self.distances: dict[str, float] = {}
        """Of all gradients from eager's."""
        self.truth: list[torch.Tensor] = []
        self.failures: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.slow = False
        """Does a step of eager take long?"""
        self.draws = False
        """Does a step of eager draw random numbers?"""
        self.own_draws: set[str] = set()
        """Systems that draw numbers of their own."""

    @functools.cached_property
    def batch(self) -> Batch:
        return self.make().batch(0)

    def enter(self, system: str, compile_: Callable[[nn.Module], Any]) -> Trainee | None:
        """Take the first step, a second to measure the peak, and warm up; a system that cannot is out, with its
        reason. Eager comes first: others are compared with it."""
        if not self._has_time(system):
            self.leave_out(system, NO_TIME)
            return None
        try:
            trainee = Trainee(compile_(self.make().model), self.batch)
            started = time.perf_counter()
            trainee.timed()
            self.first[system] = time.perf_counter() - started
            self.peaks[system] = trainee.measured().step_peak
            if system == "eager":  # it was measured from a seed
                self.draws = not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(SEED).get_state())
            if self.draws and systems.draws_its_own(compile_):
                self.own_draws.add(system)
            found = gradients(trainee.model)
            self.truth = self.truth or found
            self.distances[system] = relative_distance(found, self.truth)
            self.slow = self.slow or (system == "eager" and self.first[system] > SLOW)
            for _ in range(0 if self.slow else WARM_UP - 1):
                trainee.timed()
        except Exception as error:  # whatever a peer throws is what is shown
            self.failed(system, error)
            self.tell(f"{system}: failed")
            return None
        self.trainees[system] = trainee
        self.tell(f"{system}: first step and warm-up")
        return trainee

    def _has_time(self, system: str) -> bool:
        """Is there time for its first step, which takes about as long as that of its like, and for all rounds?"""
        if self.until is None or system in ALWAYS:
            return True
        like = KEPT if system.startswith("Encore") else "torch.compile" if system.startswith(WITHIN_BUDGET) else "eager"
        step = self.first["eager"]
        expected = self.first.get(like, step) + 2 * step + self.rounds * step * (len(self.trainees) + 1)
        return time.perf_counter() + expected < self.until

    def leave_out(self, system: str, why: str) -> None:
        self.left_out[system] = why
        self.tell(f"{system}: left out")

    def failed(self, system: str, error: Exception) -> None:
        """The system is out, even if it took part until now."""
        self.trainees.pop(system, None)
        self.failures[system] = reason(error)

    def times(self, systems: Sequence[str], rounds: int, tell: Advance = lambda note: None) -> dict[str, list[float]]:
        """Step times in turns, of those systems that do not fail."""
        return times_in_turns({system: self.trainees[system] for system in systems}, rounds, tell, self.failed)


def reason(error: Exception) -> str:
    """An exception in a cell of a table: its class and the first line of what it says."""
    said = str(error).strip().partition("\n")[0].rstrip()[:LONGEST_REASON]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _peers(entry: Entry, *, quick: bool) -> Iterator[tuple[str, Callable[[nn.Module], Any] | str]]:
    """What people would use instead, or why it is left out."""
    yield "eager", systems.eager
    yield BY_HAND, functools.partial(systems.checkpointed, classes=entry.blocks) if entry.blocks else NO_BLOCKS
    yield "save_on_cpu", systems.SavedOnCpu
    yield "torch.compile", systems.compiled
    for setting in SETTINGS:
        left_out = (QUICK if quick else entry.one_setting) if setting != min(SETTINGS) else ""
        yield f"{WITHIN_BUDGET} {setting}", left_out or functools.partial(systems.within_budget, setting=setting)


def _compare(
    name: str,
    entry: Entry,
    make: Callable[[], Workload],
    methods: Mapping[str, Mapping[str, Any]],
    *,
    rounds: int,
    quick: bool,
    until: float | None = None,
) -> Iterator[Outcome]:
    peers = dict(_peers(entry, quick=quick))
    with progress(f"{name:<11}", len(peers) + (len(methods) + 3 if methods else 5) + rounds) as tell:
        contest = _Contest(make, tell, rounds, until)
        seconds = _measured(contest, peers, methods, rounds)
    if "eager" in contest.failures:  # nothing can be held against it
        yield Outcome("eager", failure=contest.failures["eager"])
        return
    for system in contest.trainees:
        yield _outcome(contest, system, seconds[system], seconds["eager"])
    yield from (Outcome(system, failure=why) for system, why in contest.failures.items())
    yield from (Outcome(system, left_out=why) for system, why in contest.left_out.items())


def _measured(
    contest: _Contest,
    peers: Mapping[str, Callable[[nn.Module], Any] | str],
    methods: Mapping[str, Mapping[str, Any]],
    rounds: int,
) -> dict[str, list[float]]:
    """Let everybody take part; step times, unless eager failed."""
    for system, peer in peers.items():
        if isinstance(peer, str):
            contest.leave_out(system, peer)
        else:
            contest.enter(system, peer)
        if "eager" not in contest.trainees:
            return {}
    contest.enter(KEPT, functools.partial(encore.compile, overhead=0.0))
    speed = _speed(contest)
    if methods:
        _enter_methods(contest, methods, speed)
    else:
        _enter_settings(contest, speed)
    contest.enter(FLOOR, functools.partial(encore.compile, budget="min"))
    return contest.times(list(contest.trainees), rounds, contest.tell)


def _enter_settings(contest: _Contest, speed: float | None) -> None:
    """Encore as people set it."""
    contest.enter(DEFAULT, encore.compile)
    if speed is None:
        contest.leave_out(AS_FAST, NO_SPEED)
    else:
        contest.enter(AS_FAST, functools.partial(encore.compile, overhead=_slack(speed)))
    reports = [encore.report(contest.trainees[one].model) for one in (KEPT, DEFAULT) if one in contest.trainees]
    if BY_HAND in contest.trainees and reports:
        budget = reports[0].resident + contest.peaks[BY_HAND]
        contest.enter(AS_SMALL, functools.partial(encore.compile, budget=budget))


def _enter_methods(contest: _Contest, methods: Mapping[str, Mapping[str, Any]], speed: float | None) -> None:
    """Each method by itself and both together in the same time; both in the memory of the better one."""
    if speed is None:
        for system in methods:
            contest.leave_out(system, NO_SPEED)
        return
    for system, options in methods.items():
        contest.enter(system, functools.partial(encore.compile, overhead=_slack(speed, A_TENTH_MORE), **options))
    alone = [encore.report(contest.trainees[one].model) for one in (ENCODING, RECOMPUTING) if one in contest.trainees]
    if alone:
        budget = min(report.resident + report.planned.step_peak for report in alone)
        contest.enter(AT_ITS_PEAK, functools.partial(encore.compile, budget=budget))


def _speed(contest: _Contest) -> float | None:
    """Eager's time over that of Encore with everything kept, by a short trial; `None` where one of them fails."""
    rivals = [system for system in ("eager", KEPT) if system in contest.trainees]
    trial = contest.times(rivals, 1 if contest.slow else TRIAL_ROUNDS)
    return median_ratio(trial["eager"], trial[KEPT]) if {"eager", KEPT} <= trial.keys() else None


def _slack(speed: float, of_eager: float = 1.0) -> float:
    """The overhead that makes Encore take this much of eager's time."""
    return max(0.0, MARGIN * (of_eager * speed - 1))


def _outcome(
    contest: _Contest,
    system: str,
    mine: Sequence[float],
    eager: Sequence[float],
) -> Outcome:
    peak = contest.peaks[system]
    lowest, highest = ratio_spread(mine, eager)
    report = encore.report(contest.trainees[system].model) if system.startswith("Encore") else None
    return Outcome(
        system=system,
        seconds=statistics.median(mine),
        quietest=min(mine),
        against_eager=median_ratio(mine, eager),
        lowest=lowest,
        highest=highest,
        peak=peak,
        reduction=contest.peaks["eager"] / peak,
        predicted=None if report is None else report.planned.step_peak,
        predicted_seconds=None if report is None or not report.planned.seconds else report.planned.seconds,
        plan_seconds=None if report is None else report.first_step["plan"],
        first_step=contest.first[system],
        gradient_difference=contest.distances[system],
        own_draws=system in contest.own_draws,
    )
