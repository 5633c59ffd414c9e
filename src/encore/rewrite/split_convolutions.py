"""Backward of a convolution, one gradient after the other: that of its weight, then that of its input, never both at
once.

Asked for both gradients, a convolution's backward keeps its input, the gradient of its output and the gradient of its
input together, with what oneDNN copies for either product. The gradient of the weight is what reads the input; the
gradient of the input asks for no more than its size. So the weight's comes first, the input (or its decoded copy) goes,
and the other is given memory of that size to look at: the gradient of the output, where that is as large. oneDNN makes
two calls of it in any case; the bits are the same.

With channels last, oneDNN copies a weight into the feature maps' layout, then into a blocked one of its own, and does
the same with the weight's gradient. Where the weight is larger than the feature maps, its gradient comes second and is
computed from copies of those with channels first: then it comes out as the parameter is laid out. Elsewhere the
gradient needs of the weight nothing but its size, so it is given the weight's memory read with channels last, which
oneDNN need not copy. That sums up in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encore.graph import Graph, Op, Value
from encore.graph.editor import Editor
from encore.graph.values import Ref, is_contiguous, span_bytes
from encore.rewrite.channels_last import channels_last_strides, has_channels_last
from encore.rewrite.queries import device_of

aten = torch.ops.aten
INPUT, WEIGHT, BIAS, MASK = 1, 2, 3, 10


def apply(graph: Graph, *, exact: bool = False) -> Graph:
    """The graph with such backward operators split in two. `exact` asks for bit equality."""
    editor = Editor(graph)
    for op in graph.ops:
        if op.target is not aten.convolution_backward.default or not op.args[MASK][1]:
            continue
        source, weight = graph.values[op.args[INPUT].value], graph.values[op.args[WEIGHT].value]
        laid_out = has_channels_last(source) and is_contiguous(weight) and weight.role is not None
        laid_out = laid_out and device_of(graph, source.id) == "cpu"  # what oneDNN copies
        if laid_out and not exact:
            _split_laid_out(editor, op, source, weight)
        elif op.args[MASK][0]:
            _gradient_of_weight(editor, op, op.args[:BIAS])
            _gradient_of_input(editor, op)
            editor.remove(op)
    return editor.finish()


def _split_laid_out(editor: Editor, op: Op, source: Value, weight: Value) -> None:
    """With channels last, oneDNN's copies count as well."""
    gradient, *_ = op.args
    maps = [editor.graph.values[gradient.value], source]
    heavy = weight.bytes > sum(value.bytes for value in maps)
    if heavy:
        _gradient_of_input(editor, op)
        _gradient_of_weight(editor, op, [*(Ref(_channels_first(editor, op, value)) for value in maps), Ref(weight.id)])
    else:
        _gradient_of_weight(editor, op, [gradient, Ref(source.id), Ref(_only_its_shape(editor, op, weight))])
        _gradient_of_input(editor, op)
    editor.remove(op)
    _, of_weight, _ = op.writes
    assert of_weight is not None
    editor.graph.values[of_weight].stride = weight.stride if heavy else channels_last_strides(weight.shape)
    if heavy:
        _need_no_copy(editor, of_weight)


def _gradient_of_weight(editor: Editor, op: Op, operands: Sequence[Ref]) -> None:
    _, of_weight, of_bias = op.writes
    mask = [False, True, op.args[MASK][2]]
    made = editor.op_after(op, f"{op.name}_weight", op.target, (*operands, *op.args[BIAS:MASK], mask))
    _make(editor, made, (None, of_weight, of_bias))


def _gradient_of_input(editor: Editor, op: Op) -> None:
    """From the gradient of the output and the weight; the input itself is only asked for its size."""
    of_input, _, _ = op.writes
    if not op.args[MASK][0]:
        return
    gradient, source, *rest = op.args[:MASK]
    large, wanted = (editor.graph.values[one.value] for one in (gradient, source))
    if span_bytes(large) >= span_bytes(wanted) and large.dtype is wanted.dtype:
        window = (gradient, list(wanted.shape), list(wanted.stride), large.offset)
        read = editor.op_after(op, f"{op.name}_size", aten.as_strided.default, window)
        source = Ref(editor.view_result(read, large.id, wanted.shape, wanted.stride, 0))
    made = editor.op_after(op, f"{op.name}_input", op.target, (gradient, source, *rest, [True, False, False]))
    _make(editor, made, (of_input, None, None))


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
