"""One corrupted copy of a real graph for each rule of the verifier."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

import encore
from encore.api import compiled_call
from encore.errors import IllegalGraphError
from encore.graph import Graph, Op, Role, verify_graph
from encore.graph.values import Ref
from support.captured_graphs import Perceptron, captured_graph, named


@functools.cache
def perceptron() -> Graph:
    torch._dynamo.reset()
    return captured_graph(Perceptron(), torch.randn(3, 4))


def op(graph: Graph, name: str) -> Op:
    (found,) = [op for op in graph.ops if op.name == name]
    return found


def swap_values(graph: Graph) -> None:
    graph.values[5], graph.values[6] = graph.values[6], graph.values[5]


def swap_storages(graph: Graph) -> None:
    graph.storages[0], graph.storages[1] = graph.storages[1], graph.storages[0]


def renumber_an_operator(graph: Graph) -> None:
    graph.ops[3].id = 4


def write_an_input(graph: Graph) -> None:
    graph.values[graph.primals[0]].producer = 0


def read_too_early(graph: Graph) -> None:
    first, later = op(graph, "t"), named(graph, "relu")
    first.args, first.reads = (Ref(later.id),), (later.id,)
    later.readers.append(first.id)


def forget_a_reader(graph: Graph) -> None:
    named(graph, "relu").readers.remove(op(graph, "addmm_1").id)


def read_more_than_the_arguments(graph: Graph) -> None:
    reader, extra = op(graph, "addmm_1"), named(graph, "addmm")
    reader.reads = (*reader.reads, extra.id)
    extra.readers.append(reader.id)


def write_twice(graph: Graph) -> None:
    op(graph, "addmm_1").writes = (named(graph, "relu").id,)


def write_anothers_value(graph: Graph) -> None:
    named(graph, "relu").producer = op(graph, "addmm").id


def let_nothing_leave(graph: Graph) -> None:
    orphan = dataclasses.replace(graph.values[-1], id=len(graph.values), name="orphan", producer=None, storage=None)
    graph.values.append(orphan)
    graph.gradients[0] = orphan.id


def claim_a_foreign_value(graph: Graph) -> None:
    graph.storages[0].values.append(named(graph, "relu").id)


def leave_a_storage(graph: Graph) -> None:
    value = named(graph, "relu")
    assert value.storage is not None
    graph.storages[value.storage].values.remove(value.id)


def shrink_a_storage(graph: Graph) -> None:
    value = named(graph, "relu")
    assert value.storage is not None
    graph.storages[value.storage].bytes -= 1


def leave_a_view_behind(graph: Graph) -> None:
    """As a rewrite would that lets a view read a copy and forgets the view's storage."""
    view, other = op(graph, "t"), named(graph, "relu")
    seen = view.writes[0]
    assert seen is not None
    value = graph.values[seen]
    assert value.storage is not None
    assert other.storage is not None
    graph.storages[value.storage].values.remove(seen)
    copy = dataclasses.replace(graph.storages[value.storage], id=len(graph.storages), values=[seen])
    graph.storages.append(copy)
    value.storage = copy.id


def look_beyond_the_end(graph: Graph) -> None:
    named(graph, "t").offset = 1


def compute_in_place(graph: Graph) -> None:
    operand, result = named(graph, "addmm"), named(graph, "relu")
    assert operand.storage is not None
    assert result.storage is not None
    graph.storages[result.storage].values.remove(result.id)
    graph.storages[operand.storage].values.append(result.id)
    result.storage = operand.storage


def wait_for_a_tangent(graph: Graph) -> None:
    op(graph, "expand").forward = True


def read_a_backward_value(graph: Graph) -> None:
    op(graph, "t_7").forward = True


def compute_an_output_in_backward(graph: Graph) -> None:
    op(graph, "sum_1").forward = False


@pytest.mark.parametrize(
    ("corrupt", "rule"),
    [
        (swap_values, r"value 6 stands at position 5"),
        (swap_storages, r"storage 1 stands at position 0"),
        (renumber_an_operator, r"op 4 stands at position 3"),
        (write_an_input, r"primals_1 is an input and is written, too"),
        (read_too_early, r"t reads relu before it is written"),
        (forget_a_reader, r"addmm_1 is missing among the readers of value \d+"),
        (read_more_than_the_arguments, r"addmm_1 reads other values than its arguments"),
        (write_twice, r"relu is written twice"),
        (write_anothers_value, r"relu writes a value of another operator"),
        (let_nothing_leave, r"value \d+ is an output or gradient and is never written"),
        (claim_a_foreign_value, r"storage 0 claims a foreign value \d+"),
        (leave_a_storage, r"relu is missing in its storage"),
        (shrink_a_storage, r"relu is larger than its storage"),
        (leave_a_view_behind, r"t is a view and not in the storage of its operand"),
        (look_beyond_the_end, r"t reaches beyond the end of its storage"),
        (compute_in_place, r"relu computes relu into the storage of an operand"),
        (wait_for_a_tangent, r"forward operator expand reads a tangent"),
        (read_a_backward_value, r"forward operator t_7 reads a backward value"),
        (compute_an_output_in_backward, r"output \d+ is computed in backward"),
    ],
    ids=lambda argument: getattr(argument, "__name__", ""),
)
def test_a_broken_rule_is_named(corrupt: Callable[[Graph], None], rule: str) -> None:
    graph = copy.deepcopy(perceptron())
    verify_graph(graph)
    corrupt(graph)
    with pytest.raises(IllegalGraphError, match=f"^illegal graph: {rule}$"):
        verify_graph(graph)


def test_a_view_that_overlaps_itself_may_be_larger_than_its_storage() -> None:
    graph = perceptron()
    spread = named(graph, "expand")
    assert spread.storage is not None
    assert spread.bytes > graph.storages[spread.storage].bytes
    assert graph.values[graph.tangents[0]].role is Role.TANGENT
    verify_graph(graph)


class Windows(torch.nn.Module):
    """Windows of two steps, each overlapping the next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).unfold(1, 2, 1)


def test_overlapping_windows_are_legal() -> None:
    verify_graph(captured_graph(Windows(), torch.randn(3, 6, 8)))


class Places(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).as_strided((2, 3), (4, 1), 5).exp()


def test_as_strided_is_where_its_arguments_say() -> None:
    graph = copy.deepcopy(captured_graph(Places(), torch.randn(3, 8)))
    verify_graph(graph)
    named(graph, "as_strided").offset = 4
    with pytest.raises(IllegalGraphError, match="as_strided is 4 elements into its storage and reads 5 into it"):
        verify_graph(graph)


class LossAndScores(torch.nn.Module):
    """The gradient of the scores is a sum, of which one term is left if the loss alone receives a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.linear(x)
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), x.argmax(-1).flatten()), scores


def test_a_view_of_a_sum_that_has_become_its_one_term_is_in_the_storage_of_the_term() -> None:
    model = encore.compile(LossAndScores(), lowering="eager")
    loss, _ = model(torch.randn(3, 4, 8))
    loss.backward()
    (captured,) = compiled_call(model).session.graphs
    assert len(captured.plan.schedule.graph.tangents) == 1
    verify_graph(captured.plan.schedule.graph)
