"""GRU over a whole sequence as one operator: one layer, one direction, time-major or packed.

Like `lstm.py`, with h as its only state. `keep=0` keeps the gates of every step, 20 bytes a unit and step with the
output in float32; any other keeps the output alone, 4 bytes, since recomputing the gates takes nothing but h of every
step. Gates lie side by side as n, r, z and the recurrent part of n (which r is multiplied with), so that both products
write neighbouring columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from encore.rnn import reference
from encore.rnn.arena import Buffers
from encore.rnn.cell import LayerCall, Needs, RecurrentCell
from encore.rnn.native import packed_numel
from encore.rnn.operators import define_operators
from encore.rnn.passes import BackwardPass, ForwardPass, LayerPass
from encore.rnn.products import LargeProduct, StepProduct, large_product
from encore.rnn.sequence import Chunk


class GateProducts:
    """Products of a chunk's rows with the weight of all gates, into columns for n, r, z and the recurrent part of n."""

    def __init__(self, weight: Tensor, buffer: Tensor | None) -> None:
        self._hidden = hidden = weight.shape[0] // 3
        first = None if buffer is None else packed_numel(1, hidden, weight.shape[1], buffer.dtype)
        self._n = large_product(weight[2 * hidden :], None if buffer is None else buffer[:first])
        self._rz = large_product(weight[: 2 * hidden], None if buffer is None else buffer[first:])

    def write(self, left: Tensor, into: Tensor) -> None:
        """Those with the inputs, for n, r and z."""
        self._n.write(left, into[:, : self._hidden])
        self._rz.write(left, into[:, self._hidden : 3 * self._hidden])

    def add(self, left: Tensor, into: Tensor) -> None:
        """Those with the states: added for r and z, separate for n."""
        self._rz.add(left, into[:, self._hidden : 3 * self._hidden])
        self._n.write(left, into[:, 3 * self._hidden :])


class GruPass(LayerPass):
    def large_product(self, weight: Tensor, name: str) -> LargeProduct:
        return GateProducts(weight, self.arena.get(name))

    def biases(self) -> Tensor:
        """The biases as the gates lie, in the arena's `bias`."""
        into, hidden = self.arena["bias"].zero_(), self.sizes.hidden
        b_ih, b_hh = self.call.b_ih, self.call.b_hh
        if b_ih is not None:
            into[:hidden].copy_(b_ih[2 * hidden :])
            into[hidden : 3 * hidden].copy_(b_ih[: 2 * hidden])
        if b_hh is not None:
            into[hidden:].add_(self.widened("other_bias", b_hh))
        return into


class GruForward(GruPass, ForwardPass):
    def add_recurrent(self, product: StepProduct, states: Tensor, inputs: Tensor) -> None:
        hidden = self.sizes.hidden
        inputs[:, 3 * hidden :].zero_()
        product.add(states, inputs[:, hidden:])


class GruBackward(GruPass, BackwardPass):
    def begin(self) -> None:
        hidden = self.sizes.hidden
        if self.needs.weights:
            self.grad_bias = self.arena["biases"].zero_()
        self.ordered = self.arena.get("ordered")
        if self.ordered is not None:
            self.ordered[:hidden].copy_(self.w_ih[2 * hidden :])
            self.ordered[hidden:].copy_(self.w_ih[: 2 * hidden])
            self.to_inputs = large_product(self.ordered, self.arena["x_weight"], transposed=True)

    def carry(self, product: StepProduct, grad_gates: Tensor, grad_state: Tensor) -> None:
        product.add(grad_gates[:, self.sizes.hidden :], grad_state)

    def write_input_products(self, grad_gates: Tensor, into: Tensor) -> None:
        hidden = self.sizes.hidden
        if self.ordered is not None:
            self.to_inputs.write(grad_gates[:, : 3 * hidden], into)
            return
        grad_n, grad_rz = grad_gates[:, :hidden], grad_gates[:, hidden : 3 * hidden]
        torch.mm(grad_rz, self.w_ih[: 2 * hidden], out=into).addmm_(grad_n, self.w_ih[2 * hidden :])

    def add_weight_gradients(self, chunk: Chunk, grad_gates: Tensor, inputs: Tensor, previous: Tensor) -> None:
        hidden, w_ih = self.sizes.hidden, self.totals["w_ih"]
        self.add_product(chunk, grad_gates[:, hidden : 3 * hidden], inputs, w_ih[: 2 * hidden])
        self.add_product(chunk, grad_gates[:, :hidden], inputs, w_ih[2 * hidden :])
        self.add_product(chunk, grad_gates[:, hidden:], previous, self.totals["w_hh"])
        if self.call.b_ih is not None:
            self.kernels.add_column_sums(grad_gates, self.grad_bias)

    def finish(self) -> None:
        hidden = self.sizes.hidden
        if self.needs.weights and self.call.b_ih is not None:
            self.totals["b_ih"][: 2 * hidden].copy_(self.grad_bias[hidden : 3 * hidden])
            self.totals["b_ih"][2 * hidden :].copy_(self.grad_bias[:hidden])
            self.totals["b_hh"].copy_(self.grad_bias[hidden:])


class Gru(RecurrentCell):
    name = "gru"
    gradients = ("x", "h0", "w_ih", "w_hh", "b_ih", "b_hh")
    gates, columns = 3, 4

    def reference(self, reverse: bool, option: int, resets: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
        return functools.partial(reference.gru, reverse, resets)

    def backward_buffers(self, call: LayerCall, needs: Needs) -> Buffers:
        sizes, real = call.sizes, call.sizes.real
        found = dict(super().backward_buffers(call, needs))
        found["previous"] = (sizes.chunk_rows, sizes.hidden), sizes.operand  # read by its cell
        if needs.weights:
            found["biases"] = (4 * sizes.hidden,), real
        if needs.x and sizes.narrow:
            found["ordered"] = (3 * sizes.hidden, sizes.inputs), sizes.operand
        return found

    def _packed(self, call: LayerCall, name: str, depth: int) -> Buffers:
        sizes = call.sizes
        numel = sum(call.kernels.packed_numel(1, gates * sizes.hidden, depth, sizes.operand) for gates in (1, 2))
        return {name: ((numel,), sizes.operand)}


define_operators(Gru(), GruForward, GruBackward)
