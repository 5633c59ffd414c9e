"""What is left of a joint graph once it is read: identities gone, views shared, facts attached to every value."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import torch
from torch import nn

from encore.graph import Graph, Role
from encore.graph.values import Ref, map_refs, refs
from support.captured_graphs import Perceptron, captured_graph, named, operators

aten = torch.ops.aten


def line_of(model: type[nn.Module], text: str) -> str:
    """`file.py:12` for the one line of the model's forward that holds the text."""
    lines, first = inspect.getsourcelines(model.forward)
    (number,) = [first + offset for offset, line in enumerate(lines) if text in line]
    return f"{Path(inspect.getfile(model)).name}:{number}"


def perceptron() -> Graph:
    return captured_graph(Perceptron(), torch.randn(3, 4))


def test_inputs_have_their_roles_shapes_and_bytes() -> None:
    graph = perceptron()
    facts = [
        (graph.values[value].role, graph.values[value].shape, graph.values[value].bytes) for value in graph.primals
    ]
    assert facts == [
        (Role.PARAMETER, (8, 4), 128),
        (Role.PARAMETER, (8,), 32),
        (Role.INPUT, (3, 4), 48),
        (Role.PARAMETER, (2, 8), 64),
        (Role.PARAMETER, (2,), 8),
    ]
    assert [(graph.values[value].role, graph.values[value].bytes) for value in graph.tangents] == [(Role.TANGENT, 4)]
    assert graph.external == {graph.values[value].storage for value in graph.primals}
    assert sum(graph.storages[storage].bytes for storage in graph.external) == 280


def test_results_line_up_with_what_they_are_for() -> None:
    graph = perceptron()
    (loss,) = graph.outputs
    assert loss is not None
    assert graph.returned == [loss]
    assert graph.values[loss].name == "sum_1"
    shapes = [None if value is None else graph.values[value].shape for value in graph.gradients]
    assert shapes == [(8, 4), (8,), None, (2, 8), (2,)]


def test_a_value_knows_its_readers_in_forward_and_backward() -> None:
    graph = perceptron()
    hidden = named(graph, "relu")
    readers = [graph.ops[reader] for reader in hidden.readers]
    assert [(op.target, op.forward) for op in readers] == [
        (aten.addmm.default, True),
        (aten.mm.default, False),
        (aten.threshold_backward.default, False),
    ]
    weight = graph.values[graph.primals[3]]
    assert [graph.ops[reader].forward for reader in weight.readers] == [True, False]


def test_a_value_knows_its_module_and_source_line() -> None:
    graph = perceptron()
    for name, module, text in (
        ("addmm", "enter", "hidden ="),
        ("relu", "", "hidden ="),
        ("addmm_1", "leave", "self.leave"),
        ("threshold_backward", "", "hidden ="),
        ("mm_2", "enter", "hidden ="),
    ):
        op = graph.producer(named(graph, name).id)
        assert op is not None
        assert (op.module, op.source) == (module, line_of(Perceptron, text))


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def test_a_module_path_is_the_one_of_named_modules() -> None:
    model = Numbered()
    graph = captured_graph(model, torch.randn(2, 4))
    paths = {op.module for op in graph.ops}
    assert paths == {"blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"}
    assert paths <= {name for name, _ in model.named_modules()}


class Recurrent(nn.Module):
    """One weight, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return x.sum()


def test_the_transpose_of_a_weight_is_taken_once_and_taken_back_in_backward() -> None:
    graph = captured_graph(Recurrent(), torch.randn(2, 4))
    weight = graph.primals[0]
    transposes = [op for op in operators(graph, aten.t.default) if op.reads == (weight,)]
    assert len(transposes) == 1
    products = operators(graph, aten.mm.default)
    assert [transposes[0].writes[0] in op.reads for op in products if op.forward] == [True] * 3
    through_time = [op for op in products if not op.forward and weight in op.reads]
    assert len(through_time) == 2, "mm(gradient, weight): t(t(weight)) is the weight"


def test_gradients_of_a_shared_weight_are_not_transposed_back_and_forth() -> None:
    graph = captured_graph(Recurrent(), torch.randn(2, 4))
    (gradient, _) = graph.gradients
    assert gradient is not None
    total = graph.producer(gradient)
    assert total is not None
    assert total.target is aten.add.Tensor
    producers = [graph.producer(value) for value in total.reads]
    assert {op.target for op in producers if op is not None} == {aten.add.Tensor, aten.mm.default}


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = torch.sigmoid(self.linear(x))
        left, right = gates.chunk(2, dim=1)
        return (left * right.detach()).sum(), gates.detach()


def test_detach_is_gone_but_for_an_output() -> None:
    graph = captured_graph(Detached(), torch.randn(2, 4))
    (kept,) = operators(graph, aten.detach.default)
    assert kept.writes == (graph.outputs[1],)
    assert kept.forward


def test_aliases_share_a_storage_and_others_do_not() -> None:
    graph = captured_graph(Detached(), torch.randn(2, 4))
    gates = named(graph, "sigmoid")
    (chunks,) = [op for op in graph.ops if op.returns_tuple]
    halves = [graph.values[value] for value in chunks.writes if value is not None]
    output = graph.outputs[1]
    assert output is not None
    assert {value.storage for value in (*halves, graph.values[output])} == {gates.storage}
    assert gates.storage is not None
    assert set(graph.storages[gates.storage].values) == {gates.id, output, *(half.id for half in halves)}
    assert [(half.shape, half.stride, half.bytes) for half in halves] == [((2, 3), (6, 1), 24)] * 2
    assert graph.bytes_of(halves[0].id) == 48
    assert named(graph, "addmm").storage != gates.storage


class ReturnsViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x @ self.weight
        return y.t(), y.t(), y


def test_outputs_keep_an_operator_of_their_own() -> None:
    graph = captured_graph(ReturnsViews(), torch.randn(4, 4))
    outputs = [value for value in graph.outputs if value is not None]
    assert len(outputs) == len(set(outputs))
    for value in outputs:
        op = graph.producer(value)
        assert op is not None
        assert op.forward
        assert value in op.writes


class Wasteful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        (y * 3).exp()
        return y.sum()


def test_what_nobody_reads_is_dropped() -> None:
    graph = captured_graph(Wasteful(), torch.randn(2, 4))
    assert operators(graph, aten.exp) == []
    read = {value for op in graph.ops for value in op.reads}
    kept = read | {value for value in (*graph.outputs, *graph.gradients) if value is not None}
    assert all(any(value in kept for value in op.writes) for op in graph.ops)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum()


def test_new_contents_of_buffers_are_outputs_that_nobody_holds() -> None:
    graph = captured_graph(Normalised(), torch.randn(8, 4))
    buffers = [value for value in graph.primals if graph.values[value].role is Role.BUFFER]
    assert sorted(graph.values[value].shape for value in buffers) == [(), (4,), (4,)]
    assert len(graph.outputs) == 4
    assert [graph.values[value].name for value in graph.returned] == ["sum_1"]
    (backward,) = operators(graph, aten.native_batch_norm_backward.default)
    assert backward.args[3:5] == (None, None), "running statistics would be kept alive for nothing"


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()


def test_a_constant_is_held_by_the_graph() -> None:
    graph = captured_graph(WithConstant(), torch.randn(2, 4))
    (value,) = graph.constants
    assert torch.equal(graph.constants[value], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert graph.values[value].role is Role.CONSTANT
    assert graph.values[value].storage in graph.external


def test_copies_have_every_fact_of_the_original() -> None:
    graph = perceptron()
    op = dataclasses.replace(graph.ops[-1], traced_in_forward=False, forward=True, again=True)
    assert op.copy(7) == dataclasses.replace(op, id=7)
    value = dataclasses.replace(graph.values[0], offset=3)
    assert value.copy(value.readers) == value
    assert graph.storages[0].copy() == graph.storages[0]


def test_refs_are_found_and_replaced_in_every_container() -> None:
    argument = (Ref(1), [Ref(2), 3], {"key": Ref(4)}, slice(Ref(5), None, 2), "text", None)
    assert list(refs(argument)) == [1, 2, 4, 5]
    assert map_refs(argument, str) == ("1", ["2", 3], {"key": "4"}, slice("5", None, 2), "text", None)
