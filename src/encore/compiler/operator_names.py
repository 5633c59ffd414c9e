"""Names of operators in reports."""

from __future__ import annotations

from encore.graph import Op
from encore.graph.random_ops import DrawAgain, DrawState
from encore.graph.tier_ops import is_transfer


def operator_name(op: Op) -> str:
    """`aten.addmm.default` -> `addmm`; a repeated draw is called like the first."""
    if isinstance(op.target, DrawState):
        return "generator state"
    if is_transfer(op.target):
        return str(op.target)
    target = op.target.target if isinstance(op.target, DrawAgain) else op.target
    name: str = getattr(target, "__name__", "") or op.name
    return name.partition(".")[0]


def place_of(op: Op) -> str:
    """`, encoder.0 (nmt.py:12)`, as far as it is known."""
    return (f", {op.module}" if op.module else "") + (f" ({op.source})" if op.source else "")
