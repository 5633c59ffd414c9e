"""The joint graph of a long graph with repeated calls, assembled from the traces of its distinct calls.

AOTAutograd traces every time step of an unrolled loop, though all are alike, at about two milliseconds an operator.
Here each *distinct* call of a Dynamo graph (the same function and constants on operands of the same layout) is traced
once, and its trace is pasted wherever the call occurs: forwards in order, vector-Jacobian products in reverse, as
autograd's engine does. The gradients of a tensor are added up in the order in which they arrive.

The pasted graph is what AOTAutograd would have traced, operator for operator. AOTAutograd itself still
builds the callables, from a graph with the same inputs and outputs and nothing between them (`Repeats.edges`).

A graph with a call that does more than compute new tensors (writes, context managers, subclasses, outputs that are
inputs or share memory) is left to AOTAutograd, and so is one with few repetitions.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from encore.capture import torch_private
from encore.capture.call_trace import Arrival, NotRepeatableError, Result, layout_of, trace_call
from encore.capture.edges import Output, edges_of
from encore.capture.layouts import TensorLayout
from encore.capture.templates import Template, TensorWindow, frozen, template_of, tensors_of
from encore.graph.torch_private import pytree
from encore.graph.values import Ref, map_refs

log = logging.getLogger("encore")

FEWEST_CALLS = 200
MOST_DISTINCT = 0.5
"""A graph is traced by its distinct calls if it has at least so many calls, and at most this share is distinct."""

WITHOUT_STATE = frozenset({"torch", "_operator", "builtins", "math"})
"""Modules whose functions depend on nothing but their arguments."""


def trace_repeats(module: fx.GraphModule) -> Repeats | None:
    """Assemble the joint graph of a Dynamo graph from its distinct calls; None if AOTAutograd should trace it."""
    if torch_private.casts_automatically() or not torch.is_grad_enabled():
        return None
    try:
        if not _pays(module):
            return None
        with torch_private.eager_operators(), torch_private.real_tensors():
            return _Paste(module).repeats()
    except Exception as reason:  # of any kind: AOTAutograd may still trace the graph as a whole
        log.info("%d calls are traced one by one: %s", len(module.graph.nodes), reason)
        return None


@dataclass(slots=True)
class Repeats:
    """An assembled joint graph, and its inputs and outputs for AOTAutograd."""

    edges: fx.GraphModule
    graph: fx.Graph
    templates: int
    """The number of calls that were traced."""

    def joint(self, edges: fx.GraphModule) -> fx.GraphModule:
        """The assembled graph in place of the joint graph that AOTAutograd has traced from `edges`."""
        self._take_descriptions(_sources(self.graph), _sources(edges.graph))
        mine, its = self.graph.output_node(), edges.graph.output_node()
        computed, expected = pytree.arg_tree_leaves(*mine.args), pytree.arg_tree_leaves(*its.args)
        if [node is None for node in computed] != [node is None for node in expected]:
            raise NotRepeatableError("AOTAutograd expects other results")
        mine.meta["desc"] = its.meta.get("desc")
        self.graph.eliminate_dead_code()
        return torch_private.graph_in_place_of(edges, self.graph)

    def _take_descriptions(self, mine: Sequence[fx.Node], its: Sequence[fx.Node]) -> None:
        if [_seen(source) for source in mine] != [_seen(source) for source in its]:
            raise NotRepeatableError("AOTAutograd expects other inputs or tangents")
        for source, description in zip(mine, its, strict=True):
            source.meta["desc"] = description.meta.get("desc")


def _seen(source: fx.Node) -> tuple[str, TensorLayout]:
    return source.name, layout_of(source.meta["val"])


# -- whether it pays -------------------------------------------------------------------------------------------------


def _pays(module: fx.GraphModule) -> bool:
    calls = [node for node in module.graph.nodes if _is_call(node)]
    if len(calls) < FEWEST_CALLS:
        return False
    distinct = {(node.op, node.target, frozen((node.args, node.kwargs))) for node in calls}
    return len(distinct) <= MOST_DISTINCT * len(calls)


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and not _indexes_a_tuple(node)


def _indexes_a_tuple(node: fx.Node) -> bool:
    """Return whether a node only indexes a tuple of results."""
    if node.target is not operator.getitem:
        return False
    container = node.args[0]
    return isinstance(container, fx.Node) and isinstance(container.meta.get("example_value"), tuple | list)


# -- pasting ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Variable:
    """One tensor as autograd sees it, and the gradient that has arrived for it so far."""

    node: fx.Node
    requires_grad: bool
    is_view: bool = False
    gradient: fx.Node | None = None

    @property
    def tensor(self) -> torch.Tensor:
        return self.node.meta["val"]


@dataclass(slots=True)
class _Call:
    """A call of the Dynamo graph that has been pasted."""

    key: Hashable
    run: Callable[[Sequence[Any]], Any]
    template: Template
    operands: list[_Variable]
    results: list[_Variable]
    pasted: list[fx.Node]
    marks: dict[str, Any]
    """Its source line and module."""


@dataclass(slots=True)
class _Paste:
    """Assembles the joint graph of one Dynamo graph."""

    module: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    templates: dict[Hashable, Template] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """The result of a node of the Dynamo graph: a variable, or a nest of variables."""
    calls: list[_Call] = field(default_factory=list)
    mode: Any = None

    def repeats(self) -> Repeats:
        inputs = [self._input(node, number) for number, node in enumerate(_sources(self.module.graph), start=1)]
        for node in self.module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._forward(node)
        outputs = self._outputs(inputs)
        self._tangents(outputs, after=inputs[-1].node)
        for call in reversed(self.calls):
            self._backward(call)
        gradients = [source.gradient for source in inputs]
        self.graph.output((*(output.node for output in outputs), *gradients))
        facts = [Output(output.tensor, output.requires_grad, output.is_view) for output in outputs]
        edges = edges_of(self.module, facts, [gradient is not None for gradient in gradients])
        return Repeats(edges, self.graph, templates=len(self.templates))

    def _input(self, node: fx.Node, number: int) -> _Variable:
        example: Any = node.meta.get("example_value")
        if not torch_private.is_plain_fake(example):
            raise NotRepeatableError("an input is no plain tensor")
        self.mode = example.fake_mode
        source = self.graph.placeholder(f"primals_{number}")
        source.meta["val"] = example
        self.values[node] = _Variable(source, example.requires_grad)
        return self.values[node]

    def _outputs(self, inputs: Sequence[_Variable]) -> list[_Variable]:
        returned = pytree.arg_tree_leaves(*self.module.graph.output_node().args)
        outputs = [output for node in returned if isinstance(output := self.values.get(node), _Variable)]
        if len(outputs) < len(returned):
            raise NotRepeatableError("an output is no tensor")
        if len(_storages([*inputs, *outputs])) < len(_storages(inputs)) + len(outputs):
            raise NotRepeatableError("an output shares memory with another one, or with an input")
        if not any(output.requires_grad for output in outputs):
            raise NotRepeatableError("no output requires a gradient")
        return outputs

    def _tangents(self, outputs: Sequence[_Variable], after: fx.Node) -> None:
        differentiable = [output for output in outputs if output.requires_grad]
        with self.graph.inserting_after(after):
            for number, output in reversed(list(enumerate(differentiable, start=1))):
                output.gradient = self.graph.placeholder(f"tangents_{number}")
                output.gradient.meta["val"] = self._apart(torch_private.tangent_like(output.tensor))

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward(self, node: fx.Node) -> None:
        if node.op not in ("call_function", "call_method"):
            raise NotRepeatableError(f"it has a {node.op} node")
        if _indexes_a_tuple(node):
            container, index = node.args
            self.values[node] = self.values[container][index]  # type: ignore[index]
            return
        operands: list[_Variable] = []
        args, kwargs = self._over_operands((node.args, node.kwargs), operands)
        layouts = tuple((layout_of(operand.tensor), operand.requires_grad) for operand in operands)
        key = (node.op, node.target, frozen((args, kwargs)), layouts)
        run = _caller(node, args, kwargs)
        template = self._traced(key, run, operands)
        places = dict(zip(template.trace.operands, (operand.node for operand in operands), strict=True))
        marks = _marks(node)
        pasted = [self._paste(step, template, places, marks) for step in template.trace.forward]
        results = [self._result(result, operands, places) for result in template.trace.results]
        self.values[node] = _nested(template.trace.nest, results)
        self.calls.append(_Call(key, run, template, operands, results, pasted, marks))

    def _result(self, result: Result, operands: Sequence[_Variable], places: dict[fx.Node, fx.Node]) -> _Variable:
        if result.operand is not None:
            return operands[result.operand]
        if result.requires_grad and not any(operand.requires_grad for operand in operands):
            raise NotRepeatableError("it returns tensors that require gradients, from operands that do not")
        return _Variable(places[result.node], result.requires_grad, result.is_view)

    def _over_operands(self, argument: Any, operands: list[_Variable]) -> Any:
        """Return the argument with a `Ref` into the list of operands for every tensor."""
        if isinstance(argument, fx.Node):
            return self._over_operands(self.values[argument], operands)
        if isinstance(argument, _Variable):
            if argument not in operands:
                operands.append(argument)
            return Ref(operands.index(argument))
        if isinstance(argument, tuple | list):
            kind = list if isinstance(argument, list) else tuple
            return kind(self._over_operands(item, operands) for item in argument)
        if isinstance(argument, dict):
            return {key: self._over_operands(item, operands) for key, item in argument.items()}
        if isinstance(argument, slice):
            parts = (argument.start, argument.stop, argument.step)
            return slice(*(self._over_operands(part, operands) for part in parts))
        return argument

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, call: _Call) -> None:
        arrived = [
            None if result.operand is not None else variable.gradient
            for result, variable in zip(call.template.trace.results, call.results, strict=True)
        ]
        if not any(arrived):
            return
        layouts = [None if gradient is None else layout_of(gradient.meta["val"]) for gradient in arrived]
        template = call.template
        if layouts != [_tangent_layout(result) for result in template.trace.results]:
            template = self._traced((call.key, *layouts), call.run, call.operands, layouts)
        trace = template.trace
        places = dict(zip(trace.operands, (operand.node for operand in call.operands), strict=True))
        places |= zip(trace.forward, call.pasted, strict=True)
        for result, gradient in zip(trace.results, arrived, strict=True):
            if result.tangent is not None and gradient is not None:
                places[result.tangent] = gradient
        marks = call.marks | {"partitioner_tag": "is_backward"}
        for event in trace.backward:
            if isinstance(event, Arrival):
                self._accumulate(call.operands[event.operand], places[event.gradient], marks)
            else:
                self._paste(event, template, places, marks)

    def _accumulate(self, variable: _Variable, new: fx.Node, marks: dict[str, Any]) -> None:
        """Add a gradient to those that have arrived before, as autograd's engine does."""
        old = variable.gradient
        if old is None:
            variable.gradient = new
            return
        operands = [_Variable(old, False), _Variable(new, False)]
        key = ("accumulate", *(layout_of(operand.tensor) for operand in operands))
        template = self._traced(key, lambda given: given[0] + given[1], operands)
        places = dict(zip(template.trace.operands, (old, new), strict=True))
        (step,) = template.trace.forward
        variable.gradient = self._paste(step, template, places, _of_no_module(marks))

    # -- templates ---------------------------------------------------------------------------------------------------

    def _traced(
        self,
        key: Hashable,
        run: Callable[[Sequence[Any]], Any],
        operands: Sequence[_Variable],
        tangents: Sequence[TensorLayout | None] | None = None,
    ) -> Template:
        if key not in self.templates:
            alike = [self._alike(operand) for operand in operands]
            self.templates[key] = template_of(trace_call(run, alike, self.mode, tangents))
        return self.templates[key]

    def _alike(self, variable: _Variable) -> torch.Tensor:
        """A fake tensor of the same layout, at the beginning of a storage of its own."""
        layout = layout_of(variable.tensor)
        memory = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
        fake = torch_private.fake_window(self.mode, memory.untyped_storage(), 0, *layout)
        return fake.requires_grad_(variable.requires_grad)

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like this one, on a storage of its own."""
        storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
        return torch_private.fake_window(self.mode, storage, int(tensor.storage_offset()), *layout_of(tensor))

    def _paste(
        self, step: fx.Node, template: Template, places: dict[fx.Node, fx.Node], marks: dict[str, Any]
    ) -> fx.Node:
        args, kwargs = fx.map_arg((step.args, step.kwargs), places.__getitem__)
        node = self.graph.create_node("call_function", step.target, args, kwargs, name=step.name)
        places[step] = node
        tensors: list[Any] = []
        for window in template.windows[step]:
            home = tensors if window is None or window.home in (None, step) else tensors_of(places[window.home])
            tensors.append(None if window is None else self._view_of(window, home))
        node.meta = marks | {"val": tuple(tensors) if isinstance(step.meta.get("val"), tuple | list) else tensors[0]}
        return node

    def _view_of(self, window: TensorWindow, home: Sequence[Any]) -> torch.Tensor:
        if window.home is None:
            storage, offset = torch.UntypedStorage(window.bytes, device="meta"), window.offset
        else:
            base = home[window.position]
            storage, offset = base.untyped_storage(), base.storage_offset() + window.offset
        return torch_private.fake_window(self.mode, storage, offset, *window.layout)


def _caller(node: fx.Node, args: Any, kwargs: Any) -> Callable[[Sequence[Any]], Any]:
    """Return the call as a function of its operands."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        raise NotRepeatableError(f"{name} works in place")
    if (getattr(node.target, "__module__", None) or "torch").partition(".")[0] not in WITHOUT_STATE:
        raise NotRepeatableError(f"{name} may depend on more than its arguments")

    def run(operands: Sequence[Any]) -> Any:
        filled, named = map_refs((args, kwargs), operands.__getitem__)
        if callable(node.target):
            return node.target(*filled, **named)
        return getattr(filled[0], name)(*filled[1:], **named)

    return run


def _nested(nest: Any, results: Sequence[_Variable]) -> Any:
    """Return the results of a call in the nest in which it returns them."""
    if isinstance(nest, tuple | list):
        kind = list if isinstance(nest, list) else tuple
        return kind(_nested(item, results) for item in nest)
    if nest is not None and not isinstance(nest, int):
        raise NotRepeatableError(f"it returns a {type(nest).__name__}")
    return None if nest is None else results[nest]


def _tangent_layout(result: Result) -> TensorLayout | None:
    return None if result.tangent is None else layout_of(result.tangent.meta["val"])


def _marks(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _of_no_module(marks: dict[str, Any]) -> dict[str, Any]:
    return {key: mark for key, mark in marks.items() if key != "nn_module_stack"}


def _storages(variables: Sequence[_Variable]) -> set[int]:
    return {variable.tensor.untyped_storage()._cdata for variable in variables}


def _sources(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="placeholder")
