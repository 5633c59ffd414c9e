"""The joint graph of a step in which some outputs receive no gradient.

AOTAutograd traces a backward that takes a gradient for every output, and PyTorch fills in zeros for the outputs that
the loss does not use. Eager autograd runs no node that receives no gradient at all. Here the joint graph is cut down to
what eager runs: backward is linear in the gradients it is given, so an operator whose gradients are all zero returns
zeros, and is left out; a sum with such a term is its other term; an operator that reads such a term next to one that
is not zero (`cat`, for one) reads a tensor of zeros, as in eager. Inputs whose gradient is zero in this sense get none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from encore.capture import torch_private
from encore.capture.layouts import TensorLayout
from encore.graph import Graph, OpClass
from encore.graph.ops import SIDE_EFFECTS
from encore.graph.torch_private import pytree
from encore.graph.values import span_elements

aten = torch.ops.aten

MARKS = (
    "val", "desc", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "recompute",
    "ac_graph_id", "saved_tensor_with_no_vc_check",
)  # fmt: skip
"""The metadata of a node that is kept; other entries may keep the user's tensors alive."""

STATISTICS: dict[Any, tuple[int | None, frozenset[int], frozenset[int]]] = {
    aten._native_batch_norm_legit_functional.default: (5, frozenset({3, 4}), frozenset({3, 4})),
    aten._batch_norm_with_update_functional.default: (None, frozenset({3, 4}), frozenset({4, 5})),
}
"""Operators that update running statistics and use those of the batch: the argument that says so (None: always), the
positions of the old statistics, and those of the new ones among the results."""


Used = frozenset[int]
"""A set of tangents, by number."""


class NotOptionalError(Exception):
    """A graph that cannot be computed without some of its tangents."""


class Tangents:
    """The tangents of a joint graph, by number, and what depends on each of them."""

    def __init__(self, joint: fx.GraphModule, num_outputs: int) -> None:
        graph = joint.graph
        nodes = [node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name]
        self.names = [node.name for node in nodes]
        self.everything = frozenset(range(len(nodes)))
        self.layouts = [TensorLayout.of(node.meta["val"]) for node in nodes]
        self.may_be_missing = not torch_private.takes_apart_tensors(graph)
        """Whether autograd may pass None for a missing gradient instead of zeros."""
        self.optional = self.may_be_missing and len(nodes) > 1 and not torch_private.saves_unchecked(graph)
        """Whether the graph can be cut down."""
        reach = _reaches(graph, nodes)
        flat = pytree.arg_tree_leaves(*graph.output_node().args)
        self.gradients = [reach.get(node, self.everything) for node in flat[num_outputs:]]
        """For each gradient that the graph computes, the tangents it depends on. One that depends on none (the zeros of
        `torch.normal`) is computed for any set of tangents, as in eager."""
        self.joint = torch_private.graph_in_place_of(joint, lean_copy(graph))
        """The whole graph, with no more about its nodes than planning it again takes."""

    @property
    def kinds(self) -> tuple[tuple[int, torch.dtype], ...]:
        """Dimensions and type of each: what stays the same for inputs of other sizes."""
        return tuple((len(layout.shape), layout.dtype) for layout in self.layouts)

    def losses(self) -> frozenset[int]:
        """The tangents of scalars; all tangents if none is, or all are."""
        found = frozenset(number for number, layout in enumerate(self.layouts) if not layout.shape)
        return found or self.everything

    def numbers(self, names: Collection[str]) -> frozenset[int]:
        return frozenset(number for number, name in enumerate(self.names) if name in names)

    def require_all(self) -> None:
        """Declare that the graph cannot be cut down."""
        self.optional = False

    def only(self, used: Collection[int]) -> fx.GraphModule:
        """Return the joint graph with these tangents and no others."""
        if self.everything.issubset(used):
            return self.joint
        graph = self.joint.graph
        sources = {node.name: node for node in graph.find_nodes(op="placeholder")}
        reach = _reaches(graph, [sources[name] for name in self.names])
        return torch_private.graph_in_place_of(self.joint, _Cut(reach, frozenset(used)).run(graph))


def _reaches(graph: fx.Graph, tangents: Sequence[fx.Node]) -> dict[fx.Node, frozenset[int]]:
    """For every node that depends on tangents, which ones."""
    reach = {node: frozenset((number,)) for number, node in enumerate(tangents)}
    for node in graph.nodes:
        read = {reach[operand] for operand in node.all_input_nodes if operand in reach}
        if read and node.op != "output":
            reach[node] = read.pop() if len(read) == 1 else frozenset().union(*read)
    return reach


class _Cut:
    """Cuts a joint graph down to some of its tangents."""

    def __init__(self, reach: dict[fx.Node, frozenset[int]], used: frozenset[int]) -> None:
        self.zero = {node for node, tangents in reach.items() if not tangents & used}
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.filled: dict[fx.Node, fx.Node] = {}
        """Zeros that an operator reads, by what they replace."""
        self.moved: dict[int, torch.UntypedStorage] = {}
        """The storage of a sum that is replaced by its other term -> the storage of that term."""

    def run(self, graph: fx.Graph) -> fx.Graph:
        for node in graph.nodes:
            if node.op == "output":
                args = fx.map_arg(node.args, lambda read: None if read in self.zero else self.copies[read])
                self.graph.output(args[0]).meta = dict(node.meta)
            elif node not in self.zero:
                self._copy(node)
        return self.graph

    def _copy(self, node: fx.Node) -> None:
        other = self._other_term(node)
        if other is not None:
            self.copies[node] = self.copies[other]
            self.moved[node.meta["val"].untyped_storage()._cdata] = self.copies[other].meta["val"].untyped_storage()
            return
        for read in node.all_input_nodes:
            if read in self.zero and read not in self.filled:
                self.filled[read] = self._zeros(read, node)
        self.copies[node] = self.graph.node_copy(
            node, lambda read: self.filled[read] if read in self.zero else self.copies[read]
        )
        if self.moved and "val" in node.meta:
            self.copies[node].meta["val"] = pytree.tree_map_only(torch.Tensor, self._on_moved_storage, node.meta["val"])

    def _on_moved_storage(self, val: Any) -> Any:
        """A view of a sum that is replaced by its other term is a view of that term."""
        if not torch_private.is_plain_fake(val) or val.untyped_storage()._cdata not in self.moved:
            return val
        storage = self.moved[val.untyped_storage()._cdata]
        look = (tuple(val.shape), val.stride(), val.dtype, val.device)
        with torch_private.real_tensors():
            return torch_private.fake_window(val.fake_mode, storage, val.storage_offset(), *look)

    def _other_term(self, node: fx.Node) -> fx.Node | None:
        """The term that replaces a sum whose other term is zero, if it has the layout of the sum."""
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            return None
        terms = [term for term in node.args if isinstance(term, fx.Node) and term not in self.zero]
        if len(terms) != 1 or not any(term in self.zero for term in node.all_input_nodes):
            return None
        have, want = self.copies[terms[0]].meta["val"], node.meta["val"]
        alike = have.shape == want.shape and have.stride() == want.stride() and have.dtype == want.dtype
        return terms[0] if alike and have.storage_offset() == want.storage_offset() else None

    def _zeros(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        val: Any = node.meta.get("val")
        if not torch_private.is_plain_fake(val):
            raise NotOptionalError(f"{reader.name} reads {node.name}, which is not a dense tensor")
        elements = span_elements(tuple(val.shape), val.stride())
        like = {"dtype": val.dtype, "layout": torch.strided, "device": val.device, "pin_memory": False}
        full = self.graph.create_node("call_function", aten.full.default, ([elements], 0), like, f"{node.name}_zeros")
        with torch_private.real_tensors():
            storage = torch.UntypedStorage(elements * val.element_size(), device="meta")
            mode, look = val.fake_mode, (val.dtype, val.device)
            made = torch_private.fake_window(mode, storage, 0, (elements,), (1,), *look)
            seen = torch_private.fake_window(mode, storage, 0, tuple(val.shape), val.stride(), *look)
        marks = {key: reader.meta[key] for key in MARKS if key in reader.meta and key not in ("val", "desc")}
        full.meta = marks | {"val": made}
        where = (full, list(val.shape), list(val.stride()))
        view = self.graph.create_node("call_function", aten.as_strided.default, where, {}, f"{node.name}_as_zeros")
        view.meta = marks | {"val": seen}
        return view


def lean_copy(graph: fx.Graph) -> fx.Graph:
    """Return a copy of the graph with the metadata in `MARKS` alone."""
    copy = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        places[node] = copy.node_copy(node, places.__getitem__)
        places[node].meta = {key: node.meta[key] for key in MARKS if key in node.meta}
    return copy


def can_run_again(graph: Graph) -> bool:
    """Return whether forward computes the same a second time from the same inputs, even if it has written to some of
    them. If so, the backward of outputs that were expected to receive no gradient can still run."""
    forward = [op for op in graph.ops if op.forward]
    if any(op.kind in SIDE_EFFECTS and op.kind is not OpClass.RANDOM for op in forward):
        return False
    if any(isinstance(leaf, torch.Generator) for op in forward for leaf in pytree.arg_tree_leaves(op.args, op.kwargs)):
        return False
    changed = set(graph.mutated)
    for op in forward:
        if not changed.intersection(op.reads):
            continue
        results = set(range(len(op.writes)))
        if op.target in STATISTICS:
            asked, old, new = STATISTICS[op.target]
            others = {ref for place, ref in enumerate(op.args) if place not in old and hasattr(ref, "value")}
            if (asked is None or op.args[asked]) and not changed.intersection(ref.value for ref in others):
                results = set(new)
        changed.update(value for place in results if (value := op.writes[place]) is not None)
    read = {value for op in graph.ops if not op.forward for value in op.reads}
    return not changed & (read | {value for value in graph.gradients if value is not None})
