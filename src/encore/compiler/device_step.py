"""A training step of plain PyTorch on a device that is not here: what it allocates and reserves.

The loop that people write (zero the gradients, move a batch to the device, forward, backward, the optimizer's step)
runs a few times on fake tensors on the CPU. A mode sees every operator, in eager's order, with the storages that it
makes and the moment at which each is freed, and the caching allocator of the device follows. Where CUDA runs another
operator than the CPU, that one is called instead (`CudaOperators`): its saved tensors are what counts.

Known shortcomings: workspaces of cuDNN's convolutions are chosen by heuristics that are not public, and count as
nothing; kernels that CUDA loads while it runs take memory outside of the allocator. Convolutional networks are off by
up to a fifth where cuDNN takes a large workspace; others by 1 or 2 %.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from encore.devices import HALF, CachingAllocator, CudaOperators, DeviceBlock, DeviceProfile
from encore.errors import OptionError, listed
from encore.graph.torch_private import FakeTensorMode, TorchDispatchMode, pytree

aten = torch.ops.aten
STEPS = 3
"""The optimizer's state is there from the second step on, and what is freed in it is used again in the third."""
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
FOR_LOOPS = ("Adafactor",)
"""Optimizers whose step is a loop over parameters by default; the others handle all parameters at once on CUDA."""


@dataclass(slots=True)
class DeviceStep:
    """What a step of plain PyTorch takes on a device."""

    allocator: CachingAllocator
    resident: int = 0
    """Bytes that stay allocated between steps: parameters, buffers, the optimizer's state, workspaces."""
    optimizing: int = 0
    """Bytes that the optimizer's step allocates on top of what is there."""
    seconds: float = 0.0
    """The sum of the operators' rooflines in one step."""
    convolves: bool = False
    notes: list[str] = field(default_factory=list)


def run_device_step(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    profile: DeviceProfile,
    optimizer: Any = None,
) -> DeviceStep:
    """Follow a few steps of the model on the device."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Any] = {}
    twin = _twin(model, mode, fakes)
    found = DeviceStep(CachingAllocator(profile.usable))
    follow = _Follower(found, profile)
    with mode, torch.enable_grad():
        for tensor in _tensors(twin):
            follow.made(tensor)
        step = _optimizer_on(optimizer, twin, fakes)
        for tensor in pytree.tree_leaves([] if step is None else list(step.state.values())):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                follow.made(tensor)
        with CudaOperators(profile), follow:
            loop = _Loop(twin, (args, dict(kwargs)), step, follow)
            for number in range(STEPS):
                follow.times = number == STEPS - 1
                loop.step()
            loop.forget()
            found.resident = found.allocator.allocated
    return found


class _Loop:
    """The training loop. A batch and what it led to stay until the next ones are there, as in a loop over a loader."""

    def __init__(self, model: Callable[..., Any], given: tuple[Any, Any], optimizer: Any, follow: _Follower) -> None:
        self._model, self._given, self._optimizer, self._follow = model, given, optimizer, follow
        self._batch: Any = None
        self._result: Any = None

    def forget(self) -> None:
        """Free gradients, the batch and what it led to."""
        for parameter in _parameters(self._model):
            parameter.grad = None
        self._batch = self._result = None

    def step(self) -> None:
        """One step of training."""
        for parameter in _parameters(self._model):
            parameter.grad = None
        self._batch = pytree.tree_map_only(torch.Tensor, _fake, self._given)
        args, kwargs = self._batch
        self._result = self._model(*args, **kwargs)
        roots = [tensor for tensor in _losses(self._result) if tensor.requires_grad]
        if not roots:
            raise OptionError(
                "a call with these arguments leads to no gradient; an estimate needs a training step: a trainable "
                "parameter, or an input with requires_grad=True"
            )
        given = [None if root.dim() == 0 else torch.empty_like(root) for root in roots]
        self._follow.backward = True
        torch.autograd.backward(roots, given)
        self._follow.backward = False
        if self._optimizer is not None:
            with self._follow.optimizing():
                self._optimizer.step()


def _twin(model: Any, mode: Any, fakes: dict[int, Any]) -> Any:
    """A copy of a module with fake tensors on the CPU, by whose `id` of the original they are noted."""
    if not isinstance(model, nn.Module):
        return model
    with mode:
        for module in model.modules():
            for tensor in pytree.tree_leaves(vars(module)):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in fakes:
                    fakes[id(tensor)] = _fake(tensor)
    try:
        return copy.deepcopy(model, fakes)
    except Exception as error:
        raise OptionError(
            f"{type(model).__name__} cannot be copied without its memory ({str(error).splitlines()[0]}); "
            "an estimate needs a module that copy.deepcopy accepts, with all parameters initialised"
        ) from error


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind without memory; to be called in a fake mode."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _losses(result: Any) -> list[torch.Tensor]:
    """What backward begins at: the loss, or everything if there is none."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return [loss]
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    scalars = [tensor for tensor in tensors if tensor.dim() == 0 and tensor.requires_grad]
    return scalars[:1] or tensors


def _parameters(model: Any) -> Iterator[nn.Parameter]:
    return model.parameters() if isinstance(model, nn.Module) else iter(())


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    if isinstance(model, nn.Module):
        yield from model.parameters()
        yield from model.buffers()


def _optimizer_on(optimizer: Any, twin: Any, fakes: dict[int, Any]) -> Any:
    """The optimizer for the twin's parameters, as it runs on CUDA."""
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        for tensor in pytree.tree_leaves(list(optimizer.state.values())):
            if isinstance(tensor, torch.Tensor):
                fakes[id(tensor)] = _fake(tensor)
        made = copy.deepcopy(optimizer, fakes)
    else:
        made = optimizer_class(optimizer)([one for one in _parameters(twin) if one.requires_grad], lr=1e-3)
    for group in made.param_groups:
        if group.get("foreach", False) is None and not group.get("fused") and type(made).__name__ not in FOR_LOOPS:
            group["foreach"] = True
    return made


def optimizer_class(optimizer: Any) -> Any:
    """The class of an optimizer that is given as such, or by name."""
    known = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = known.get(optimizer) if isinstance(optimizer, str) else optimizer
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise OptionError(
            f"optimizer={optimizer!r} is not a torch.optim.Optimizer; give one, its class, or one of {listed(known)}"
        )
    return kind


class _Follower(TorchDispatchMode):
    """Has the allocator follow every operator."""

    def __init__(self, step: DeviceStep, profile: DeviceProfile) -> None:
        super().__init__()
        self._step, self._profile = step, profile
        self._blocks: dict[int, tuple[Any, DeviceBlock | None]] = {}
        """By storage: what tells when it is freed, and its block."""
        self._multiplied: set[bool] = set()
        """Whether forward and backward, which run in threads of their own, have their workspace for cuBLAS."""
        self._optimizing = self.times = self.backward = False
        self._most = 0
        """The most that was allocated while the optimizer ran."""

    def made(self, tensor: torch.Tensor) -> None:
        """A tensor whose storage may be new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            block = self._step.allocator.allocate(storage.nbytes())
            self._blocks[key] = (weakref.ref(storage, lambda _: self._freed(key)), block)
            self._most = max(self._most, self._step.allocator.allocated)

    def _freed(self, key: int) -> None:
        _, block = self._blocks.pop(key)
        self._step.allocator.free(block)

    @contextlib.contextmanager
    def optimizing(self) -> Iterator[None]:
        """The optimizer runs: its counters of steps are numbers on the host."""
        allocator = self._step.allocator
        before, self._most = allocator.allocated, 0
        self._optimizing = True
        try:
            yield
        finally:
            self._optimizing = False
            self._step.optimizing = max(0, self._most - max(before, allocator.allocated))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._number(args[0])
        packet = func.overloadpacket
        if packet in PRODUCTS and self.backward not in self._multiplied:
            self._multiplied.add(self.backward)
            self._step.allocator.allocate(self._profile.product_workspace)
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            if tensor.dim() or not self._optimizing:
                self.made(tensor)
        self._step.convolves = self._step.convolves or packet in CONVOLUTIONS
        if self.times:
            self._step.seconds += self._seconds(packet, args, kwargs or {}, result, made)
        return result

    def _number(self, tensor: torch.Tensor) -> bool | float:
        """What code reads off a tensor, which has no numbers here."""
        if self._optimizing:
            return 1.0
        if tensor.dtype is not torch.bool:
            raise OptionError(
                "the model reads a number off a tensor (.item(), int(), float()), which decides what it does; an "
                "estimate for a device that is not here has no numbers. Give it as an argument instead"
            )
        note = "code that asks a tensor for a truth value (such as mask.all()) was answered False"
        if note not in self._step.notes:
            self._step.notes.append(note)
        return False

    def _seconds(self, packet: Any, args: Any, kwargs: Any, result: Any, made: list[torch.Tensor]) -> float:
        """The roofline of one operator."""
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if all(one._is_view() for one in made) and packet not in flop_registry:
            return 0.0
        moved = sum(tensor.numel() * tensor.itemsize for tensor in (*read, *made)) / self._profile.bandwidth
        count = flop_registry.get(packet)
        if count is None:
            return moved
        narrow = any(tensor.dtype in HALF for tensor in read)
        rate = self._profile.tensor_flops if narrow else self._profile.flops
        return max(moved, count(*args, **kwargs, out_val=result) / rate)
