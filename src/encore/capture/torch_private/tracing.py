"""AOTAutograd and its tracers: from a Dynamo graph to the joint graph, and what is active while a graph is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.collect_metadata_analysis import coerce_tangent_and_suggest_memory_format
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from encore.capture.torch_private.autograd_node import Groups, hooked_nodes
from encore.capture.torch_private.eager_kernels import eager_operators
from encore.graph.torch_private import FakeTensorMode

Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]


Emit = Callable[[fx.GraphModule], Callable[..., Any]]


def trace_joint(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    partition: Partition,
    forward: Emit,
    backward: Emit,
    takes_missing_gradients: Callable[[], bool],
    groups: Callable[[Sequence[Any]], Groups],
    marks_outputs: bool,
) -> Callable[..., Any]:
    """Run AOTAutograd on a Dynamo graph: `partition` splits the joint graph, `forward` and `backward` compile its
    parts. For an output without gradient, backward is given None if it `takes_missing_gradients`, else zeros. `groups`
    are the inputs whose gradients may leave backward before its end. Outputs of symbolic sizes are marked for graphs
    that follow in the step, if there are any."""

    def partition_fn(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _inputs: forward(graph),
        bw_compiler=lambda graph, _inputs: backward(graph),
        inference_compiler=lambda graph, _inputs: make_boxed_func(graph.forward),
        partition_fn=partition_fn,
        decompositions={},
    )
    with eager_operators(), compile_settings(), hooked_nodes(takes_missing_gradients, groups, marks_outputs):
        return compiler(module, inputs)


@contextlib.contextmanager
def compile_settings() -> Iterator[None]:
    """PyTorch's settings while a graph is planned and its kernels are compiled."""
    # Donated buffers may be overwritten by backward, which forbids retain_graph; Encore never writes over saved values.
    # `fallback_random` keeps draws whose result is not read: they advance the generator.
    settings = functorch_config.patch(donated_buffer=False, enable_autograd_cache=False)
    with settings, inductor_config.patch(fallback_random=True):
        yield


def trace_functional(
    function: Callable[[list[Any]], list[Any]], tensors: Sequence[torch.Tensor], mode: FakeTensorMode
) -> fx.Graph:
    """Trace the operators that a function runs on fake tensors, with writes to its intermediates functionalized:
    AOTAutograd's trace without its treatment of inputs and outputs. To be called inside `eager_operators`."""
    functionalized_here = torch._C.DispatchKeySet(DispatchKey.Functionalize)

    def run(*given: torch.Tensor) -> list[Any]:
        with torch._C._ExcludeDispatchKeyGuard(functionalized_here):
            found = function([to_fun(tensor) for tensor in given])
        return [from_fun(tensor) for tensor in found]

    one_thread = torch.autograd.set_multithreading_enabled(False)
    with mode, enable_python_dispatcher(), FunctionalTensorMode(), one_thread, torch.enable_grad():
        return make_fx(run, decomposition_table={}, _disable_torch_fn_metadata_mode=True)(*tensors).graph


def last_traced_node() -> fx.Node:
    """Inside `trace_functional`: the last node of the graph so far."""
    mode = get_proxy_mode()
    assert mode is not None
    return next(iter(reversed(mode.tracer.graph.nodes)))


def was_written(tensor: torch.Tensor) -> bool:
    """Inside `trace_functional`: return whether the function has written to this operand."""
    return has_data_mutation(tensor)


def tangent_like(output: torch.Tensor) -> torch.Tensor:
    """Return the fake gradient that AOTAutograd traces with for a fake output."""
    with output.fake_mode:  # type: ignore[attr-defined]
        return coerce_tangent_and_suggest_memory_format(output)[0]


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def casts_automatically() -> bool:
    """Return whether autocast is enabled for any device."""
    return torch._C._is_any_autocast_enabled()


def traces_here() -> bool:
    """Return whether this thread is tracing, for AOTAutograd, `make_fx` or `torch.export`."""
    return get_proxy_mode() is not None or TracingContext.try_get() is not None


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Suspend tracing and autocast: tensors created inside are real, operators run when they are called."""
    with _disable_current_modes(), torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Suspend tracing and the Python kernels that replace C++ ones; autocast stays as it is."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


def plain_callable(module: fx.GraphModule) -> Callable[..., Any]:
    return make_boxed_func(module.forward)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes one list and empties it as boxed."""

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
