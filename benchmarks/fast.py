"""The suite `fast`: step times of eager, `torch.compile` and Encore with everything kept.

Step times and peaks come from one process for each workload, every system on the same seed and batch, in interleaved
rounds. The gradients are compared with those of a float64 copy of the model. First steps are taken in
processes of their own, with empty caches (cold) and with those that the first left behind (warm).
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import encore
from benchmarks.schema import Layout, Written
from benchmarks.workloads import TINY_SIZES, Workload, build
from encore.compare import systems
from encore.compare.contest import WARM_UP
from encore.compare.trainee import (
    SEED,
    Trainee,
    interleaved_times,
    median_ratio,
    ratio_spread,
    relative_distance,
)
from encore.machine import Machine, this_machine
from encore.terminal import progress

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = ("transformer", "resnet", "nmt", "speech", "lm")
LESS_OF = {"lm": {"steps": 35}}
"""Sizes that keep a suite of peers within minutes."""
ROUNDS, QUICK_ROUNDS = 9, 3
LONG, LONGER = 10, 60
NMT_STEPS = 30

SYSTEMS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": systems.eager,
    "torch.compile": systems.compiled,
    "Encore, eager lowering": functools.partial(encore.compile, lowering="eager", overhead=0.0),
    "Encore": functools.partial(encore.compile, overhead=0.0),
}
"""Encore keeps everything here: the suite `plan` shows what its plans save, and at which price."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One system on one workload. Bytes and seconds; ratios are medians over the rounds."""

    system: str
    seconds: float
    against_eager: float
    spread: tuple[float, float]
    """The lowest and the highest of the rounds' ratios to eager."""
    against_compile: float
    peak: int
    predicted: int | None
    """What Encore said before the step ran."""
    gradient_error: float
    """Distance of all gradients from the float64 ones, relative to those."""
    own_draws: bool
    """The model draws, and the system draws other numbers than eager: gradients cannot be compared."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of the translator in a fresh process."""

    system: str
    steps: int
    cache: str
    seconds: float
    stages: dict[str, float] = field(default_factory=dict)
    kernels: int = 0


@dataclass(frozen=True, slots=True)
class FastSuite(Written):
    """One run of the suite."""

    layout = Layout("encore_bench_fast", 3)

    machine: Machine
    quick: bool
    rounds: int
    outcomes: dict[str, tuple[Outcome, ...]]
    """By workload."""
    first_steps: tuple[FirstStep, ...]
    seconds: float = 0.0
    """What all of it took."""


def run_fast(*, quick: bool = False) -> FastSuite:
    """Measure everything, reporting progress on stderr."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    outcomes = {}
    for name in WORKLOADS:
        sizes = TINY_SIZES[name] if quick else LESS_OF.get(name, {})
        outcomes[name] = tuple(compare_systems(functools.partial(build, name, **sizes), rounds=rounds))
        torch.compiler.reset()
        gc.collect()
    return FastSuite(this_machine(), quick, rounds, outcomes, tuple(first_steps(quick=quick)))


def compare_systems(make: Callable[[], Workload], *, rounds: int) -> list[Outcome]:
    """All systems on one workload."""
    workload = make()
    batch = workload.batch(0)
    with progress(f"{workload.name:<11}", len(SYSTEMS) + rounds) as advance:
        trainees = {}
        for system, compile_ in SYSTEMS.items():
            model = make().model
            trainees[system] = Trainee(compile_(model), batch)
            for _ in range(1 + WARM_UP):
                trainees[system].timed()
            advance(f"{system}: first step and warm-up")
        seconds = interleaved_times({system: one.timed for system, one in trainees.items()}, rounds, advance)
    truth = _true_gradients(make(), batch)
    draws = not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(SEED).get_state())
    return [
        Outcome(
            system=system,
            seconds=statistics.median(seconds[system]),
            against_eager=median_ratio(seconds[system], seconds["eager"]),
            spread=ratio_spread(seconds[system], seconds["eager"]),
            against_compile=median_ratio(seconds[system], seconds["torch.compile"]),
            peak=trainee.measured().step_peak,
            predicted=encore.report(trainee.model).planned.step_peak if system.startswith("Encore") else None,
            gradient_error=relative_distance(trainee.gradients(), truth),  # of the step just measured, from `SEED`
            own_draws=draws and systems.draws_its_own(SYSTEMS[system]),
        )
        for system, trainee in trainees.items()
    ]


def _true_gradients(workload: Workload, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    exact = copy.deepcopy(workload.model).double()
    wide = tuple(part.double() if part.is_floating_point() else part for part in batch)
    torch.manual_seed(SEED)
    exact(*wide).backward()
    return [parameter.grad for parameter in exact.parameters() if parameter.grad is not None]


# -- first steps, each in a process of its own -----------------------------------------------------------------------


def first_steps(*, quick: bool) -> list[FirstStep]:
    """Cold and warm; and with few and many time steps."""
    sizes = {**TINY_SIZES["nmt"]} if quick else {}
    lengths = (6, 12) if quick else (LONG, LONGER)
    steps = lengths[0] if quick else NMT_STEPS
    cases = [("torch.compile", steps, "cold"), ("Encore", steps, "cold"), ("Encore", steps, "warm")]
    found = []
    with (
        progress("first steps", len(cases) + len(lengths)) as advance,
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
    ):
        for system, length, cache in cases:
            found.append(_in_a_process(system, length, cache, Path(one), sizes))
            advance(f"{system}, {length} steps, {cache}")
        for length in lengths:
            found.append(
                _in_a_process("Encore", length, "cold" if length == lengths[0] else "shared", Path(other), sizes)
            )
            advance(f"Encore, {length} steps")
    return found


def _in_a_process(system: str, steps: int, cache: str, folder: Path, sizes: dict[str, int]) -> FirstStep:
    environment = {
        **os.environ,
        "ENCORE_CACHE_DIR": str(folder / "encore"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    asked = json.dumps({"system": system, "sizes": {**sizes, "steps": steps}})
    command = [sys.executable, "-m", "benchmarks.fast", asked]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise encore.EncoreError(f"the first step of {system} failed: {done.stderr.strip().splitlines()[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return FirstStep(system, steps, cache, **answer)


def _take_first_step(asked: str) -> None:
    """What such a process does: one step, timed; the answer goes to stdout as JSON."""
    question = json.loads(asked)
    workload = build("nmt", **question["sizes"])
    model = SYSTEMS[question["system"]](workload.model)
    batch = workload.batch(0)
    started = time.perf_counter()
    model(*batch).backward()
    answer: dict[str, Any] = {"seconds": time.perf_counter() - started}
    if question["system"].startswith("Encore"):
        report = encore.report(model)
        answer |= {"stages": report.first_step, "kernels": sum(graph.kernels for graph in report.graphs)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _take_first_step(sys.argv[1])
