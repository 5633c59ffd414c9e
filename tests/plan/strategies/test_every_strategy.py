"""Every strategy drops only what may be dropped, and from what it keeps the rest is made again, bit for bit.

Forward runs on real tensors, then once more for the dropped values alone, with nothing at hand but what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from encore.graph import Graph, Op, OpClass, Value
from encore.graph.values import map_refs
from encore.lower.calls import callable_for
from encore.plan.strategies import STRATEGIES, block_boundaries
from encore.schedule.order import order_backward
from support.captured_graphs import captured_graph, operators
from support.recompute_reference import backward_asks_for, kept_bytes, workload_graph
from support.workload_cases import FIVE
from test_random_networks import Drawn, examples, networks

aten, SLOW = torch.ops.aten, pytest.mark.slow
NEVER = {OpClass.VIEW, OpClass.RANDOM, OpClass.MUTATING, OpClass.COLLECTIVE, OpClass.OPAQUE}
KEPT = {
    "everything": {"lm": 274_436, "nmt": 265_652, "resnet": 6_998_084, "speech": 1_396_548, "transformer": 967_044},
    "echo": {"lm": 192_512, "nmt": 165_248, "resnet": 3_629_184, "speech": 1_244_928, "transformer": 643_200},
    "mirror": {"lm": 292_864, "nmt": 243_072, "resnet": 3_629_184, "speech": 1_244_928, "transformer": 643_200},
    "chen": {"lm": 194_564, "nmt": 164_148, "resnet": 2_485_380, "speech": 106_244, "transformer": 695_684},
    "blocks": {"lm": 110_596, "nmt": 91_444, "resnet": 1_810_564, "speech": 81_668, "transformer": 245_124},
    "min cut": {"lm": 145_408, "nmt": 132_480, "resnet": 3_629_184, "speech": 1_244_928, "transformer": 622_720},
}
"""Bytes of feature maps, by strategy and workload. Mirror holds more than it need for the language model."""
BOUNDARIES = {"lm": 33, "nmt": 19, "resnet": 3 + 4 + 6 + 3, "speech": 2, "transformer": 3}
"""Where blocks begin or end: cells of the LSTMs and steps of the decoder, bottlenecks, layers."""


def assert_legal(graph: Graph, dropped: frozenset[int]) -> None:
    kept, again = backward_asks_for(graph, dropped)
    assert again == dropped  # nothing is dropped that backward never comes to
    assert not dropped & {*graph.primals, *graph.constants, *graph.outputs, *graph.tangents}
    for value in dropped:
        producer = graph.producer(value)
        assert producer is not None
        assert producer.forward
        assert producer.kind not in NEVER
        assert graph.values[value].storage not in graph.external
    assert kept.isdisjoint(dropped)


def tensor_like(value: Value) -> torch.Tensor:
    """Normal numbers where they can be; zeros where they are indices or counts."""
    assert value.dtype is not None
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype).zero_()
    return tensor.normal_() if value.dtype.is_floating_point else tensor


def run(op: Op, tensors: Mapping[int, Any]) -> dict[int, Any]:
    args, kwargs = (map_refs(argument, tensors.__getitem__) for argument in (op.args, op.kwargs))
    results = callable_for(op.target)(*args, **kwargs)
    made = results if op.returns_tuple else (results,)
    return {value: result for value, result in zip(op.writes, made, strict=True) if value is not None}


def assert_made_again(graph: Graph, dropped: frozenset[int], given: dict[int, Any], forward: dict[int, Any]) -> None:
    """Run what makes the dropped values from nothing but what is kept, and compare."""
    kept, again = backward_asks_for(graph, dropped)
    tensors = given | {value: forward[value] for value in kept}
    for op in graph.ops:
        taken_again = op.kind is OpClass.VIEW and all(value in tensors for value in op.reads)
        if op.forward and (taken_again or not again.isdisjoint(op.writes)):
            made = run(op, tensors)
            tensors |= {value: result for value, result in made.items() if taken_again or value in again}
    scratch = {op.writes[3] for op in operators(graph, aten.mkldnn_rnn_layer)}  # not all of it is ever written
    for value in again:
        if value not in scratch:
            assert torch.equal(forward[value].nan_to_num(), tensors[value].nan_to_num()), graph.values[value].name


@torch.no_grad()
def check_every_strategy(graph: Graph) -> None:
    given: dict[int, Any] = {value: tensor_like(graph.values[value]) for value in graph.primals} | graph.constants
    forward = dict(given)
    for op in graph.ops:
        if op.forward:
            forward |= run(op, forward)
    for strategy in STRATEGIES.values():
        dropped = strategy(graph)
        assert_legal(graph, dropped)
        assert_made_again(graph, dropped, given, forward)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name == "resnet" else ()) for name in FIVE])
def test_every_strategy_on_a_workload(name: str) -> None:
    graph = workload_graph(name)
    _, saved = order_backward(graph)
    assert backward_asks_for(graph)[0] == {value for value in saved if graph.values[value].producer is not None}
    check_every_strategy(graph)
    kept = {strategy: kept_bytes(graph, propose(graph)) for strategy, propose in STRATEGIES.items()}
    assert {"everything": kept_bytes(graph)} | kept == {strategy: row[name] for strategy, row in KEPT.items()}
    assert len(block_boundaries(graph)) == BOUNDARIES[name]


@examples(8, derandomize=True)
@networks
def test_every_strategy_on_random_networks(drawn: Drawn) -> None:
    torch._dynamo.reset()
    network = drawn.make()
    graph = captured_graph(network, network.example())
    check_every_strategy(graph)
