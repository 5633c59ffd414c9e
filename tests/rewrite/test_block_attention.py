"""Dot-product attention found in graphs, however it is written, and left alone where it is something else."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import encore
from encore.graph import OpClass, verify_graph
from encore.measurements import MachineCache
from encore.rewrite import Judge
from encore.rewrite.dot_attention import find_dot_attentions
from encore.rnn import dot
from encore.schedule import replay
from support.captured_graphs import captured, captured_graph, drop_gradients, operators, train_step
from support.rounding import assert_gradients_as_accurate
from support.single_pass import all_but, checked, gradients

FORWARD, BACKWARD = torch.ops.encore.dot_attention, torch.ops.encore.dot_attention_backward
OTHERS = all_but("block_attention")
B, H, TQ, TK, D = 3, 2, 12, 17, 4


def mostly_slow(names: Collection[Any], *quick: Any) -> list[Any]:
    """Parameters for a test, of which these few are always tried."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does is the machine's business; a head at a time."""
    monkeypatch.setattr(Judge, "blocks_pay", lambda *_: True)
    monkeypatch.setattr(dot, "WORKSPACE", 4 * TQ * TK)


class Attention(nn.Module):
    """Attention of one sequence to another; how it is written, from heads on, is given."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value = (nn.Linear(6, H * D) for _ in range(3))
        self.leave = nn.Linear(H * D, 5)
        self.bias = nn.Parameter(torch.randn(TQ, TK))
        self.register_buffer("hidden", torch.rand(B, 1, 1, TK) < 0.4)
        self.register_buffer("ahead", torch.ones(TQ, TK).triu(3).bool())
        self.register_buffer("slope", torch.randn(H, 1, TK))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(y), self.value(y)
        return self.leave(self.attend(self, q, k, v).reshape(*x.shape[:2], H * D)).square().sum()


def split(*rows: Tensor) -> list[Tensor]:
    return [one.unflatten(-1, (H, D)).transpose(1, 2) for one in rows]


def written(
    steps: Callable[[Any, Tensor], Tensor] = lambda m, s: s / math.sqrt(D), before: float = 1.0
) -> Callable[..., Tensor]:
    """Attention with something done to the scores."""

    def attend(m: Any, *rows: Tensor) -> Tensor:
        q, k, v = split(*rows)
        return (steps(m, (q * before) @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2)

    return attend


def einsum(m: Any, *rows: Tensor) -> Tensor:
    q, k, v = (one.unflatten(-1, (H, D)) for one in rows)
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def stacked(m: Any, *rows: Tensor) -> Tensor:
    """Three dimensions throughout, as `F.multi_head_attention_forward` has it."""
    q, k, v = (one.flatten(0, 1) for one in split(*rows))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).mul(0.5).softmax(-1), v).unflatten(0, (B, H)).transpose(1, 2)


def added_in_the_product(m: Any, *rows: Tensor) -> Tensor:
    q, k, v = (one.flatten(0, 1) for one in split(*rows))
    mask = q.new_zeros(TQ, TK).masked_fill(m.ahead, -math.inf)
    weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=0.5).softmax(2)
    return torch.bmm(weights, v).unflatten(0, (B, H)).transpose(1, 2)


def masked_in_between(m: Any, *rows: Tensor) -> Tensor:
    """Masks know of heads, products do not."""
    q, k, v = (one.flatten(0, 1) for one in split(*rows))
    scores = torch.bmm(q, k.transpose(1, 2)).unflatten(0, (B, H)) + q.new_zeros(B, 1, TQ, TK).masked_fill(m.hidden, -9)
    return torch.bmm(scores.flatten(0, 1).softmax(-1), v).unflatten(0, (B, H)).transpose(1, 2)


def one_head(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(1, 2)).div(3).softmax(-1) @ v


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "plain": written(lambda m, s: s),
    "divided": written(),
    "scaled before": written(lambda m, s: s, before=0.5),
    "einsum": einsum,
    "three dimensions": stacked,
    "one head": one_head,
    "added in the product": added_in_the_product,
    "masked in between": masked_in_between,
    "causal": written(lambda m, s: (s * 0.5).masked_fill(m.ahead, -math.inf)),
    "causal, scaled after": written(lambda m, s: s.masked_fill(m.ahead, -math.inf) * 0.5),
    "padded": written(lambda m, s: (s * 0.5).masked_fill(m.hidden, -1e9)),
    "slopes": written(lambda m, s: s * 0.5 + m.slope),
    "two masks": written(lambda m, s: (s + m.slope).masked_fill(m.ahead, -1e4).masked_fill(m.hidden, -1e9)),
    "chosen": written(lambda m, s: torch.where(m.ahead, -math.inf, s * 0.5)),
    "chosen the other way": written(lambda m, s: torch.where(~m.hidden, s, torch.full([], -1e9)) / 2),
    "hidden, then added": written(lambda m, s: s.masked_fill(m.ahead, -math.inf) + m.slope),
}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, TQ, 6), torch.randn(B, TK, 6)


QUICK = ("chosen", "chosen the other way", "einsum", "added in the product", "masked in between", "two masks")


@pytest.mark.parametrize("spelling", mostly_slow(SPELLINGS, *QUICK))
def test_found_and_right(spelling: str) -> None:
    graph = checked(Attention(SPELLINGS[spelling]), *batch(), skip=OTHERS)
    assert graph.rewrites == ("block_attention",)
    after = graph.plan.schedule.graph
    assert len(operators(after, FORWARD)) == len(operators(after, BACKWARD)) == 1
    made = [after.values[value] for op in after.ops for value in op.writes if value is not None]
    assert not [value.name for value in made if value.shape[-2:] == (TQ, TK) and value.bytes >= 4 * B * H * TQ * TK]


def test_heads_are_not_copied() -> None:
    """`matmul` lays them out in one row; the operator reads them where the projections put them."""
    graph = checked(Attention(SPELLINGS["divided"]), *batch(), skip=OTHERS).plan.schedule.graph
    (op,) = operators(graph, FORWARD)
    assert [graph.values[value].stride[-2:] for value in op.reads] == [(H * D, 1), (1, H * D), (H * D, 1)]


@pytest.mark.slow
def test_beside_kernels_and_other_passes() -> None:
    graph = checked(Attention(SPELLINGS["two masks"]), *batch(), skip=())
    assert "block_attention" in graph.rewrites


def dropped(m: Any, *rows: Tensor) -> Tensor:
    q, k, v = split(*rows)
    weights = (q @ k.transpose(-2, -1) * 0.5).masked_fill(m.ahead, -math.inf).softmax(-1)
    return (F.dropout(weights, 0.3) @ v).transpose(1, 2)


def dropped_in_a_row(m: Any, *rows: Tensor) -> Tensor:
    """As `F.multi_head_attention_forward` has it."""
    q, k, v = (one.flatten(0, 1) for one in split(*rows))
    weights = F.dropout(torch.bmm(q, k.transpose(1, 2)).softmax(-1), 0.3)
    return torch.bmm(weights, v).unflatten(0, (B, H)).transpose(1, 2)


class Around(Attention):
    """More draws before and after."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.2), y) + F.dropout(x, 0.4).sum()


@pytest.mark.parametrize("frozen", mostly_slow([(), ("query", "key"), ("value",)], ()))
@pytest.mark.parametrize("attend", [dropped, dropped_in_a_row])
def test_dropout_on_the_weights(attend: Callable[..., Tensor], frozen: tuple[str, ...]) -> None:
    """The same coins as eager's, in one byte each; nothing else is as large as the scores."""
    model, args = Around(attend), batch()
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    eager = copy.deepcopy(model)
    found = []
    for number in range(2):  # the second step has new coins
        steps = []
        for one in (eager, model):
            one.zero_grad()
            torch.manual_seed(number)
            if one is model and not number:
                graph = captured(one, *args, lowering="fused", skip=OTHERS)
            else:
                train_step(one, *args)
            steps.append((gradients(one), torch.get_rng_state()))
        (_, after), (have, after_ours) = steps
        assert torch.equal(after, after_ours)
        assert_gradients_as_accurate(model, eager, train_step, *args, seed=number)
        found.append(have)
    assert not torch.equal(*found)
    assert graph.rewrites == ("block_attention",)
    drop_gradients(model)
    assert graph.plan.timeline.step_peak == encore.measure(lambda: train_step(model, *args)).step_peak
    planned = graph.plan.schedule.graph
    verify_graph(planned)
    replay(graph.plan.schedule)
    assert len(operators(planned, FORWARD)) == len(operators(planned, BACKWARD)) == 1
    made = [planned.values[value] for op in planned.ops if op.kind is not OpClass.VIEW for value in op.writes if value]
    large = [value for value in made if math.prod(value.shape) >= B * H * TQ * TK]
    assert [value.dtype for value in large] == [torch.bool]


@pytest.mark.slow
def test_dropout_whose_coins_are_flipped_again() -> None:
    """The planner may let go of the mask, too."""
    model, args = Around(dropped), batch()
    eager = copy.deepcopy(model)
    torch.manual_seed(3)
    train_step(eager, *args)
    torch.manual_seed(3)
    graph = captured(model, *args, lowering="fused", budget="min", skip=OTHERS)
    assert_gradients_as_accurate(model, eager, train_step, *args, seed=3)
    assert graph.rewrites == ("block_attention",)


FROZEN = [("query",), ("key",), ("value",), ("query", "key"), ("query", "key", "value")]


@pytest.mark.parametrize("frozen", mostly_slow(FROZEN, ("query",)))
def test_gradients_that_nobody_wants(frozen: tuple[str, ...]) -> None:
    model = Attention(SPELLINGS["causal"])
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    graph = checked(model, *batch(), skip=OTHERS)
    assert graph.rewrites == ("block_attention",)
    needs = tuple(name not in frozen for name in ("query", "key", "value"))
    assert [op.args[-3:] for op in operators(graph.plan.schedule.graph, BACKWARD)] == ([needs] if any(needs) else [])


@pytest.mark.parametrize("fill", mostly_slow([-math.inf, -1e4, 0.0], -1e4))
def test_rows_that_are_hidden_altogether(fill: float) -> None:
    """They come out as eager's do, NaN or not."""
    model = Attention(written(lambda m, s: s.masked_fill(m.everything, fill)))
    model.register_buffer("everything", (torch.arange(B) == 1).view(B, 1, 1, 1))
    eager, args = copy.deepcopy(model), batch()
    graph = captured(model, *args, lowering="fused", skip=OTHERS)
    assert graph.rewrites == ("block_attention",)
    train_step(eager, *args)
    assert_gradients_as_accurate(model, eager, train_step, *args)


def by_heads(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def attended(m: Any, *rows: Tensor) -> Tensor:
        q, k, v = split(*rows)
        return attend(q, k, v).transpose(1, 2)

    return attended


def weights_are_wanted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.sum(-1, keepdim=True).square()


def scores_are_wanted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.softmax(-1) @ v + scores.square().mean(-1, keepdim=True)


def dropped_and_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return F.dropout(weights, 0.5) @ v + weights @ v


NEAR_MISSES: dict[str, Callable[..., Tensor]] = {
    "dropped twice": by_heads(lambda q, k, v: F.dropout(F.dropout((q @ k.mT).softmax(-1)), 0.1) @ v),
    "dropped and whole": by_heads(dropped_and_whole),
    "dropped scores": written(lambda m, s: F.dropout(s, 0.1)),
    "weights are wanted": by_heads(weights_are_wanted),
    "scores are wanted": by_heads(scores_are_wanted),
    "over queries": by_heads(lambda q, k, v: (q @ k.mT).softmax(-2) @ v),
    "a bias is learnt": written(lambda m, s: s + m.bias),
    "added, then scaled": written(lambda m, s: (s + m.slope) * 0.5),
    "filled, then added": written(lambda m, s: s.masked_fill(m.ahead, -1e4) + m.slope),
    "chosen between tensors": written(lambda m, s: torch.where(m.ahead, m.slope, s)),
    "turned round": written(lambda m, s: s * -0.5),
    "capped": written(lambda m, s: 5 * torch.tanh(s / 5)),
    "in double": written(lambda m, s: s.double().softmax(-1).float()),
}


@pytest.mark.parametrize(
    "name", mostly_slow(NEAR_MISSES, "dropped and whole", "weights are wanted", "a bias is learnt")
)
def test_near_misses_are_left_alone(name: str) -> None:
    assert not list(find_dot_attentions(captured_graph(Attention(NEAR_MISSES[name]), *batch())))


def test_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention(SPELLINGS["causal"])
    monkeypatch.setattr(Judge, "blocks_pay", lambda *_: False)
    graph = captured(model, *batch(), lowering="fused", skip=OTHERS)
    assert not operators(graph.plan.schedule.graph, FORWARD)


@pytest.mark.slow
def test_skipped() -> None:
    graph = captured(Attention(SPELLINGS["causal"]), *batch(), lowering="fused", skip=(*OTHERS, "block_attention"))
    assert not operators(graph.plan.schedule.graph, FORWARD)


@pytest.mark.slow
def test_the_eager_lowering_keeps_the_bits() -> None:
    graph = captured(Attention(SPELLINGS["causal"]), *batch(), lowering="eager")
    assert not operators(graph.plan.schedule.graph, FORWARD)


def test_the_judge_times_both_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    (found,) = find_dot_attentions(captured_graph(Attention(SPELLINGS["two masks"]), *batch()))
    assert (found.shape, found.sizes, found.scale) == ((B, H, TQ, TK), (D, D), 1.0)
    assert (len(found.added), found.fills) == (1, [-1e4, -1e9])
    judge = Judge(run=True)
    judge.cache = MachineCache(tmp_path / "measurements.json")
    assert judge.blocks_pay(found, torch.float32) in (True, False)
    (ratio,) = judge.cache.matching(("rewrite attention",)).values()
    assert ratio > 0
    assert not Judge(run=False).blocks_pay(found, torch.float64)
    found.shape = (B, H, 512, 512)
    assert Judge(run=False).blocks_pay(found, torch.float64)


def test_an_estimate_runs_on_tensors_without_memory() -> None:
    (graph,) = encore.estimate(Attention(SPELLINGS["divided"]), *batch()).captured
    assert "block_attention" in graph.rewrites
