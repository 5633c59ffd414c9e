"""One training step of a tiny workload, observed action by action; each is captured once a lowering and test run.

Around every operator and kernel a marker (a block of a size nothing else asks for) is allocated and released, so that
the list of allocator events says which of them each allocation belongs to, with no clock involved.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import encore
import encore.lower.codegen
from benchmarks.workloads import tiny
from encore.api import compiled_call
from encore.cost.torch_private import AllocatorEvents
from encore.lower import Lowered
from encore.lower.kernels import CompiledKernel
from encore.plan import Plan
from encore.schedule import Schedule
from support.compare_with_eager import in_double, run_step

BEGIN, END = 1_000_003, 1_000_033


@dataclass(frozen=True)
class Seen:
    """What the allocator said about one operator or kernel."""

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
    errors: dict[str, tuple[float, float]]
    """How far outputs and gradients are from float64's, as a share of their norm: Encore's, eager's."""
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
def tiny_step(name: str, lowering: str) -> TinyStep:
    """Capture the workload, verify it, and watch one step of it."""
    torch._dynamo.reset()
    workload = tiny(name)
    model, batch = workload.model, workload.batch(0)
    plain = copy.deepcopy(model)

    def step() -> None:
        model(*batch).backward()

    step()
    model.zero_grad()
    eager = encore.measure(step).step_peak
    model.zero_grad()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("encore.lower.codegen.callable_for", marked(encore.lower.calls.callable_for))
        patch.setattr("encore.compiler.lowered_plan.lower", with_marked_kernels)
        encore.compile(model, lowering=lowering, overhead=0.0)
        step()
        model.zero_grad()
    watching.append(True)
    try:
        events = AllocatorEvents()
        events.start()
        step()
        operators = tuple(read_events([event.bytes for event in events.stop()]))
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
        errors=errors_of(run_step(model, batch), plain, batch),
        measured=measured,
        eager=eager,
        operators=operators,
    )


watching: list[bool] = []


def marked(callable_for: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """`callable_for` whose callables mark their begin and end while somebody watches."""

    @functools.cache
    def wrapped(target: Any) -> Callable[..., Any]:
        run = marking(callable_for(target))
        run.__name__ = str(target).replace(".", "_")
        return run

    return wrapped


def marking(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not watching:
            return call(*args, **kwargs)
        mark(BEGIN)
        result = call(*args, **kwargs)
        mark(END)
        return result

    return run


def with_marked_kernels(
    schedule: Schedule, name: str, kernels: Mapping[str, CompiledKernel], *others: Any, **settings: Any
) -> Lowered:
    """`lower`, whose kernels mark their begin and end too."""
    marked_kernels = {key: dataclasses.replace(kernel, call=marking(kernel.call)) for key, kernel in kernels.items()}
    return encore.lower.lower(schedule, name, marked_kernels, *others, **settings)


def errors_of(found: dict[str, torch.Tensor], plain: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
    """Both against float64, which draws the same masks."""
    expected = run_step(plain, batch)
    truth = run_step(copy.deepcopy(plain).double(), pytree.tree_map_only(torch.Tensor, in_double, batch))
    assert torch.equal(found["generator"], truth["generator"])
    compared = {name: want for name, want in truth.items() if name.startswith(("output", "gradient"))}
    largest = max(float(want.norm()) for want in compared.values())
    errors = {}
    for name, want in compared.items():
        norm = max(float(want.norm()), 1e-3 * largest)  # some gradients are rounding and nothing else
        ours, theirs = (float((step[name].double() - want).norm()) / norm for step in (found, expected))
        errors[name] = (ours, theirs)
    return errors
