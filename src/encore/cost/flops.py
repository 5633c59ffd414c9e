"""Floating-point operations of the operators that compute more than they move: a table. A multiply-add counts as two.

Operators that are not in the table are assumed to be bound by memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from encore.graph import Graph, Op
from encore.graph.torch_private import packet_name
from encore.graph.values import Ref

Shape = tuple[int, ...]


def count_flops(graph: Graph, op: Op) -> float:
    """Return the operations of one call; 0 for operators that are bound by memory."""
    count = COUNTS.get(packet_name(op.target))
    return 0 if count is None else count(_Arguments(graph, op))


class _Arguments:
    """The arguments of a call by the names in its schema."""

    def __init__(self, graph: Graph, op: Op) -> None:
        names = [argument.name for argument in op.target._schema.arguments]
        self._given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
        self._defaults = {argument.name: argument.default_value for argument in op.target._schema.arguments}
        self._graph = graph
        self.results = [graph.values[value].shape for value in op.writes if value is not None]

    def __getitem__(self, name: str) -> Any:
        return self._given.get(name, self._defaults.get(name))

    def shape(self, *names: str) -> Shape:
        """The shape of the first of these arguments that is given."""
        for name in names:
            argument = self[name]
            if isinstance(argument, Ref):
                return self._graph.values[argument.value].shape
        return ()


def _product(left: str, right: str) -> Callable[[_Arguments], float]:
    """Matrices, or stacks of them: the product of each row of the left one with each column of the right one."""
    return lambda given: 2 * math.prod(given.shape(left)) * given.shape(right)[-1]


def _linear(given: _Arguments) -> float:
    return 2 * math.prod(given.shape("input")) * given.shape("weight")[0]


def _convolution(given: _Arguments) -> float:
    """One product for every filter and position of the result (of the source, if the convolution is transposed)."""
    weight = given.shape("weight")
    positions = given.shape("input") if given["transposed"] else given.results[0]
    return 2 * math.prod(positions) * math.prod(weight[1:])


def _convolution_backward(given: _Arguments) -> float:
    """As much as forward for the source's gradient, and for the weight's; the bias is a sum."""
    weight = given.shape("weight")
    positions = given.shape("input") if given["transposed"] else given.shape("grad_output")
    wanted = sum(bool(flag) for flag in given["output_mask"][:2])
    return 2 * wanted * math.prod(positions) * math.prod(weight[1:])


def _attention(given: _Arguments) -> float:
    """Scores, and the sum of values; half of both if attention is causal."""
    return (2 * _scores(given) + 2 * _mix(given)) * (0.5 if given["is_causal"] else 1)


def _attention_backward(given: _Arguments) -> float:
    """Scores again, their gradient, and the gradients of query, key and value."""
    return (6 * _scores(given) + 4 * _mix(given)) * (0.5 if given["is_causal"] else 1)


def _scores(given: _Arguments) -> float:
    return math.prod(given.shape("query")) * given.shape("key")[-2]


def _mix(given: _Arguments) -> float:
    return math.prod(given.shape("query")[:-1]) * math.prod(given.shape("value")[-2:])


def _dot(scores: int, mix: int) -> Callable[[_Arguments], float]:
    """Attention in blocks: how many products there are of the size of scores, and of the size of a mix of values."""
    return lambda given: (
        2 * scores * math.prod(given.shape("query")) * given.shape("keys")[-1]
        + 2 * mix * math.prod(given.shape("query")[:-1]) * math.prod(given.shape("values")[-2:])
    )


def _additive(per_number: int) -> Callable[[_Arguments], float]:
    """A tanh for every pair of query and key, which costs as much as this many operations."""
    return lambda given: per_number * math.prod(given.shape("query")) * given.shape("keys")[1]


def _recurrent(given: _Arguments) -> float:
    """A product with both weight matrices for every step of every sequence; the cell itself is negligible."""
    steps = math.prod(given.shape("input")[:-1])
    matrices = (("weight0", "weight1"), ("weight1", "weight2"))[given["weight0"] is None]  # backward counts from 1
    return 2 * steps * sum(math.prod(given.shape(name)) for name in matrices)


def _sequence(given: _Arguments) -> float:
    """Encore's recurrent layers: as above, and the projection of h if there is one."""
    return 2 * _rows(given) * _weights(given, "w_ih", "w_hh", "w_hr")


def _sequence_backward(given: _Arguments) -> float:
    """The products with each weight: for the gradient of its operand (the input's only if it is needed), for its own
    gradient, and for gates that were not saved and are recomputed."""
    passes = {"w_ih": bool(given["need_x"]), "w_hh": True, "w_hr": True}
    rebuilt = {"w_ih": bool(given["keep"]), "w_hh": bool(given["keep"]), "w_hr": False}
    times = {name: passes[name] + bool(given["need_weights"]) + rebuilt[name] for name in passes}
    return 2 * _rows(given) * sum(times[name] * _weights(given, name) for name in times)


def _rows(given: _Arguments) -> int:
    return math.prod(given.shape("x")[:-1])


def _weights(given: _Arguments, *names: str) -> int:
    return sum(math.prod(shape) for name in names if (shape := given.shape(name)))


COUNTS: dict[str, Callable[[_Arguments], float]] = {
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "_int_mm": _product("self", "mat2"),
    "_scaled_mm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2"),
    "addbmm": _product("batch1", "batch2"),
    "baddbmm": _product("batch1", "batch2"),
    "linear": _linear,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    **dict.fromkeys(("lstm_forward", "gru_forward", "elman_forward"), _sequence),
    **dict.fromkeys(("lstm_backward", "gru_backward", "elman_backward"), _sequence_backward),
    "dot_attention": _dot(1, 1),
    "dot_attention_backward": _dot(3, 2),
    "additive_scores": _additive(32),
    "additive_scores_backward": _additive(48),
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": lambda given: 2 * _recurrent(given),
}
"""By the operator's name without its overload."""
