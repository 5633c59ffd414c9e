"""What the simulator says beside the total: what each byte is for, what outlives the step, what is written over."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import encore
from encore.api import compiled_call
from encore.plan import Plan
from encore.schedule import Kind, Run, Schedule, alive_at_worst, changes, replay, simulate
from support.captured_graphs import Perceptron, captured
from support.observed_steps import tiny_step
from support.workload_cases import workloads_lowered

in_each_lowering = workloads_lowered(eager=("lm", "speech", "transformer"), fused=("speech",))


@functools.cache
def perceptron() -> Plan:
    torch._dynamo.reset()
    return captured(Perceptron(), torch.randn(3, 4)).plan


@in_each_lowering
def test_live_bytes_split_into_kinds(name: str, lowering: str) -> None:
    timeline = tiny_step(name, lowering).plan.timeline
    workspace = list(Kind).index(Kind.WORKSPACE)
    for moment in timeline.moments:
        assert sum(moment.by_kind) == moment.live + timeline.resident
        assert min(moment.by_kind) >= 0
        assert moment.by_kind[workspace] == 0
        assert moment.peak >= moment.live


@in_each_lowering
def test_the_worst_moment_is_the_highest(name: str, lowering: str) -> None:
    timeline = tiny_step(name, lowering).plan.timeline
    assert timeline.step_peak == max(moment.peak for moment in timeline.moments)
    worst = timeline.moments[timeline.worst]
    assert worst.peak == worst.live + timeline.workspace_at_worst
    graph = tiny_step(name, lowering).plan.schedule.graph
    alive = [graph.bytes_of(value) for value in alive_at_worst(tiny_step(name, lowering).plan.schedule, timeline)]
    assert alive == sorted(alive, reverse=True)
    assert sum(alive) == worst.live


@in_each_lowering
def test_what_comes_and_goes_adds_up_to_every_moment(name: str, lowering: str) -> None:
    plan = tiny_step(name, lowering).plan
    coming = iter((*changes(plan.schedule, plan.timeline), None))
    change = next(coming)
    outside, there = dict.fromkeys(Kind, 0), dict[int, tuple[int, Kind]]()
    for place, moment in enumerate(plan.timeline.moments):
        while change is not None and change.moment == place:
            if change.storage is None:
                outside[change.kind] += change.bytes
            elif change.bytes < 0:
                assert there.pop(change.storage) == (-change.bytes, change.kind)
            else:
                size, _ = there.get(change.storage, (change.bytes, change.kind))
                assert (change.storage in there) == (change.value is not None)
                there[change.storage] = (size, change.kind)
            change = next(coming)
        found = dict(outside)
        for size, kind in there.values():
            found[kind] += size
        expected = dict(zip(Kind, moment.by_kind, strict=True)) | {Kind.PARAMETER: 0, Kind.INPUT: 0}
        assert found == expected, place
    assert change is None


def test_every_byte_of_a_perceptron() -> None:
    """Hidden layer 3x8 (96 B), output 3x2 (24 B), loss and its tangent 4 B each; `relu` writes over `addmm`."""
    schedule = perceptron().schedule
    timeline = simulate(schedule)
    graph = schedule.graph
    after = {
        graph.ops[moment.action.op].name: (moment.live, moment.phase)
        for moment in timeline.moments
        if isinstance(moment.action, Run)
    }
    hidden, output, loss, tangent = 96, 24, 4, 4
    held = hidden + loss + tangent
    weight_2, bias_2, weight_1, bias_1 = 64, 8, 128, 32
    assert after["addmm"] == (hidden, "forward")
    assert after["relu"] == (hidden, "forward")
    assert after["addmm_1"] == (hidden + output, "forward")
    assert after["sum_1"] == (hidden + output + loss, "forward")
    assert timeline.saved == hidden + loss
    assert after["expand"] == (held, "backward")
    assert after["mm"] == (held + hidden, "backward")
    assert after["mm_1"] == (held + hidden + weight_2, "backward")
    assert after["sum_2"] == (held + hidden + weight_2 + bias_2, "backward")
    assert after["threshold_backward"] == (held + hidden + weight_2 + bias_2, "backward")
    without_hidden = loss + tangent + hidden + weight_2 + bias_2
    assert after["mm_2"] == (without_hidden + weight_1, "backward")
    assert after["sum_3"] == (without_hidden + weight_1 + bias_1, "backward")
    assert timeline.step_peak == without_hidden + weight_1 + bias_1
    assert timeline.moments[-1].live == loss + tangent + weight_2 + bias_2 + weight_1 + bias_1


def test_kinds_at_the_end_are_gradients_and_the_output() -> None:
    timeline = simulate(perceptron().schedule)
    by_kind = dict(zip(Kind, timeline.moments[-1].by_kind, strict=True))
    assert {kind: size for kind, size in by_kind.items() if size} == {
        Kind.PARAMETER: 232,
        Kind.INPUT: 48,
        Kind.GRADIENT: 232 + 4,
        Kind.OUTPUT: 4,
    }


def test_workspace_raises_the_peak_and_leaves_live_bytes_alone() -> None:
    schedule = perceptron().schedule
    plain, wide = (
        simulate(schedule),
        simulate(schedule, lambda graph, op: 1000 if getattr(op, "name", "") == "mm" else 0),
    )
    assert [moment.live for moment in plain.moments] == [moment.live for moment in wide.moments]
    assert wide.step_peak == 200 + 1000
    assert wide.workspace_at_worst == 1000
    assert replay(schedule, workspace=lambda graph, op: 1000 if getattr(op, "name", "") == "mm" else 0) == 1200


def test_outputs_that_only_go_on_do_not_outlive_forward() -> None:
    kept, gone = (simulate(perceptron().schedule, outputs_outlive=outlive) for outlive in (True, False))
    assert kept.saved == gone.saved
    assert kept.moments[-1].live - gone.moments[-1].live == 4


class TransposedParameter(nn.Module):
    """Its gradient comes out in another layout than the parameter has, so that autograd copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


class Doubled(nn.Module):
    """Two parameters with one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(32, 64))
        self.right = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * (self.left + self.right)).sum()


@pytest.mark.parametrize("kind", [TransposedParameter, Doubled])
def test_gradients_that_autograd_copies_are_counted(kind: type[nn.Module]) -> None:
    model = encore.compile(kind(), lowering="eager")
    x = torch.randn(4, 32) if kind is TransposedParameter else torch.randn(32, 64)
    assert encore.verify(model, x).bit_equal
    measured = encore.measure(lambda: model(x).backward())
    timeline = compiled_call(model).session.graphs[0].plan.timeline
    assert measured.step_peak <= timeline.step_peak <= 1.01 * measured.step_peak


def reused(schedule: Schedule) -> list[tuple[str, str]]:
    """Operators that write over an operand, and that operand."""
    graph = schedule.graph
    return [
        (graph.ops[action.op].name, graph.values[action.over].name)
        for action in (*schedule.forward, *schedule.backward)
        if isinstance(action, Run) and action.over is not None
    ]


def test_what_dies_is_written_over_and_nothing_else() -> None:
    assert reused(perceptron().schedule) == [("relu", "addmm"), ("threshold_backward", "mm")]


class Held(nn.Module):
    """Every operand of a pointwise operator is wanted later: by backward, by the caller, or by the caller's hands."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        root = torch.sqrt(x)
        return root, (root * x).sum()


def test_inputs_saved_values_and_outputs_are_never_written_over() -> None:
    call = encore.compile(Held().forward, lowering="eager")
    x = torch.rand(4, 4).add_(1).requires_grad_()
    root, total = call(x)
    total.backward(retain_graph=True)
    first = x.grad
    assert first is not None
    (again,) = torch.autograd.grad(total, x)
    assert torch.equal(root, torch.sqrt(x))
    assert torch.equal(again, first)
    schedule = compiled_call(call).session.graphs[0].plan.schedule
    over = {name for _, name in reused(schedule)}
    graph = schedule.graph
    kept = {graph.values[value].name for value in (*graph.primals, *schedule.saved, *graph.tangents, *graph.returned)}
    assert not over & kept
