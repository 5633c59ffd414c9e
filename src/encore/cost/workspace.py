"""Workspaces: the bytes that an operator allocates and frees while it runs, beyond its results.

oneDNN reorders the operands of a convolution into layouts of its own choice, autograd's formulas make copies, a matrix
product may need a contiguous operand: a graph has none of this. So workspaces are measured: each distinct call runs
once on random tensors, and what the allocator reports is cached. Pointwise operators are not run: their workspace is a
boxed scalar, and a copy of operands of another type. Nor is a call between sizes that were run, if its workspace is
certain from these (`fitted_workspaces.py`). If operators may not run (in an estimate, or under a user's
profiler) and nothing is cached, a bound is used: it covers oneDNN's reorders, and is a guess for operators without a
rule here.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from encore.codecs import WORKSPACES as CODING
from encore.cost.domains import domain_key
from encore.cost.fitted_workspaces import FittedWorkspaces, sizes_of_call
from encore.cost.probe import device_of_call, footprint, probe_workspace
from encore.cost.room import has_room
from encore.cost.signature import as_first_drawn, call_signature, can_run, draws_from_aten, is_pure_aten
from encore.cost.torch_private import profiler_is_running
from encore.devices import kind_of
from encore.graph import Graph, Op, OpClass
from encore.graph.on_shapes import call_on_shapes, shaped_arguments
from encore.graph.ops import is_pointwise
from encore.graph.random_ops import DrawAgain
from encore.graph.structure import op_structure
from encore.graph.torch_private import OpOverload
from encore.graph.values import Ref
from encore.kernels.draws import FEW, STATE_BYTES
from encore.measurements import machine_cache
from encore.rnn import WORKSPACES as RECURRENT
from encore.schedule import Fused
from encore.schedule.operator_trace import OperatorTrace

aten = torch.ops.aten
log = logging.getLogger("encore")

WORKSPACES = {**RECURRENT, **CODING}
"""Encore's own operators, and functions from their arguments to their workspace."""

BOXED_SCALARS = 16
"""A Python number among tensors becomes a tensor of 8 bytes, and 4 more where it is converted."""

BOXED_COMPLEX = 24
"""The same for a complex number: 16 bytes, and 8 where it is converted."""
MASKS = {aten.where.self: 0, aten.masked_fill.Scalar: 1, aten.masked_fill.Tensor: 1}
"""Operands, by position, that are not cast."""
CASTS = frozenset({aten._to_copy.default, aten.copy.default})
HALF = (torch.bfloat16, torch.float16)
ONEDNN_CHANNELS = 16
REORDERS = frozenset({"convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
"""Operators that copy operands and results into layouts of their own."""


class Workspaces:
    """Returns the workspaces of operators of graphs. With `run=False` nothing is run."""

    def __init__(self, *, run: bool) -> None:
        self.run = run
        self.bounds = True
        """Whether operators that are not known take the bounds of this machine; on another one they take nothing."""
        self._cache = machine_cache()
        self._known: dict[str, int] = {}
        self._traces: dict[str, OperatorTrace] = {}
        """Of calls that were probed on an accelerator in this process."""
        self._kernel_traces: dict[str, OperatorTrace] = {}
        self._fitted = FittedWorkspaces()
        self._own: dict[Hashable, int] = {}
        """Of Encore's own operators, by call."""
        self._kernels: dict[str, int] = {}
        self._bounds: dict[str, str] = {}
        """Why the known workspace of a call is a bound."""
        self._bounded: weakref.WeakKeyDictionary[Graph, dict[str, str]] = weakref.WeakKeyDictionary()
        self._answers: weakref.WeakKeyDictionary[Graph, dict[int, int]] = weakref.WeakKeyDictionary()

    def learn(self, kernel: str, workspace: int) -> None:
        """Record the workspace of a compiled kernel."""
        self._kernels[kernel] = workspace

    def trace(self, graph: Graph, op: Op | Fused) -> OperatorTrace | None:
        """What an operator asks of its accelerator's allocator; None where that was not recorded."""
        if isinstance(op, Fused):
            return self.kernel_trace(op.kernel.key)
        if op.kind is OpClass.VIEW:
            return None
        if op.kind is OpClass.RANDOM or isinstance(op.target, DrawAgain):
            op = as_first_drawn(op)
        if op.target in WORKSPACES or not (is_pure_aten(op) or draws_from_aten(op)) or _between_devices(graph, op):
            return None
        self(graph, op)
        return self._traces.get(self._key(graph, op))

    def kernel_trace(self, kernel: str) -> OperatorTrace | None:
        """What a compiled kernel asks of its accelerator's allocator, if it was recorded."""
        return self._kernel_traces.get(kernel)

    def learn_trace(self, kernel: str, trace: OperatorTrace | None) -> None:
        """Record what a compiled kernel asks of the allocator."""
        if trace is not None:
            self._kernel_traces[kernel] = trace

    def _key(self, graph: Graph, op: Op) -> str:
        return f"workspace {call_signature(graph, op)}{domain_key(op)}"

    def __call__(self, graph: Graph, op: Op | Fused) -> int:
        if isinstance(op, Fused):
            known = self._kernels.get(op.kernel.key)
            return _bound_of_kernel(graph, op) if known is None else known
        if op.kind is OpClass.VIEW:
            return 0
        answers = self._answers.get(graph)
        if answers is None:
            answers = self._answers[graph] = {}
        known = answers.get(op.id)
        if known is None:
            known = answers[op.id] = self._answer(graph, op)
        return known

    def _answer(self, graph: Graph, op: Op) -> int:
        if op.target in WORKSPACES:
            return self._of_own(graph, op)
        if not is_pure_aten(op):
            if op.kind is OpClass.RANDOM or isinstance(op.target, DrawAgain):
                return self._of_draw(graph, op)
            if op.kind is OpClass.OPAQUE and isinstance(op.target, OpOverload):
                self._bounded.setdefault(graph, {})[str(op.target)] = "none is counted: custom operators are not probed"
            return 0
        if is_pointwise(op.target) and kind_of(device_of_call(graph, op)) == "cpu":
            return _pointwise(graph, op)
        if is_pointwise(op.target) and len({graph.values[value].dtype for value in op.reads}) < 2:
            return 0  # numbers are arguments of the kernel, and it converts what it reads
        return self._measured(graph, op) if self.bounds else 0

    def _of_own(self, graph: Graph, op: Op) -> int:
        """The workspace of an operator of Encore's own, from the shapes of its operands."""
        arguments = shaped_arguments(graph, op)
        key = (op.target, arguments, torch.get_num_threads())
        if key not in self._own:
            self._own[key] = int(call_on_shapes(WORKSPACES[op.target], arguments))
        return self._own[key]

    def _of_draw(self, graph: Graph, op: Op) -> int:
        """The workspace of a draw; with the state that is restored after it, if it repeats another one."""
        first = as_first_drawn(op)
        on_cpu = kind_of(device_of_call(graph, op)) == "cpu"
        state = 0 if first is op or not on_cpu else graph.bytes_of(op.reads[0])
        if not on_cpu and not draws_from_aten(first):
            return 0  # numbers and the state are on the host
        if draws_from_aten(first):
            return state + self._measured(graph, first)
        return state + _drawn(graph, first)

    def _measured(self, graph: Graph, op: Op) -> int:
        key = self._key(graph, op)
        if key not in self._known:
            self._known[key] = self._ask(graph, op, key)
        if key in self._bounds:
            self._bounded.setdefault(graph, {})[str(op.target)] = self._bounds[key]
        return self._known[key]

    def bounded(self, graph: Graph) -> dict[str, str]:
        """Operators of a graph whose workspace is a bound although operators may be run, and why."""
        return dict(self._bounded.get(graph, {}))

    def save(self) -> None:
        self._cache.save()

    def _ask(self, graph: Graph, op: Op, key: str) -> int:
        cached = self._cache.get(key)
        if not self.run:
            return _bound(graph, op) if cached is None else int(cached)
        structure, sizes = f"{op_structure(graph, op)} threads={torch.get_num_threads()}", sizes_of_call(graph, op)
        if kind_of(device_of_call(graph, op)) != "cpu":
            return self._probed(graph, op, key, cached)  # for its trace, which is not kept on disk
        if cached is not None:
            self._fitted.note(structure, sizes, int(cached))
            return int(cached)
        fitted = self._fitted.at(structure, sizes)
        if fitted is not None:
            self._cache.put(key, fitted)  # for estimates, which know of no other calls
            return fitted
        found = self._probed(graph, op, key)
        if key not in self._bounds:
            self._fitted.note(structure, sizes, found)
        return found

    def _probed(self, graph: Graph, op: Op, key: str, cached: float | None = None) -> int:
        """What a call takes that is run now; what it took before, or a bound, if it cannot run."""
        why = self._reason_not_to_run(graph, op)
        if not why:
            try:
                probed = probe_workspace(graph, op)
            except Exception as error:  # of any kind: an operator may reject random operands, and still run in the step
                why = f"it cannot be run ({error})"
        if why and cached is not None:
            return int(cached)
        if why:
            log.info("the workspace of %s is a bound: %s", op.target, why)
            self._bounds[key] = why.splitlines()[0]
            return _bound(graph, op)
        self._cache.put(key, probed.bytes)
        if probed.trace is not None:
            self._traces[key] = probed.trace
        return probed.bytes

    def _reason_not_to_run(self, graph: Graph, op: Op) -> str:
        if profiler_is_running():
            return "a profiler is running"
        if not can_run(graph, op):
            return "it has operands that are empty or on a device that is not here"
        if not has_room(footprint(graph, op), device_of_call(graph, op)):
            return "there is too little free memory for its operands"
        return ""


def _between_devices(graph: Graph, op: Op) -> bool:
    """Return whether a call has operands and results on several devices, of which one would be recorded."""
    values = (graph.values[value] for value in (*op.reads, *op.writes) if value is not None)
    return len({graph.storages[value.storage].device for value in values if value.storage is not None}) > 1


def _drawn(graph: Graph, op: Op) -> int:
    """The workspace of a draw: large masks are drawn by a kernel of Encore's on a copy of the generator's state."""
    if op.target != torch.ops.encore.dropout_mask.default:
        return BOXED_SCALARS
    coins = sum(graph.bytes_of(value) for value in op.writes if value is not None)
    return STATE_BYTES if coins >= FEW else BOXED_SCALARS


def _pointwise(graph: Graph, op: Op) -> int:
    """A number among the operands is boxed; an operand of another type is cast into a temporary."""
    boxed = BOXED_SCALARS if any(isinstance(argument, int | float) for argument in op.args) else 0
    boxed = BOXED_COMPLEX if any(isinstance(argument, complex) for argument in op.args) else boxed
    if len({graph.values[value].dtype for value in op.reads}) < 2:
        return boxed + _cast_to_result(graph, op)
    reads = [value for position, value in enumerate(op.reads) if position != MASKS.get(op.target)]
    operands = [graph.values[value] for value in reads if graph.values[value].dtype is not None]
    shaped = [value for value in operands if value.shape] or operands
    if len({value.dtype for value in shaped}) < 2:
        return boxed
    common = functools.reduce(torch.promote_types, (value.dtype for value in shaped if value.dtype is not None))
    cast = [value for value in shaped if value.dtype != common]
    return boxed + sum(math.prod(value.shape) * common.itemsize for value in cast)


def _cast_to_result(graph: Graph, op: Op) -> int:
    """Integers of which floating-point numbers are computed are cast first; a cast itself writes its result."""
    result = graph.values[op.writes[0]].dtype if op.writes and op.writes[0] is not None else None
    if result is None or not result.is_floating_point or op.target in CASTS:
        return 0
    cast = [graph.values[value] for value in op.reads]
    cast = [value for value in cast if value.shape and value.dtype is not None and not _is_inexact(value.dtype)]
    return sum(math.prod(value.shape) * result.itemsize for value in cast)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _bound_of_kernel(graph: Graph, action: Fused) -> int:
    """Pointwise results stay in registers; any other may be written out between two loops of the kernel."""
    ops = (graph.ops[number] for number in action.ops)
    stored = (op for op in ops if op.kind is not OpClass.VIEW and not is_pointwise(op.target))
    inner = {value for op in stored for value in op.writes if value is not None} - set(action.writes)
    return sum(graph.values[value].bytes for value in inner)


def _bound(graph: Graph, op: Op) -> int:
    if op.kind is OpClass.RANDOM:
        return BOXED_SCALARS
    packet = op.target.overloadpacket.__name__
    if packet in REORDERS:
        return _reordered(graph, op)
    rule = RULES.get(op.target)
    if rule is not None:
        return rule(graph, op)
    operands = [graph.values[value] for value in op.reads]
    if op.kind is OpClass.HEAVY:  # copied if they are expanded; half precision is reordered as in a convolution
        operands = [value for value in operands if 0 in value.stride or value.dtype in HALF]
    elif op.kind is OpClass.CHEAP:
        operands = []
    return BOXED_SCALARS + 2 * sum(value.bytes for value in operands)


def _reordered(graph: Graph, op: Op) -> int:
    """A copy of every operand and result in oneDNN's layouts, which pad channels to the width of a vector: dimension 1
    of activations, dimensions 0 and 1 of weights."""
    weights = {graph.values[argument.value].shape for argument in op.args[1:3] if isinstance(argument, Ref)}
    total = 0
    for value_id in (*op.reads, *op.writes):
        if value_id is None:
            continue
        value = graph.values[value_id]
        padded = list(value.shape)
        for dimension in (0, 1) if value.shape in weights else (1,):
            if len(padded) > 2:
                padded[dimension] = -(-padded[dimension] // ONEDNN_CHANNELS) * ONEDNN_CHANNELS
        total += max(value.bytes, math.prod(padded) * (value.dtype.itemsize if value.dtype is not None else 0))
    return total


def _first_result(graph: Graph, op: Op) -> int:
    return graph.values[op.writes[0]].bytes if op.writes[0] is not None else 0


def _rows_per_thread(graph: Graph, op: Op) -> int:
    """Weight and bias gradients, summed up per thread first."""
    small = [graph.values[value].bytes for value in op.writes[1:] if value is not None]
    return torch.get_num_threads() * sum(small)


RULES: dict[Any, Callable[[Graph, Op], int]] = {
    aten.native_batch_norm_backward.default: _first_result,
    aten.native_layer_norm_backward.default: _rows_per_thread,
    aten._safe_softmax.default: lambda graph, op: 2 * _first_result(graph, op),
    aten.binary_cross_entropy_with_logits.default: lambda graph, op: 2 * graph.values[op.reads[0]].bytes,
}
"""Bounds for operators that are not pointwise."""
