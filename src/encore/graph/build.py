"""A joint `torch.fx` graph -> `Graph`, without operators that compute nothing.

Autograd's trace has `detach`, pairs of views that cancel, and one `t()` of the same weight for every time step. None of
them computes anything, yet each is a call at run time and a name that keeps a storage alive. They are removed here:
operands are read through identities, equal views are shared, transposes cancel. Outputs of the step keep their own
operator, since AOTAutograd has already decided how they alias.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from encore.devices import KINDS, kind_of
from encore.graph.on_shapes import windows
from encore.graph.ops import SIDE_EFFECTS, OpClass, class_of_call, without_unread
from encore.graph.sizes import true_bytes, true_types
from encore.graph.torch_private import pytree
from encore.graph.values import Graph, Op, Ref, Role, Storage, Value, block_bytes, refs, span_bytes

aten = torch.ops.aten

FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
OWN_MODULES = str(Path(__file__).parents[1] / "rnn")
"""The folder of `encore.nn`'s modules, whose lines are not the user's."""
MODULE_ROOT = re.compile(r"^L\[['\"]?\w+['\"]?\]\.?(?:__self__\.?)?")
MODULE_ENTRY = re.compile(r"_modules\[['\"]([^'\"]+)['\"]\]")
EMPTY_CONSTRUCTORS = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)


class UnsupportedGraphError(Exception):
    """The graph has something that `Graph` cannot express; the compiler runs it as plain PyTorch and reports why."""


@dataclass(frozen=True, slots=True)
class Primal:
    """What an input of the graph is to the user."""

    role: Role
    leaf: bool
    """Whether its gradient is accumulated in a `.grad`."""
    identity: int | None
    """A number for the user's tensor, valid as long as the model lives."""
    mutated: bool = False
    """Whether the step replaces its contents."""


def build_graph(joint: fx.GraphModule, *, primals: Sequence[Primal], returned: Sequence[bool]) -> Graph:
    """Build the graph of an AOTAutograd joint graph. `returned` says for each forward output whether the caller gets
    it."""
    graph = _Builder(joint, len(returned)).build(returned, [primal.role for primal in primals])
    graph.identities = [primal.identity for primal in primals]
    graph.leaves = {value for value, primal in zip(graph.primals, primals, strict=True) if primal.leaf}
    graph.mutated = {value for value, primal in zip(graph.primals, primals, strict=True) if primal.mutated}
    return graph


class _Builder:
    def __init__(self, joint: fx.GraphModule, num_outputs: int) -> None:
        self.joint = joint
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.constants: dict[int, Any] = {}
        self.operand: dict[fx.Node, Any] = {}
        """How later operators read a node: a Ref, a literal, or (for several results) a tuple of those."""
        self.result: dict[fx.Node, int] = {}
        """The node's own value, if it has one, for outputs of the graph."""
        self.shared_values: dict[Any, int] = {}
        self.storage_by_pointer: dict[int, int] = {}
        self.lazily_negated: set[int] = set()
        """Values that carry PyTorch's conjugate or negative bit."""
        self.copied_tangents: set[int] = set()
        self.backward_began = False
        (output,) = joint.graph.find_nodes(op="output")
        flat = pytree.arg_tree_leaves(*output.args)
        self.output_nodes, self.gradient_nodes = flat[:num_outputs], flat[num_outputs:]
        self.exported = {node for node in flat if isinstance(node, fx.Node)}

    def build(self, returned: Sequence[bool], roles: Sequence[Role]) -> Graph:
        primals: list[int] = []
        tangents: list[int] = []
        for node in self.joint.graph.nodes:
            if node.op == "placeholder":
                if "tangents" in node.name:
                    tangents.append(self._source(node, Role.TANGENT))
                elif "primals" in node.name:
                    primals.append(self._source(node, roles[len(primals)]))
                else:
                    raise UnsupportedGraphError(f"the graph has an input of an unknown kind, {node.name!r}")
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op != "output":
                raise UnsupportedGraphError(f"the graph has a {node.op} node, {node.name!r}")
        outputs = [self._exported(node) for node in self.output_nodes]
        graph = Graph(
            values=self.values,
            storages=self.storages,
            ops=self.ops,
            primals=primals,
            tangents=tangents,
            outputs=outputs,
            gradients=[self._exported(node) for node in self.gradient_nodes],
            constants=self.constants,
            copied_tangents=self.copied_tangents,
            literals={
                position: self.operand[node]
                for position, node in enumerate(self.output_nodes)
                if isinstance(node, fx.Node) and _literal(self.operand[node]) is not None
            },
            returned=[
                value for value, is_returned in zip(outputs, returned, strict=True) if is_returned and value is not None
            ],
        )
        _mark_forward(graph)
        _drop_dead(graph)
        return graph

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _source(self, node: fx.Node, role: Role) -> int:
        value = self._new_value(node.name, node.meta.get("val"), producer=None)
        value.role = role
        self.result[node] = value.id
        literal = _literal(node.meta.get("val"))
        self.operand[node] = Ref(value.id) if literal is None else literal
        if role is Role.TANGENT and value.storage is not None and value.bytes < span_bytes(value):
            self.copied_tangents.add(value.id)
            self.storages[value.storage].bytes = span_bytes(value)
        return value.id

    def _constant(self, node: fx.Node) -> None:
        constant = functools.reduce(getattr, str(node.target).split("."), self.joint)
        value = self._new_value(node.name, constant if isinstance(constant, torch.Tensor) else None, producer=None)
        value.role = Role.CONSTANT
        self.constants[value.id] = constant
        self.result[node] = value.id
        self.operand[node] = Ref(value.id)

    def _call(self, node: fx.Node) -> None:
        # The trace is in eager's order: from the first backward node on, all are.
        self.backward_began |= node.meta.get("partitioner_tag") == "is_backward" or any(
            source.op == "placeholder" and "tangents" in source.name for source in node.all_input_nodes
        )
        if node.target is operator.getitem:
            container, index = node.args
            if isinstance(container, fx.Node) and isinstance(self.operand[container], tuple):
                self.operand[node] = self.operand[container][index]
                if isinstance(self.operand[node], Ref):
                    value = self.values[self.operand[node].value]
                    value.name = node.name
                    self.result[node] = value.id
                return
        val = node.meta.get("val")
        literal = _literal(val)
        if literal is not None:
            self.operand[node] = literal
            return
        target = node.target
        if target is aten.bernoulli.p and self._is_empty(node.args[0]):
            target = torch.ops.encore.bernoulli_noise.default
        args = without_unread(node.target, _as_refs(tuple(node.args), self.operand))
        kwargs = _as_refs(dict(node.kwargs), self.operand)
        kind = class_of_call(target, args, kwargs)
        if isinstance(val, torch.Tensor) and (kind is OpClass.VIEW or self._casts_a_parameter(node, args)):
            same_as = self._same_view(node, args, kwargs, val)
            if same_as is not None:
                self.operand[node] = Ref(same_as)
                if node not in self.exported:
                    return
        op = self._new_op(node, target, kind, args, kwargs, val)
        if op.returns_tuple:
            self.operand[node] = tuple(None if value is None else Ref(value) for value in op.writes)
        elif op.writes[0] is not None:
            self.result[node] = op.writes[0]
            self.operand.setdefault(node, Ref(op.writes[0]))
        else:
            self.operand[node] = None

    def _same_view(self, node: fx.Node, args: Any, kwargs: Any, val: torch.Tensor) -> int | None:
        """Return a value that equals this view, or None; then later views may be replaced by this one."""
        if not (args and isinstance(args[0], Ref)):
            return None
        base = self.values[args[0].value]
        if node.target is aten._to_copy.default:
            return self._shared(node, args, kwargs)
        if node.target in (aten.detach.default, aten.alias.default) or self._describes(base, val):
            return base.id
        if node.target in (aten.t.default, aten.transpose.int) and base.producer is not None:
            before = self.ops[base.producer]
            if before.target is node.target and before.args[1:] == args[1:]:
                inner = self.values[before.args[0].value]
                if self._describes(inner, val):
                    return inner.id
        return self._shared(node, args, kwargs)

    def _is_empty(self, node: Any) -> bool:
        """Return whether a node creates memory only to be filled; its reader then is the functional form of an in-place
        operator."""
        return isinstance(node, fx.Node) and getattr(node.target, "overloadpacket", None) in EMPTY_CONSTRUCTORS

    def _casts_a_parameter(self, node: fx.Node, args: Any) -> bool:
        """Autocast casts a weight at each use while tracing; eager keeps one cast for all of them."""
        if node.target is not aten._to_copy.default or not isinstance(args[0], Ref):
            return False
        return self.values[args[0].value].role is Role.PARAMETER

    def _shared(self, node: fx.Node, args: Any, kwargs: Any) -> int | None:
        """Return an equal value of an earlier node, or None; then later nodes may be replaced by this one."""
        key = (node.target, _hashable(args), _hashable(kwargs))
        if key in self.shared_values:
            return self.shared_values[key]
        if node not in self.exported:
            self.shared_values[key] = len(self.values)
        return None

    def _describes(self, value: Value, val: torch.Tensor) -> bool:
        """Return whether a fake tensor and a value are the same view of the same storage."""
        if val.is_conj() or val.is_neg() or value.id in self.lazily_negated:
            return False  # the same bytes, read differently
        return (
            value.storage == self._storage(val)
            and value.shape == _ints(val.shape)
            and value.stride == _ints(val.stride())
            and value.dtype == val.dtype
            and value.offset == int(val.storage_offset())
        )

    # -- records -----------------------------------------------------------------------------------------------------

    def _new_op(self, node: fx.Node, target: Any, kind: OpClass, args: Any, kwargs: Any, val: Any) -> Op:
        returns_tuple = isinstance(val, tuple | list)
        results = list(val) if returns_tuple else [val]
        if any(isinstance(result, tuple | list) for result in results):
            raise UnsupportedGraphError(f"{node.target} returns nested lists")
        op = Op(
            id=len(self.ops),
            name=node.name,
            target=target,
            args=args,
            kwargs=kwargs,
            reads=tuple(dict.fromkeys(refs((args, kwargs)))),
            writes=(),
            returns_tuple=returns_tuple,
            kind=kind,
            module=_module_path(node),
            source=_source_line(node.stack_trace),
            traced_in_forward=not self.backward_began,
        )
        self.ops.append(op)
        sizes = true_bytes(node.target, args, self.values, results)
        types = true_types(node.target, args, self.values, results)
        writes: list[int | None] = []
        for position, result in enumerate(results):
            if result is None:
                writes.append(None)
                continue
            name = f"{node.name}.{position}" if returns_tuple else node.name
            value = self._new_value(name, result, producer=op.id)
            if kind is not OpClass.VIEW:
                self._separate_from_siblings(value, writes)
            if position in types and value.storage is not None:
                value.dtype, value.bytes = types[position], result.numel() * types[position].itemsize
                self.storages[value.storage].bytes = value.bytes
            if position in sizes and value.storage is not None:
                if value.shape == (0,):
                    value.shape, value.stride, value.bytes = (sizes[position],), (1,), sizes[position]
                self.storages[value.storage].bytes = sizes[position]
            writes.append(value.id)
        op.writes = tuple(writes)
        if kind is OpClass.VIEW:
            self._move_views(op)
        for value_id in op.reads:
            self.values[value_id].readers.append(op.id)
        return op

    def _move_views(self, op: Op) -> None:
        """Put a view into the storage of its operand, which may be another tensor than when it was traced: a sum whose
        other term is zero has been replaced by its one term."""
        bases = [base for read in op.reads if (base := self.values[read]).storage is not None]
        made = [self.values[value] for value in op.writes if value is not None]
        if len(bases) != 1 or all(value.storage in (None, bases[0].storage) for value in made):
            return
        (base,) = bases
        assert base.storage is not None
        for value, seen in zip(made, windows(op, base, self.storages[base.storage].bytes), strict=True):
            if _ints(seen.shape) != value.shape or _strides(seen) != value.stride:
                raise UnsupportedGraphError(f"{op.name} is a view of another tensor than it was traced with")
            if value.storage is not None:
                self.storages[value.storage].values.remove(value.id)
            self.storages[base.storage].values.append(value.id)
            value.storage, value.offset = base.storage, _offset(seen)

    def _new_value(self, name: str, val: Any, producer: int | None) -> Value:
        tensor = val if isinstance(val, torch.Tensor) else None
        value = Value(
            id=len(self.values),
            name=name,
            storage=None if tensor is None else self._storage(tensor),
            shape=() if tensor is None else _ints(tensor.shape),
            stride=() if tensor is None else _strides(tensor),
            dtype=None if tensor is None else tensor.dtype,
            bytes=0 if tensor is None else int(tensor.numel()) * tensor.element_size(),
            producer=producer,
            offset=0 if tensor is None else _offset(tensor),
        )
        self.values.append(value)
        if tensor is not None and (tensor.is_conj() or tensor.is_neg()):
            self.lazily_negated.add(value.id)
        if value.storage is not None:
            self.storages[value.storage].values.append(value.id)
        return value

    def _separate_from_siblings(self, value: Value, siblings: Sequence[int | None]) -> None:
        """Fake kernels may return one tensor twice where the real kernel returns two (oneDNN's bias gradients)."""
        storage = value.storage
        if storage is None or not any(self.values[other].storage == storage for other in siblings if other is not None):
            return
        self.storages[storage].values.remove(value.id)
        copy = Storage(len(self.storages), self.storages[storage].bytes, self.storages[storage].device, [value.id])
        self.storages.append(copy)
        value.storage = copy.id

    def _storage(self, tensor: torch.Tensor) -> int | None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse and other layouts without one block of memory
            return None
        pointer = storage._cdata
        if pointer not in self.storage_by_pointer:
            self.storage_by_pointer[pointer] = len(self.storages)
            device = str(tensor.device)
            if kind_of(device) not in (*KINDS, "meta"):
                raise UnsupportedGraphError(f"it has tensors on {device}; Encore plans steps on CPUs and CUDA devices")
            self.storages.append(Storage(len(self.storages), block_bytes(int(storage.nbytes()), device), device))
        return self.storage_by_pointer[pointer]

    def _exported(self, node: Any) -> int | None:
        if not isinstance(node, fx.Node) or _literal(self.operand[node]) is not None:
            return None
        return self.result.get(node)


def _mark_forward(graph: Graph) -> None:
    """Mark the operators of forward: those that the outputs need, and others that eager runs there, with an effect or
    for the backward of a custom function. Views alone go where their readers are."""
    depends = set(graph.tangents)
    for op in graph.ops:
        if depends.intersection(op.reads):
            depends.update(value for value in op.writes if value is not None)
    needed = {value for value in graph.outputs if value is not None}
    for op in reversed(graph.ops):
        in_forward = op.traced_in_forward and op.kind is not OpClass.VIEW and not depends.intersection(op.reads)
        if in_forward or any(value in needed for value in op.writes):
            op.forward = True
            needed.update(op.reads)


def _drop_dead(graph: Graph) -> None:
    """Remove operators without effects whose results are not read."""
    exported = {value for value in (*graph.outputs, *graph.gradients) if value is not None}
    alive: set[int] = set()
    needed = set(exported)
    for op in reversed(graph.ops):
        if op.kind in SIDE_EFFECTS or any(value in needed for value in op.writes):
            alive.add(op.id)
            needed.update(op.reads)
    if len(alive) == len(graph.ops):
        return
    renumbered = {old: new for new, old in enumerate(sorted(alive))}
    graph.ops[:] = [op for op in graph.ops if op.id in alive]
    for op in graph.ops:
        op.id = renumbered[op.id]
    for value in graph.values:
        if value.producer is not None and value.producer not in renumbered:
            if value.storage is not None:
                graph.storages[value.storage].values.remove(value.id)
            value.storage = None
        value.producer = None if value.producer is None else renumbered.get(value.producer)
        value.readers = [renumbered[reader] for reader in value.readers if reader in renumbered]


# -- reading fx ------------------------------------------------------------------------------------------------------


def _literal(val: Any) -> Any:
    """Return a number as a constant: every shape has its own graph."""
    if isinstance(val, torch.SymInt):
        return int(val)
    if isinstance(val, torch.SymFloat):
        return float(val)
    if isinstance(val, torch.SymBool):
        return bool(val)
    return val if isinstance(val, int | float | bool) else None


def _as_refs(argument: Any, operand: dict[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return operand[argument]
    if isinstance(argument, tuple):
        return tuple(_as_refs(item, operand) for item in argument)
    if isinstance(argument, list):
        return [_as_refs(item, operand) for item in argument]
    if isinstance(argument, dict):
        return {key: _as_refs(item, operand) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_as_refs(part, operand) for part in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return _literal(argument)
    return argument


def _hashable(argument: Any) -> Any:
    if isinstance(argument, tuple | list):
        return tuple(_hashable(item) for item in argument)
    if isinstance(argument, dict):
        return tuple(sorted((key, _hashable(item)) for key, item in argument.items()))
    if isinstance(argument, slice):
        return ("slice", argument.start, argument.stop, argument.step)
    return argument


def _ints(sizes: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return _ints(tensor.stride()) if tensor.layout is torch.strided else ()


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) if tensor.layout is torch.strided else 0


@functools.lru_cache(maxsize=4096)
def _source_line(stack_trace: str | None) -> str:
    """The user's innermost line: `file.py:12`."""
    frames = FRAME.findall(stack_trace or "")
    frames = [frame for frame in frames if not frame[0].startswith(OWN_MODULES)] or frames
    if not frames:
        return ""
    path, line = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}"


def _module_path(node: fx.Node) -> str:
    """The path of the module whose call created this node, as in `named_modules()`; that of forward for gradients."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return MODULE_ENTRY.sub(r"\1", MODULE_ROOT.sub("", path))
