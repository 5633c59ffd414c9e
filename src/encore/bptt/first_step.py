"""Facts about the first step: which parameters it uses, what it writes to, how many bytes it takes.

It is run a few times, from the same state, and everything it changed is restored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from encore.bptt.loop import Loop
from encore.bptt.snapshot import Surroundings, same_bits
from encore.bptt.trees import Structure
from encore.errors import OptionError
from encore.graph.torch_private import TorchDispatchMode

ACCUMULATE: Any = type(get_gradient_edge(torch.zeros(1, requires_grad=True)).node)
STATISTICS = ("running_mean", "running_var")
"""Written by operators whose schema does not say so."""


@dataclass(slots=True)
class Facts:
    """What is known of a step."""

    parameters: list[Tensor]
    """Leaves that the step uses and that require gradients, besides its arguments."""
    surroundings: Surroundings
    ys: Structure
    results: list[Tensor]
    """The first step's y, for shapes and types."""
    y_is_carry: list[tuple[int, int]]
    """Pairs of places: a y that is the same tensor as one of the new carry."""
    quiet: bool
    """Whether steps without a tape give the same bits, carry and y."""
    tape: int
    work: int
    step_seconds: float
    draws: tuple[bool, ...]
    """For each of its random states, whether it draws from it."""
    differentiable: bool

    @property
    def quiet_around(self) -> bool:
        """Whether the step leaves random states and buffers as they are."""
        return not self.surroundings.buffers and not any(self.draws)


class _StepWatch(TorchDispatchMode):
    """Notes writes to memory that was there before, with its old content, generators that are drawn from, with their
    state, and the bytes of new memory."""

    def __init__(self, reserved: Mapping[int, str]) -> None:
        super().__init__()
        self.reserved = reserved
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
            if key in self.reserved:
                raise OptionError(
                    f"the step writes into {self.reserved[key]}, which it needs again when it is run again; "
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
    """Bytes of a gradient, also of the sparse one of an embedding."""
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
    """The leaves that a tape leads to, and outputs that are leaves; raises `OptionError` if it leads into a graph that
    is older than it."""
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
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Remove hooks on leaves for a while: they are for whole gradients, and partial ones must not call them."""
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


def probe(loop: Loop, item: Any, given: Sequence[Tensor]) -> Facts:
    """Run the first step, with input `item`. `given` are the user's tensors."""
    start = [tensor.detach() for tensor in loop.start]
    devices = sorted({tensor.device for tensor in (*start, *given) if tensor.is_cuda}, key=str)
    surroundings = Surroundings([], devices)
    random = surroundings.random_state()
    reserved = {tensor.untyped_storage()._cdata: "its carry" for tensor in start}
    reserved |= {tensor.untyped_storage()._cdata: "its input" for tensor in _tensors(item)}
    watch = _StepWatch(reserved)
    first = _taped(loop, start, item, given, watch)
    surroundings.buffers = [memory for memory, _ in watch.written.values()]
    surroundings.generators = [generator for generator, _ in watch.generators.values()]
    random += [state for _, state in watch.generators.values()]

    def restore() -> None:
        surroundings.set_random_state(random)
        with torch.no_grad():
            for memory, before in watch.written.values():
                memory.copy_(before)

    draws = tuple(not torch.equal(*states) for states in zip(random, surroundings.random_state(), strict=True))
    restore()
    began = time.perf_counter()
    with torch.no_grad(), loop.contexts():
        again, y_again = loop.call(loop.carry.unflatten([tensor.detach() for tensor in start]), item)
    seconds = time.perf_counter() - began
    restore()
    out, results = first.out, first.results
    places = {id(tensor): place for place, tensor in enumerate(out) if tensor.requires_grad}
    return Facts(
        parameters=first.parameters, surroundings=surroundings, ys=first.ys,
        results=[tensor.detach() for tensor in results],
        y_is_carry=[(position, places[id(one)]) for position, one in enumerate(results) if id(one) in places],
        quiet=all(map(same_bits, (*out, *results), (*loop.carry.flatten(again), *first.ys.flatten(y_again)))),
        tape=_tape_bytes(first, start, item, given), work=first.work, step_seconds=seconds, draws=draws,
        differentiable=first.differentiable,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _First:
    """The first step, run with a tape and reversed."""

    out: list[Tensor]
    ys: Structure
    results: list[Tensor]
    parameters: list[Tensor]
    saved: dict[int, int]
    """Bytes of the storages that its tape saves, by their keys."""
    work: int
    differentiable: bool


def _taped(loop: Loop, start: Sequence[Tensor], item: Any, given: Sequence[Tensor], watch: _StepWatch) -> _First:
    since = sequence_number()
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
        return tensor

    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()) for tensor in start]
    with watch:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor), loop.contexts():
            new, y = loop.call(loop.carry.unflatten(leaves), item)
        out = loop.carry.flatten(new)
        ys = Structure(y, "the step's y")
        results = ys.flatten(y)
        outputs = [tensor for tensor in (*out, *results) if tensor.requires_grad]
        known = {id(tensor) for tensor in (*leaves, *loop.consts)}
        parameters = [tensor for key, tensor in leaves_behind(outputs, since).items() if key not in known]
        differentiable = any(tensor.requires_grad for tensor in (*given, *parameters))
        before, kept = watch.allocated, 0
        if outputs and differentiable:
            inputs = [tensor for tensor in (*leaves, *loop.consts, *parameters) if tensor.requires_grad]
            with without_hooks(parameters):
                zeros = [torch.zeros_like(output) for output in outputs]
                gradients = torch.autograd.grad(outputs, inputs, zeros, allow_unused=True)
            own = {id(tensor) for tensor in leaves}
            pairs = zip(inputs, gradients, strict=True)
            kept = sum(_bytes(gradient) for one, gradient in pairs if gradient is not None and id(one) not in own)
            del gradients, pairs
    # Besides what backward allocates: the state that is worked from, and the one it is compared with. Gradients of
    # parameters are not counted: a plain loop has them, too.
    work = watch.allocated - before - kept + 2 * sum(tensor.nbytes for tensor in start)
    return _First(out, ys, results, parameters, saved, work, differentiable)


def _tape_bytes(first: _First, start: Sequence[Tensor], item: Any, given: Sequence[Tensor]) -> int:
    """Bytes that the tape of a step takes: what it saves that is not there anyway."""
    saved = first.saved
    outside = [tensor for tensor in (*given, *first.parameters) if tensor.layout == torch.strided]
    for tensor in outside:
        saved.pop(tensor.untyped_storage()._cdata, None)
    for tensor in _tensors(item):  # part of one of the user's tensors, or made for this step: its own bytes at most
        key = tensor.untyped_storage()._cdata
        if key in saved:
            saved[key] = min(saved[key], tensor.nbytes)
    ends = [tensor for tensor in first.results if not any(tensor is other for other in first.out)]
    for tensor in (*start, *ends):  # inside a block the tape keeps them
        saved.setdefault(tensor.untyped_storage()._cdata, tensor.nbytes)
    return sum(saved.values())
