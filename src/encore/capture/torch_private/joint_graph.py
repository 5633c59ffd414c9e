"""AOTAutograd's joint graph: what its inputs and outputs are to the user, and the two modules to split it into.

AOTAutograd gives a partition function one joint graph, and takes two modules whose inputs and outputs follow its
conventions (descriptions in `node.meta["desc"]`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    SubclassGetAttrAOTInput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils.checkpoint import CheckpointPolicy

from encore.graph import OpClass, Primal, Role, classify
from encore.graph.torch_private import pytree
from encore.graph.values import Value

RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def takes_apart_tensors(graph: fx.Graph) -> bool:
    """Return whether a joint graph takes the inner tensors of tensor subclasses, which AOTAutograd unwraps."""
    sources = graph.find_nodes(op="placeholder")
    return any(isinstance(source.meta.get("desc"), SubclassGetAttrAOTInput) for source in sources)


def saves_unchecked(graph: fx.Graph) -> bool:
    """Return whether a joint graph saves a tensor for backward without a version check."""
    return any(node.meta.get("saved_tensor_with_no_vc_check", False) for node in graph.nodes)


def graph_in_place_of(joint: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module like the joint one with another graph; its code is never generated, since it is not run."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(joint, graph)


def plain_partition(joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own split, for a graph that Encore cannot read; it obeys `torch.utils.checkpoint`."""
    return min_cut_rematerialization_partition(joint, (), num_fwd_outputs=num_outputs)


def checkpointed(joint: fx.GraphModule) -> set[str]:
    """The names of operators that `torch.utils.checkpoint` marks for recomputation: those of each checkpointed region
    except what the next region reads."""
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


def shell(joint: fx.GraphModule, num_outputs: int, saved: Sequence[Value]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward modules for AOTAutograd: inputs and outputs only; Encore's schedule is the body."""
    nodes = {node.name: node for node in joint.graph.nodes}
    (output,) = joint.graph.find_nodes(op="output")
    flat = pytree.arg_tree_leaves(*output.args)
    descriptions = pytree.arg_tree_leaves(output.meta.get("desc", [None] * len(flat)))
    sources = joint.graph.find_nodes(op="placeholder")
    primals = [node for node in sources if "tangents" not in node.name]
    tangents = [node for node in sources if "tangents" in node.name]
    crossing = [nodes[value.name] if value.name in nodes else _node_of(joint, value) for value in saved]
    kept = [_saved_description(node, position) for position, node in enumerate(crossing)]
    forward = _hollow(primals, [*flat[:num_outputs], *crossing], [*descriptions[:num_outputs], *kept])
    backward = _hollow([*crossing, *tangents], flat[num_outputs:], descriptions[num_outputs:])
    return fx.GraphModule(joint, forward), fx.GraphModule(joint, backward)


def _node_of(joint: fx.GraphModule, value: Value) -> fx.Node:
    """A node for a saved value that exists only in the rewritten graph."""
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


def primals(joint: fx.GraphModule, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Primal]:
    """What each primal of the joint graph is to the user."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    sources = (node for node in joint.graph.find_nodes(op="placeholder") if "tangents" not in node.name)
    (output,) = joint.graph.find_nodes(op="output")
    leaving = pytree.arg_tree_leaves(output.meta.get("desc", []))
    mutated = [desc.mutated_input for desc in leaving if isinstance(desc, InputMutationAOTOutput)]
    return [
        dataclasses.replace(_primal(node, names, inputs), mutated=node.meta.get("desc") in mutated) for node in sources
    ]


def given(joint: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The tensor for each primal of the joint graph; None for one that is not an input of the Dynamo graph as it is."""
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
    """For each forward output, whether it is returned to the caller: new contents of mutated inputs are not."""
    (output,) = joint.graph.find_nodes(op="output")
    descriptions = pytree.arg_tree_leaves(output.meta.get("desc", [None] * num_outputs))
    return [not isinstance(description, InputMutationAOTOutput) for description in descriptions[:num_outputs]]
