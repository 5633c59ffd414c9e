"""Codes whose bytes depend on the data, and codes that lose something: planned with a margin, watched, told."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import encore
from encore.codecs import CODECS, Densities, Share
from encore.compiler.watch import CodeWatch, measured_error
from encore.cost.density import densities, planned_density, planned_width
from encore.fates import Encode, Terms, owned
from encore.plan import feature_maps
from support.captured_graphs import captured, drop_gradients, operators, train_step
from support.lowerings import fused_is_slow
from support.random_steps import ByBytes


class Rectified(nn.Module):
    """ReLU feeds products, whose backward reads all of it: half are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


X = torch.randn(256, 48, generator=torch.Generator().manual_seed(0))


def peak_of(model: nn.Module, x: torch.Tensor) -> int:
    drop_gradients(model)
    peak = encore.measure(lambda: train_step(model, x)).step_peak
    drop_gradients(model)
    return peak


def test_sparse_codes_are_planned_from_the_first_batch_and_exact() -> None:
    model = encore.compile(Rectified(), budget="min", lowering="eager", methods="encode")
    state = torch.get_rng_state()
    train_step(model, X)
    assert torch.equal(torch.get_rng_state(), state)
    report = encore.report(model)
    rows = [row for row in report.decisions if row.code == "sparse"]
    assert rows
    for row in rows:
        assert row.largest is not None
        assert 0.8 * row.held < row.largest <= row.held < 0.8 * row.bytes
        assert row.dense == row.bytes + 8
        assert row.density is not None
        assert row.planned_density is not None
        assert 0.3 < row.density <= row.planned_density < 0.8
    assert 0.9 * report.planned.step_peak < peak_of(model, X) <= report.planned.step_peak
    encore.verify(model, X)
    assert "codes by density" in str(report)
    for seed in range(3):
        other = torch.randn(256, 48, generator=torch.Generator().manual_seed(seed + 1))
        assert peak_of(model, other) <= report.planned.step_peak


def test_an_estimate_takes_everything_for_dense() -> None:
    estimate = encore.estimate(Rectified(), X)
    plan = estimate.plan(estimate.floor)
    assert {row.code for row in plan.decisions} <= {"", "bits"}


def test_denser_data_is_warned_of_once_and_still_right() -> None:
    model = encore.compile(Rectified(), budget="min", lowering="eager", methods="encode")
    first = model.get_parameter("layers.0.bias")
    nn.init.constant_(first, -0.5)
    train_step(model, X)
    drop_gradients(model)
    nn.init.constant_(first, 3.0)
    with pytest.warns(UserWarning, match="denser than that of the first batch") as told:
        train_step(model, X)
    assert len([one for one in told if "encore" in str(one.message)]) <= len(model.layers)
    report = encore.report(model)
    assert report.planned.step_peak < peak_of(model, X) <= report.densest_step_peak
    assert "were all of these maps dense" in str(report)
    encore.verify(model, X)


def test_densities_leave_room_and_are_those_of_forward() -> None:
    graph = captured(Rectified(), X).unplanned.schedule
    primals = [*Rectified().parameters(), X]
    shapes = [graph.graph.values[value].shape for value in graph.graph.primals]
    ordered = []
    for shape in shapes:
        (place, *_) = [number for number, primal in enumerate(primals) if primal.shape == shape]
        ordered.append(primals.pop(place).detach())
    seen = densities(graph.graph, ordered, {Share.NON_ZEROS: set(feature_maps(graph))})[Share.NON_ZEROS]
    relus = {name: share for name, share in seen.items() if name.startswith("relu")}
    assert len(relus) == 4
    assert all(0.2 < share < 0.9 for share in relus.values())
    assert planned_density(torch.tensor([0.0, 0.0, 1.0, -2.0])) == pytest.approx(0.55)
    assert planned_density(torch.zeros(4)) == pytest.approx(0.02)
    assert planned_density(torch.ones(4)) == 1.0


class LookedUp(nn.Module):
    """Backward reads rows by positions of which nobody knows how far they reach."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(4096.0) % 16)  # sums that come out the same in any order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[(x * 10).long()].square().sum()


def test_integers_are_planned_from_the_first_batch_and_watched() -> None:
    near, count = X.abs().tile(4, 2), 4 * 256 * 96
    model = encore.compile(LookedUp(), budget="min", lowering="eager", methods="encode")
    train_step(model, near)
    report = encore.report(model)
    (row,) = [row for row in report.decisions if row.code == "integers"]
    assert (row.bytes, row.held, row.largest, row.dense) == (8 * count, 16 + count, 16 + count, 16 + 8 * count)
    assert row.planned_density == row.density == 1 / 8
    assert "bytes of integers      12.5%    planned; 12.5% at most so far" in str(report)
    assert report.densest_step_peak == report.planned.step_peak + 7 * count
    assert 0.9 * report.planned.step_peak < peak_of(model, near) <= report.planned.step_peak
    assert encore.verify(model, near).bit_equal
    with pytest.warns(UserWarning, match="its integers reach further than those of the first batch"):
        train_step(model, near * 20)
    assert encore.verify(model, near * 20).bit_equal
    report = encore.report(model)
    (row,) = [row for row in report.decisions if row.code == "integers"]
    assert (row.largest, row.density) == (16 + 2 * count, 1 / 4)
    assert report.planned.step_peak < peak_of(model, near * 20) <= report.densest_step_peak


def test_widths_leave_room() -> None:
    for most, width in ((0, 1), (231, 1), (240, 2), (59_000, 2), (60_000, 4), (2**31, 4), (2**40, 8)):
        assert planned_width(torch.tensor([-7, most - 7])) == width / 8
    assert planned_width(torch.tensor([-30_000, 30_000], dtype=torch.int16)) == 1.0
    assert planned_width(torch.empty(0, dtype=torch.int64)) == 1 / 8


@fused_is_slow
def test_codecs_that_lose_something_are_used_only_where_they_may_be_and_told(lowering: str) -> None:
    without = encore.compile(Rectified(), budget="min", lowering=lowering, methods="encode")
    train_step(without, X)
    assert all(row.lossless for row in encore.report(without).decisions)
    torch._dynamo.reset()
    model = encore.compile(Rectified(), budget="min", lowering=lowering, methods="encode", lossy="fp16")
    train_step(model, X)
    report = encore.report(model)
    rows = [row for row in report.decisions if not row.lossless]
    assert rows
    assert {row.code for row in rows} == {"fp16"}
    for row in rows:
        assert row.error is not None
        assert row.error_bound is not None
        assert 0 < row.error <= row.error_bound < 1e-3
    assert all(row.held == row.bytes // 2 for row in rows)
    assert "fp16, lossy" in str(report)
    assert "off by at most 0.00049 of the largest number, 0.000" in str(report)
    assert peak_of(model, X) <= report.planned.step_peak


def test_a_saved_plan_that_loses_something_wants_to_be_allowed() -> None:
    fresh = Rectified()
    model = encore.compile(copy.deepcopy(fresh), budget="min", lowering="eager", methods="encode", lossy=("fp16",))
    train_step(model, X)
    plan = encore.report(model).plan
    torch._dynamo.reset()
    refused = encore.compile(copy.deepcopy(fresh), plan=plan)
    with pytest.raises(encore.PlanError, match="'fp16', which is lossy; allow it with lossy='fp16'"):
        train_step(refused, X)
    torch._dynamo.reset()
    allowed = encore.compile(copy.deepcopy(fresh), plan=plan, lossy="fp16")
    train_step(allowed, X)
    assert encore.report(allowed).plan == plan


def test_the_error_is_that_of_the_codec() -> None:
    x = torch.randn(100_000)
    fp16 = CODECS["fp16"]
    wanted = float((x.half().float() - x).abs().max() / x.abs().max())
    error, bound = measured_error(fp16, x)
    assert error == pytest.approx(wanted, rel=1e-3)
    assert error <= bound == pytest.approx(2.0**-11)  # half a step of the largest number
    assert measured_error(CODECS["sparse"], x) == (0.0, 0.0)
    watch = CodeWatch("x", fp16, 200_000)
    watch(x, *fp16.options)
    assert (watch.error, watch.error_bound) == (error, bound)
    assert watch.most == 200_000
    assert dataclasses.is_dataclass(fp16)


def test_positions_of_pooling_windows_are_held_in_fewer_bytes() -> None:
    """Their range is known from the picture; that of other integers only from data."""

    def step(x: torch.Tensor) -> torch.Tensor:
        ranks = torch.argsort(x.flatten(1), dim=1)
        return nn.functional.max_pool2d(x.sin(), 2).square().sum() + x.flatten(1).gather(1, ranks).prod(1).sum()

    x = torch.randn(4, 8, 32, 32, requires_grad=True)
    graph = captured(step, x).unplanned.schedule.graph
    (ranks,) = (graph.values[op.writes[1] or 0] for op in operators(graph, torch.ops.aten.sort))

    def offered(seen: Densities) -> list[tuple[str, int]]:
        terms = Terms(ByBytes(), codecs=tuple(CODECS), densities=seen)
        found = Encode.candidates(graph, owned(graph), terms, ())
        return [(one.codec, one.bytes) for one in found if graph.values[one.value].dtype is torch.int64]

    pooled = ("uint16", 2 * 4 * 8 * 16 * 16)
    assert offered({}) == [pooled]
    seen = {Share.NUMBER_BYTES: {ranks.name: planned_width(torch.tensor([0, 8 * 32 * 32 - 1]))}}
    assert sorted(offered(seen)) == [("integers", 16 + 2 * 4 * 8 * 32 * 32), pooled]
