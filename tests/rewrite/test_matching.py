"""The pattern matcher on small graphs: captures, operand order, views in between, values that something else reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from encore.graph import Graph, verify_graph
from encore.graph.values import Ref
from encore.rewrite.matching import (
    AnyTensor,
    Argument,
    Match,
    OneOf,
    OpPattern,
    Pattern,
    SameElements,
    Scope,
    Views,
    matches,
)
from encore.rewrite.rules import NewOp, Rule, apply_rules
from support.captured_graphs import captured_graph, operators

aten = torch.ops.aten
SIN, COS = aten.sin.default, aten.cos.default
ADD, MUL = aten.add.Tensor, aten.mul.Tensor


def graph_of(function: Callable[..., Tensor], inputs: int = 1) -> Graph:
    args = [torch.randn(4, 6, requires_grad=True) for _ in range(inputs)]
    return captured_graph(function, *args)


def found(graph: Graph, pattern: OpPattern) -> list[Match]:
    """The matches in forward."""
    scope = Scope(graph)
    return [match for op in graph.ops if op.forward for match in matches(scope, pattern, op)]


def test_an_operator_with_what_makes_its_operand() -> None:
    graph = graph_of(lambda x: x.sin().cos().sin())
    (match,) = found(graph, OpPattern(COS, AnyTensor("x", OpPattern(SIN, ..., name="inner"))))
    assert match.op.target is COS
    assert match["inner"].target is SIN
    assert match.value("x").producer == match["inner"].id
    assert len(found(graph, OpPattern(SIN, AnyTensor()))) == 2


def test_several_targets_and_plain_arguments() -> None:
    graph = graph_of(lambda x: (x * 3).sin() + (x * 4).cos())
    scale = OpPattern(MUL, AnyTensor(), Argument("scale", lambda number: number > 2))
    assert [match["scale"] for match in found(graph, OpPattern((SIN, COS), scale))] == [3, 4]
    assert len(found(graph, OpPattern((SIN, COS), OpPattern(MUL, AnyTensor(), 3)))) == 1
    assert not found(graph, OpPattern((SIN, COS), OpPattern(MUL, AnyTensor(), 5)))


def test_all_arguments_are_described_or_the_rest_left_open() -> None:
    graph = graph_of(lambda x: x.sum(1, keepdim=True))
    total = aten.sum.dim_IntList
    assert not found(graph, OpPattern(total, AnyTensor()))
    assert not found(graph, OpPattern(total, AnyTensor(), [1], True, 0))
    assert len(found(graph, OpPattern(total, AnyTensor(), ...))) == 1
    assert len(found(graph, OpPattern(total, AnyTensor(), [1], True))) == 1


def test_keyword_arguments_must_be_allowed() -> None:
    graph = graph_of(lambda x: torch.add(x.sin(), x.cos(), alpha=2))
    assert not found(graph, OpPattern(ADD, AnyTensor(), AnyTensor()))
    assert len(found(graph, OpPattern(ADD, AnyTensor(), AnyTensor(), any_kwargs=True))) == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_commutative_operands(swapped: bool) -> None:
    graph = graph_of(lambda x, y: y + x.sin() if swapped else x.sin() + y, 2)
    pattern: tuple[Any, ...] = (ADD, OpPattern(SIN, AnyTensor("x")), AnyTensor("y"))
    (match,) = found(graph, OpPattern(*pattern, commutes=True))
    assert (match["x"], match["y"]) == tuple(graph.primals)
    assert len(found(graph, OpPattern(*pattern))) == (not swapped)


def test_both_orders_match_where_both_fit() -> None:
    graph = graph_of(lambda x: x.sin() + x.sin().sin())
    pattern = OpPattern(ADD, OpPattern(SIN, AnyTensor("inner")), AnyTensor(), commutes=True)
    assert len({match["inner"] for match in found(graph, pattern)}) == 2


def test_a_name_stands_for_one_value() -> None:
    twice = OpPattern(MUL, AnyTensor("x"), AnyTensor("x"))
    assert len(found(graph_of(lambda x: x.sin() * x.cos() + x * x), twice)) == 1


@pytest.mark.parametrize("views", [0, 1, 2])
def test_views_in_between(views: int) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        for view in [Tensor.t, lambda y: y.unsqueeze(0)][:views]:
            y = view(y)
        return y.cos()

    graph = graph_of(function)
    assert len(found(graph, OpPattern(COS, Views(OpPattern(SIN, AnyTensor()))))) == 1
    assert len(found(graph, OpPattern(COS, OpPattern(SIN, AnyTensor())))) == (views == 0)


READ_AGAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "the value": lambda x: (lambda y: y.t().cos().t() + y.exp())(x.sin()),
    "a view": lambda x: (lambda y: y.cos() + y.exp())(x.sin().t()),
}


@pytest.mark.parametrize("again", READ_AGAIN)
def test_only_use(again: str) -> None:
    """Neither the value nor a view on the way may be read by anything else."""
    exclusive = OpPattern(COS, Views(OpPattern(SIN, AnyTensor(), only_use=True), only_use=True))
    graph = graph_of(READ_AGAIN[again])
    assert not found(graph, exclusive)
    assert len(found(graph, OpPattern(COS, Views(OpPattern(SIN, AnyTensor()))))) == 1
    scope = Scope(graph)
    assert not any(scope.is_read_once(value) for value in scope.leaving)


def test_one_of_several_patterns() -> None:
    either = OneOf(OpPattern(SIN, AnyTensor("in sine")), OpPattern(COS, AnyTensor("in cosine")))
    matched = found(graph_of(lambda x: x.sin().exp() + x.cos().exp()), OpPattern(aten.exp.default, either))
    assert [set(match.captures) for match in matched] == [{"in sine"}, {"in cosine"}]


def test_the_same_elements() -> None:
    graph = graph_of(lambda x: x.t().sin())
    (transposed,), x = operators(graph, SIN)[0].reads, graph.primals[0]
    scope = Scope(graph)

    def fits(pattern: Pattern, value: int) -> bool:
        return any(True for _ in pattern.fits(scope, Ref(value), {"x": x}))

    assert fits(SameElements("x"), x)
    assert not fits(SameElements("x"), transposed)
    assert fits(SameElements("x", transposed=True), transposed)
    assert not fits(SameElements("x", transposed=True), x)
    assert not fits(SameElements("y"), x)


def test_the_phase_of_an_operator() -> None:
    graph = graph_of(lambda x: x.sin())
    scope = Scope(graph)

    def count(forward: bool | None) -> int:
        pattern = OpPattern(COS, AnyTensor(), forward=forward)
        return sum(1 for op in graph.ops for _ in matches(scope, pattern, op))

    assert (count(True), count(False), count(None)) == (0, 1, 1)


def test_a_rule_replaces_what_it_matches() -> None:
    """`sin(x) * scale` becomes `scale * -cos(x)`, and reads a constant where the condition holds."""
    graph = graph_of(lambda x: (x.sin() * 3).exp() + x.sin() * 5)
    pattern = OpPattern(MUL, OpPattern(SIN, AnyTensor("x")), Argument("scale"), forward=True)
    replacement = NewOp(MUL, NewOp(aten.neg.default, NewOp(COS, AnyTensor("x"))), Argument("scale"))
    after = apply_rules(graph, (Rule(pattern, replacement, lambda match: match["scale"] == 3),))
    (negated,) = [op for op in after.ops if op.forward and op.target is aten.neg.default]
    (product,) = (after.ops[reader] for reader in after.values[negated.writes[0] or 0].readers)
    assert (product.target, product.args[1]) == (MUL, 3)
    assert after.ops[after.values[negated.reads[0]].producer or 0].target is COS
    assert len([op for op in after.ops if op.forward and op.target is SIN]) == 1


def test_no_match_leaves_the_graph_as_it_is() -> None:
    graph = graph_of(lambda x: x.sin())
    rule = Rule(OpPattern(aten.tan.default, AnyTensor("x")), NewOp(SIN, AnyTensor("x")))
    assert apply_rules(graph, (rule,)) is graph


def test_the_example_of_the_documentation() -> None:
    graph = graph_of(lambda x: (-x).abs().sum() + (-x).exp().sum())
    negated = OpPattern(aten.neg.default, AnyTensor("x"))
    rule = Rule(
        OpPattern(aten.abs.default, negated),
        NewOp(aten.abs.default, AnyTensor("x")),
        lambda match: match.value("x").dtype is torch.float32,
    )
    after = apply_rules(graph, (rule,))
    verify_graph(after)
    (absolute,) = operators(after, aten.abs)
    assert absolute.reads == (after.primals[0],)
