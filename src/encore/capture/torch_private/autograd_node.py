"""The autograd node that a compiled graph runs as: the function that AOTAutograd builds, hooked into."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.runtime_wrappers import _AOTDispatchAutogradFunctionFactory as AutogradFactory

from encore.errors import DoubleBackwardError

ONLY_ONCE = (
    "double backward through a compiled model, as for a gradient penalty, is not supported: its operators have no "
    'second derivative. Run such a step as plain PyTorch: with torch.compiler.set_stance("force_eager"): ...'
)

_running_nodes = threading.local()


def running_node() -> Any:
    """Inside the forward or backward of a compiled graph: its autograd node, on which attributes can be set. None for
    graphs that always receive all gradients."""
    return getattr(_running_nodes, "node", None)


def keeps_graph() -> bool:
    """Inside a backward: return whether it was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Inside a backward: call this when the whole pass of autograd is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


@contextlib.contextmanager
def _as_running(node: Any) -> Iterator[None]:
    before = running_node()
    _running_nodes.node = node
    try:
        yield
    finally:
        _running_nodes.node = before


Groups = Sequence[Sequence[int]]
"""Inputs by number, those whose gradients leave backward first in the first group."""


@contextlib.contextmanager
def hooked_nodes(
    wanted: Callable[[], bool], groups: Callable[[Sequence[Any]], Groups], marks_outputs: bool
) -> Iterator[None]:
    """While AOTAutograd compiles one graph (Dynamo compiles one at a time): set `running_node` in the autograd function
    that it builds and, if `wanted`, have autograd pass missing gradients as None instead of zeros. If someone waits for
    single gradients, the node becomes a chain of nodes, by the `groups` of the inputs that it is called with."""
    build = AutogradFactory.build

    def build_hooked(factory: AutogradFactory) -> Any:
        described = factory.spec.fw_metadata
        # None would stand for buffers that backward may overwrite, and forbid retain_graph from the second step on.
        described.bw_donated_idxs = []
        # PyTorch 2.14 reads there which saved tensors are inputs, by their numbers in the first variant of the graph,
        # and detaches views of all others. Another variant saves others: all views are detached, as in 2.13.
        described.saved_tensor_is_graph_input = defaultdict(bool)  # type: ignore[attr-defined]
        # Tensors of symbolic sizes are marked for other graphs of Dynamo's: saved ones by number, too, and those that
        # the user gets.
        described.dynamic_saved_tensors_idxs = {}
        described.dynamic_outputs &= marks_outputs
        function: Any = build(factory)
        function._double_backward = _only_once
        if wanted():
            forward, backward = function._fwd_fn, function._bwd_fn

            def run_forward(node: Any, args: tuple[Any, ...], *rest: Any) -> Any:
                node.set_materialize_grads(False)
                node.encore_chain = _chains.__dict__.pop("next", None)
                with _as_running(node):
                    return forward(node, args if node.encore_chain is None else args[1:], *rest)

            def run_backward(gradients: Any, node: Any, *args: Any) -> Any:
                with _as_running(node):
                    found = backward(gradients, node, *args)
                return found if node.encore_chain is None else (None, *found)

            function._fwd_fn, function._bwd_fn = run_forward, run_backward
            apply = function.apply

            def apply_chain(*args: Any) -> Any:
                parts = groups(args) if torch.is_grad_enabled() and _someone_waits(args) else ()
                chained = _chained(args, parts, described.input_info) if parts else None
                if chained is None:
                    return apply(*args)
                _chains.next = Chain(parts[0])
                try:
                    return apply(_relays(_chains.next, args, chained), *_detached(args, chained))
                finally:
                    _chains.__dict__.pop("next", None)

            function.apply = apply_chain
        return function

    AutogradFactory.build = build_hooked  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        AutogradFactory.build = build  # type: ignore[method-assign]


# -- gradients that leave backward one after the other ---------------------------------------------------------------
#
# Autograd collects what a node returns when it returns. So a graph whose gradients are waited for is a chain of nodes:
# the first runs backward until the first gradients are final and returns them, the next one goes on from there. A
# tensor without elements, which each passes to the next, keeps them in order; autograd's engine runs the collecting
# nodes (and their hooks) before the next of the chain, since these come first in its queue.


class Chain:
    """What the nodes of a chain share: what continues the backward that runs, by autograd's number for it."""

    def __init__(self, first: Sequence[int]) -> None:
        self.first = first
        """The inputs whose gradients the first node returns."""
        self.running: dict[int, Callable[[Sequence[int]], list[Any]]] = {}


_chains = threading.local()


def chain_of(node: Any) -> Chain | None:
    """The chain that an autograd node of a compiled graph is the first of."""
    return getattr(node, "encore_chain", None)


def backward_number() -> int:
    """Inside a backward: autograd's number for it."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return backward_number() != -1


def _someone_waits(args: Sequence[Any]) -> bool:
    """Return whether hooks, or the reducer of DistributedDataParallel, take gradients as soon as they are there."""
    parallel = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if parallel is not None and parallel.require_backward_grad_sync:
        return True
    leaves = (one for one in args if isinstance(one, torch.Tensor) and one.requires_grad and one.is_leaf)
    return any(leaf._post_accumulate_grad_hooks for leaf in leaves)


def _chained(args: Sequence[Any], groups: Groups, described: Sequence[Any]) -> list[list[int]] | None:
    """The inputs of each node but the first: later groups, and last all others. None if there is no such chain."""
    inputs = [number for number, tensor in enumerate(args) if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    early = {number for group in groups for number in group}
    rest = [number for number in inputs if number not in early]
    later = [*(list(group) for group in groups[1:]), rest]
    moved = [number for group in later for number in group]
    if not rest or len(described) != len(args) or not early.issubset(inputs):
        return None
    if any(described[number].mutates_data or described[number].mutates_metadata for number in moved):
        return None
    return later


class _Relay(torch.autograd.Function):
    """A later node of a chain."""

    @staticmethod
    def forward(node: Any, chain: Chain, numbers: list[int], _: Any, *inputs: Any) -> torch.Tensor:  # type: ignore[override]
        node.set_materialize_grads(False)
        node.chain, node.numbers = chain, numbers
        return torch.empty(0)

    @staticmethod
    def backward(node: Any, _: Any) -> Any:  # type: ignore[override]
        go_on = node.chain.running.get(backward_number())
        with torch._C._DisableAutocast(), torch.no_grad():
            found = [None] * len(node.numbers) if go_on is None else go_on(node.numbers)
        if torch.is_grad_enabled():
            found = list(_OnlyOnce.apply(torch.empty(0, requires_grad=True), *found))
        return (None, None, None, *found)


class _OnlyOnce(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(node: Any, _: Any, *gradients: Any) -> Any:  # type: ignore[override]
        return gradients

    @staticmethod
    def backward(node: Any, *_: Any) -> Any:  # type: ignore[override]
        raise DoubleBackwardError(ONLY_ONCE)


def _only_once(_: Any, run: Callable[[], Sequence[Any]], __: Any) -> tuple[Any, ...]:
    """What a backward with `create_graph=True` returns, in place of AOTAutograd's own."""
    with torch.no_grad():
        found = run()
    return tuple(_OnlyOnce.apply(torch.empty(0, requires_grad=True), *found))


def _relays(chain: Chain, args: Sequence[Any], chained: Sequence[list[int]]) -> Any:
    """Build the chain from its end; return what the first node reads."""
    token: Any = None
    for numbers in reversed(chained):
        token = _Relay.apply(chain, numbers, token, *(args[number] for number in numbers))
    return token


def _detached(args: Sequence[Any], chained: Sequence[list[int]]) -> list[Any]:
    """The arguments of the first node: later nodes have the gradients of these."""
    moved = {number for numbers in chained for number in numbers}
    return [value.detach() if number in moved else value for number, value in enumerate(args)]
