"""Recompute: free it after forward, and run forward's operators again right before backward reads it.

The search takes values to recompute by themselves, without candidates: `schedule/copies.py` adds the copies, and
chains of them cost what the walk over the step says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from encore.devices import KINDS, kind_of
from encore.fates.fate import Fate, Given
from encore.fates.normalised import is_training_batch_norm
from encore.fates.ownership import changing_storages, owned
from encore.graph import Graph, Op, OpClass
from encore.graph.ops import DRAWS_BY_SHAPE
from encore.graph.torch_private import OpOverload
from encore.graph.values import Ref

RUN_AGAIN = frozenset({OpClass.CHEAP, OpClass.HEAVY, OpClass.RANDOM})


@dataclass(frozen=True, slots=True)
class Recompute(Fate):
    """Free it after forward and recompute it right before backward reads it."""

    kind: ClassVar[str] = "recompute"
    runs_again: ClassVar[bool] = True
    value: int

    @property
    def why(self) -> str:
        return "cheaper to recompute than to keep"

    @classmethod
    def allowed_values(cls, graph: Graph) -> frozenset[int]:
        return recomputable(graph)

    @classmethod
    def read(cls, graph: Graph, value: int, entry: Mapping[str, Any], given: Given) -> Recompute:
        return cls(value)


def recomputable(graph: Graph) -> frozenset[int]:
    """The values that forward may free because running their operators again would give the same.

    Writes, messages between processes and unknown operators happen once; a draw can be repeated where its generator's
    state can be kept. Outputs are kept by the caller anyway. And an operator can only run again while its operands are
    what they were: new contents of inputs and buffers are copied over the old ones before backward runs.
    """
    changing = changing_storages(graph)
    ours = owned(graph)
    return frozenset(
        value
        for op in graph.ops
        if op.forward and op.kind is not OpClass.VIEW and _can_run_again(graph, op, changing)
        for value in results_of_copy(op)
        if value in ours
    )


def _can_run_again(graph: Graph, op: Op, changing: set[int]) -> bool:
    if not isinstance(op.target, OpOverload):
        return False
    if op.kind is OpClass.RANDOM:
        known = kind_of(device_of(graph, op)) in KINDS
        if not known or op.target.overloadpacket.__name__ not in DRAWS_BY_SHAPE:
            return False
    if op.kind not in RUN_AGAIN:
        return False
    statistics = op.args[3:5] if is_training_batch_norm(op) else ()
    unread = {argument.value for argument in statistics if isinstance(argument, Ref)}
    return not any(graph.values[read].storage in changing for read in op.reads if read not in unread)


def results_of_copy(op: Op) -> tuple[int | None, ...]:
    """What a copy of an operator makes: of BatchNorm, not the running statistics, which are counted once."""
    return op.writes[:3] if is_training_batch_norm(op) else op.writes


def device_of(graph: Graph, op: Op) -> str:
    """The device of an operator's first result."""
    (value, *_) = (value for value in op.writes if value is not None)
    storage = graph.values[value].storage
    assert storage is not None
    return graph.storages[storage].device
