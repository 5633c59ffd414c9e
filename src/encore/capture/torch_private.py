"""Every private door of PyTorch that capture goes through; torch is pinned to one minor version for their sake.

What is relied upon: AOTAutograd hands a partition function one joint graph and takes back two modules whose inputs and
outputs follow its convention; `OpOverload.py_kernels` holds the Python decompositions that would replace what eager
runs; Dynamo tells a graph why it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.callback
import torch._dynamo.external_utils
import torch._dynamo.trace_rules
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import eval_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.utils import counters as dynamo_counters
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._functorch._aot_autograd.collect_metadata_analysis import coerce_tangent_and_suggest_memory_format
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    SubclassGetAttrAOTInput,
)
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._functorch._aot_autograd.runtime_wrappers import _AOTDispatchAutogradFunctionFactory as AutogradFactory
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from encore.graph import OpClass, Primal, Role, classify
from encore.graph.random_ops import traced_dropout, traced_dropout_
from encore.graph.values import Value

log = logging.getLogger("encore")
aten = torch.ops.aten
DispatchKey = torch._C.DispatchKey

# Decompositions that only tracing sees: eager runs a C++ kernel instead, with other numbers, other memory or another
# speed. Operators missing here (batch norm, one_hot, ...) need theirs: their C++ form mutates or depends on data.
ONLY_IN_TRACING = (
    "dropout", "dropout_", "matmul", "lstm", "gru", "rnn_tanh", "rnn_relu", "softshrink", "hardshrink",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa", "multi_margin_loss", "multilabel_margin_loss_forward",
)  # fmt: skip
RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
COMPOSITE_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
INSTEAD: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: traced_dropout,
    aten.dropout_.default: traced_dropout_,
}
"""What tracing runs in their place, where it is not the C++ kernel; `recurrent.py` adds its own."""

# Fake kernels that keep the strides of their input where the CPU kernels do not: operator -> position of the input.
# A view traced on the wrong strides is refused at run time.
LAID_OUT_ANEW = {aten._native_batch_norm_legit_functional.default: 0, aten.native_batch_norm_backward.default: 1}

_eager_lock = threading.RLock()
_eager_scopes = contextlib.ExitStack()
_eager_depth = 0


@contextlib.contextmanager
def eager_operators() -> Iterator[None]:
    """Trace what eager PyTorch runs: composite operators through their C++ kernels, results laid out as those do."""
    global _eager_depth
    with _eager_lock:
        _eager_depth += 1
        if _eager_depth == 1:
            _enter_eager_operators()
    try:
        yield
    finally:
        with _eager_lock:
            _eager_depth -= 1
            if _eager_depth == 0:
                _eager_scopes.close()


def _enter_eager_operators() -> None:
    _eager_scopes.callback(FakeTensorMode.cache_clear)
    for packet in ONLY_IN_TRACING:
        for overload in getattr(aten, packet).overloads():
            operator = getattr(getattr(aten, packet), overload)
            _eager_scopes.callback(operator._dispatch_cache.clear)
            for key in COMPOSITE_KEYS:
                _put(operator.py_kernels, key, INSTEAD.get(operator))
            operator._dispatch_cache.clear()
    for operator, position in LAID_OUT_ANEW.items():
        _put(decomposition_table, operator, _laid_out_anew(decomposition_table[operator], position))
    FakeTensorMode.cache_clear()


def _put(table: Any, key: Any, kernel: Callable[..., Any] | None) -> None:
    """Put a kernel in place of another, or of none, until the scopes close."""
    before = table.pop(key, None)
    if kernel is not None:
        table[key] = kernel
    if before is not None:
        _eager_scopes.callback(table.__setitem__, key, before)
    else:
        _eager_scopes.callback(table.pop, key, None)


def _laid_out_anew(fake: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A fake kernel whose first result is contiguous in the memory format of its input, as on CPU."""

    @functools.wraps(fake)  # fake tensors look at a kernel's module and name before they trust it
    def run(*args: Any, **kwargs: Any) -> Any:
        first, *others = fake(*args, **kwargs)
        source = args[position]
        if first is not None and source.device.type == "cpu":
            first = torch.empty_like(first, memory_format=suggest_memory_format(source))
        return (first, *others)

    return run


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
) -> Callable[..., Any]:
    """Run AOTAutograd on a Dynamo graph: `partition` sees the joint graph, then both callables are asked for. Backward
    is given None for an output that receives no gradient if it `takes_missing_gradients`, else zeros."""

    def partition_fn(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    compiler = aot_autograd(
        fw_compiler=lambda graph, _inputs: forward(graph),
        bw_compiler=lambda graph, _inputs: backward(graph),
        inference_compiler=lambda graph, _inputs: make_boxed_func(graph.forward),
        partition_fn=partition_fn,
        decompositions={},
    )
    with eager_operators(), compile_settings(), _hooked_nodes(takes_missing_gradients):
        return compiler(module, inputs)


@contextlib.contextmanager
def compile_settings() -> Iterator[None]:
    """PyTorch's settings while a graph is planned and its kernels are compiled."""
    # Donated buffers may be overwritten by backward, which forbids retain_graph; Encore never writes over saved values.
    # `fallback_random` keeps draws that nobody reads: they move the generator.
    settings = functorch_config.patch(donated_buffer=False, enable_autograd_cache=False)
    with settings, inductor_config.patch(fallback_random=True):
        yield


# -- the autograd node that a graph runs as ---------------------------------------------------------------------------

_running_nodes = threading.local()


def running_node() -> Any:
    """Inside the forward or backward of a compiled graph: its autograd node, on which attributes can be set. None for
    graphs that are always given all gradients."""
    return getattr(_running_nodes, "node", None)


def keeps_graph() -> bool:
    """Inside a backward: was it called with `retain_graph=True`?"""
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
def _hooked_nodes(wanted: Callable[[], bool]) -> Iterator[None]:
    """While AOTAutograd compiles one graph (Dynamo compiles one at a time): make `running_node` known to the autograd
    function that it makes, and have autograd pass gradients that are missing as None instead of zeros."""
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


def takes_apart_tensors(graph: fx.Graph) -> bool:
    """Does a joint graph take the parts of tensors of a special class, which AOTAutograd puts together again?"""
    sources = graph.find_nodes(op="placeholder")
    return any(isinstance(source.meta.get("desc"), SubclassGetAttrAOTInput) for source in sources)


def saves_unchecked(graph: fx.Graph) -> bool:
    """Does a joint graph save anything for backward that is not checked for writes?"""
    return any(node.meta.get("saved_tensor_with_no_vc_check", False) for node in graph.nodes)


def trace_functional(
    function: Callable[[list[Any]], list[Any]], tensors: Sequence[torch.Tensor], mode: FakeTensorMode
) -> fx.Graph:
    """The operators a function runs on fake tensors, writes to its own intermediates taken out: AOTAutograd's trace
    without its opinions about inputs and outputs. To be called inside `eager_operators`."""
    functionalized_here = torch._C.DispatchKeySet(DispatchKey.Functionalize)

    def run(*given: torch.Tensor) -> list[Any]:
        with torch._C._ExcludeDispatchKeyGuard(functionalized_here):
            found = function([to_fun(tensor) for tensor in given])
        return [from_fun(tensor) for tensor in found]

    one_thread = torch.autograd.set_multithreading_enabled(False)
    with mode, enable_python_dispatcher(), FunctionalTensorMode(), one_thread, torch.enable_grad():
        return make_fx(run, decomposition_table={}, _disable_torch_fn_metadata_mode=True)(*tensors).graph


def last_traced_node() -> fx.Node:
    """Inside `trace_functional`: the node made last."""
    mode = get_proxy_mode()
    assert mode is not None
    return next(iter(reversed(mode.tracer.graph.nodes)))


def was_written(tensor: torch.Tensor) -> bool:
    """Inside `trace_functional`: has the function written to this operand?"""
    return has_data_mutation(tensor)


def fake_window(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor that looks at a given fake storage. To be called with real tensors."""
    return FakeTensor(mode, torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride), device)


def composite(operator: Any) -> Callable[..., Any]:
    """The C++ kernel of a composite operator, past any Python one."""
    return functools.partial(operator._op_dk, DispatchKey.CompositeImplicitAutograd)


def is_transformed() -> bool:
    """Is a transform of `torch.func`, or forward-mode differentiation, at work?"""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def casts_automatically() -> bool:
    """Is any kind of autocast on?"""
    return torch._C._is_any_autocast_enabled()


def traces_here() -> bool:
    """Is this thread tracing, for AOTAutograd, `make_fx` or `torch.export`?"""
    return get_proxy_mode() is not None or torch._guards.TracingContext.try_get() is not None


def is_plain_fake(thing: Any) -> bool:
    """A fake tensor that stands for a dense one of no special class."""
    return type(thing) is FakeTensor and thing.layout is torch.strided


def tangent_like(output: torch.Tensor) -> torch.Tensor:
    """The fake gradient that AOTAutograd traces with for a fake output."""
    with output.fake_mode:  # type: ignore[attr-defined]
        return coerce_tangent_and_suggest_memory_format(output)[0]


def graph_in_place_of(joint: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module like the joint one with another graph; its code is never generated, since nobody runs it."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(joint, graph)


def plain_partition(joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own split, for a graph that Encore cannot read; it heeds what `torch.utils.checkpoint` asks for."""
    return min_cut_rematerialization_partition(joint, (), num_fwd_outputs=num_outputs)


def checkpointed(joint: fx.GraphModule) -> set[str]:
    """Operators, by name, that the user has asked to run again by `torch.utils.checkpoint`: those of each checkpointed
    region but for what the next region reads."""
    marked = [node for node in joint.graph.nodes if node.meta.get("recompute") in RECOMPUTED]
    kept: set[fx.Node] = set()
    for node in marked:
        region = node.meta.get("ac_graph_id", 0)
        if any(user.meta.get("ac_graph_id", region) > region for user in node.users):
            kept.add(node)
            while classify(node.target) is OpClass.VIEW and isinstance(node.args[0], fx.Node):
                node = node.args[0]
                kept.add(node)
    return {node.name for node in marked if node not in kept}


def plain_callable(module: fx.GraphModule) -> Callable[..., Any]:
    return make_boxed_func(module.forward)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function that takes one list and empties it, marked as such."""

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def shell(joint: fx.GraphModule, num_outputs: int, saved: Sequence[Value]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two modules AOTAutograd wants to see: inputs and outputs only, since the body is a schedule of ours."""
    nodes = {node.name: node for node in joint.graph.nodes}
    (output,) = joint.graph.find_nodes(op="output")
    flat = torch.utils._pytree.arg_tree_leaves(*output.args)
    descriptions = torch.utils._pytree.arg_tree_leaves(output.meta.get("desc", [None] * len(flat)))
    sources = joint.graph.find_nodes(op="placeholder")
    primals = [node for node in sources if "tangents" not in node.name]
    tangents = [node for node in sources if "tangents" in node.name]
    crossing = [nodes[value.name] if value.name in nodes else _stand_in(joint, value) for value in saved]
    kept = [_saved_description(node, position) for position, node in enumerate(crossing)]
    forward = _hollow(primals, [*flat[:num_outputs], *crossing], [*descriptions[:num_outputs], *kept])
    backward = _hollow([*crossing, *tangents], flat[num_outputs:], descriptions[num_outputs:])
    return fx.GraphModule(joint, forward), fx.GraphModule(joint, backward)


def _stand_in(joint: fx.GraphModule, value: Value) -> fx.Node:
    """A node for a saved value that only a rewritten graph has."""
    mode = next(node.meta["val"].fake_mode for node in joint.graph.nodes if hasattr(node.meta.get("val"), "fake_mode"))
    node = fx.Graph().create_node("call_function", _in_the_schedule, name=value.name)
    with mode:
        node.meta["val"] = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    return node


def unchecked_last(joint: fx.GraphModule, saved: Sequence[str]) -> tuple[str, ...]:
    """AOTAutograd's convention: what is saved without a version check comes last."""
    unchecked = {node.name for node in joint.graph.nodes if node.meta.get("saved_tensor_with_no_vc_check", False)}
    return tuple(sorted(saved, key=lambda name: name in unchecked))


def _saved_description(node: fx.Node, position: int) -> Any:
    if node.meta.get("saved_tensor_with_no_vc_check", False):
        return SavedForBackwardsNoVcCheckAOTOutput(position)
    return SavedForBackwardsAOTOutput(position)


def _hollow(inputs: Sequence[fx.Node], results: Sequence[Any], descriptions: Sequence[Any]) -> fx.Graph:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in results:
        if isinstance(node, fx.Node) and node not in made:
            made[node] = graph.create_node("call_function", _in_the_schedule, name=node.name)
            made[node].meta = dict(node.meta)
    end = graph.output(tuple(made[node] if isinstance(node, fx.Node) else node for node in results))
    end.meta["desc"] = tuple(descriptions)
    return graph


def _in_the_schedule() -> Any:
    raise AssertionError("this graph is a shell; Encore runs its schedule instead")


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Step out of tracing for a while: tensors made inside are real, operators run as they are called."""
    with _disable_current_modes(), torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def beside_tracing() -> Iterator[None]:
    """Like `real_tensors`, with autocast as it is, and with no Python kernels in place of C++ ones."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        yield


# -- what a graph's inputs and outputs are to the user ----------------------------------------------------------------


def primals(joint: fx.GraphModule, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Primal]:
    """What each primal of the joint graph is to the user."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    sources = (node for node in joint.graph.find_nodes(op="placeholder") if "tangents" not in node.name)
    (output,) = joint.graph.find_nodes(op="output")
    leaving = torch.utils._pytree.arg_tree_leaves(output.meta.get("desc", []))
    mutated = [desc.mutated_input for desc in leaving if isinstance(desc, InputMutationAOTOutput)]
    return [
        dataclasses.replace(_primal(node, names, inputs), mutated=node.meta.get("desc") in mutated) for node in sources
    ]


def given(joint: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """What stands behind each primal of the joint graph; None where that is none of the inputs as they are."""
    sources = (node for node in joint.graph.find_nodes(op="placeholder") if "tangents" not in node.name)
    found = [node.meta.get("desc") for node in sources]
    return [
        inputs[description.idx] if isinstance(description, PlainAOTInput) and description.idx < len(inputs) else None
        for description in found
    ]


def _primal(node: fx.Node, names: Sequence[str], inputs: Sequence[Any]) -> Primal:
    description = node.meta.get("desc")
    if not isinstance(description, PlainAOTInput) or description.idx >= len(inputs):
        parameter = isinstance(node.meta.get("val"), torch.nn.Parameter)
        return Primal(Role.PARAMETER if parameter else Role.INPUT, leaf=parameter, identity=None)
    given = inputs[description.idx]
    if isinstance(given, torch.nn.Parameter) or getattr(given, "_is_param", False):
        role = Role.PARAMETER
    else:
        role = Role.BUFFER if "_buffers_" in names[description.idx] else Role.INPUT
    return Primal(role, leaf=isinstance(given, torch.Tensor) and given.is_leaf, identity=id(given))


def returned_outputs(joint: fx.GraphModule, num_outputs: int) -> list[bool]:
    """For each forward output: does the caller hold it? New contents of mutated inputs are copied and dropped."""
    (output,) = joint.graph.find_nodes(op="output")
    descriptions = torch.utils._pytree.arg_tree_leaves(output.meta.get("desc", [None] * num_outputs))
    return [not isinstance(description, InputMutationAOTOutput) for description in descriptions[:num_outputs]]


def pin_sizes(module: fx.GraphModule) -> None:
    """Guard every symbolic size of the inputs to the number it has now: each shape gets a plan of its own."""
    for node in module.graph.find_nodes(op="placeholder"):
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt | torch.SymFloat):
            _pin(example)
        elif isinstance(example, torch.Tensor):
            for size in (*example.shape, *example.stride(), example.storage_offset()):
                _pin(size)


def _pin(size: Any) -> None:
    if isinstance(size, torch.SymInt):
        int(size)
    elif isinstance(size, torch.SymFloat):
        float(size)


def traced_code() -> list[CodeType]:
    """The code of every function that Dynamo has traced for the graph it is about to hand over."""
    return torch._guards.TracingContext.get_traced_code() or []


GIVEN_REASON = re.compile(r"wrapped with `torch.compiler.disable` \(reason: (encore: .*?)\)|Message: (encore: .*)")
"""What Encore itself gave as the reason of a break."""


def break_reason(module: fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended this graph before the function did: (reason, `file.py:line`), or None."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    line = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" if frame else ""
    given = GIVEN_REASON.search(str(reason.reason))
    if given is not None:
        return ((given[1] or given[2]).strip().removeprefix("encore: "), line)
    lines = [text.strip() for text in str(reason.reason).splitlines()]
    told = [text for text in lines if text and not text.startswith(("Hint:", "Developer debug context:", "For more"))]
    return ("; ".join(told[:2]) or "unknown", line)


# -- calling ---------------------------------------------------------------------------------------------------------


def dynamo_compile(function: Callable[..., Any], backend: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """`torch.compile` with one graph a shape, and a limit of its own on their number."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module) and torch._dynamo.trace_rules.check(owner.forward):
        # A forward that PyTorch itself wrote (nn.Sequential, nn.LSTM): Dynamo passes over such frames unless inlined.
        function = torch._dynamo.external_utils.wrap_inline(function)
    compile_: Callable[..., Any] = torch.compile  # its type stubs miss the last two arguments
    return compile_(function, backend=backend, dynamic=False, recompile_limit=limit, isolate_recompiles=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Replacement:
    """What stands for a function while Dynamo traces."""

    traced: Any
    """What is traced."""
    outside: str
    """The name of the function that runs where the graph ends at it."""
    module: str
    """Where that is defined."""


_replacing = threading.Lock()
_replaced: Counter[int] = Counter()
"""How many compiled models that run have Dynamo read these objects in another way, by id."""


@contextlib.contextmanager
def read_otherwise(readers: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """When Dynamo meets one of these functions or classes inside, let it be read by a function of ours."""
    table = VariableBuilder._id_dispatch()
    with _replacing:
        _replaced.update(map(id, readers))
        table.update({id(thing): reader for thing, reader in readers.items()})
    try:
        yield
    finally:
        with _replacing:
            _replaced.subtract(map(id, readers))
            for thing in readers:
                if not _replaced[id(thing)]:
                    table.pop(id(thing), None)


def traced_as(replacement: Callable[[Callable[..., Any]], Replacement | None]) -> Callable[..., Any]:
    """Reads a function as the replacement there is for it at that moment; without one, as Dynamo does."""

    def build(builder: VariableBuilder, function: Callable[..., Any]) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        found = replacement(function)
        if found is not None:
            _load_outside(builder, found)
            return UserFunctionVariable(found.traced)
        usual: Any = torch._dynamo.trace_rules.lookup(function)
        return usual.create_with_source(function, source=builder.get_source())

    return build


def _load_outside(builder: VariableBuilder, found: Replacement) -> None:
    """Where the graph ends at a call of what is being read, call what is meant to run outside of graphs."""
    unread = builder.tx.output.variable_tracker_cache.get(builder.source)
    if unread is not None:
        unread.source = AttrSource(builder.tx.import_source(found.module), found.outside)


def constructed_as(other: type, first: type, replacement: Callable[[type], Replacement | None]) -> Callable[..., Any]:
    """Reads a class as one whose calls with a first argument of type `first` construct another class, and whose calls
    with a tensor are those of the replacement there is for it at that moment."""

    class Constructor(UserDefinedClassVariable):
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            if args and args[0].python_type() is first:
                source = AttrSource(tx.import_source(other.__module__), other.__name__)
                return VariableTracker.build(tx, other, source).call_function(tx, args, kwargs)
            found = replacement(self.value) if args and args[0].is_tensor() else None
            if found is None:
                return super().call_function(tx, args, kwargs)
            return UserFunctionVariable(found.traced).call_function(tx, args, kwargs)

    def build(builder: VariableBuilder, value: type) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        found = replacement(value)
        if found is not None:
            _load_outside(builder, found)
        return Constructor(value, source=builder.get_source())

    return build


def whole_graphs() -> Any:
    """Let Dynamo trace through `nn.LSTM` and its kin instead of breaking the graph at them, keep it from cutting the
    graph into DDP's buckets, since a plan wants the whole model, and let it guard on hooks of modules. For this thread
    alone."""
    return torch._dynamo.config.patch(allow_rnn=True, optimize_ddp=False, skip_nnmodule_hook_guards=False)


HOOKS_OF_ALL_MODULES = re.compile(r"\b_global_(forward|backward)(_pre)?_hooks\b\W*$")
"""The end of the name of a source: the hooks of `register_module_forward_hook` and its kin."""


def guard_hooks() -> None:
    """Inside a Dynamo backend: trace again once hooks are added to a module or to all modules, or removed. Dynamo's
    default is to assume that modules without hooks stay without (`skip_nnmodule_hook_guards`), and it has no guard for
    hooks of all modules."""
    context = torch._guards.TracingContext.try_get()
    if context is None:  # the backend was called without Dynamo
        return
    guards = context.guards_context.dynamo_guards
    for guard in list(guards):
        none_yet = guard.inner_create_fn() is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
        if none_yet or HOOKS_OF_ALL_MODULES.search(guard.name):
            guards.add(guard.originating_source.make_guard(GuardBuilder.SEQUENCE_LENGTH))


def tell_of_recurrent_layers(backend: Callable[..., Any], tell: Callable[[], None]) -> None:
    """Call `tell` once Dynamo has passed over `nn.LSTM` or its kin in a process that runs `torch.compile` for this
    backend. The function around such a layer is skipped as a whole, so that the backend itself never hears of it."""
    told = False
    seen = _layers_passed_over()

    def look(_: Any) -> None:
        nonlocal told, seen
        before, seen = seen, _layers_passed_over()
        more = seen > before or 0 < seen < before  # less: the counters were reset
        asked_for = any(getattr(known, "compiler_fn", None) is backend for known in eval_frame.cached_backends.values())
        if asked_for and more and not told and not torch._dynamo.config.allow_rnn:
            told = True
            try:
                tell()
            except Warning as warning:  # made an error: raised here, it would leave Dynamo's callbacks pending for good
                log.warning("%s", warning)

    torch._dynamo.callback.callback_handler.register_end_callback(look)


RECURRENT_LAYER = "Attempted to wrap RNN, GRU, or LSTM"


def _layers_passed_over() -> int:
    """How often Dynamo has passed over a recurrent layer, for any backend, since it was reset."""
    return sum(count for reason, count in dynamo_counters["unimplemented"].items() if RECURRENT_LAYER in reason)


class BackendRefusal(ShortenTraceback):
    """Carries an error of a backend through Dynamo, which wraps all others in `BackendCompilerFailed`. Where the
    compiled function was called, Dynamo asks such an exception for itself without the frames of Dynamo, and raises
    what it gets."""

    def __init__(self, error: Exception, *, keep_frames: bool) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error
        self.keep_frames = keep_frames or torch._dynamo.config.verbose

    def remove_dynamo_frames(self) -> Any:
        if not self.keep_frames:  # frames keep the tensors of the failed call alive
            self.__traceback__ = self.error.__traceback__ = None
        return self.error


def generator_state() -> bytes:
    """The state of the CPU's generator, outside of the memory that steps are measured in."""
    return bytes(torch.get_rng_state().numpy())


def set_generator_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def has_ranks() -> bool:
    """Is this process one of several in a distributed run?"""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size() > 1


def told_first(key: str, mine: str) -> str:
    """In a distributed run, what the first rank to come here said under this key; nobody waits for anybody."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return store.compare_set(key, "", mine).decode()


TraceFailed = torch._dynamo.exc.TorchRuntimeError  # the user's own operators refused their operands


def fake_mode() -> FakeTensorMode:
    """Tensors with shapes and no memory; real ones that were closed over are read as fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)
