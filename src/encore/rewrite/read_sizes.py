"""A pooling layer's backward is told the size of the layer's input instead of holding it; lossless, and as fast."""

from __future__ import annotations

from encore.graph import Graph, Op
from encore.graph.editor import Editor
from encore.graph.needs import BackwardNeeds, Need
from encore.graph.sized_ops import SIZE, SIZED
from encore.graph.values import Ref


def read_sizes(graph: Graph) -> Graph:
    """The graph with such backward operators where nobody else in backward needs the numbers of the input."""
    editor = Editor(graph)
    needs = BackwardNeeds(graph)
    for storage, readings in needs.of.items():
        if needs.is_kept_whole(storage):
            continue
        for reading in readings:
            if reading.need is Need.SIZE and reading.op.target in SIZED and not reading.op.kwargs:
                _tell(editor, reading.op, reading.value)
    return editor.finish()


def _tell(editor: Editor, op: Op, source: int) -> None:
    value = editor.graph.values[source]
    (result,) = op.writes
    assert result is not None
    made = editor.graph.values[result]
    if made.dtype != value.dtype or not isinstance(op.args[SIZE], Ref):
        return
    args = (op.args[0], list(made.shape), list(made.stride), *op.args[SIZE + 1 :])
    told = editor.op_after(op, op.name, SIZED[op.target], args)
    editor.adopt(told, result)
