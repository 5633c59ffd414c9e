"""Graphs built by hand: operators of a class, tensors of a size in bytes, and what backward reads of them."""

from __future__ import annotations

from typing import Any

import torch

from encore.graph import Graph, Op, Role, Storage, Value, classify
from encore.graph.values import Ref

aten = torch.ops.aten
CHEAP, HEAVY, VIEW, RANDOM = aten.tanh.default, aten.mm.default, aten.t.default, aten.bernoulli.default


class Drawing:
    """Draw forward operator by operator, then say what backward needs."""

    def __init__(self) -> None:
        self.graph = Graph([], [], [], [], [], [], [])
        self.tangent: int | None = None

    def primal(self, size: int, role: Role = Role.PARAMETER) -> int:
        value = self._value(size, role=role)
        self.graph.primals.append(value)
        self.graph.gradients.append(None)
        return value

    def run(self, target: Any, *operands: int, size: int = 0, module: str = "", forward: bool = True) -> int:
        """One operator; its result is a view of its first operand if the operator is one."""
        graph = self.graph
        kind, args = classify(target), tuple(Ref(value) for value in operands)
        reads = tuple(dict.fromkeys(operands))
        op = Op(len(graph.ops), f"op{len(graph.ops)}", target, args, {}, reads, (), False, kind, module, "sketch.py:1")
        op.forward = forward
        graph.ops.append(op)
        for value in reads:
            graph.values[value].readers.append(op.id)
        storage = graph.values[operands[0]].storage if target is VIEW else None
        op.writes = (self._value(size, producer=op.id, storage=storage),)
        return len(graph.values) - 1

    def cheap(self, *operands: int, size: int, module: str = "") -> int:
        return self.run(CHEAP, *operands, size=size, module=module)

    def heavy(self, *operands: int, size: int, module: str = "") -> int:
        return self.run(HEAVY, *operands, size=size, module=module)

    def view(self, operand: int) -> int:
        return self.run(VIEW, operand, size=self.graph.values[operand].bytes)

    def returns(self, value: int) -> None:
        self.graph.outputs.append(value)
        self.graph.returned.append(value)

    def needs(self, *values: int) -> None:
        """A gradient is computed from these."""
        if self.tangent is None:
            self.tangent = self._value(1, role=Role.TANGENT)
            self.graph.tangents.append(self.tangent)
        gradient = self.run(CHEAP, self.tangent, *values, size=1, forward=False)
        primal = self.primal(1)
        self.graph.gradients[self.graph.primals.index(primal)] = gradient

    def _value(
        self, size: int, role: Role | None = None, producer: int | None = None, storage: int | None = None
    ) -> int:
        graph = self.graph
        number = len(graph.values)
        if storage is None:
            storage = len(graph.storages)
            graph.storages.append(Storage(storage, size, "cpu"))
        graph.storages[storage].values.append(number)
        graph.values.append(Value(number, f"v{number}", storage, (size,), (1,), torch.uint8, size, producer, role))
        return number
