"""FSDP2 on fake tensors: what it gathers, frees, reduces and keeps around the blocks of a model that is not sharded.

`torch.distributed` and its processes are not needed, so the number of shards is a number. Hooks stand where FSDP2's
stand, and allocate what these allocate (`sharded_memory.py`) as fake tensors, so that a recording of the step contains
it. The weights that the model computes with are not counted: they are views of what was gathered.

Known shortcoming: on a GPU FSDP2 gathers and reduces on streams of its own, where the caching allocator may keep a
buffer a little longer than its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from encore.capture import torch_private
from encore.capture.torch_private import ParameterGroup, ShardedParameter
from encore.compiler.sharded_memory import GroupMemory
from encore.errors import OptionError
from encore.graph.torch_private import pytree

MOST_SHARDS = 10**6


@dataclass(frozen=True, slots=True)
class Sharding:
    """How FSDP2 would shard a model: `Sharding(64)` shards every block of it, and then the rest, over 64 ranks."""

    shards: int
    """Ranks that have a part of every parameter."""
    blocks: tuple[type[nn.Module], ...] = ()
    """The classes of the modules that are sharded by themselves; if not given, those of the elements of every
    `nn.ModuleList` and `nn.Sequential` that has several elements of one class."""
    shard_dtype: torch.dtype | None = None
    """The type of shards, if it is not that of the parameters: float32 for `MixedPrecisionPolicy(param_dtype=bfloat16)`
    and a model in bfloat16."""
    reduce_dtype: torch.dtype | None = None
    """The type in which gradients are reduced, if it is not that of the parameters."""
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.shards, int) or isinstance(self.shards, bool) or not 1 <= self.shards <= MOST_SHARDS:
            raise OptionError(f"shards={self.shards!r} is not accepted; give the number of ranks, from 1 on")

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """The modules of a model that are sharded by themselves, none inside of another, in order."""
        if self.blocks:
            found = [one for one in model.modules() if isinstance(one, self.blocks)]
        else:
            lists = [one for one in model.modules() if isinstance(one, nn.ModuleList | nn.Sequential)]
            found = [part for one in lists if len(one) > 1 and len({type(part) for part in one}) == 1 for part in one]
        found = [one for one in dict.fromkeys(found) if one is not model and any(True for _ in one.parameters())]
        inner = {part for one in found for part in one.modules() if part is not one}
        outer = [one for one in found if one not in inner]
        if not outer:
            raise OptionError(
                f"{type(model).__name__} has no blocks: no nn.ModuleList with several modules of one class"
                f"{' and no module of the classes that were given' if self.blocks else ''}. Name their classes: "
                "shards=encore.Sharding(64, blocks=(Block,))"
            )
        return outer

    def groups(self, model: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter], ParameterGroup]]:
        """Every module that is sharded, the blocks first, with its parameters."""
        taken: set[nn.Parameter] = set()
        found = []
        blocks = self.blocks_of(model)
        for module in (*blocks, model):
            own = [one for one in module.parameters() if one not in taken]
            taken.update(own)
            stays = module is model or not self.reshard_after_forward
            described = ParameterGroup(tuple(map(self._described, own)), self.shards, stays, ())
            found.append((module, own, described))
        return found

    def _described(self, one: nn.Parameter) -> ShardedParameter:
        kept_in = self.shard_dtype if self.shard_dtype and one.is_floating_point() else one.dtype
        return ShardedParameter(
            tuple(one.shape), kept_in, one.dtype, self.reduce_dtype or one.dtype, one.requires_grad, 0
        )


class SimulatedGroup:
    """The parameters of one module, and the memory that they are in now."""

    def __init__(self, parameters: Sequence[nn.Parameter], memory: GroupMemory) -> None:
        self.parameters = parameters
        self.memory = memory
        self.gathered: Tensor | None = None
        self.buffer: Tensor | None = None
        """What its shards have been gathered into, ahead of their use."""
        self.shard_gradients: Tensor | None = None
        self.is_reduced = False
        self.places: list[int] = []
        """Of its forwards in the order of all."""


class SimulatedSharding:
    """Hooks around the modules of a fake twin that do to memory what FSDP2 does."""

    def __init__(self, root: nn.Module, sharding: Sharding) -> None:
        self.groups = [SimulatedGroup(own, GroupMemory.of(described)) for _, own, described in sharding.groups(root)]
        modules = [module for module, _, _ in sharding.groups(root)]
        self._root = self.groups[-1]
        self._kept: Tensor | None = None
        """The buffer that the latest forward was copied out of."""
        self._reducing: Tensor | None = None
        self._order: list[SimulatedGroup] = []
        self._ends = False
        for module, group in zip(modules, self.groups, strict=True):
            module.register_forward_pre_hook(_disabled(self._before(group)), prepend=True, with_kwargs=True)
            module.register_forward_hook(_disabled(self._after(group)))

    def forget(self) -> None:
        """Zero the gradients: a step is over."""
        for group in self.groups:
            group.shard_gradients = group.gathered = group.buffer = None
            for one in group.parameters:
                one.grad = None
        self._kept = self._reducing = None
        self._order.clear()

    # -- what hooks do -----------------------------------------------------------------------------------------------

    def _before(self, group: SimulatedGroup) -> Callable[..., Any]:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if group is self._root:
                self.forget()
            group.is_reduced = False
            if group.gathered is None:
                self._gather(group)
                self._kept = None
                group.gathered, self._kept, group.buffer = _bytes(group.memory.gathered), group.buffer, None
            return _watched((args, kwargs), lambda: self._reduce(group))

        return begin

    def _after(self, group: SimulatedGroup) -> Callable[..., Any]:
        def end(_: nn.Module, __: Any, output: Any) -> None:
            if not group.memory.stays:
                group.gathered = None
            if group is self._root:
                self._kept = None
            group.places.append(len(self._order))
            self._order.append(group)
            for tensor in _differentiable(output):
                tensor.register_hook(lambda _: self._before_backward(group))

        return end

    def _gather(self, group: SimulatedGroup) -> None:
        if group.gathered is None and group.buffer is None:
            cast = _bytes(group.memory.cast)
            group.buffer = _bytes(group.memory.all_gather)
            del cast

    def _before_backward(self, group: SimulatedGroup) -> None:
        if not self._ends:
            self._ends = True
            torch_private.at_end_of_backward(self._end)
        if group.is_reduced or not group.places:
            return
        if group.gathered is None:
            self._gather(group)
            group.gathered, group.buffer = _bytes(group.memory.gathered), None
        place = group.places.pop()
        if place:
            self._gather(self._order[place - 1])

    def _reduce(self, group: SimulatedGroup) -> None:
        if group.is_reduced:
            return
        group.is_reduced = True
        group.gathered = None
        trained = [one for one in group.parameters if one.grad is not None]
        self._reducing = None
        if not trained:
            return
        self._reducing = _bytes(group.memory.reduce_scatter)
        for one in trained:
            one.grad = None
        reduced = _bytes(group.memory.reduced)
        same = group.memory.reduced == group.memory.shard_gradients
        group.shard_gradients = reduced if same else _bytes(group.memory.shard_gradients)

    def _end(self) -> None:
        self._ends = False
        for group in self.groups:
            self._reduce(group)
            group.places.clear()
        self._reducing = None
        self._order.clear()


class _PostBackward(torch.autograd.Function):
    """Calls a function once the gradients of a module's inputs are there, and those of its parameters with them."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        ctx.call()
        return (None, *gradients)


def _disabled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook as Dynamo leaves it to Python, which ends a graph there, as FSDP2's hooks do."""
    disabled: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _differentiable(tree: Any) -> Iterator[Tensor]:
    return (one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor) and one.requires_grad)


def _watched(arguments: Any, call: Callable[[], None]) -> Any:
    """The arguments of a module, whose gradients call a function."""
    leaves, structure = pytree.tree_flatten(arguments)
    places = [place for place, one in enumerate(leaves) if isinstance(one, Tensor) and one.requires_grad]
    if places:
        passed = _PostBackward.apply(call, *(leaves[place] for place in places))
        for place, one in zip(places, passed, strict=True):
            leaves[place] = one
    return pytree.tree_unflatten(leaves, structure)


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)
