"""Made-up operands lie in the domains of their operators: nothing that is probed raises or reads out of bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from encore.cost import domains
from encore.cost.domains import DOMAINS, EachDimension, Indices
from encore.cost.probe import random_call
from encore.graph import Graph, Op, OpClass
from encore.rewrite import judge
from support.captured_graphs import captured_graph, operators

aten = torch.ops.aten


def overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


@pytest.mark.parametrize("name", DOMAINS)
def test_the_table_names_operators_and_arguments_that_exist(name: str) -> None:
    arguments = {argument.name for overload in overloads(name) for argument in overload._schema.arguments}
    for argument, domain in DOMAINS[name].items():
        named = [getattr(domain, field, None) for field in ("of", "dim", "axis", "ends")]
        assert {argument, *(other for other in named if isinstance(other, str))} <= arguments


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


X = functools.partial(torch.rand, requires_grad=True)
LENGTHS = torch.tensor([6, 5, 6])
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "probabilities": (lambda x, t: F.binary_cross_entropy(x * 1, t), (X(4, 5), torch.rand(4, 5))),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + 9 * torch.eye(4)), (X(4, 4),)),
    "old_cholesky": (lambda x: torch.cholesky(x @ x.mT + 9 * torch.eye(4)), (X(4, 4),)),
    "solve": (lambda x, y: torch.linalg.solve(x + 9 * torch.eye(4), y), (X(4, 4), X(4, 2))),
    "inverse": (lambda x: torch.linalg.inv(x + 9 * torch.eye(4)), (X(4, 4),)),
    "determinant": (lambda x: torch.linalg.slogdet(x + 9 * torch.eye(4))[1], (X(2, 4, 4),)),
    "pivots": (lambda x: torch.linalg.lu(x + 9 * torch.eye(4)), (X(4, 4),)),
    "classes": (lambda x, t: F.cross_entropy(x, t), (X(6, 5), integers(5, 6))),
    "classes_of_pixels": (lambda x, t: F.nll_loss(x, t), (X(2, 5, 3, 3), integers(5, 2, 3, 3))),
    "margins": (lambda x, t: F.multi_margin_loss(x, t), (X(6, 5), integers(5, 6))),
    "margins_of_labels": (lambda x, t: F.multilabel_margin_loss(x, t), (X(6, 5), integers(5, 6, 5))),
    "embedding": (lambda x, i: F.embedding(i, x), (X(7, 3), integers(7, 20))),
    "bags": (lambda x, i, o: F.embedding_bag(i, x, o), (X(7, 3), integers(7, 20), torch.tensor([0, 4, 9]))),
    "summed_bags": (
        lambda x, i, o, w: F.embedding_bag(i, x, o, mode="sum", per_sample_weights=w),
        (X(7, 3), integers(7, 20), torch.tensor([0, 4, 9]), X(20)),
    ),
    "gather": (lambda x, i: x.gather(1, i), (X(3, 9), integers(9, 3, 20))),
    "scatter": (lambda x, i: torch.zeros(3, 9).scatter_add(1, i, x), (X(3, 20), integers(9, 3, 20))),
    "index_select": (lambda x, i: x.index_select(0, i), (X(3, 9), integers(3, 20))),
    "index_add": (lambda x, i: torch.zeros(3, 9).index_add(0, i, x), (X(20, 9), integers(3, 20))),
    "advanced_index": (lambda x, i, j: x[i, :, j], (X(3, 9, 4), integers(3, 20), integers(4, 20))),
    "take": (lambda x, i: x.take(i), (X(3, 9), integers(27, 20))),
    "adaptively_pooled": (lambda x: F.adaptive_max_pool2d(x * 1, 2), (X(2, 3, 8, 8),)),
    "pooled": (lambda x: F.max_pool2d(x * 1, 2), (X(2, 3, 8, 8),)),
    "unpooled": (lambda x, i: F.max_unpool2d(x, i, [2, 2]), (X(1, 2, 3, 3), integers(36, 1, 2, 3, 3))),
    "fractional": (
        lambda x, r: aten.fractional_max_pool2d(x, [2, 2], [3, 3], r)[0],
        (X(2, 3, 8, 8), torch.rand(2, 3, 2)),
    ),
    "ctc": (
        lambda x, t, n, m: aten._ctc_loss(x.log_softmax(2), t, n, m)[0],
        (X(6, 3, 5), integers(4, 3, 2) + 1, LENGTHS, torch.tensor([2, 1, 2])),
    ),
    "segments": (
        lambda x, n: torch.segment_reduce(x, "sum", lengths=n, axis=0),
        (X(17, 2), torch.tensor([6, 5, 6])),
    ),
    "integer_division": (lambda x, i, j: x * (i % j), (X(5), integers(9, 5), integers(9, 5) + 1)),
    "drawn": (lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)), (X(5),)),
    "poisson": (lambda x: x * torch.poisson(torch.full_like(x, 0.5)), (X(5),)),
}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("case", CASES)
def test_every_operator_runs_on_made_up_operands(case: str) -> None:
    function, args = CASES[case]
    graph = captured_graph(function, *args)
    for op in graph.ops:
        if op.kind is not OpClass.VIEW and isinstance(op.target, torch._ops.OpOverload):
            with torch.no_grad(), torch.random.fork_rng():
                random_call(graph, op)()


def made_up_arguments(graph: Graph, op: Op) -> dict[str, Any]:
    call = random_call(graph, op)
    assert isinstance(call, functools.partial)
    return {**dict(zip((one.name for one in op.target._schema.arguments), call.args, strict=False)), **call.keywords}


@pytest.mark.parametrize(
    ("case", "target", "argument", "size"),
    [
        ("classes", aten.nll_loss_forward, "target", 5),
        ("classes_of_pixels", aten.nll_loss2d_backward, "target", 5),
        ("embedding", aten.embedding, "indices", 7),
        ("embedding", aten.embedding_dense_backward, "indices", 7),
        ("bags", aten._embedding_bag, "indices", 7),
        ("gather", aten.gather, "index", 9),
        ("index_select", aten.index_select, "index", 3),
        ("take", aten.take, "index", 27),
        ("pooled", aten.max_pool2d_with_indices_backward, "indices", 64),
        ("unpooled", aten.max_unpool2d, "indices", 36),
    ],
)
def test_indices_are_spread_over_what_they_index(case: str, target: Any, argument: str, size: int) -> None:
    function, args = CASES[case]
    graph = captured_graph(function, *args)
    (op, *_) = operators(graph, target)
    drawn = made_up_arguments(graph, op)[argument]
    assert 0 <= int(drawn.min()) < int(drawn.max()) < size


def test_an_index_of_each_dimension_keeps_to_its_own() -> None:
    function, args = CASES["advanced_index"]
    graph = captured_graph(function, *args)
    (op,) = operators(graph, aten.index)
    first, _, third = made_up_arguments(graph, op)["indices"]
    assert int(first.max()) == 2
    assert int(third.max()) == 3
    assert isinstance(DOMAINS["index"]["indices"], EachDimension)


def test_offsets_ascend_from_zero_and_lengths_add_up() -> None:
    graph = captured_graph(*_case("bags"))
    (op,) = operators(graph, aten._embedding_bag)
    assert made_up_arguments(graph, op)["offsets"].tolist() == [0, 6, 13]
    graph = captured_graph(*_case("segments"))
    (op,) = operators(graph, aten.segment_reduce)
    lengths = made_up_arguments(graph, op)["lengths"]
    assert int(lengths.sum()) == 17
    assert lengths.tolist() == sorted(lengths.tolist())


def test_an_expanded_operand_is_filled_once_and_a_large_one_by_repeating() -> None:
    memory = torch.empty(3 * domains.DRAWN + 5, dtype=torch.int64)
    graph = captured_graph(*_case("gather"))
    (op,) = operators(graph, aten.gather)
    Indices("self", "dim").fill(memory, domains.ProbedCall(graph, op), torch.Generator())
    assert (int(memory.min()), int(memory.max())) == (0, 8)
    assert torch.equal(memory[: domains.DRAWN], memory[domains.DRAWN : 2 * domains.DRAWN])
    assert torch.equal(memory[:5], memory[-5:])


def test_a_rewrite_is_not_judged_without_memory_for_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = judge.ConvolutionShape((2, 3, 8, 8), (4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float32)
    asked: list[int] = []

    def no_room(footprint: int, device: str) -> bool:
        asked.append(footprint)
        return False

    monkeypatch.setattr(judge, "has_room", no_room)
    monkeypatch.setattr(judge, "_ratio", lambda *sides: pytest.fail("a side was run"))
    unknown = judge.Judge(run=True)
    monkeypatch.setattr(unknown.cache, "get", lambda key: None)
    assert not unknown.channels_last_pays([shape])
    assert asked == [2 * shape.bytes]


def _case(name: str) -> tuple[Any, ...]:
    function, args = CASES[name]
    return (function, *args)
