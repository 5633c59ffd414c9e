"""Checks of forward or backward while it runs: no operator may change a value that is still needed.

An operator may write to the memory of a live value only if it is scheduled to write over that operand, and no other
live value is in that memory. Checksums of all live storages are compared after every operator. The results of an
operator must be where the graph has them: a view in the storage of its operand, everything else in a storage of its
own, with the graph's shape and strides. Checksums allocate no tensor memory, so that peaks stay the same.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from encore.errors import CheckError
from encore.graph import Graph, Op, OpClass
from encore.graph.ops import is_codec
from encore.graph.tier_ops import StoreTo
from encore.graph.torch_private import OpOverload
from encore.schedule import Action, Free, Fused, Load, Run, Store, Wait

UNKNOWN = frozenset({OpClass.OPAQUE, OpClass.COLLECTIVE, OpClass.MUTATING})
"""Operators whose results may be in any storage."""

SCRATCH: dict[Any, int] = {
    torch.ops.aten.mkldnn_rnn_layer_backward.default: [
        argument.name for argument in torch.ops.aten.mkldnn_rnn_layer_backward.default._schema.arguments
    ].index("workspace")
}
"""Operators that write to an operand of theirs alone, although their schema does not say so -> its position."""


def made_by(graph: Graph, action: Action) -> tuple[int, ...]:
    """The values that an action defines. A load defines its value in its wait."""
    if isinstance(action, Free | Load):
        return ()
    if isinstance(action, Fused):
        return tuple(action.writes)
    op = graph.ops[action.op]
    if isinstance(action, Wait) and isinstance(op.target, StoreTo):
        return ()
    return tuple(value for value in op.writes if value is not None)


@dataclass(frozen=True)
class Phase:
    """The actions and arguments of a lowered function."""

    graph: Graph
    name: str
    actions: Sequence[Action]
    given: Sequence[int]

    @functools.cached_property
    def last_read(self) -> dict[int, int]:
        """For each value, the last action that reads it."""
        found: dict[int, int] = {}
        for position, action in enumerate(self.actions):
            if isinstance(action, Fused):
                found.update(dict.fromkeys(action.reads, position))
            elif isinstance(action, Run | Store | Load):
                found.update(dict.fromkeys(self.graph.ops[action.op].reads, position))
        return found


class CheckedPhase:
    """Checks one run of a phase. The lowered function calls `after` for every action and `free` before every `del`."""

    def __init__(self, phase: Phase, *given: Any) -> None:
        self.phase = phase
        self.graph = phase.graph
        self.alive: dict[int, torch.Tensor] = {}
        self.sums: dict[int, int] = {}
        """Address of a storage -> checksum of its bytes."""
        self.arriving: set[int] = set()
        """Storages that a collective fills until its wait."""
        self._define(zip(phase.given, given, strict=True))
        self._define(phase.graph.constants.items())

    def after(self, position: int, *made: Any) -> None:
        """Compare all live values, and add the results of the action."""
        action = self.phase.actions[position]
        ops = action.ops if isinstance(action, Fused) else (action.op,)  # type: ignore[union-attr]
        op = self.graph.ops[ops[-1]]
        taken = self._taken(action)
        self._check_taken(op, taken)
        written = {_address(self.alive[value]) for value in taken if value in self.alive}
        written |= self._declared_writes(op) if isinstance(action, Run) else set()
        self._compare(op, written)
        results = dict(zip(made_by(self.graph, action), made, strict=True))
        if isinstance(action, Run):
            self._check_places(op, results, written)
        for value, tensor in results.items():
            if isinstance(tensor, torch.Tensor) and not self._is_code(value):
                self._check_layout(op, value, tensor)
        for value in taken:
            self.alive.pop(value, None)
        for address in written:
            self.sums.pop(address, None)
        if op.kind is OpClass.COLLECTIVE:
            self._arrive(op, results)
        self._define(results.items())
        self._define((value, tensor) for value, tensor in self.alive.items() if _address(tensor) in written)
        for value in taken:
            if self.phase.last_read.get(value, -1) > position:
                self._fail(op, f"wrote over {self._text(value)}, which is still needed")

    def free(self, *values: int) -> None:
        """Remove values whose names are deleted."""
        for value in values:
            self.alive.pop(value, None)
        addresses = {_address(tensor) for tensor in self.alive.values()}
        self.sums = {address: total for address, total in self.sums.items() if address in addresses}

    # -- what an operator may write ------------------------------------------------------------------------------------

    def _taken(self, action: Action) -> tuple[int, ...]:
        """The operands that an action is scheduled to write over."""
        if isinstance(action, Fused):
            return tuple(operand for _, operand in action.over)
        return (action.over,) if isinstance(action, Run) and action.over is not None else ()

    def _check_taken(self, op: Op, taken: Iterable[int]) -> None:
        for value in taken:
            address = _address(self.alive[value])
            for other, tensor in self.alive.items():
                if other not in taken and _address(tensor) == address:
                    self._fail(op, f"wrote over {self._text(value)}, and {self._text(other)} is in the same memory")

    def _declared_writes(self, op: Op) -> set[int]:
        """The storages that an operator writes to by its schema."""
        if op.target in SCRATCH:
            return {_address(self.alive[op.args[SCRATCH[op.target]].value])}
        known = isinstance(op.target, OpOverload) and op.kind not in (OpClass.MUTATING, OpClass.COLLECTIVE)
        if known or op.kind not in UNKNOWN:
            return set()
        return {_address(self.alive[value]) for value in op.reads if value in self.alive} - {0}

    def _arrive(self, op: Op, results: dict[int, Any]) -> None:
        waited = {_address(self.alive[value]) for value in op.reads if value in self.alive}
        if "wait" in str(op.target):
            self.arriving -= waited
        else:
            self.arriving |= {_address(tensor) for tensor in results.values() if isinstance(tensor, torch.Tensor)}

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _compare(self, op: Op, written: set[int]) -> None:
        looked: set[int] = set()
        for value, tensor in self.alive.items():
            address = _address(tensor)
            if address in looked or address in written or address in self.arriving or address not in self.sums:
                continue
            looked.add(address)
            if _checksum(tensor) != self.sums[address]:
                self._fail(op, f"changed {self._text(value)}, which is still needed")

    def _check_places(self, op: Op, results: dict[int, Any], written: set[int]) -> None:
        if op.kind in UNKNOWN:
            return
        operands = {_address(self.alive[value]) for value in op.reads if value in self.alive}
        for value, tensor in results.items():
            address = _address(tensor) if isinstance(tensor, torch.Tensor) else 0
            if not address or self.graph.values[value].storage is None:
                continue
            if op.kind is OpClass.VIEW and operands and address not in operands:
                self._fail(op, f"returned {self._text(value)} in new memory, and it is a view in the graph")
            if op.kind is not OpClass.VIEW and address not in written and address in self.sums:
                self._fail(op, f"returned {self._text(value)} in the memory of a live value")

    def _check_layout(self, op: Op, number: int, tensor: torch.Tensor) -> None:
        value = self.graph.values[number]
        if value.storage is None or tensor.layout is not torch.strided or len(value.stride) != len(value.shape):
            return
        found = _layout(tensor.shape, tensor.stride(), tensor.dtype)
        if found != _layout(value.shape, value.stride, value.dtype):
            self._fail(
                op,
                f"returned {value.name} as {tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}, "
                f"and the graph has {value.dtype}{list(value.shape)} with strides {list(value.stride)}",
            )

    def _is_code(self, value: int) -> bool:
        """Return whether a value is a code, whose size is only bounded."""
        producer = self.graph.producer(value)
        return producer is not None and (is_codec(producer.target) or not isinstance(producer.target, OpOverload))

    def _define(self, values: Iterable[tuple[int, Any]]) -> None:
        for value, tensor in values:
            if isinstance(tensor, torch.Tensor):
                self.alive[value] = tensor
                address = _address(tensor)
                if address and address not in self.sums:
                    self.sums[address] = _checksum(tensor)

    def _fail(self, op: Op, what: str) -> NoReturn:
        where = f" of {op.module}" if op.module else ""
        where += f" ({op.source})" if op.source else ""
        raise CheckError(
            f"ENCORE_CHECK: in {self.phase.name}, the operator {op.name} = {op.target}{where} {what}. This is a bug in "
            'Encore: please report it with the model; lowering="eager" or skip= may avoid it'
        )

    def _text(self, number: int) -> str:
        value = self.graph.values[number]
        readers = [self.graph.ops[reader].name for reader in value.readers]
        return f"{value.name} {list(value.shape)} (read by {', '.join(readers) or 'the caller'})"


def _layout(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """A key for layouts: strides of dimensions with one element do not matter."""
    if 0 in shape:
        return tuple(shape), dtype
    return tuple(shape), tuple(step for size, step in zip(shape, stride, strict=True) if size > 1), dtype


def _address(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage; 0 for one without bytes, or without a storage."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # sparse, oneDNN's own layouts
        return 0


def _checksum(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu":
        storage = storage.cpu()
    return zlib.crc32((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
