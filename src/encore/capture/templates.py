"""Keys by which calls are equal, and traced calls as templates that can be pasted for every equal call."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from encore.capture.call_trace import Arrival, CallTrace, NotRepeatableError, layout_of
from encore.capture.layouts import TensorLayout
from encore.graph import OpClass, classify
from encore.graph.torch_private import OpOverload


def frozen(argument: Any) -> Hashable:
    """A key that is equal for arguments with which a call does the same. (`1`, `1.0` and `True` are equal in
    Python.)"""
    if isinstance(argument, fx.Node):
        return frozen(argument.meta.get("example_value"))
    if isinstance(argument, torch.Tensor):
        return (layout_of(argument), argument.requires_grad)
    if isinstance(argument, tuple | list):
        return (type(argument), *(frozen(item) for item in argument))
    if isinstance(argument, dict):
        return tuple((key, frozen(item)) for key, item in argument.items())
    if isinstance(argument, slice):
        return (slice, frozen(argument.start), frozen(argument.stop), frozen(argument.step))
    if isinstance(argument, float):
        return (float, repr(argument))
    if not isinstance(argument, Hashable) or isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise NotRepeatableError(f"it takes a {type(argument).__name__}")
    return (type(argument), argument)


class TensorWindow(NamedTuple):
    """The memory of a traced tensor: a storage of its own, or that of a tensor traced before it."""

    home: fx.Node | None
    position: int
    """The position among the results of `home`."""
    offset: int
    """From the first element of that tensor."""
    layout: TensorLayout
    bytes: int


NEVER_PASTED = frozenset({OpClass.MUTATING, OpClass.COLLECTIVE})


@dataclass(frozen=True, slots=True)
class Template:
    """A traced call, ready to be pasted."""

    trace: CallTrace
    windows: dict[fx.Node, tuple[TensorWindow | None, ...]]
    """For every node, by position of its results."""


def template_of(trace: CallTrace) -> Template:
    windows: dict[fx.Node, tuple[TensorWindow | None, ...]] = {}
    homes: dict[int, tuple[fx.Node, int, int]] = {}
    tangents = [result.tangent for result in trace.results if result.tangent is not None]
    for node in (*trace.operands, *tangents, *trace.forward, *trace.backward):
        if isinstance(node, Arrival):
            continue
        _check_computes(node)
        windows[node] = tuple(
            None if tensor is None else _window_of(node, position, tensor, homes)
            for position, tensor in enumerate(tensors_of(node))
        )
    return Template(trace, windows)


def _check_computes(node: fx.Node) -> None:
    if node.op != "call_function" or node.target is operator.getitem:
        return
    if not isinstance(node.target, OpOverload) or classify(node.target) in NEVER_PASTED:
        raise NotRepeatableError(f"{node.target} does more than compute")
    if "as_strided" in node.target.overloadpacket.__name__:
        raise NotRepeatableError(f"the offset of {node.target} is relative to a whole storage")


def _window_of(node: fx.Node, position: int, tensor: Any, homes: dict[int, tuple[fx.Node, int, int]]) -> TensorWindow:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_neg():
        raise NotRepeatableError(f"{node.target} returns something that is not a plain tensor")
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset())
    home = homes.setdefault(storage._cdata, (node, position, offset))
    is_first = home[:2] == (node, position)
    return TensorWindow(
        home=None if is_first else home[0],
        position=home[1],
        offset=offset if is_first else offset - home[2],
        layout=layout_of(tensor),
        bytes=storage.nbytes(),
    )


def tensors_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the results of a node, as a tuple."""
    val = node.meta.get("val")
    return tuple(val) if isinstance(val, tuple | list) else (val,)
