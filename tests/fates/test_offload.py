"""Feature maps that go to disk: planned, exact, predicted, checked; and disks that fail in the middle of a step."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import encore
from benchmarks.workloads import tiny
from encore.api import compiled_call, estimate_with
from encore.codecs import CODECS
from encore.cost import LinkLessons, known_link
from encore.cost.lessons import STEPS
from encore.errors import TierError
from encore.fates import Encode, Link, Offload
from encore.lower import Transport
from encore.options import Budget, Options, make_options
from encore.plan import Candidate, Methods, choose, stack_plans
from encore.plan.planner import Planner, candidates_of
from encore.schedule import Load, Store, Wait, replay
from encore.tiers import Disk, slot_file
from support.captured_graphs import captured, drop_gradients, train_step
from support.lowerings import fused_is_slow
from support.mask_models import Gated, Pictures
from support.random_steps import ByBytes, no_workspace
from support.watchdog import watchdog

FAST = Link(store=1e-12, load=1e-12, call=1e-9, pace=1.0, depth=64)
"""Nothing beats a disk like this one."""
SLOW = Link(store=1e-3, load=1e-3, call=1.0, pace=1.0, depth=64)
BOXED = 64
TOKEN = 8


class Tower(nn.Module):
    """Equal layers, whose feature maps are large enough to move."""

    def __init__(self, layers: int = 5, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


X = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watchdog(120):
        yield


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encore.compiler.session.link_to", lambda tier: FAST)


def on_disk(model: Any, **options: Any) -> Any:
    """Compiled for the smallest peak, with nothing but the disk to get there."""
    return encore.compile(model, **{"budget": "min", "methods": "encode", "tiers": "disk", **options})


def measured(model: nn.Module, x: torch.Tensor) -> int:
    drop_gradients(model)
    peak = encore.measure(lambda: train_step(model, x)).step_peak
    drop_gradients(model)
    return peak


def transport_of(model: Any) -> Transport:
    return compiled_call(model).session.transports["disk"]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("fast")
def test_feature_maps_on_disk_are_exact_and_predicted_to_the_byte(lowering: str) -> None:
    model = on_disk(Tower(), lowering=lowering)
    train_step(model, X)
    report = encore.report(model)
    moved = [row for row in report.decisions if row.action == "offload"]
    assert moved
    assert all(row.code == "to disk" and row.held == 0 and row.lossless for row in moved)
    assert report.planned.moved == sum(row.bytes for row in moved) >= 3 * X.nbytes
    assert 0 <= report.planned.step_peak - measured(model, X) <= BOXED + TOKEN * len(moved)
    encore.verify(model, X)
    (graph,) = compiled_call(model).session.last_step
    kinds = {type(action) for action in (*graph.plan.schedule.forward, *graph.plan.schedule.backward)}
    assert {Store, Load, Wait} <= kinds
    replay(graph.plan.schedule, limit=report.planned.step_peak, workspace=compiled_call(model).session.workspaces)
    assert f"{'moved to tiers':<18}" in str(report)
    assert report.stalled is not None
    assert json.loads(report.to_json())["planned"]["moved"] == report.planned.moved


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("lowering", ["eager", pytest.param("fused", marks=pytest.mark.slow)])
def test_all_methods_together_are_exact(lowering: str) -> None:
    for model, x in ((Gated(), X), (Pictures(), torch.randn(32, 3, 16, 16))):
        compiled = encore.compile(model, budget="min", tiers=("disk",), lowering=lowering)
        train_step(compiled, x)
        report = encore.report(compiled)
        assert measured(compiled, x) <= report.planned.step_peak
        encore.verify(compiled, x)


@pytest.mark.usefixtures("fast")
def test_a_disk_takes_budgets_that_recomputing_cannot_or_only_for_more_time() -> None:
    x = X.repeat(4, 1)
    floors = {}
    for tiers in ((), ("disk",)):
        torch._dynamo.reset()
        model = encore.compile(Tower(8), budget="min", lowering="eager", methods=("recompute", "encode"), tiers=tiers)
        train_step(model, x)
        floors[tiers] = encore.report(model).planned
    assert floors["disk",].step_peak <= floors[()].step_peak
    assert floors["disk",].overhead < floors[()].overhead


def test_more_methods_never_give_a_slower_plan_for_a_budget() -> None:
    """Budgets are the very peaks of the plans that there are with fewer methods."""
    workload = tiny("resnet")
    kept = captured(workload.model, *workload.batch(0)).unplanned
    lossless = tuple(name for name, codec in CODECS.items() if codec.lossless)
    disk = {"disk": Link(store=5e-9, load=5e-9, call=1e-5, pace=0.7, depth=8)}

    def candidates(codecs: tuple[str, ...], links: dict[str, Link]) -> list[Candidate]:
        return candidates_of([Planner(kept, no_workspace, ByBytes(), methods=Methods(codecs=codecs), links=links)])

    fewer = candidates((), {})
    for more in (candidates(lossless, {}), candidates((), disk)):
        for candidate in fewer:
            budget = Options(budget=Budget(bytes=stack_plans([candidate.plan]).total))
            assert choose(more, budget).overhead <= choose(fewer, budget).overhead
        floors = [choose(several, Options(budget=Budget())).plan.timeline.step_peak for several in (fewer, more)]
        assert floors[1] <= floors[0]


def test_a_slow_disk_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encore.compiler.session.link_to", lambda tier: SLOW)
    model = encore.compile(Tower(), overhead=0.5, lowering="eager", tiers="disk")
    train_step(model, X)
    report = encore.report(model)
    assert report.planned.moved == 0
    assert report.stalled is None
    assert "tiers" not in str(report)


def test_the_stall_of_a_slow_disk_is_part_of_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encore.compiler.session.link_to", lambda tier: SLOW)
    model = on_disk(Tower(), lowering="eager")
    train_step(model, X)
    planned = encore.report(model).planned
    assert planned.stall > 500
    assert planned.seconds > planned.stall
    assert planned.overhead > 500


@pytest.mark.slow
def test_the_stall_for_a_disk_of_known_pace_is_predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A disk that takes a hundredth of a second for a quarter of a megabyte, which nothing here can hide."""
    monkeypatch.setattr("encore.tiers.disk.PIECE", 1 << 18)
    monkeypatch.setattr("encore.cost.links.PARCEL", 1 << 20)
    monkeypatch.setattr("encore.cost.links.PARCELS", 2)
    monkeypatch.setattr("encore.cost.links.ROUNDS", 2)
    monkeypatch.setattr("encore.cost.links.SMALL", 2)
    inject(monkeypatch, "pwrite", slowly)
    inject(monkeypatch, "preadv", slowly)
    x = torch.randn(4096, 64)
    model = on_disk(Tower(), tiers=Disk(tmp_path, workers=1, depth=64), lowering="eager")
    train_step(model, x)
    report = encore.report(model)
    assert report.planned.moved >= 3 * x.nbytes
    assert report.planned.stall > 0.1
    stalls = []
    for _ in range(3):
        drop_gradients(model)
        train_step(model, x)
        stalls.append(encore.report(model).stalled or 0.0)
    assert min(stalls) > 0.1  # the suite `bptt` shows how close the prediction is on a quiet machine


@pytest.mark.slow
def test_the_first_steps_teach_how_fast_the_tier_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody has taken the disk for a hundred times faster than it is."""
    monkeypatch.setattr("encore.tiers.disk.PIECE", 1 << 18)
    monkeypatch.setattr("encore.compiler.session.link_to", lambda tier: FAST)
    inject(monkeypatch, "pwrite", slowly)
    inject(monkeypatch, "preadv", slowly)
    x = torch.randn(8192, 64)
    tier = Disk(tmp_path, workers=1, depth=64)
    model = on_disk(Tower(), tiers=tier, lowering="eager")
    for _ in range(STEPS):
        train_step(model, x)
    assert known_link(tier.name, tier.place) is None  # the first step does not count
    train_step(model, x)
    learnt = known_link(tier.name, tier.place)
    assert learnt is not None
    assert learnt.store > 0.01 / (1 << 18)
    assert learnt.load > 0.01 / (1 << 18)
    (graph,) = compiled_call(model).session.last_step
    assert graph.lessons is None
    monkeypatch.setattr("encore.compiler.session.link_to", lambda tier: learnt)
    torch._dynamo.reset()
    model = on_disk(Tower(), tiers=tier, lowering="eager")
    train_step(model, x)
    stalls = []
    for _ in range(3):
        train_step(model, x)
        stalls.append(encore.report(model).stalled or 0.0)
    assert min(encore.report(model).planned.stall, *stalls) > 0.1  # where the fast disk stalls for nothing


def test_steps_show_bytes_a_second_and_the_pace_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tier's own counts: a second of stores, half of it waited for, and computing that took twice as long."""
    now = 0.0
    monkeypatch.setattr("encore.cost.lessons.time.perf_counter", lambda: now)
    with Disk(tmp_path) as tier:
        lessons = LinkLessons(tier, Link(store=1, load=1, call=0.01, pace=1.0, depth=4), computing=0.5)
        for step in range(STEPS + 1):
            lessons.begin_step()
            lessons.begin_step()  # a forward without a backward
            tier.transfers.stores += 10
            tier.transfers.bytes_stored += 10**8
            tier.transfers.store_seconds += 1.0
            tier.transfers.waited_seconds += 1.0
            now += 1.5
            lessons.ran(now - 1.5)
            tier.transfers.loads += 10
            tier.transfers.bytes_loaded += 10**8
            tier.transfers.load_seconds += 1.0
            now += 0.5
            lessons.ran(now - 0.5)
            assert lessons.over is False
            lessons.end_step()
            assert lessons.over is (step == STEPS)
        learnt = known_link(tier.name, tier.place)
    assert learnt is not None
    assert learnt.store == pytest.approx(0.9e-8)
    assert learnt.load == pytest.approx(0.9e-8)
    assert learnt.pace == pytest.approx(0.5)


def test_host_memory_is_no_place_for_what_is_there_already() -> None:
    model = on_disk(Tower(), tiers=("host",), lowering="eager")
    train_step(model, X)
    assert encore.report(model).planned.moved == 0


@pytest.mark.usefixtures("fast")
def test_a_second_backward_loads_again() -> None:
    plain = Tower()
    model = on_disk(copy.deepcopy(plain), lowering="eager")
    for one in (plain, model):
        loss = one(X)
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))


@pytest.mark.usefixtures("fast")
def test_parcels_go_with_their_step() -> None:
    model = on_disk(Tower(), lowering="eager")
    train_step(model, X)
    transport = transport_of(model)
    losses = [model(X) for _ in range(3)]  # forwards without a backward, held
    held = transport.parcels
    assert held >= 3 * 3
    claimed = transport.tier._file.claimed  # type: ignore[attr-defined]
    del losses[0]
    losses[0].backward()
    losses.clear()
    gc.collect()
    train_step(model, X)
    transport.prepare(())
    assert transport.parcels == 0
    assert transport.tier._file.claimed == claimed  # type: ignore[attr-defined]


@pytest.mark.usefixtures("fast")
def test_two_forwards_before_their_backwards() -> None:
    plain = Tower()
    model = on_disk(copy.deepcopy(plain), lowering="eager")
    for one in (plain, model):
        first, second = one(X), one(X.neg() * 2)
        second.backward()
        first.backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_a_code_on_disk_is_told_with_its_seconds() -> None:
    """Encoded and moved: what decodes reads what came back, and its time is the feature map's."""
    kept = captured(Gated(), X).plan
    step = kept.schedule.graph
    mask = next(op.writes[0] for op in step.ops if op.forward and op.target is torch.ops.aten.gt.Scalar)
    assert mask is not None
    size = step.values[mask].bytes // 8
    fate = Offload(mask, "disk", Encode(mask, "bits", size), size, FAST)
    plan = Planner(kept, no_workspace, ByBytes(), links={"disk": FAST}).given(frozenset({fate})).plan
    row = plan.decisions[mask]
    assert row.fate == fate
    assert (row.fate.code, row.fate.moved, row.held) == ("bits to disk", size, 0)
    assert row.seconds > FAST.lost_seconds(size)
    replay(plan.schedule)


# -- plans on paper --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast")
@fused_is_slow
def test_a_saved_plan_moves_the_same_values(tmp_path: Path, lowering: str) -> None:
    model = on_disk(Tower(), lowering=lowering)
    train_step(model, X)
    first = encore.report(model)
    first.plan.save(tmp_path / "plan.json")
    assert encore.SavedPlan.load(tmp_path / "plan.json") == first.plan
    torch._dynamo.reset()
    again = encore.compile(Tower(), plan=tmp_path / "plan.json", tiers=("disk",))
    train_step(again, X)
    second = encore.report(again)
    assert second.plan == first.plan
    assert second.planned.step_peak == first.planned.step_peak
    assert second.planned.moved == first.planned.moved
    torch._dynamo.reset()
    without = encore.compile(Tower(), plan=tmp_path / "plan.json")
    with pytest.raises(encore.PlanError, match=r"moves tanh.* to 'disk'; allow it with tiers='disk'"):
        train_step(without, X)


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        ("dick", "tiers='dick' is not a tier; there are 'disk', 'host'"),
        (("disk", "tape"), "tiers='tape' is not a tier"),
        (7, "tiers=7 is not accepted"),
        (("disk", "disk"), "names 'disk' twice"),
    ],
)
def test_tiers_are_checked_before_anything_is_traced(tiers: Any, why: str) -> None:
    with pytest.raises(encore.OptionError, match=why):
        encore.compile(Tower(), tiers=tiers)


def test_an_estimate_knows_tiers_and_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCORE_TIER_DIR", "/not/here")
    options = make_options({"tiers": "disk", "methods": "encode"})
    estimate = estimate_with(options, Tower(), (X,), {})
    planned = estimate.plan("min").planned
    assert planned.moved >= 3 * X.nbytes
    assert planned.step_peak < estimate.unplanned.step_peak


def test_a_folder_that_is_not_there_is_told_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCORE_TIER_DIR", "/not/here")
    model = on_disk(Tower(), lowering="eager")
    with pytest.raises(TierError, match="no folder '/not/here'"):
        train_step(model, X)


@pytest.mark.usefixtures("fast")
def test_a_disk_that_was_brought_along(tmp_path: Path) -> None:
    with Disk(tmp_path) as disk:
        model = on_disk(Tower(), tiers=disk, lowering="eager")
        train_step(model, X)
        encore.verify(model, X)
        assert disk.transfers.loads > 0


# -- disks that fail -------------------------------------------------------------------------------------------------

Fault = Callable[..., Any]


def failing_at(call: int, number: int) -> Fault:
    seen = 0

    def fault(real: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == call:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return fault


def slowly(real: Callable[..., Any], *arguments: Any) -> Any:
    time.sleep(0.01)
    return real(*arguments)


def inject(patch: pytest.MonkeyPatch, name: str, fault: Fault) -> None:
    real = getattr(os, name)
    patch.setattr(os, name, lambda *arguments: fault(real, *arguments))


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("name", "fault", "why"),
    [
        ("pwrite", failing_at(1, errno.EIO), "while writing.*EIO"),
        ("pwrite", failing_at(2, errno.ENOSPC), "while writing.*ENOSPC"),
        ("preadv", failing_at(1, errno.EIO), "while reading.*EIO"),
        ("preadv", failing_at(3, errno.EIO), "while reading.*EIO"),
        ("preadv", lambda real, file, blocks, offset: 0, "ends after 0 of"),
        ("preadv", lambda real, file, blocks, offset: _one_byte_off(real(file, blocks, offset), blocks), "checksum"),
    ],
)
def test_a_transfer_that_fails_is_told_in_its_step_and_the_next_one_is_fine(name: str, fault: Fault, why: str) -> None:
    plain = Tower()
    model = on_disk(copy.deepcopy(plain), lowering="eager")
    train_step(model, X)
    drop_gradients(model)
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, name, fault)
        with pytest.raises(encore.EncoreError, match=why):
            train_step(model, X)
    drop_gradients(model)
    train_step(model, X)
    train_step(plain, X)
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def _one_byte_off(count: int, blocks: list[memoryview]) -> int:
    blocks[0][5] ^= 1
    return count


@pytest.mark.usefixtures("fast")
def test_a_full_disk_is_told_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_disk(Tower(), lowering="eager")
    with monkeypatch.context() as patch:
        patch.setattr(slot_file, "free_disk", lambda descriptor: (64 << 20) + 100_000)
        with pytest.raises(encore.EncoreError, match=r"no room for .* more in .*are free"):
            train_step(model, X)
        assert transport_of(model).tier.transfers.stores == 0
    train_step(model, X)
    encore.verify(model, X)


@pytest.mark.usefixtures("fast")
def test_a_hook_that_copies_what_autograd_saves_is_told() -> None:
    model = on_disk(Tower(), lowering="eager")
    train_step(model, X)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = model(X)
    transport_of(model).prepare(())
    with pytest.raises(TierError, match="was freed before backward reloads it"):
        loss.backward()
