"""Which heads are found, and which are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from encore.rewrite import narrow_indices
from encore.rewrite.head_slices import split_head
from encore.rewrite.heads import Gathered, RowByRow, Summed, find_heads
from support.captured_graphs import captured_graph, operators
from support.head_models import DECLINED, FORMS, WIDTH, Net, batch, causal, entropy

aten = torch.ops.aten


@pytest.mark.parametrize("form", DECLINED)
def test_declined(form: str) -> None:
    graph = captured_graph(Net(DECLINED[form]), *batch())
    assert split_head(graph, 4) is graph


def test_one_slice_or_one_row_is_nothing_to_split() -> None:
    graph = captured_graph(Net(FORMS["bias"]), *batch())
    assert split_head(graph, 1) is graph
    torch._dynamo.reset()
    row = captured_graph(Net(FORMS["rows first"]), torch.randn(1, 1, WIDTH), torch.zeros(1, 1, dtype=torch.int64))
    assert split_head(row, 4) is row


def test_one_head_is_split_where_another_is_declined() -> None:
    def end(net: Net, hidden: torch.Tensor, target: torch.Tensor) -> Any:
        return entropy(net.leave(hidden), target), hidden @ net.turned

    graph = captured_graph(Net(end), *batch())
    split = split_head(graph, 4)
    assert len(operators(graph, aten._log_softmax)) == 1
    assert len(operators(split, aten._log_softmax)) == 8


def test_rows_leave_through_the_three_gradients_of_a_linear_layer() -> None:
    (head,) = find_heads(captured_graph(Net(FORMS["bias"]), *batch()))
    assert [type(leave) for leave in head.exits] == [RowByRow, Gathered, Summed]
    assert head.loss.target is aten.nll_loss_forward.default
    assert head.product.op.module == "leave"


def test_a_head_that_gives_no_gradient_has_no_exits() -> None:
    (head,) = find_heads(captured_graph(Net(FORMS["frozen head"]), *batch()))
    assert head.exits == ()


def test_labels_that_backward_reads_narrowed_are_the_same_labels() -> None:
    """Labels that the step computes are saved as smaller integers, like any other index."""
    net = Net(lambda net, h, t: causal(net, h, t)[0])
    graph = captured_graph(net, *batch())
    narrowed = narrow_indices.apply(graph)
    assert narrowed is not graph
    assert len(list(find_heads(narrowed))) == 1
