"""Dropout's noise is a coin and a constant: one byte an element crosses to backward instead of four; lossless.

The coins are drawn as booleans (the same ones, and several times faster: `encore::dropout_mask`), and whoever reads the
noise makes it from them right before: a conversion and a product that melt into the reader's kernel.
"""

from __future__ import annotations

import torch

from encore.graph import Graph, Op, OpClass
from encore.graph.editor import Editor
from encore.graph.values import Ref
from encore.rewrite.matmuls import device_of, exported

aten = torch.ops.aten


def narrow_masks(graph: Graph) -> Graph:
    """The graph with dropout's noise drawn as booleans."""
    editor = Editor(graph)
    leaving = exported(graph)
    for op in graph.ops:
        if op.target is not torch.ops.encore.dropout_noise.default or op.writes[0] in leaving:
            continue
        (noise,) = op.writes
        assert noise is not None
        readers = [graph.ops[reader] for reader in graph.values[noise].readers]
        if any(reader.kind is OpClass.VIEW for reader in readers):
            continue
        value = graph.values[noise]
        editor.make_instead(op, torch.ops.encore.dropout_mask.default, torch.bool)
        for forward in (True, False):
            same_phase = [reader for reader in readers if reader.forward is forward]
            if same_phase:
                wide = _noise(editor, same_phase[0], noise, value.dtype, op.args[1])
                for reader in same_phase:
                    editor.read_instead(reader, noise, wide)
    return editor.finish()


def _noise(editor: Editor, reader: Op, mask: int, dtype: torch.dtype | None, p: float) -> int:
    """0 where the mask is false, else what dropout multiplies by, to the last bit."""
    assert dtype is not None
    scale = torch.ones((), dtype=dtype).div_(1 - p).item()
    value, device = editor.graph.values[mask], device_of(editor.graph, mask)
    convert = editor.op_before(reader, f"{value.name}_wide", aten._to_copy.default, (Ref(mask),), {"dtype": dtype})
    wide = editor.result(convert, value.shape, dtype, device)
    multiply = editor.op_before(reader, f"{value.name}_noise", aten.mul.Tensor, (Ref(wide), scale))
    noise = editor.result(multiply, value.shape, dtype, device)
    for made in (wide, noise):
        editor.graph.values[made].stride = value.stride
    return noise
