"""Dropout's noise is a boolean times a constant: one byte an element crosses to backward instead of four; lossless.

The booleans are drawn as such (the same draw, several times faster: `encore::dropout_mask`), and each phase makes the
noise from them right before its first reader: a conversion and a product that are fused into the reader's kernel.
"""

from __future__ import annotations

import torch

from encore.graph import Graph, OpClass
from encore.graph.values import Ref
from encore.rewrite.matching import AnyTensor, Argument, Match, OpPattern
from encore.rewrite.op_builder import OpBuilder
from encore.rewrite.queries import dtype_of, readers_of, result_of
from encore.rewrite.rules import Rule, apply_rules

aten = torch.ops.aten


def apply(graph: Graph) -> Graph:
    """The graph with dropout's noise drawn as booleans."""
    return apply_rules(graph, RULES)


def dropout_scale(p: float, dtype: torch.dtype) -> float:
    """What dropout multiplies by, to the last bit."""
    return torch.ones((), dtype=dtype).div_(1 - p).item()


def _stays_without_views(match: Match) -> bool:
    noise = result_of(match.op)
    views = any(reader.kind is OpClass.VIEW for reader in readers_of(match.graph, noise))
    return noise not in match.scope.leaving and not views


def _draw_booleans(builder: OpBuilder, match: Match) -> None:
    noise, editor = result_of(match.op), builder.editor
    dtype = dtype_of(match.graph, noise)
    editor.make_instead(match.op, torch.ops.encore.dropout_mask.default, torch.bool)
    for forward in (True, False):
        readers = [reader for reader in readers_of(match.graph, noise) if reader.forward is forward]
        if readers:
            name = match.graph.values[noise].name
            wide = builder.before(readers[0], f"{name}_wide", aten._to_copy.default, (Ref(noise),), dtype=dtype)
            args = (Ref(wide), dropout_scale(match["p"], dtype))
            scaled = builder.before(readers[0], f"{name}_noise", aten.mul.Tensor, args)
            for reader in readers:
                editor.read_instead(reader, noise, scaled)


NOISE = OpPattern(torch.ops.encore.dropout_noise.default, AnyTensor(), Argument("p"))
RULES = (Rule(NOISE, _draw_booleans, _stays_without_views),)
