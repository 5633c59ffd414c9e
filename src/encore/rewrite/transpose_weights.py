"""A weight that many products read transposed is laid out transposed once a step.

PyTorch's linear layers store `[outputs, inputs]` and multiply by the transpose. With few rows on the left (a recurrent
step of a small batch) vector libraries are up to three times faster on a contiguous `[inputs, outputs]`.
"""

from __future__ import annotations

import torch

from encore.graph import Graph
from encore.graph.editor import Editor
from encore.graph.values import Ref, is_contiguous
from encore.rewrite.judge import Judge
from encore.rewrite.matmuls import Product, products
from encore.rewrite.queries import device_of

aten = torch.ops.aten
FEWEST_USES = 4


def apply(graph: Graph, judge: Judge) -> Graph:
    """The graph with transposed copies of the weights for which that pays."""
    editor = Editor(graph)
    uses: dict[int, list[Product]] = {}
    for found in products(graph):
        maker = graph.producer(found.right)
        if maker is not None and maker.target is aten.t.default and found.op.forward:
            stored = graph.values[maker.reads[0]]
            if stored.role is not None and is_contiguous(stored):
                uses.setdefault(found.right, []).append(found)
    for weight, readers in uses.items():
        value = graph.values[weight]
        assert value.dtype is not None
        if len(readers) < FEWEST_USES or not judge.transposed_pays(graph, readers):
            continue
        maker = graph.producer(weight)
        assert maker is not None
        copy = editor.op_after(
            maker,
            f"{value.name}_laid_out",
            aten.clone.default,
            (Ref(weight),),
            {"memory_format": torch.contiguous_format},
        )
        copy.forward = True
        laid_out = editor.result(copy, value.shape, value.dtype, device_of(graph, weight))
        for reader in readers:
            editor.read_instead(reader.op, weight, laid_out)
    return editor.finish()
