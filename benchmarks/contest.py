"""Encore compared with what people would use instead: the suites `echo`, `gist` and `rnn-workloads`.

In one process for each workload, in interleaved rounds, on the same seed and batch: eager; `torch.compile`, by itself
and with `activation_memory_budget` at several settings; `torch.utils.checkpoint` around each block; `save_on_cpu`;
Encore with everything kept, at its default, as small as eager's time allows, at the peak of the checkpointed model, and
at its floor. In `gist` there is instead each method by itself and both together, within a tenth more than eager's time,
and both once more within the memory of the better of the two. A system that fails, in its first step or later, is shown
with its error, and one that is left out with the reason; where eager fails, that is all there is of its workload.
An interrupted suite prints the workloads that were done and writes nothing.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import encore
from benchmarks.save_on_cpu import SavedOnCpu
from benchmarks.schema import Layout, Written
from benchmarks.workloads import TINY_SIZES, Workload, build
from encore.compare import systems
from encore.compare.contest import EAGER, Contest
from encore.compare.outcome import Outcome
from encore.compare.trainee import Trainee, median_ratio
from encore.machine import Machine, this_machine
from encore.terminal import progress

ROUNDS, QUICK_ROUNDS = 5, 2
FEWER_ROUNDS = {"gist": 3}
"""Where a step takes seconds and there are many systems."""
TRIAL_ROUNDS = 3
MARGIN = 0.85
"""How much of the time that eager takes longer may go into recomputation; the rest is for noise."""
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
ALWAYS = (EAGER, BY_HAND, "torch.compile", f"{WITHIN_BUDGET} {min(SETTINGS)}", KEPT, DEFAULT, AS_FAST, BOTH)
"""Systems that run however little time there is."""
NO_SPEED = f"how much slower it may be is told by {KEPT!r}, which failed"


@dataclass(frozen=True, slots=True)
class Entry:
    """A workload, at a size where activations outweigh the gradients, and what other systems need to know of it."""

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
class ContestSuite(Written):
    """One run of a suite."""

    layout = Layout("encore_contest", 4)

    suite: str
    machine: Machine
    quick: bool
    rounds: int
    outcomes: dict[str, tuple[Outcome, ...]]
    """By workload."""
    gradients: dict[str, int]
    """Bytes of the gradients themselves, by workload that eager ran: no plan takes those away."""
    interrupted: bool = False
    """Workloads are missing: the run was interrupted."""
    seconds: float = 0.0
    """What all of it took."""


def run_contest(suite: str, *, quick: bool = False, minutes: float | None = None) -> ContestSuite:
    """Measure everything, reporting progress on stderr. `quick` takes tiny sizes, fewer rounds and one
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
            found = _compare(name, entry, make, METHODS.get(suite, {}), rounds=rounds, quick=quick, until=until)
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


def _peers(entry: Entry, *, quick: bool) -> Iterator[tuple[str, Callable[[nn.Module], Any] | str]]:
    """What people would use instead, or why it is left out."""
    yield EAGER, systems.eager
    yield BY_HAND, functools.partial(systems.checkpointed, classes=entry.blocks) if entry.blocks else NO_BLOCKS
    yield "save_on_cpu", SavedOnCpu
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
) -> tuple[Outcome, ...]:
    peers = dict(_peers(entry, quick=quick))
    with progress(f"{name:<11}", len(peers) + (len(methods) + 3 if methods else 5) + rounds) as advance:
        batch = make().batch(0)
        contest = Contest(
            lambda: Trainee(make().model, batch), advance, rounds=rounds, until=until, like=_like, always=ALWAYS
        )
        seconds = _measured(contest, peers, methods, rounds)
    if EAGER in contest.failures:  # nothing can be compared with it
        return (Outcome(EAGER, failure=contest.failures[EAGER]),)
    return tuple(contest.outcomes(seconds))


def _like(system: str) -> str:
    """The system whose first step takes about as long."""
    if system.startswith("Encore"):
        return KEPT
    return "torch.compile" if system.startswith(WITHIN_BUDGET) else EAGER


def _measured(
    contest: Contest,
    peers: Mapping[str, Callable[[nn.Module], Any] | str],
    methods: Mapping[str, Mapping[str, Any]],
    rounds: int,
) -> dict[str, list[float]]:
    """Step times of all systems, unless eager failed."""
    for system, peer in peers.items():
        if isinstance(peer, str):
            contest.leave_out(system, peer)
        else:
            contest.enter(system, peer)
        if EAGER not in contest.trainees:
            return {}
    contest.enter(KEPT, functools.partial(encore.compile, overhead=0.0))
    speed = _speed(contest)
    if methods:
        _enter_methods(contest, methods, speed)
    else:
        _enter_settings(contest, speed)
    contest.enter(FLOOR, functools.partial(encore.compile, budget="min"))
    return contest.times(list(contest.trainees), rounds, contest.advance)


def _enter_settings(contest: Contest, speed: float | None) -> None:
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


def _enter_methods(contest: Contest, methods: Mapping[str, Mapping[str, Any]], speed: float | None) -> None:
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


def _speed(contest: Contest) -> float | None:
    """Eager's time over that of Encore with everything kept, by a short trial; `None` where one of them fails."""
    rivals = [system for system in ("eager", KEPT) if system in contest.trainees]
    trial = contest.times(rivals, 1 if contest.slow else TRIAL_ROUNDS)
    return median_ratio(trial["eager"], trial[KEPT]) if {"eager", KEPT} <= trial.keys() else None


def _slack(speed: float, of_eager: float = 1.0) -> float:
    """The overhead that makes Encore take this much of eager's time."""
    return max(0.0, MARGIN * (of_eager * speed - 1))
