"""FSDP2's sharded modules, as far as a step's memory depends on them.

FSDP2 replaces parameters by shards (`DTensor`), gathers the parameters of a group in a hook before forward, resizes
their memory to nothing after it, and gathers them again before backward. Its state is in no public interface.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter that FSDP2 shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """That of its shard."""
    computed_in: torch.dtype
    """That of the gathered parameter."""
    reduced_in: torch.dtype
    """That in which gradients are reduced."""
    trained: bool
    shard_bytes: int
    """On this rank, with padding."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that are gathered and reduced together."""

    parameters: tuple[ShardedParameter, ...]
    shards: int
    stays: bool
    """Whether they stay gathered from forward to backward."""
    ranks: tuple[int, ...]
    """Of the processes that have a shard of them."""
    index: int = 0
    """Its place among the groups of the root."""


def _states() -> list[Any]:
    """The states of all modules of the process that `fully_shard` was called on."""
    if STATES not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    kind = sys.modules[STATES].FSDPState
    found: dict[int, Any] = {}
    for reference in list(_module_state_mapping.values()):
        state = reference() if callable(reference) else reference
        if isinstance(state, kind):
            found[id(state)] = state
    return list(found.values())


def _parameters_of(state: Any) -> Iterator[Any]:
    for group in state._fsdp_param_groups:
        yield from group.fsdp_params


def sharded_root(module: nn.Module) -> nn.Module | None:
    """The root of the sharded modules that a module has parameters of: itself, or a module around it; None if no
    parameter of it is sharded."""
    inside = set(module.modules())
    roots: list[nn.Module] = []
    for state in _states():
        if any(parameter._module_info.module in inside for parameter in _parameters_of(state)):
            whole = next((one for one in state._state_ctx.all_states if one._is_root), state)
            roots.append(whole._modules[0])
    around = [root for root in roots if root not in inside]
    return (around[0] if around else module) if roots else None


def _states_in(root: nn.Module) -> list[Any]:
    inside = set(root.modules())
    return [state for state in _states() if any(module in inside for module in state._modules)]


def parameter_groups(root: nn.Module) -> list[ParameterGroup]:
    """The groups of a root, in the order of its modules."""
    order = {module: place for place, module in enumerate(root.modules())}
    states = sorted(_states_in(root), key=lambda state: min(order.get(one, 0) for one in state._modules))
    found: list[ParameterGroup] = []
    for state in states:
        for group in state._fsdp_param_groups:
            process_group = getattr(group.mesh_info, "shard_process_group", None)
            ranks = () if process_group is None else tuple(torch.distributed.get_process_group_ranks(process_group))
            is_root = state._modules[0] is root or state._is_root
            stays = group.post_forward_mesh_info is None or (is_root and bool(state._auto_reshard_after_forward))
            parameters = tuple(_described(one, group.mp_policy) for one in group.fsdp_params)
            found.append(ParameterGroup(parameters, max(1, len(ranks)), stays, ranks, len(found)))
    return found


def _described(one: Any, policy: Any) -> ShardedParameter:
    dtype = one.sharded_param.dtype
    computed_in = policy.param_dtype if policy.param_dtype and dtype.is_floating_point else dtype
    return ShardedParameter(
        tuple(one._orig_size),
        dtype,
        computed_in,
        policy.reduce_dtype or computed_in,
        bool(one.sharded_param.requires_grad),
        one._sharded_param_data.untyped_storage().nbytes(),
    )


def gathered_storages(root: nn.Module) -> list[torch.UntypedStorage]:
    """The memory of the gathered parameters, which has no bytes while they are sharded."""
    every = [one for state in _states_in(root) for one in _parameters_of(state)]
    return [output.untyped_storage() for one in every for output in one.all_gather_outputs]


def local_tensors(root: nn.Module) -> list[torch.Tensor]:
    """What a rank has of a root between two steps: its shards, and the parameters and buffers that are not sharded."""
    sharded, local = set[int](), list[torch.Tensor]()
    for state in _states_in(root):
        for one in _parameters_of(state):
            sharded |= {id(one.sharded_param), id(getattr(one, "_unsharded_param", None))}
            local.append(one._sharded_param_data)
    others = [*root.parameters(), *root.buffers()]
    return local + [on_this_rank(one) for one in others if id(one) not in sharded]


def local_gradients(root: nn.Module) -> list[torch.Tensor]:
    """The gradients that a rank has of a root's parameters."""
    every = [one.sharded_param for state in _states_in(root) for one in _parameters_of(state)]
    return [on_this_rank(one.grad) for one in every if one.grad is not None]


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor that this rank has; another tensor as it is."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        return tensor._local_tensor
    return tensor
