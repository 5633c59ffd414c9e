"""One workload of many lengths: eager PyTorch, `torch.compile(dynamic=True)` and Encore on the same batches.

Encore, at 60 % of the largest step seen, and `torch.compile(dynamic=True)` each begin with empty caches, one after the
other; every step of Encore's is predicted to keep the budget, or counted. Then, over the same lengths again, steps of
eager PyTorch, of `torch.compile` and of Encore are interleaved; some lengths are measured for their peak, and compared
with a copy of the model that has seen this one length.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

import encore
from benchmarks.workloads.lengths import LengthWorkload
from encore.api import compiled_call
from encore.compare.trainee import Trainee, interleaved_times, median_ratio, ratio_spread, relative_distance
from encore.reports.report import Report
from encore.units import seconds_text

DISTINCT = 0.64
"""Different lengths, as a share of the batches."""
ROUNDS, SINGLE_ROUNDS = 2, 5
"""Of steps at every length, and at those that are looked at."""
PATIENCE = 2
"""`torch.compile` is stopped when it has taken so many times what Encore took for all batches."""
BUDGET = "60%"
FAMILIAR = 3
"""New lengths after which no kernel should be compiled any more."""


@dataclass(frozen=True, slots=True)
class LengthOutcome:
    """One workload. Seconds; steps are forward and backward."""

    distinct: int
    """Different lengths among the batches."""
    whole: bool
    """Whether no code is run once for every position."""
    first: float
    """The first step."""
    new: float
    """What a new length costs beyond its later steps: the median."""
    slowest: float
    """The most that one of them costs."""
    total: float
    """All batches, once."""
    compiled_total: float | None
    """The same with `torch.compile(dynamic=True)`."""
    compiled_failed: str
    """Why there is no such figure."""
    eager_total: float
    again: float
    """A step of a known length over eager's: the median over all lengths."""
    again_spread: tuple[float, float]
    compiled_again: float | None
    single: float
    """A step over that of a copy that has seen this one length: the median."""
    single_spread: tuple[float, float]
    predicted_kept: int
    """Lengths whose predicted peak was within the budget at their first step; of all `distinct` ones."""
    kept: int
    """Lengths whose measured peak is within the budget, of those looked at."""
    looked_at: int
    apart: float
    """How far a predicted peak is above the measured one, as a fraction, at most; below 0 if it is below."""
    least_apart: float
    gradient_error: float
    """Relative distance of gradients from float64, over eager's: the largest."""
    late_kernels: int
    """Kernels compiled after the first few lengths."""

    @property
    def against_first(self) -> float:
        return self.new / self.first


def compare_lengths(
    make: Callable[[], LengthWorkload],
    *,
    batches: int,
    looked_at: int,
    advance: Callable[[str], None] = lambda note: None,
) -> LengthOutcome:
    """All systems on one workload."""
    eager, planned = make(), make()
    lengths = drawn_lengths(planned.lengths, batches)
    distinct = sorted(set(lengths))
    with empty_caches():
        encore.compile(planned.model, budget=BUDGET)
        seconds, predicted = [], dict[int, bool]()
        for length in lengths:
            seconds.append(_step(planned, length, advance))
            if length not in predicted:
                predicted[length] = _is_predicted_within(planned)
        compiled, compiled_seconds, why = _compiled(make(), lengths, PATIENCE * sum(seconds), advance)
        known = {"eager": eager, "Encore": planned} | ({} if compiled is None else {"torch.compile": compiled})
        again = {system: [_trainee(one, length).timed for length in distinct] for system, one in known.items()}
        rounds = {system: dict[int, float]() for system in known}
        for place, length in enumerate(distinct):
            times = interleaved_times({system: steps[place] for system, steps in again.items()}, ROUNDS)
            for system, found in times.items():
                rounds[system][length] = statistics.median(found)
            advance(f"length {length} again")
        chosen = [distinct[place * (len(distinct) - 1) // (looked_at - 1)] for place in range(looked_at)]
        peaks = [_peaks(planned, length) for length in chosen]
        errors = [_gradient_error(make, eager, planned, length) for length in chosen]
        singles = [_against_single(make, planned, length, advance) for length in chosen]
    costs = _new_costs(lengths, seconds, rounds["Encore"])
    mine, theirs = ([rounds[system][length] for length in distinct] for system in ("Encore", "eager"))
    session = compiled_call(planned.model).session
    return LengthOutcome(
        distinct=len(distinct),
        whole=planned.whole,
        first=seconds[0],
        new=statistics.median(costs),
        slowest=max(costs),
        total=sum(seconds),
        compiled_total=None if compiled_seconds is None else sum(compiled_seconds),
        compiled_failed=why,
        eager_total=sum(rounds["eager"][length] for length in lengths),
        again=median_ratio(mine, theirs),
        again_spread=ratio_spread(mine, theirs),
        compiled_again=median_ratio(list(rounds["torch.compile"].values()), theirs) if compiled else None,
        single=statistics.median(singles),
        single_spread=(min(singles), max(singles)),
        predicted_kept=sum(predicted.values()),
        kept=sum(is_kept for is_kept, _ in peaks),
        looked_at=len(peaks),
        apart=max(apart for _, apart in peaks),
        least_apart=min(apart for _, apart in peaks),
        gradient_error=max(errors),
        late_kernels=sum(graph.kernels_compiled for graph in session.graphs[FAMILIAR:]) if planned.whole else 0,
    )


def drawn_lengths(bounds: tuple[int, int], batches: int) -> list[int]:
    """The longest, which shows whether it fits, and others in random order, the same each time: about two thirds of
    all are different, or as many as there are."""
    draw, known = random.Random(0), range(bounds[0], bounds[1])
    distinct = draw.sample(known, min(len(known), max(1, round(DISTINCT * batches) - 1)))
    lengths = distinct + draw.choices(distinct, k=batches - 1 - len(distinct))
    draw.shuffle(lengths)
    return [bounds[1], *lengths]


def _new_costs(lengths: list[int], seconds: list[float], later: dict[int, float]) -> list[float]:
    """What each new length but the first costs beyond a later step of it."""
    seen, costs = {lengths[0]}, []
    for length, spent in zip(lengths, seconds, strict=True):
        if length not in seen:
            seen.add(length)
            costs.append(max(0.0, spent - later[length]))
    return costs


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    names = ("ENCORE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    torch.compiler.reset()
    with tempfile.TemporaryDirectory(prefix="encore-lengths-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: str(Path(folder) / name) for name in names})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _trainee(workload: LengthWorkload, length: int) -> Trainee:
    call = functools.partial(_seeded, workload)
    return Trainee(call, workload.batch(length), closed_over=tuple(workload.model.parameters()))


def _seeded(workload: LengthWorkload, *batch: torch.Tensor) -> torch.Tensor:
    random.seed(0)
    return workload.forward(workload.model, *batch)


def _step(workload: LengthWorkload, length: int, advance: Callable[[str], None]) -> float:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Dynamo does not know how to trace the builtin")
        spent = _trainee(workload, length).timed()
    advance(f"length {length}: {spent:.2f} s")
    return spent


def _compiled(
    workload: LengthWorkload, lengths: list[int], patience: float, advance: Callable[[str], None]
) -> tuple[LengthWorkload | None, list[float] | None, str]:
    """The model by `torch.compile(dynamic=True)`, and the seconds of its steps; or why it fails."""
    torch._dynamo.config.allow_rnn = True
    workload.model.compile(dynamic=True)
    seconds: list[float] = []
    try:
        with _out_of_patience_after(patience):
            seconds.extend(_step(workload, length, advance) for length in lengths)
        return workload, seconds, ""
    except _OutOfPatienceError:
        return None, None, f"stopped after {seconds_text(patience)}, with {len(seconds)} batches done"
    except Exception as error:
        return None, None, f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:100]}"
    finally:
        torch._dynamo.config.allow_rnn = False


class _OutOfPatienceError(BaseException):
    """Passes through whatever catches exceptions while it compiles."""


@contextlib.contextmanager
def _out_of_patience_after(seconds: float) -> Iterator[None]:
    """Interrupt what runs inside, in the main thread, after so many seconds: a single step may compile for hours."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _OutOfPatienceError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_predicted_within(planned: LengthWorkload) -> bool:
    """Whether the peak that was predicted of the latest step is within its budget."""
    report, limit = _report_and_limit(planned)
    return limit is None or report.resident + report.planned.step_peak <= limit


def _report_and_limit(planned: LengthWorkload) -> tuple[Report, int | None]:
    """The report of the latest step, and its budget in bytes."""
    session = compiled_call(planned.model).session
    session.step.begin()
    report, program = encore.report(planned.model), session.step.last
    return report, session.last_step[-1].limit if program is None else program.limit


def _peaks(planned: LengthWorkload, length: int) -> tuple[bool, float]:
    """Whether the measured peak of a length is within its budget, and how far the predicted one is above it."""
    one = _trainee(planned, length)
    one.timed()
    measured = one.measured().step_peak
    report, limit = _report_and_limit(planned)
    return limit is None or report.resident + measured <= limit, report.planned.step_peak / measured - 1


def _gradient_error(
    make: Callable[[], LengthWorkload], eager: LengthWorkload, planned: LengthWorkload, length: int
) -> float:
    exact = make()
    exact.model.double()
    gradients = []
    for one in (exact, eager, planned):
        trainee = _trainee(one, length)
        if one is exact:
            trainee = Trainee(
                trainee.model,
                tuple(part.double() if part.is_floating_point() else part for part in trainee.args),
                closed_over=trainee.closed_over,
            )
        trainee.timed()
        gradients.append(trainee.gradients())
    truth, plain, mine = gradients
    return relative_distance(mine, truth) / max(relative_distance(plain, truth), 1e-12)


def _against_single(
    make: Callable[[], LengthWorkload], planned: LengthWorkload, length: int, advance: Callable[[str], None]
) -> float:
    """Step times over those of a copy that has seen this one length and has the same budget in bytes: the median of the
    rounds' ratios."""
    single = make()
    steps = {"all": _trainee(planned, length).timed, "one": _trainee(single, length).timed}
    steps["all"]()
    _, limit = _report_and_limit(planned)
    encore.compile(single.model, budget=BUDGET if limit is None else limit)
    for _ in range(4):
        steps["one"]()
    times = interleaved_times(steps, SINGLE_ROUNDS)
    advance(f"length {length} alone")
    return median_ratio(times["all"], times["one"])
