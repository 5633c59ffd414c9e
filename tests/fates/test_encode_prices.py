"""Codes among the plans: chosen where they pay, exact, predicted to the byte, saved, refused where they cannot be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.codecs import CODECS
from encore.plan import Methods
from encore.plan.planner import Planner, candidates_of
from encore.plan.saved import VERSION, GraphPlan
from encore.plan.search import Search
from encore.plan.step_model import StepModel
from support.captured_graphs import captured, drop_gradients, train_step
from support.mask_models import Gated, Pictures
from support.random_steps import ByBytes, no_workspace

X = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
BOXED = 64
"""Bytes that a prediction leaves for Python numbers among the operands."""
LOSSLESS = tuple(name for name, codec in CODECS.items() if codec.lossless)


def measured(model: nn.Module, x: torch.Tensor) -> int:
    drop_gradients(model)
    peak = encore.measure(lambda: train_step(model, x)).step_peak
    drop_gradients(model)
    return peak


@pytest.mark.parametrize(("methods", "budget"), [(("encode",), "min"), (("recompute", "encode"), "70%")])
def test_a_plan_with_codes_is_exact_and_predicted_to_the_byte(
    lowering: str, methods: tuple[str, ...], budget: str
) -> None:
    model, x = Gated(), X
    compiled = encore.compile(model, budget=budget, lowering=lowering, methods=methods)
    train_step(compiled, x)
    report = encore.report(compiled)
    assert 0 <= report.planned.step_peak - measured(compiled, x) <= BOXED
    encore.verify(compiled, x)
    actions = {row.action for row in report.decisions}
    assert actions <= {"keep", *methods}
    if methods == ("encode",):
        rows = [row for row in report.decisions if row.action == "encode"]
        assert rows
        assert all(row.code == "bits" and row.held == row.bytes // 8 and row.lossless for row in rows)
        assert "encode bits" in str(report)


def test_a_network_with_pools_norms_and_draws_is_exact(lowering: str) -> None:
    compiled = encore.compile(Pictures(), budget="min", lowering=lowering)
    x = torch.randn(8, 3, 16, 16)
    train_step(compiled, x)
    report = encore.report(compiled)
    assert measured(compiled, x) <= report.planned.step_peak
    encore.verify(compiled, x)


def test_codes_make_budgets_cheaper_and_plans_stay_monotone() -> None:
    kept = captured(Gated(), X).unplanned
    candidates = {}
    for codecs in ((), LOSSLESS):
        planner = Planner(kept, no_workspace, ByBytes(), methods=Methods(codecs=codecs))
        candidates[codecs] = candidates_of([planner])
        peaks = [candidate.plan.timeline.step_peak for candidate in candidates[codecs]]
        assert [candidate.overhead for candidate in candidates[codecs]] == sorted(
            candidate.overhead for candidate in candidates[codecs]
        )
        assert peaks[-1] < peaks[0]
    assert any(candidate.plan.encodings for candidate in candidates[LOSSLESS])
    for candidate in candidates[()]:
        within = [other for other in candidates[LOSSLESS] if other.step_peak <= candidate.step_peak * 1.02]
        assert min(other.overhead for other in within) <= candidate.overhead * 1.05 + 1e-9


def test_one_value_has_one_fate() -> None:
    kept = captured(Gated(), X).unplanned
    planner = Planner(kept, no_workspace, ByBytes(), methods=Methods(codecs=LOSSLESS))
    model = StepModel(kept.schedule, kept.timeline, ByBytes(), fused=False)
    model.add_candidates(planner.candidates(model.open_values, planner.methods))
    search = Search(model)
    search.run([])
    for rough in search.found.values():
        values = [fate.value for fate in rough.fates]
        assert len(values) == len(set(values))


def test_what_keep_names_is_not_encoded() -> None:
    compiled = encore.compile(Gated(), budget="min", lowering="eager", methods="encode", keep=["*"])
    train_step(compiled, X)
    assert {row.action for row in encore.report(compiled).decisions} == {"keep"}


def planned(**options: Any) -> encore.Report:
    compiled = encore.compile(Gated(), budget="min", lowering="eager", methods="encode", **options)
    train_step(compiled, X)
    return encore.report(compiled)


def test_a_saved_plan_with_codes_is_used_again(tmp_path: Path) -> None:
    first = planned()
    first.plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["encore_plan"] == VERSION
    assert encore.SavedPlan.load(tmp_path / "plan.json") == first.plan
    torch._dynamo.reset()
    model = encore.compile(Gated(), plan=tmp_path / "plan.json")
    train_step(model, X)
    again = encore.report(model)
    assert again.plan == first.plan
    assert again.planned.step_peak == first.planned.step_peak
    assert [(row.action, row.held) for row in again.decisions] == [(row.action, row.held) for row in first.decisions]


def test_a_plan_of_the_first_layout_is_still_read() -> None:
    told = json.loads(planned().plan.to_json())
    told["encore_plan"] = 1
    for graph in told["graphs"]:
        del graph["encode"], graph["stash"]
    plan = encore.SavedPlan.parse(told, "here")
    assert plan.graphs[0].fates["encode"] == ()
    torch._dynamo.reset()
    model = encore.compile(Gated(), plan=plan)
    train_step(model, X)
    assert {row.action for row in encore.report(model).decisions} == {"keep"}


def with_code(plan: encore.SavedPlan, **changed: Any) -> encore.SavedPlan:
    (graph,) = plan.graphs
    first, *others = graph.fates["encode"]
    assert not isinstance(first, str)
    fates = {**graph.fates, "encode": ({**first, **changed}, *others)}
    return dataclasses.replace(plan, graphs=(dataclasses.replace(graph, fates=fates),))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codec": "morse"}, "'morse', which this Encore does not know; it has .*'bits'"),
        ({"value": "addmm"}, r"'bits' cannot encode addmm \(torch.float32, \[512, 64\]\)"),
    ],
)
def test_a_code_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    plan = with_code(planned().plan, **changed)
    torch._dynamo.reset()
    model = encore.compile(Gated(), plan=plan)
    with pytest.raises(encore.PlanError, match=message):
        train_step(model, X)


def test_plans_between_ranks_carry_codes() -> None:
    code = {"value": "mask", "codec": "bits", "bytes": 12}
    plan = GraphPlan(("a = b",), {"recompute": ("c",), "encode": (code,), "stash": (), "offload": ()})
    assert GraphPlan.from_json(plan.to_json()) == plan
