"""Seconds of operators and kernels: timed once and remembered, by arithmetic and bytes where nothing may run."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from encore.cached_files import read_record, write_record
from encore.compiler.fuse import kernels_of
from encore.cost import Seconds, kernel_timing, rates, seconds, time_kernels
from encore.cost.flops import count_flops
from encore.cost.kernel_timing import kernel_seconds
from encore.cost.probe import random_call, random_tensor
from encore.cost.seconds import may_run
from encore.cost.timing import seconds_of
from encore.graph import Graph, Op, OpClass
from encore.lower import kernel_store
from encore.measurements import MachineCache
from encore.plan import step_seconds
from encore.schedule import Fused, Schedule, schedule_step
from encore.schedule.kernel import Operand
from support.captured_graphs import captured, captured_graph, operators

aten = torch.ops.aten
pytestmark = pytest.mark.measured_times


@pytest.fixture(autouse=True)
def _time_small_operators_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "WORTH_TIMING", 0)


def start_from(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process would: nothing is known but what the file holds. Kernels stay those of the run."""
    cache = MachineCache(path)
    for module in (seconds, rates):
        monkeypatch.setattr(module, "machine_cache", lambda: cache)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start_from(tmp_path / "seconds.json", monkeypatch)


def forbid_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> float:
        raise AssertionError("something was timed")

    for module in (seconds, rates, kernel_timing):
        monkeypatch.setattr(module, "seconds_of", refuse)


def block(x: torch.Tensor) -> torch.Tensor:
    """A layer's worth of operators: a product, a view, dropout, an activation."""
    weight = x.new_ones(8, 8)
    return F.dropout(torch.tanh(x.flatten(0, 1) @ weight), 0.5).sum()


def graph_of_block() -> Graph:
    return captured_graph(block, torch.randn(4, 6, 8, requires_grad=True))


def products(*rows: int) -> Graph:
    def multiply(*sources: torch.Tensor) -> torch.Tensor:
        return torch.stack([(source @ source.t()).sum() for source in sources]).sum()

    return captured_graph(multiply, *[torch.randn(count, 64, requires_grad=True) for count in rows])


# -- operators --------------------------------------------------------------------------------------------------------


def test_what_was_timed_once_is_known_to_the_next_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph = graph_of_block()
    first = Seconds(run=True)
    found = {op.id: first(graph, op) for op in graph.ops}
    assert all(number > 0 for number in found.values())
    first.save()
    start_from(tmp_path / "seconds.json", monkeypatch)
    forbid_running(monkeypatch)
    for run in (True, False):
        again = Seconds(run=run)
        assert {op.id: again(graph, op) for op in graph.ops} == found


def test_a_call_is_told_from_another_by_its_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed = iter(range(1, 100))
    monkeypatch.setattr(seconds, "seconds_of", lambda *args, **kwargs: next(timed))
    graph = products(16, 16, 32)
    same, again, other = operators(graph, aten.mm.default)[:3]
    asked = Seconds(run=True)
    assert (asked(graph, same), asked(graph, again), asked(graph, other)) == (1, 1, 2)
    asked.save()
    keys = json.loads((tmp_path / "seconds.json").read_text())["measurements"]
    assert [key.split()[:2] for key in keys] == [["seconds", "aten.mm.default"]] * 2


def test_what_a_step_goes_into_is_timed_again_and_the_best_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = products(16, 32)
    schedule = schedule_step(graph)
    small, large = operators(graph, aten.mm.default)[:2]
    looks = {small.id: iter((1e-4, 1.0)), large.id: iter((5.0, 4.0, 3.0, 1.0))}
    allowed: dict[int, list[float]] = {small.id: [], large.id: []}

    def look(graph: Graph, op: Op, over: int | None, *, most_seconds: float = 0.0) -> float:
        if op.id not in looks:
            return 1e-9
        allowed[op.id].append(most_seconds)
        return next(looks[op.id])

    monkeypatch.setattr(seconds, "op_seconds", look)
    asked = Seconds(run=True)
    assert (asked(graph, small), asked(graph, large)) == (1e-4, 5.0)
    asked.settle(schedule)
    assert (asked(graph, small), asked(graph, large)) == (1e-4, 3.0)
    assert allowed == {small.id: [0.0], large.id: [0.0, pytest.approx(1.0, rel=1e-3), pytest.approx(1.0, rel=1e-3)]}
    asked.settle(schedule)  # settled: nothing is timed again
    assert asked(graph, large) == 3.0


def test_writing_over_an_operand_is_timed_as_such() -> None:
    graph = graph_of_block()
    (op,) = operators(graph, aten.tanh.default)
    asked = Seconds(run=True)
    operand = op.reads[0]
    assert asked(graph, op) > 0
    assert asked(graph, op, operand) > 0
    call = random_call(graph, op, operand)
    assert call() is call.keywords["out"]  # type: ignore[attr-defined]
    keys = [key for key in asked._cache._loaded() if "aten.tanh.default" in key]
    assert [key.endswith(" over") for key in keys] == [False, True]


def test_views_cost_their_call_and_are_not_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of_block()
    views = [op for op in graph.ops if op.kind is OpClass.VIEW]
    asked = Seconds(run=True)
    (once,) = {asked(graph, op) for op in views}
    assert once > 0
    forbid_running(monkeypatch)
    assert Seconds(run=True)(graph, views[0]) == once


def test_a_draw_is_timed_and_the_generator_left_alone() -> None:
    graph = graph_of_block()
    (draw,) = [op for op in graph.ops if op.kind is OpClass.RANDOM]
    assert seconds.may_run(graph, draw)
    before = torch.get_rng_state()
    asked = Seconds(run=True)
    for op in graph.ops:
        asked(graph, op)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_estimate_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    schedule = captured(block, torch.randn(4, 6, 8, requires_grad=True)).plan.schedule
    forbid_running(monkeypatch)
    guess = Seconds(run=False)
    assert step_seconds(schedule, guess) > 0
    guess.save()
    assert not (tmp_path / "seconds.json").exists(), "a guess is not kept"


def test_nothing_is_timed_beside_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of_block()
    forbid_running(monkeypatch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert all(Seconds(run=True)(graph, op) > 0 for op in graph.ops)


def test_what_would_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = products(16)
    asked = Seconds(run=True)
    asked(graph, operators(graph, aten.mm.default)[0])
    monkeypatch.setattr("encore.cost.room._available", lambda: 1000)
    bigger = products(32)
    (op, *_) = operators(bigger, aten.mm.default)
    assert not seconds.may_run(bigger, op)
    assert asked(bigger, op) > 0


def test_an_operator_that_refuses_made_up_operands_is_guessed_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    graph = products(16)
    (op, *_) = operators(graph, aten.mm.default)

    def refuse(graph: Any, op: Any, over: Any) -> float:
        raise RuntimeError("not with zeros")

    monkeypatch.setattr(seconds, "op_seconds", refuse)
    with caplog.at_level(logging.INFO, logger="encore"):
        assert Seconds(run=True)(graph, op) > 0
    assert "the seconds of aten.mm.default are an estimate: it cannot be run (not with zeros)" in caplog.text


@pytest.mark.parametrize("nonsense", [0, -1.0, math.nan, math.inf])
def test_entries_that_are_no_durations_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nonsense: float
) -> None:
    graph = graph_of_block()
    path = tmp_path / "seconds.json"
    first = Seconds(run=True)
    for op in graph.ops:
        first(graph, op)
    first.save()
    told = read_record(path)
    write_record(path, {**told, "measurements": dict.fromkeys(told["measurements"], nonsense)})
    start_from(path, monkeypatch)
    for run in (False, True):
        again = Seconds(run=run)
        assert all(math.isfinite(again(graph, op)) and again(graph, op) > 0 for op in graph.ops)


# -- arithmetic and bytes ---------------------------------------------------------------------------------------------


def test_more_arithmetic_and_more_bytes_cost_more() -> None:
    graph = products(256, 512, 1024)
    guess = Seconds(run=False)
    for target in (aten.mm.default, aten.sum.default):
        found = [guess(graph, op) for op in operators(graph, target)[:3]]
        assert found == sorted(found)
        assert found[0] < found[2]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.groups = nn.Conv2d(8, 16, 3, groups=2)
        self.back = nn.ConvTranspose2d(16, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.groups(self.enter(x))).sum()


def test_flops_of_convolutions() -> None:
    graph = captured_graph(Convolutions(), torch.randn(2, 3, 12, 12))
    forward = [
        2 * (2 * 8 * 12 * 12) * (3 * 3 * 3),
        2 * (2 * 16 * 10 * 10) * (4 * 3 * 3),
        2 * (2 * 16 * 10 * 10) * (4 * 2 * 2),
    ]
    assert [count_flops(graph, op) for op in operators(graph, aten.convolution.default)] == forward
    backward = [count_flops(graph, op) for op in operators(graph, aten.convolution_backward.default)]
    assert backward == [2 * forward[2], 2 * forward[1], forward[0]], "nobody wants the gradient of the input"


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def test_flops_of_attention_and_products() -> None:
    q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7))
    graph = captured_graph(attend, q, k, v)
    (op,) = operators(graph, aten._scaled_dot_product_flash_attention_for_cpu)
    (back,) = operators(graph, aten._scaled_dot_product_flash_attention_for_cpu_backward)
    assert count_flops(graph, op) == 2 * 2 * (2 * 3 * 5 * 7 * 8)
    assert count_flops(graph, back) == 5 * 2 * (2 * 3 * 5 * 7 * 8)
    graph = products(16)
    assert count_flops(graph, operators(graph, aten.mm.default)[0]) == 2 * 16 * 16 * 64
    assert count_flops(graph, operators(graph, aten.sum.default)[0]) == 0


def test_flops_of_a_recurrent_layer() -> None:
    layer = nn.LSTM(12, 16)
    graph = captured_graph(lambda x: layer(x)[0], torch.randn(5, 3, 12))
    forward = 2 * 5 * 3 * (4 * 16 * 12 + 4 * 16 * 16)
    assert [count_flops(graph, op) for op in operators(graph, aten.mkldnn_rnn_layer.default)] == [forward]
    assert [count_flops(graph, op) for op in operators(graph, aten.mkldnn_rnn_layer_backward.default)] == [2 * forward]


def test_flops_of_encores_own_layers() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = encore.nn.LSTM(12, 16, proj_size=8, stash=3)
            self.gru = encore.nn.GRU(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gru(self.lstm(x)[0])[0]

    graph = captured_graph(Layers(), torch.randn(5, 3, 12))
    rows, own = 2 * 5 * 3, torch.ops.encore
    w_ih, w_hh, w_hr = 64 * 12, 64 * 8, 8 * 16
    assert [count_flops(graph, op) for op in operators(graph, own.lstm_forward)] == [rows * (w_ih + w_hh + w_hr)]
    rebuilt = rows * (w_ih + w_hh)
    backward = rows * (w_ih + 2 * w_hh + 2 * w_hr) + rebuilt  # nobody asks for the gradient of x
    assert [count_flops(graph, op) for op in operators(graph, own.lstm_backward)] == [backward]
    weights = 30 * 8 + 30 * 10
    assert [count_flops(graph, op) for op in operators(graph, own.gru_forward)] == [rows * weights]
    assert [count_flops(graph, op) for op in operators(graph, own.gru_backward)] == [2 * rows * weights]


@pytest.mark.parametrize("stash", ["fast", 8])
def test_recurrent_layers_are_timed_whatever_they_keep(stash: str | int) -> None:
    graph = captured_graph(encore.nn.LSTM(32, 48, stash=stash), torch.randn(20, 8, 32, requires_grad=True))
    own, asked = torch.ops.encore, Seconds(run=True)
    found = [op for op in graph.ops if op.target in (own.lstm_forward.default, own.lstm_backward.default)]
    assert len(found) == 2
    assert all(may_run(graph, op) and asked(graph, op) > 1e-5 for op in found)


# -- kernels ----------------------------------------------------------------------------------------------------------


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * 2 + 1).exp() * x


def fused() -> Schedule:
    return captured(chain, torch.randn(16, 32, requires_grad=True), lowering="fused").plan.schedule


def fused_actions(schedule: Schedule) -> list[Fused]:
    actions = [action for action in (*schedule.forward, *schedule.backward) if isinstance(action, Fused)]
    assert actions
    return actions


def test_a_kernel_is_guessed_until_it_is_learned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    schedule = fused()
    action = fused_actions(schedule)[0]
    asked = Seconds(run=True)
    guessed = asked(schedule.graph, action)
    assert guessed > 0
    assert not asked.knows(action.kernel)
    asked.learn(action.kernel, 2 * guessed)
    assert asked(schedule.graph, action) == 2 * guessed
    asked.save()
    start_from(tmp_path / "seconds.json", monkeypatch)
    assert Seconds(run=False)(schedule.graph, action) == 2 * guessed


def test_kernels_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = fused()
    kernels = kernels_of(schedule)
    compiled = kernel_store().compile(kernels.values()).compiled
    asked = Seconds(run=True)
    time_kernels(asked, kernels, compiled)
    assert all(asked.knows(kernel) for kernel in kernels.values())
    total = step_seconds(schedule, asked)
    forbid_running(monkeypatch)
    time_kernels(asked, kernels, compiled)
    assert step_seconds(schedule, asked) == total


def test_an_estimate_times_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_of(fused())
    compiled = kernel_store().compile(kernels.values()).compiled
    forbid_running(monkeypatch)
    guess = Seconds(run=False)
    time_kernels(guess, kernels, compiled)
    assert not any(guess.knows(kernel) for kernel in kernels.values())


def test_operands_that_a_kernel_writes_over_are_made_good() -> None:
    kernel = dataclasses.replace(fused_actions(fused())[0].kernel, over=((0, 0),))
    largest = []

    def double(operands: list[torch.Tensor]) -> tuple[Any, ...]:
        operands[0].mul_(2)
        largest.append(float(operands[0].abs().max()))
        operands.clear()
        return ()

    assert kernel_seconds(kernel, double) > 0
    assert len(largest) > 4
    assert len(set(largest[2:])) == 1


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("stride", [(8, 1), (1, 3), (0, 1), (16, 2)])
def test_a_made_up_operand_is_laid_out_as_promised(stride: tuple[int, int], offset: int) -> None:
    operand = Operand((3, 8), stride, torch.float32, "cpu", aligned=not offset)
    tensor = random_tensor(operand, "cpu", torch.Generator(), offset=offset)
    assert (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == ((3, 8), stride, offset)
    assert tensor.isfinite().all()


def test_noise_goes_on_to_the_end_of_a_large_tensor() -> None:
    operand = Operand((3, 70_001), (70_001, 1), torch.float32, "cpu", aligned=True)
    tensor = random_tensor(operand, "cpu", torch.Generator())
    assert 0.9 < float(tensor.std()) < 1.1
    assert float(tensor[-1, -100:].std()) > 0


def test_calls_take_turns_and_long_ones_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("encore.cost.timing._switches", lambda: 0)
    assert seconds_of([lambda: ran.append("a"), lambda: ran.append("b")]) > 0
    assert ran[:5] == ["a", "b", "a", "b", "a"]
    ran.clear()
    monkeypatch.setattr("encore.cost.timing.LONG_SECONDS", 0)
    seconds_of([lambda: ran.append("a")], most_seconds=0)
    assert ran == ["a", "a"]


def test_disturbed_runs_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([(1e-3, False), (1e-3, False), *[(1e-2, True)] * 30, *[(1e-4, False)] * 15])
    monkeypatch.setattr("encore.cost.timing._run", lambda *args: next(runs))
    monkeypatch.setattr("encore.cost.timing.PATIENCE", math.inf)
    assert seconds_of([lambda: None], most_seconds=math.inf) == 1e-4
    assert list(runs) == []
