"""The autograd node that a compiled graph runs as: the function that AOTAutograd builds, hooked into."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd.runtime_wrappers import _AOTDispatchAutogradFunctionFactory as AutogradFactory

_running_nodes = threading.local()


def running_node() -> Any:
    """Inside the forward or backward of a compiled graph: its autograd node, on which attributes can be set. None for
    graphs that always receive all gradients."""
    return getattr(_running_nodes, "node", None)


def keeps_graph() -> bool:
    """Inside a backward: return whether it was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


@contextlib.contextmanager
def _as_running(node: Any) -> Iterator[None]:
    before = running_node()
    _running_nodes.node = node
    try:
        yield
    finally:
        _running_nodes.node = before


@contextlib.contextmanager
def hooked_nodes(wanted: Callable[[], bool]) -> Iterator[None]:
    """While AOTAutograd compiles one graph (Dynamo compiles one at a time): set `running_node` in the autograd function
    that it builds and, if `wanted`, have autograd pass missing gradients as None instead of zeros."""
    build = AutogradFactory.build

    def build_hooked(factory: AutogradFactory) -> Any:
        # None would stand for buffers that backward may overwrite, and forbid retain_graph from the second step on.
        factory.spec.fw_metadata.bw_donated_idxs = []
        function: Any = build(factory)
        if wanted():
            forward, backward = function._fwd_fn, function._bwd_fn

            def run_forward(node: Any, *args: Any) -> Any:
                node.set_materialize_grads(False)
                with _as_running(node):
                    return forward(node, *args)

            def run_backward(gradients: Any, node: Any, *args: Any) -> Any:
                with _as_running(node):
                    return backward(gradients, node, *args)

            function._fwd_fn, function._bwd_fn = run_forward, run_backward
        return function

    AutogradFactory.build = build_hooked  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        AutogradFactory.build = build  # type: ignore[method-assign]
