"""Seconds by a roofline model, for operators and kernels that are not measured.

An operator is assumed to reach the machine's full arithmetic rate or bandwidth, whichever takes longer, plus the time
of its call: a lower bound, and good enough to compare. Functions such as tanh take time even in registers; they are
counted by the element, which matters in fused kernels, where little is moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from encore.cost.flops import count_flops
from encore.cost.rates import AssumedRates, Rates
from encore.graph import Graph, Op, OpClass
from encore.graph.torch_private import packet_name
from encore.graph.values import Value, span_bytes
from encore.schedule import Fused

OPERATOR_CALL = 2.5
KERNEL_CALL = 4.0
"""A call that allocates a result, and one of a compiled kernel, in calls of a view."""

NANOSECONDS: dict[str, float] = {
    "exp": 0.3, "exp2": 0.3, "expm1": 0.6, "log": 0.4, "log1p": 0.6, "log2": 0.5, "sigmoid": 0.4, "silu": 0.4,
    "tanh": 0.6, "erf": 0.6, "gelu": 0.8, "gelu_backward": 1.2, "silu_backward": 0.6, "softplus": 1.0, "mish": 1.5,
    "mish_backward": 2.0, "elu": 0.5, "logsumexp": 0.4, "_softmax": 0.4, "_log_softmax": 0.4,
    "_log_softmax_backward_data": 0.4, "sin": 0.6, "cos": 0.6, "tan": 1.2, "pow": 1.5, "sqrt": 0.15, "rsqrt": 0.2,
    "dropout_mask": 0.5, "dropout_noise": 2.0, "bernoulli_noise": 2.0, "native_dropout": 2.0, "bernoulli": 2.0,
    "rand": 2.0, "rand_like": 2.0, "randn": 3.0, "randn_like": 3.0,
}  # fmt: skip
"""By operator, for one thread and element, with vector registers of 512 bits; twice that with 256."""
OTHERWISE = 0.05
"""Additions, products, comparisons."""

GATHERS = frozenset({"embedding", "index", "index_select", "gather", "take"})
"""Operators that read no more of their first operand than they return."""


def op_roofline(graph: Graph, op: Op, rates: Rates) -> float:
    """Seconds of one operator."""
    read = (op.writes[0], *op.reads[1:]) if packet_name(op.target) in GATHERS else op.reads
    values = _values(graph, (*read, *op.writes))
    device = _device(graph, values)
    moved = sum(map(_bytes, values)) / rates.bandwidth(device)
    count = count_flops(graph, op)
    computed = count / rates.flops(device, values[0].dtype) if count else _arithmetic(graph, op, device)
    return OPERATOR_CALL * rates.view + max(moved, computed)


def kernel_roofline(graph: Graph, action: Fused, rates: Rates) -> float:
    """Seconds of one fused kernel: operands and results are moved, intermediate values are only computed."""
    values = _values(graph, (*action.reads, *action.writes))
    device = _device(graph, values)
    moved = sum(map(_bytes, values)) / rates.bandwidth(device)
    inside = (graph.ops[number] for number in action.ops)
    return KERNEL_CALL * rates.view + moved + sum(_arithmetic(graph, op, device) for op in inside)


class AssumedSeconds:
    """The seconds of operators and kernels by arithmetic and bytes, at assumed rates: the same in every process."""

    def __init__(self) -> None:
        self.rates = AssumedRates()

    def __call__(self, graph: Graph, op: Op | Fused, over: int | None = None) -> float:
        if isinstance(op, Fused):
            return kernel_roofline(graph, op, self.rates)
        return self.rates.view if op.kind is OpClass.VIEW else op_roofline(graph, op, self.rates)

    def inside(self, graph: Graph, op: Op) -> float:
        return op_roofline(graph, op, self.rates)


def _arithmetic(graph: Graph, op: Op, device: str) -> float:
    """Seconds in registers: for a reduction, by the elements that it reads; nothing on CUDA."""
    if device != "cpu" or op.kind is OpClass.VIEW:
        return 0.0
    elements = max((math.prod(value.shape) for value in _values(graph, (*op.reads, *op.writes))), default=0)
    return elements * NANOSECONDS.get(packet_name(op.target), OTHERWISE) * 1e-9 / torch.get_num_threads()


def _values(graph: Graph, numbers: Iterable[int | None]) -> list[Value]:
    found = (graph.values[number] for number in numbers if number is not None)
    return [value for value in found if value.storage is not None]


def _bytes(value: Value) -> int:
    """The bytes that are moved: an expanded tensor is read from cache after the first time, a slice skips elements."""
    return min(span_bytes(value), value.bytes)


def _device(graph: Graph, values: list[Value]) -> str:
    """The device that it runs on: the accelerator if any value is there."""
    devices = [graph.storages[value.storage].device for value in values if value.storage is not None]
    return next((device for device in devices if device != "cpu"), "cpu")
