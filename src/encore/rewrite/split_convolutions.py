"""Backward of a convolution with channels last: the gradient of its input, then that of its weight, never both at once.

oneDNN copies a weight into the feature maps' layout, then into a blocked one of its own, and does the same with the
weight's gradient. Asked for both gradients it holds all of that together; asked for one after the other, half. Where
the weight is larger than the feature maps, its gradient is computed from copies of those with channels first: then it
comes out as the parameter is laid out. Elsewhere the gradient needs of the weight nothing but its size, so it is given
the weight's memory read with channels last, which oneDNN need not copy.
"""

from __future__ import annotations

import torch

from encore.graph import Graph, Op, Value
from encore.graph.values import Ref, is_contiguous
from encore.rewrite.channels_last import channels_last_strides, has_channels_last
from encore.rewrite.edit import Editor
from encore.rewrite.matmuls import device_of

aten = torch.ops.aten
INPUT, WEIGHT, MASK = 1, 2, 10


def split_convolutions(graph: Graph) -> Graph:
    """The graph with such backward operators split in two."""
    editor = Editor(graph)
    for op in graph.ops:
        if op.target is not aten.convolution_backward.default or not op.args[MASK][1]:
            continue
        source, weight = graph.values[op.args[INPUT].value], graph.values[op.args[WEIGHT].value]
        if has_channels_last(source) and is_contiguous(weight) and weight.role is not None:
            _split(editor, op, source, weight)
    return editor.finish()


def _split(editor: Editor, op: Op, source: Value, weight: Value) -> None:
    of_input, of_weight, of_bias = op.writes
    wants_input, _, wants_bias = op.args[MASK]
    gradient, _, _, *settings = op.args[:MASK]
    if wants_input:
        first = editor.op_after(op, f"{op.name}_input", op.target, (*op.args[:MASK], [True, False, False]))
        _make(editor, first, (of_input, None, None))
    maps = [editor.graph.values[gradient.value], source]
    heavy = weight.bytes > sum(value.bytes for value in maps)
    if heavy:
        operands = (*(_channels_first(editor, op, value) for value in maps), weight.id)
    else:
        operands = (gradient.value, source.id, _only_its_shape(editor, op, weight))
    second = editor.op_after(
        op, f"{op.name}_weight", op.target, (*map(Ref, operands), *settings, [False, True, wants_bias])
    )
    _make(editor, second, (None, of_weight, of_bias))
    editor.remove(op)
    assert of_weight is not None
    strides = weight.stride if heavy else channels_last_strides(weight.shape)
    editor.graph.values[of_weight].stride = strides
    if heavy:
        _need_no_copy(editor, of_weight)


def _need_no_copy(editor: Editor, gradient: int) -> None:
    """The gradient is laid out as its parameter now: drop the copy that would have made it so."""
    graph = editor.graph
    readers = [graph.ops[reader] for reader in graph.values[gradient].readers]
    if len(readers) == 1 and readers[0].target is aten.clone.default:
        (copy,) = readers[0].writes
        graph.gradients = [gradient if leaving == copy else leaving for leaving in graph.gradients]
        editor.remove(readers[0])


def _make(editor: Editor, op: Op, results: tuple[int | None, ...]) -> None:
    op.returns_tuple = True
    op.writes = results
    for value in results:
        if value is not None:
            editor.graph.values[value].producer = op.id


def _channels_first(editor: Editor, op: Op, value: Value) -> int:
    dense = {"memory_format": torch.contiguous_format}
    copy = editor.op_after(op, f"{value.name}_first", aten.clone.default, (Ref(value.id),), dense)
    assert value.dtype is not None
    return editor.result(copy, value.shape, value.dtype, device_of(editor.graph, value.id))


def _only_its_shape(editor: Editor, op: Op, weight: Value) -> int:
    strides = channels_last_strides(weight.shape)
    window = (Ref(weight.id), list(weight.shape), list(strides))
    read = editor.op_after(op, f"{op.name}_shape", aten.as_strided.default, window)
    return editor.view_result(read, weight.id, weight.shape, strides, 0)
