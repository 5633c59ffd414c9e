"""One training step of a tiny workload, observed operator by operator; each workload is captured once a test run.

Around every operator a marker (a block of a size nothing else asks for) is allocated and released, so that the list of
allocator events says which operator each allocation belongs to, with no clock involved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import encore
import encore.lower.codegen
from encore.api import compiled_call
from encore.cost.allocator import AllocatorEvents
from encore.plan import Plan
from encore.workloads import tiny

BEGIN, END = 1_000_003, 1_000_033


@dataclass(frozen=True)
class Seen:
    """What the allocator said about one operator."""

    before: int
    after: int
    peak: int


@dataclass(frozen=True)
class TinyStep:
    """A captured and measured step."""

    plan: Plan
    graphs: int
    report: encore.Report
    estimate: encore.Estimate
    verification: encore.Verification
    measured: int
    eager: int
    operators: tuple[Seen, ...]


def mark(size: int) -> None:
    torch.empty(size, dtype=torch.uint8)


def read_events(events: list[int]) -> Iterator[Seen]:
    """Allocator events with markers -> live bytes before and after every operator, and the most in between."""
    live = before = peak = 0
    inside = False
    for size in events:
        if abs(size) in (BEGIN, END):
            if size == BEGIN:
                before = peak = live
                inside = True
            elif size == END:
                yield Seen(before, live, peak)
                inside = False
            continue
        live += size
        if inside:
            peak = max(peak, live)


@functools.cache
def tiny_step(name: str) -> TinyStep:
    """Capture the workload, verify it, and watch one step of it."""
    torch._dynamo.reset()
    workload = tiny(name)
    model, batch = workload.model, workload.batch(0)

    def step() -> None:
        model(*batch).backward()

    step()
    model.zero_grad()
    eager = encore.measure(step).step_peak
    model.zero_grad()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("encore.lower.codegen.callable_for", marked(encore.lower.calls.callable_for))
        encore.compile(model)
        step()
        model.zero_grad()
    watching.append(True)
    try:
        events = AllocatorEvents()
        events.start()
        step()
        operators = tuple(read_events([size for _, size in events.stop()]))
    finally:
        watching.clear()
    model.zero_grad()
    measured = encore.measure(step).step_peak
    model.zero_grad()
    (captured, *others) = compiled_call(model).session.graphs
    return TinyStep(
        plan=captured.plan,
        graphs=1 + len(others),
        report=encore.report(model),
        estimate=encore.estimate(tiny(name).model, *batch),
        verification=encore.verify(model, *batch),
        measured=measured,
        eager=eager,
        operators=operators,
    )


watching: list[bool] = []


def marked(callable_for: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """`callable_for` whose callables mark their begin and end while somebody watches."""

    @functools.cache
    def wrapped(target: Any) -> Callable[..., Any]:
        call = callable_for(target)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not watching:
                return call(*args, **kwargs)
            mark(BEGIN)
            result = call(*args, **kwargs)
            mark(END)
            return result

        run.__name__ = str(target).replace(".", "_")
        return run

    return wrapped
