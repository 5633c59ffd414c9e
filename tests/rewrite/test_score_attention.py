"""Additive attention found in graphs, however it is written, and left alone where it is something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from benchmarks.workloads import nmt
from encore.compiler import CapturedGraph
from encore.rewrite import Judge
from encore.rewrite.additive_scores import find_additive_scores
from encore.schedule import Run
from support.captured_graphs import captured, captured_graph, operators
from support.single_pass import all_but, checked

SCORES, BACKWARD = torch.ops.encore.additive_scores, torch.ops.encore.additive_scores_backward
OTHERS = all_but("score_attention")


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does is the machine's business."""
    monkeypatch.setattr(Judge, "scoring_pays", lambda *_: True)


class Attention(nn.Module):
    """Attention of one sequence to another; how scores are written is given."""

    def __init__(self, scores: Callable[[Any, Tensor, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.scores = scores
        self.query, self.keys = nn.Linear(6, 16), nn.Linear(6, 16, bias=False)
        self.score = nn.Linear(16, 1, bias=False)
        self.bias = nn.Parameter(torch.randn(16))
        self.norm = norm or nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = self.scores(self, self.query(x), self.keys(y)).softmax(-1)
        return (weights @ y).square().sum()


def middle(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return m.norm(q.unsqueeze(2) + k.unsqueeze(1)).tanh()


SPELLINGS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "linear": lambda m, q, k: m.score(middle(m, q, k)).squeeze(-1),
    "matmul": lambda m, q, k: middle(m, q, k) @ m.score.weight[0],
    "matmul with a column": lambda m, q, k: (middle(m, q, k) @ m.score.weight.t())[..., 0],
    "einsum": lambda m, q, k: torch.einsum("bqkh,h->bqk", middle(m, q, k), m.score.weight[0]),
    "sum": lambda m, q, k: (middle(m, q, k) * m.score.weight[0]).sum(-1),
    "sum the other way": lambda m, q, k: (m.score.weight[None] * middle(m, q, k)).sum(3, keepdim=True)[..., 0],
    "indexing": lambda m, q, k: m.score(m.norm(k[:, None] + q[:, :, None]).tanh()).squeeze(3),
    "expand": lambda m, q, k: m.score(
        m.norm(q.unsqueeze(2).expand(-1, -1, k.shape[1], -1) + k.unsqueeze(1).expand(-1, q.shape[1], -1, -1)).tanh()
    ).view(q.shape[0], q.shape[1], -1),
    "bias": lambda m, q, k: m.score(m.norm(q.unsqueeze(2) + k.unsqueeze(1) + m.bias).tanh()).squeeze(-1),
    "bias first": lambda m, q, k: m.score(m.norm(m.bias + (q.unsqueeze(2) + k.unsqueeze(1))).tanh()).squeeze(-1),
    "bias on one side": lambda m, q, k: m.score(m.norm((q + m.bias).unsqueeze(2) + k.unsqueeze(1)).tanh()).squeeze(-1),
    "offset": lambda m, q, k: nn.functional.linear(middle(m, q, k), m.score.weight, m.bias[:1]).squeeze(-1),
}  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 12, 6), torch.randn(4, 17, 6)


def is_replaced(graph: CapturedGraph) -> bool:
    after = graph.plan.schedule.graph
    shapes = [value.shape for op in after.ops for value in (after.values[one] for one in op.writes if one is not None)]
    gone = all(shape[:3] != (4, 12, 17) or len(shape) == 3 or shape[3] == 1 for shape in shapes)
    return graph.rewrites == ("score_attention",) and gone and len(operators(after, BACKWARD)) == 1


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_found(spelling: str) -> None:
    graph = captured_graph(Attention(SPELLINGS[spelling]), *batch())
    (found,) = find_additive_scores(graph)
    assert found.shape == (4, 12, 17)
    assert {"query", "keys", "weight"} <= set(found.gradients)


@pytest.mark.parametrize("spelling", ["linear", "einsum", "sum", "bias", "offset"])
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(16), nn.LayerNorm(16, elementwise_affine=False)], ids=str)
def test_right_and_predicted(spelling: str, norm: nn.Module | None) -> None:
    graph = checked(Attention(SPELLINGS[spelling], copy.deepcopy(norm)), *batch(), skip=OTHERS)
    assert is_replaced(graph)
    assert graph.plan.timeline.step_peak < 0.5 * graph.unplanned.timeline.step_peak


def test_beside_kernels_and_other_passes() -> None:
    graph = checked(Attention(SPELLINGS["linear"], nn.LayerNorm(16)), *batch(), skip=())
    assert "score_attention" in graph.rewrites
    assert len(operators(graph.plan.schedule.graph, BACKWARD)) == 1


class Decoder(nn.Module):
    """One query at a time, each made from the context before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(SPELLINGS["linear"])
        self.step = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        attention, keys = self.inner, self.inner.keys(y)
        for _ in range(4):
            scores = attention.score(torch.tanh(keys + attention.query(x).unsqueeze(1))).squeeze(-1)
            x = self.step((scores.softmax(-1).unsqueeze(1) @ y).squeeze(1)).relu()
        return x.square().sum()


def test_steps_of_a_decoder_add_up_in_place() -> None:
    graph = checked(Decoder(), torch.randn(9, 6), torch.randn(9, 60, 6), skip=OTHERS)
    assert graph.rewrites == ("score_attention",)
    schedule = graph.plan.schedule
    steps = operators(schedule.graph, BACKWARD)
    assert len(steps) == len(operators(schedule.graph, SCORES)) == 4
    over = [
        action.over for action in schedule.backward if isinstance(action, Run) and action.op in {op.id for op in steps}
    ]
    assert [one is not None for one in over] == [False, True, True, True]


def test_the_translator_of_the_workloads() -> None:
    work = nmt.workload(batch_size=3, hidden=8, steps=7)
    graph = captured_graph(work.model, *work.batch(0))
    assert [found.shape for found in find_additive_scores(graph)] == [(3, 1, 7)] * 7


def test_gradients_that_nobody_wants() -> None:
    for frozen in ("query", "keys", "score"):
        model = Attention(SPELLINGS["linear"])
        getattr(model, frozen).requires_grad_(False)
        graph = checked(model, *batch(), skip=OTHERS)
        assert is_replaced(graph)
        (op,) = operators(graph.plan.schedule.graph, BACKWARD)
        assert op.args[-3:] == tuple(name != frozen for name in ("query", "keys", "score"))


NEAR_MISSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda m, q, k: m.score((q.unsqueeze(2) + k.unsqueeze(1)).sigmoid()).squeeze(-1),
    "product": lambda m, q, k: m.score((q.unsqueeze(2) * k.unsqueeze(1)).tanh()).squeeze(-1),
    "difference scaled": lambda m, q, k: m.score(torch.add(q.unsqueeze(2), k.unsqueeze(1), alpha=2).tanh()).squeeze(-1),
    "two scores": lambda m, q, k: (middle(m, q, k) @ torch.stack([m.bias, m.score.weight[0]], 1)).sum(-1),
    "tanh read twice": lambda m, q, k: (lambda t: m.score(t).squeeze(-1) + t.square().sum(-1))(middle(m, q, k)),
    "sum read twice": lambda m, q, k: (
        lambda s: m.score(s.tanh()).squeeze(-1) + s.square().sum(-1)
    )(q.unsqueeze(2) + k.unsqueeze(1)),
    "weight for every key": lambda m, q, k: (middle(m, q, k) * k.unsqueeze(1)).sum(-1),
    "sum over the wrong dimension": lambda m, q, k: (middle(m, q, k) * m.score.weight[0]).sum(1).mean(-1).unsqueeze(1),
    "nothing is spread out": lambda m, q, k: m.score((k + k.flip(0)).tanh()).squeeze(-1).unsqueeze(1),
    "dropout between": lambda m, q, k: m.score(nn.functional.dropout(middle(m, q, k), 0.5)).squeeze(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone(name: str) -> None:
    y = torch.randn(4, 17, 6)
    model = Attention(NEAR_MISSES[name])
    graph = captured_graph(model, torch.randn(4, 17, 6), y)
    assert not list(find_additive_scores(graph))


def test_a_square_middle() -> None:
    """As many queries as keys as hidden units: sizes tell nothing."""
    model = Attention(SPELLINGS["linear"])
    graph = checked(model, torch.randn(2, 16, 6), torch.randn(2, 16, 6), skip=OTHERS)
    assert graph.rewrites == ("score_attention",)


def test_skipped_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(Attention(SPELLINGS["linear"]), *batch(), lowering="fused", skip=(*OTHERS, "score_attention"))
    assert not operators(graph.plan.schedule.graph, SCORES)
    monkeypatch.setattr(Judge, "scoring_pays", lambda *_: False)
    graph = captured(Attention(SPELLINGS["linear"]), *batch(), lowering="fused", skip=OTHERS)
    assert not operators(graph.plan.schedule.graph, SCORES)


def test_the_eager_lowering_keeps_the_bits() -> None:
    graph = captured(Attention(SPELLINGS["linear"]), *batch(), lowering="eager")
    assert not operators(graph.plan.schedule.graph, SCORES)


def test_the_judge_times_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (found,) = find_additive_scores(captured_graph(Attention(SPELLINGS["linear"]), *batch()))
    judge = Judge(run=True)
    assert judge.scoring_pays(found, torch.float32) in (True, False)
    assert any("scores torch.float32 (4, 12, 17) 16" in key for key in judge.cache.matching(("rewrite scores",)))
    assert not Judge(run=False).scoring_pays(found, torch.float64)
    found.hidden = 4096
    assert Judge(run=False).scoring_pays(found, torch.float64)


def test_an_estimate_runs_on_tensors_without_memory() -> None:
    model = Attention(SPELLINGS["linear"])
    estimate = encore.estimate(model, *batch())
    assert estimate.unplanned.step_peak > 0
    (graph,) = estimate.captured
    assert "score_attention" in graph.rewrites


def test_the_steps_of_a_decoder_are_left_to_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (found,) = find_additive_scores(captured_graph(Attention(SPELLINGS["linear"]), *batch()))
    found.shape, found.hidden = (64, 1, 64), 4096
    assert not Judge(run=False).scoring_pays(found, torch.float32)
