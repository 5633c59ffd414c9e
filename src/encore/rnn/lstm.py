"""LSTM over a whole sequence as one operator: one layer, one direction, time-major or packed.

EcoRNN's layer (Zheng et al., 2018) with less kept. Forward: products with the inputs for a chunk of time as one matrix
product, and for each step the recurrent product with the cell behind it in one pass. `keep` chooses what is saved for
backward. 0 keeps i, f, g, o and c of every step with the output: 24 bytes a unit and step in float32, the fastest. K
keeps c every K steps: 4 + 4 / K bytes. The output has every h already, so that backward recomputes all gates of K steps
with two matrix products, and c by one pointwise pass from the c that was kept. Gradients of weights and inputs are
matrix products over a chunk; the two biases share one gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encore.rnn import reference
from encore.rnn.arena import Buffers
from encore.rnn.cell import LayerCall, Needs, RecurrentCell
from encore.rnn.operators import define_operators
from encore.rnn.passes import BackwardPass, ForwardPass
from encore.rnn.sequence import Chunk
from encore.rnn.steps import BackwardSteps, Entering, ForwardSteps, RebuiltGates


class LstmForward(ForwardPass):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        c_n = self.states[1]
        self.c = self.arena.get("cell", c_n).copy_(self.call.states[1])
        if self.call.w_hr is not None:
            weight = self.widened("w_hr", self.call.w_hr)
            self.kernels.pack(weight, 1, transposed=False, out=self.arena["projection"])

    def enter(self, chunk: Chunk) -> None:
        if self.sizes.keep and chunk is not self.walk.chunks[0]:
            active = chunk.active[0]
            self.kept["cells"][chunk.kept : chunk.kept + active] = self.c[:active]

    def steps(self, part: Chunk, *tensors: Any) -> ForwardSteps:
        steps = super().steps(part, *tensors)
        steps.cell = self.c
        steps.cells = None if self.sizes.keep else self.kept["cells"][part.in_memory]
        steps.projection, steps.raw = self.arena.get("projection"), self.arena.get("raw")
        return steps

    def finish(self) -> None:
        if self.sizes.keep:
            self.kept["cells"][self.walk.kept :].zero_()  # a bound from shapes: a packed sequence may need fewer rows
        if self.states[1] is not self.c:
            self.states[1].copy_(self.c)


class LstmBackward(BackwardPass):
    def begin(self) -> None:
        super().begin()
        self.c0 = self.widened("c0", self.call.states[1])
        if self.call.w_hr is not None:
            weight = self.widened("w_hr", self.call.w_hr)
            self.kernels.pack(weight, 1, transposed=True, out=self.arena["projection"])

    def entering(self, chunk: Chunk) -> Entering:
        """c before a chunk."""
        cells = self.kept["cells"]
        if not self.sizes.keep:
            return Entering(cells[chunk.before_row :], chunk.before_active, self.c0)
        if chunk is self.walk.chunks[0]:
            return Entering(self.c0, self.sizes.batch, self.c0)
        return Entering(cells[chunk.kept :], chunk.active[0], self.c0)

    def rebuilt(self, gates: RebuiltGates) -> RebuiltGates:
        chunk = gates.chunk
        gates.entering, gates.cells = self.entering(chunk), self.arena["cells"][: chunk.rows]
        gates.raw = self.arena["raw"][: chunk.rows] if self.call.projected else None
        return gates

    def enter(self, chunk: Chunk, gates: Tensor | None) -> None:
        """h before its projection, which was recomputed with the gates if those were not kept."""
        if self.call.projected and not self.sizes.keep:
            assert gates is not None
            tanh = torch.tanh(self.kept["cells"][chunk.in_memory], out=self.arena["tanh"][: chunk.rows])
            self.arena["raw"][: chunk.rows].copy_(gates[:, 3 * self.sizes.hidden :]).mul_(tanh)

    def complete(self, steps: BackwardSteps, chunk: Chunk) -> BackwardSteps:
        part = steps.chunk
        cells = self.arena["cells"][: chunk.rows] if self.sizes.keep else self.kept["cells"][chunk.in_memory]
        steps.cells, steps.grad_cell = cells[part.within(chunk)], self.totals["c0"]
        if part.times[0] == chunk.times[0]:
            steps.entering = self.entering(chunk)
        else:
            steps.entering = Entering(cells[part.before_row - chunk.first :], part.before_active, self.c0)
        if self.call.projected:
            steps.projection = self.arena["projection"]
            steps.grad_projected = self.arena["grad_projected"][part.within(chunk)]
        return steps

    def add_weight_gradients(self, chunk: Chunk, grad_gates: Tensor, inputs: Tensor, previous: Tensor) -> None:
        super().add_weight_gradients(chunk, grad_gates, inputs, previous)
        if self.call.projected:
            grads, raw = self.arena["grad_projected"][: chunk.rows], self.arena["raw"][: chunk.rows]
            self.add_product(chunk, grads, raw, self.totals["w_hr"])


class Lstm(RecurrentCell):
    name = "lstm"
    operands = ("x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr")
    state_names = ("h0", "c0")
    gradients = ("x", "h0", "c0", "w_ih", "w_hh", "bias", "w_hr")
    gates = columns = 4
    keeps_cells = True

    def reference(self, reverse: bool, option: int, resets: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
        return functools.partial(reference.lstm, reverse, resets)

    def forward_buffers(self, call: LayerCall) -> Buffers:
        sizes, real = call.sizes, call.sizes.real
        found = dict(super().forward_buffers(call))
        if call.projected:
            found["raw"] = (sizes.batch, sizes.hidden), real
            found["projection"] = (call.kernels.packed_numel(1, sizes.width, sizes.hidden, real),), real
        if sizes.mixed:
            found["cell"] = (sizes.batch, sizes.hidden), real
        return found

    def backward_buffers(self, call: LayerCall, needs: Needs) -> Buffers:
        sizes, real, rows = call.sizes, call.sizes.real, call.sizes.chunk_rows
        found = dict(super().backward_buffers(call, needs))
        if sizes.mixed or not call.states[1].is_contiguous():
            found["c0"] = (sizes.batch, sizes.hidden), real
        if sizes.mixed:
            found["grad_c0"] = (sizes.batch, sizes.hidden), real
        if sizes.keep:
            found["cells"] = (rows, sizes.hidden), real
        if call.projected:
            found["projection"] = (call.kernels.packed_numel(1, sizes.hidden, sizes.width, real),), real
            found["grad_projected"] = (rows, sizes.width), real
            found["raw"] = (rows, sizes.hidden), real
            if not sizes.keep:
                found["tanh"] = (rows, sizes.hidden), real
            if sizes.mixed and needs.weights:
                found["grad_w_hr"] = (sizes.width, sizes.hidden), real
        return found


define_operators(Lstm(), LstmForward, LstmBackward)
