"""Positions that a pooling layer keeps for backward are stored in four bytes instead of eight; lossless.

They count within one feature map, so four bytes are plenty. Backward widens them again right before they are read.
"""

from __future__ import annotations

import torch

from encore.graph import Graph
from encore.graph.values import Ref
from encore.rewrite.edit import Editor
from encore.rewrite.matmuls import device_of, exported

aten = torch.ops.aten
POSITIONS = {aten.max_pool2d_with_indices.default: 1, aten.adaptive_max_pool2d.default: 1}
"""Operators that return positions, and where among their results."""


def narrow_indices(graph: Graph) -> Graph:
    """The graph with positions that cross from forward to backward made narrow on the way."""
    editor = Editor(graph)
    leaving = exported(graph)
    for op in graph.ops:
        number = op.writes[POSITIONS[op.target]] if op.target in POSITIONS and op.forward else None
        if number is None or number in leaving:
            continue
        readers = [graph.ops[reader] for reader in graph.values[number].readers]
        value, device = graph.values[number], device_of(graph, number)
        if not readers or any(reader.forward for reader in readers) or value.dtype is not torch.int64:
            continue
        narrow = editor.op_after(op, f"{value.name}_narrow", aten._to_copy.default, (Ref(number),), _to(torch.int32))
        small = editor.result(narrow, value.shape, torch.int32, device)
        widen = editor.op_before(
            readers[0], f"{value.name}_wide", aten._to_copy.default, (Ref(small),), _to(torch.int64)
        )
        wide = editor.result(widen, value.shape, torch.int64, device)
        for made in (small, wide):
            editor.graph.values[made].stride = value.stride
        for reader in readers:
            editor.read_instead(reader, number, wide)
    return editor.finish()


def _to(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"dtype": dtype}
