"""Backward of a scan: the gradient that moves from block to block, and the sums that grow on the way.

Autograd adds gradients up in the order in which they arrive, latest step first. To give the numbers of a plain loop, a
block's backward begins with what would have arrived there before: the sum that a parameter has so far is a root of its
own, not added to that block's sum afterwards; and where y is the new carry itself, its gradient arrives at the next
block's first state, before what the steps there contribute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encore.bptt.first_step import Facts, leaves_behind
from encore.bptt.loop import Loop
from encore.bptt.source import Once
from encore.errors import OptionError, ReplayError


@dataclass(slots=True)
class BlockTape:
    """A block of steps whose backward can run."""

    start: int
    stop: int
    since: int
    """Nodes of its graph have sequence numbers from here on."""
    entry: list[Tensor]
    out: list[Tensor]
    ys: list[list[Tensor]]
    inputs: list[Tensor | None]


class Gradients:
    """Gradients of the carry where backward stands, and of inputs, consts and parameters so far."""

    def __init__(
        self, loop: Loop, facts: Facts, steps: int, carry: Sequence[Tensor | None], ys: Sequence[Tensor | None]
    ) -> None:
        self.loop = loop
        self.facts = facts
        self.steps = steps
        self.carry = list(carry)
        self.inputs: list[Tensor | None] = [None] * len(loop.source.tensors)
        self._ys = ys
        self._leaves = [*loop.consts, *facts.parameters]
        self._sums: dict[int, Tensor] = {}
        self._carried = dict(facts.y_is_carry)

    @property
    def sums(self) -> list[Tensor | None]:
        """Of consts and parameters."""
        return [self._sums.get(id(tensor)) for tensor in self._leaves]

    def reverse(self, tape: BlockTape) -> None:
        """Take the gradient from the end of a block to its beginning."""
        found = self._backward(tape)
        self.carry = []
        for place, tensor in enumerate(tape.entry):
            first = all(tensor is not other for other in tape.entry[:place])
            self.carry.append(found.get(id(tensor)) if first else None)
        for tensor in self._leaves:
            total = found.get(id(tensor))
            if total is not None:
                self._sums[id(tensor)] = total
        source = self.loop.source
        for position, leaf in enumerate(tape.inputs):
            part = None if leaf is None else found.get(id(leaf))
            if part is not None:
                whole = self.inputs[position]
                if whole is None:
                    whole = self.inputs[position] = torch.zeros_like(source.tensors[position])
                whole[source.rows(tape.start, tape.stop)] = part
        if isinstance(source, Once):
            source.forget(tape.start, tape.stop)

    def _backward(self, tape: BlockTape) -> dict[int, Tensor | None]:
        """Gradients of the leaves of a tape, by the `id` of each."""
        arriving = [*self._arriving(tape)]
        if not arriving:
            return {}
        entry = {id(tensor): tensor for tensor in tape.entry}
        wanted = [*entry.values(), *(leaf for leaf in tape.inputs if leaf is not None), *self._leaves]
        inputs = [tensor for tensor in wanted if tensor.requires_grad]
        self._check_leaves(tape, inputs)
        arriving += [(tensor, self._sums[id(tensor)]) for tensor in self._leaves if id(tensor) in self._sums]
        roots, gradients = zip(*arriving, strict=True)
        arriving.clear()
        self.carry = []
        given = torch.autograd.grad(roots, inputs, gradients, allow_unused=True)
        return dict(zip(map(id, inputs), given, strict=True))

    def _arriving(self, tape: BlockTape) -> Iterator[tuple[Tensor, Tensor]]:
        """The roots of a block's backward with their gradients, in the order in which they arrive in a plain loop."""
        for position, gradient in enumerate(self._ys):
            if gradient is not None:
                moved = tape.stop != self.steps and not self.loop.is_cut(tape.stop) and position in self._carried
                for step, y in enumerate(tape.ys[: len(tape.ys) - moved], tape.start):
                    if y[position].requires_grad:
                        yield y[position], gradient[step]
        if tape.start and not self.loop.is_cut(tape.start):
            for position, place in self._carried.items():
                gradient = self._ys[position]
                if gradient is not None:
                    yield tape.entry[place], gradient[tape.start - 1]
        for tensor, gradient in zip(tape.out, self.carry, strict=True):
            if gradient is not None and tensor.requires_grad:
                yield tensor, gradient

    def _check_leaves(self, tape: BlockTape, known: Sequence[Tensor]) -> None:
        """Raise `OptionError` for a parameter that the first step did not use: it would get no gradient."""
        outputs = [*tape.out, *(tensor for y in tape.ys for tensor in y)]
        expected = {id(tensor) for tensor in known} | {id(tensor) for tensor in tape.entry}
        for key, leaf in leaves_behind(outputs, tape.since).items():
            if key not in expected:
                raise OptionError(
                    f"steps {tape.start} to {tape.stop - 1} use a parameter of shape {tuple(leaf.shape)} that the "
                    "first step did not use; pass it as part of consts=, and take that as the step's third argument"
                )
        for position, place in self.facts.y_is_carry:
            if tape.stop != self.steps and tape.ys[-1][position] is not tape.out[place]:
                raise ReplayError(f"the step's y was its new carry at first and is not at step {tape.stop - 1}")
