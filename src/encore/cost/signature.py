"""Operator calls by what their cost depends on, and whether they may run on random operands."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from encore.devices import is_here
from encore.graph import Graph, Op, OpClass
from encore.graph.random_ops import DrawAgain
from encore.graph.torch_private import OpOverload
from encore.graph.values import Ref
from encore.rnn import WORKSPACES

TAKES_EMPTY_OPERANDS = frozenset(
    {
        *WORKSPACES,
        torch.ops.aten._embedding_bag_backward.default,
        torch.ops.aten._embedding_bag_per_sample_weights_backward.default,
    }
)
"""Operators that may be probed with empty operands: Encore's own, and those that PyTorch calls with one (the bag of
every index, which `mode="sum"` does not compute)."""


def call_signature(graph: Graph, op: Op) -> str:
    """Everything that a measurement of the call depends on, as text: calls with equal signatures are measured once."""

    def text(argument: Any) -> str:
        if isinstance(argument, Ref):
            value = graph.values[argument.value]
            device = "" if value.storage is None else graph.storages[value.storage].device
            return _layout(value.dtype, value.shape, value.stride, device)
        if isinstance(argument, tuple | list):
            return f"({','.join(text(item) for item in argument)})"
        return repr(argument)

    options = ",".join(f"{key}={text(argument)}" for key, argument in sorted(op.kwargs.items()))
    return f"{_name(op.target)} {text(op.args)} {options} threads={torch.get_num_threads()}"


@functools.lru_cache(maxsize=4096)
def _layout(dtype: torch.dtype | None, shape: tuple[int, ...], stride: tuple[int, ...], device: str) -> str:
    return f"{dtype}{list(shape)}{list(stride)}{device}"


@functools.lru_cache(maxsize=4096)
def _name(target: Any) -> str:
    return str(target)


def is_pure_aten(op: Op) -> bool:
    """Return whether an operator is PyTorch's own, draws nothing and writes to nothing: it can run on random
    operands."""
    if not isinstance(op.target, OpOverload):
        return False
    return op.kind in (OpClass.CHEAP, OpClass.HEAVY) or (op.kind is OpClass.OPAQUE and op.target.namespace == "aten")


def as_first_drawn(op: Op) -> Op:
    """Return the draw that an operator repeats; the operator itself if it repeats none."""
    if not isinstance(op.target, DrawAgain):
        return op
    drawn = dataclasses.replace(op, target=op.target.target, args=op.args[1:], kind=OpClass.RANDOM)
    return dataclasses.replace(drawn, reads=op.reads[1:])


def draws_from_aten(op: Op) -> bool:
    """Return whether it draws with an operator of PyTorch's own from a default generator, whose state can be
    restored."""
    if op.kind is not OpClass.RANDOM or getattr(op.target, "namespace", "") != "aten":
        return False
    return not any(isinstance(argument, torch.Generator) for argument in (*op.args, *op.kwargs.values()))


def can_run(graph: Graph, op: Op) -> bool:
    """Return whether operands for it can be allocated: their devices are here, and their layouts are known."""
    for value in op.reads:
        storage = graph.values[value].storage
        if 0 in graph.values[value].shape and op.target not in TAKES_EMPTY_OPERANDS:
            return False  # some kernels crash on empty operands
        if storage is None or (not graph.values[value].stride and graph.values[value].shape):
            return False
        if not is_here(graph.storages[storage].device):
            return False
    return True
