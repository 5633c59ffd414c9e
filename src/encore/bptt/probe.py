"""A look at the first step: which parameters it uses, what it writes to, how many bytes it takes.

It is run a few times, from the same state, and everything it changed is put back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from encore.bptt.snapshot import Surroundings, same_bits
from encore.bptt.trees import Structure
from encore.errors import OptionError

ACCUMULATE: Any = type(get_gradient_edge(torch.zeros(1, requires_grad=True)).node)
STATISTICS = ("running_mean", "running_var")
"""Written by operators whose schema does not say so."""


@dataclass(slots=True)
class Facts:
    """What is known of a step."""

    parameters: list[Tensor]
    """Leaves that the step uses and that want gradients, beside its arguments."""
    surroundings: Surroundings
    ys: Structure
    results: list[Tensor]
    """The first step's y, for shapes and types."""
    y_is_carry: list[tuple[int, int]]
    """Where a y is the very tensor of the new carry."""
    quiet: bool
    """Do steps without a tape give the same bits, carry and y?"""
    tape: int
    work: int
    step_seconds: float
    draws: tuple[bool, ...]
    """From which of its random states does it draw?"""
    differentiable: bool

    @property
    def quiet_around(self) -> bool:
        """Does the step leave random states and buffers alone?"""
        return not self.surroundings.buffers and not any(self.draws)


class _Watch(TorchDispatchMode):
    """Notes writes to memory that was there before, with what it held, generators that are drawn from, with their
    state, and the bytes of new memory."""

    def __init__(self, refused: Mapping[int, str]) -> None:
        super().__init__()
        self.refused = refused
        self.made: set[int] = set()
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        """The step's own, with the state they were in before."""
        self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._look(argument, value)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._look(argument, kwargs[argument.name])
        for generator in (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)):
            if id(generator) not in self.generators:
                self.generators[id(generator)] = generator, generator.get_state()
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs:
                self.made.add(storage._cdata)
                self.allocated += storage.nbytes()
        return result

    def _look(self, argument: Any, value: Any) -> None:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if not writes and argument.name not in STATISTICS:
            return
        for tensor in _tensors(value):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.refused:
                raise OptionError(
                    f"the step writes into {self.refused[key]}, which it needs again when it is run again; "
                    "let it return a new tensor instead"
                )
            if key not in self.made and key not in self.written:
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self.written[key] = memory, memory.clone()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def _bytes(gradient: Tensor) -> int:
    """Also of the sparse gradient of an embedding."""
    if gradient.layout == torch.strided:
        return gradient.nbytes
    return gradient._indices().nbytes + gradient._values().nbytes


NUMBERED = torch.zeros((), requires_grad=True)


def sequence_number() -> int:
    """Nodes of the autograd graph made from now on have a higher one."""
    with torch.enable_grad():
        node: Any = NUMBERED.view(()).grad_fn
    return int(node._sequence_nr())


def leaves_behind(outputs: Iterable[Tensor], since: int) -> dict[int, Tensor]:
    """The leaves that a tape leads to, and outputs that are leaves; raises `OptionError` where it leads into a graph
    that was there before it."""
    stack: list[Any] = []
    found: dict[int, Tensor] = {}
    for tensor in outputs:
        if tensor.grad_fn is not None:
            stack.append(tensor.grad_fn)
        elif tensor.requires_grad:
            found[id(tensor)] = tensor
    seen = set(stack)
    while stack:
        node: Any = stack.pop()
        if type(node) is ACCUMULATE:
            found[id(node.variable)] = node.variable
            continue
        if node._sequence_nr() < since:
            raise OptionError(
                "the step uses a tensor from outside that was computed with gradients "
                f"(by {node.name()}); pass it as consts=, and take it as the step's third argument"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


@contextlib.contextmanager
def hooks_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Hooks on leaves are for whole gradients: partial ones must not call them."""
    kept = []
    for tensor in tensors:
        hooks = tensor._backward_hooks
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def probe(
    call: Callable[[Any, Any], tuple[Any, Any]],
    carry: Structure,
    start: Sequence[Tensor],
    item: Any,
    given: Sequence[Tensor],
    consts: Sequence[Tensor],
) -> Facts:
    """Run the first step from `start` with `item`. `given` are the user's tensors; `consts` are leaves made of them."""
    devices = sorted({tensor.device for tensor in (*start, *given) if tensor.is_cuda}, key=str)
    surroundings = Surroundings([], devices)
    random = surroundings.random_state()
    refused = {tensor.untyped_storage()._cdata: "its carry" for tensor in start}
    refused |= {tensor.untyped_storage()._cdata: "its input" for tensor in _tensors(item)}
    watch = _Watch(refused)
    since = sequence_number()
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
        return tensor

    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()) for tensor in start]
    with watch:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            new, y = call(carry.unflatten(leaves), item)
        out = carry.flatten(new)
        ys = Structure(y, "the step's y")
        results = ys.flatten(y)
        outputs = [tensor for tensor in (*out, *results) if tensor.requires_grad]
        found = leaves_behind(outputs, since)
        own = {id(tensor) for tensor in leaves}
        apart = own | {id(tensor) for tensor in consts}
        parameters = [tensor for key, tensor in found.items() if key not in apart]
        differentiable = any(tensor.requires_grad for tensor in (*given, *parameters))
        taken = watch.allocated
        kept = 0
        if outputs and differentiable:
            inputs = [tensor for tensor in (*leaves, *consts, *parameters) if tensor.requires_grad]
            with hooks_aside(parameters):
                zeros = [torch.zeros_like(output) for output in outputs]
                gradients = torch.autograd.grad(outputs, inputs, zeros, allow_unused=True)
            pairs = zip(inputs, gradients, strict=True)
            kept = sum(_bytes(gradient) for one, gradient in pairs if gradient is not None and id(one) not in own)
            del gradients, pairs
    # Beside what backward allocates: the state that is worked from, and the one it is compared with. Gradients of
    # parameters are not counted: everybody has them.
    work = watch.allocated - taken - kept + 2 * sum(tensor.nbytes for tensor in start)
    outside = [tensor for tensor in (*given, *parameters) if tensor.layout == torch.strided]
    for tensor in outside:
        saved.pop(tensor.untyped_storage()._cdata, None)
    for tensor in _tensors(item):  # part of something of the user's, or made for this step: its own bytes at most
        key = tensor.untyped_storage()._cdata
        if key in saved:
            saved[key] = min(saved[key], tensor.nbytes)
    ends = [tensor for tensor in results if not any(tensor is other for other in out)]
    for tensor in (*start, *ends):  # inside a block they are held by the tape, whoever else needs them
        saved.setdefault(tensor.untyped_storage()._cdata, tensor.nbytes)

    surroundings.buffers = [memory for memory, _ in watch.written.values()]
    surroundings.generators = [generator for generator, _ in watch.generators.values()]
    random += [state for _, state in watch.generators.values()]

    def put_back() -> None:
        surroundings.set_random_state(random)
        with torch.no_grad():
            for memory, before in watch.written.values():
                memory.copy_(before)

    draws = tuple(not torch.equal(*states) for states in zip(random, surroundings.random_state(), strict=True))
    put_back()
    began = time.perf_counter()
    with torch.no_grad():
        again, y_again = call(carry.unflatten([tensor.detach() for tensor in start]), item)
    seconds = time.perf_counter() - began
    put_back()
    quiet = all(map(same_bits, (*out, *results), (*carry.flatten(again), *ys.flatten(y_again))))
    places = {id(tensor): place for place, tensor in enumerate(out) if tensor.requires_grad}
    y_is_carry = [(position, places[id(one)]) for position, one in enumerate(results) if id(one) in places]
    return Facts(
        parameters=parameters, surroundings=surroundings, ys=ys, results=[tensor.detach() for tensor in results],
        y_is_carry=y_is_carry, quiet=quiet, tape=sum(saved.values()), work=work, step_seconds=seconds,
        draws=draws, differentiable=differentiable,
    )  # fmt: skip
