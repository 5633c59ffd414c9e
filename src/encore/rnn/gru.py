"""GRU over a whole sequence as one operator: one layer, one direction, time-major or packed.

Like `lstm.py`, with h as its only state. `keep=0` keeps the gates of every step, 20 bytes a unit and step with the
output in float32; any other keeps the output alone, 4 bytes, since h of every step is all that building the gates
again takes. Gates lie side by side as n, r, z and the recurrent part of n (which r is multiplied with), so that both
products write neighbouring columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from encore.rnn import reference
from encore.rnn.arena import Arena, Layout
from encore.rnn.cell import Call, Cell, Needs, define_operators
from encore.rnn.lanes import lanes
from encore.rnn.layer import (
    add_product,
    input_rows,
    last_states,
    loaded_states,
    parts_of,
    previous_states,
    recurrent_weight,
    widened,
    within,
)
from encore.rnn.native import packed_numel
from encore.rnn.products import large_product
from encore.rnn.sequence import Chunk, Walk

OPERANDS = (
    "Tensor x, Tensor h0, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? batch_sizes, bool reverse"
)


class Gru(Cell):
    name = "gru"
    forward_schema = f"gru_forward({OPERANDS}, int keep) -> (Tensor output, Tensor h_n, Tensor gates)"
    backward_schema = (
        f"gru_backward(Tensor? grad_output, Tensor? grad_h_n, {OPERANDS}, int keep, Tensor output, Tensor gates, "
        "bool need_x, bool need_weights) -> (Tensor x, Tensor h0, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh)"
    )
    operands = gradients = ("x", "h0", "w_ih", "w_hh", "b_ih", "b_hh")
    gates, columns = 3, 4

    def reference(self, reverse: bool, option: int) -> Callable[..., tuple[Tensor, ...]]:
        return functools.partial(reference.gru, reverse)

    def results(self, call: Call) -> tuple[Tensor, ...]:
        x, (h0,), sizes = call.x, call.states, call.sizes
        return (
            x.new_empty((*x.shape[:-1], sizes.hidden)),
            h0.new_empty(h0.shape),
            x.new_empty((0 if sizes.keep else sizes.rows, 4 * sizes.hidden)),
        )

    def forward(self, call: Call, walk: Walk, arena: Arena, results: Sequence[Tensor]) -> None:
        output, h_n, gates = results
        kernels, keep, hidden = call.kernels, call.sizes.keep, call.sizes.hidden
        recurrent = widened(arena, "w_hh", call.w_hh)
        packed, product = recurrent_weight(call.sizes, arena, kernels, recurrent, 3, transposed=False)
        from_inputs = GateProducts(widened(arena, "w_ih", call.w_ih), arena.get("input_weight"))
        bias = _biases(arena, call.b_ih, call.b_hh)
        states = loaded_states(arena, call.states[0])
        flat = output.view(call.sizes.rows, call.sizes.hidden)
        turn = 0

        def inputs_of(chunk: Chunk, own: Arena) -> Tensor:
            buffer = own.get("inputs")
            return gates[chunk.first : chunk.last] if buffer is None else buffer[: chunk.rows]

        def prepare(chunk: Chunk, own: Arena) -> None:
            from_inputs.write(input_rows(call.x, chunk, own), inputs_of(chunk, own))

        with lanes(call.sizes.lanes) as shared:
            for chunk, own in shared.over(walk.chunks, arena, call.sizes.forward_turns, prepare):
                inputs = inputs_of(chunk, own)
                for part in parts_of(walk, chunk, product):
                    rows, its = slice(part.first, part.last), inputs[within(part, chunk)]
                    if product is not None:  # added for r and z, apart for n
                        its[:, 3 * hidden :].zero_()
                        product.add(states[turn][: part.rows], its[:, hidden:])
                    kept = None if keep else gates[rows]
                    kernels.gru_forward(part, its, bias, packed, states[turn], states[1 - turn], flat[rows], kept)
                    turn = (turn + len(part.times)) % 2
        last_states(flat, walk, h_n)

    def backward_layout(self, call: Call, needs: Needs) -> Layout:
        sizes, real = call.sizes, call.sizes.real
        layout = dict(super().backward_layout(call, needs))
        if needs.weights:
            layout["biases"] = (4 * sizes.hidden,), real
        if needs.x and sizes.narrow:
            layout["ordered"] = (3 * sizes.hidden, sizes.inputs), sizes.operand
        return layout

    def _packed(self, call: Call, name: str, depth: int) -> Layout:
        sizes = call.sizes
        numel = sum(call.kernels.packed_numel(1, gates * sizes.hidden, depth, sizes.operand) for gates in (1, 2))
        return {name: ((numel,), sizes.operand)}

    def backward_chunk_layout(self, call: Call, needs: Needs) -> Layout:
        layout = dict(super().backward_chunk_layout(call, needs))
        layout["previous"] = (call.sizes.chunk_rows, call.sizes.hidden), call.sizes.operand  # read by its cell
        return layout

    def backward(
        self, call: Call, walk: Walk, arena: Arena, grad_output: Tensor | None, kept: Sequence[Tensor],
        totals: Mapping[str, Tensor], needs: Needs,
    ) -> None:  # fmt: skip
        output, gates = kept
        sizes, kernels, keep, hidden = call.sizes, call.kernels, call.sizes.keep, call.sizes.hidden
        grad_state = totals["h0"]
        if needs.weights:
            grad_biases = arena["biases"].zero_()
        recurrent, input_weight = widened(arena, "w_hh", call.w_hh), widened(arena, "w_ih", call.w_ih)
        packed, product = recurrent_weight(sizes, arena, kernels, recurrent, 3, transposed=True)
        if keep:
            _biases(arena, call.b_ih, call.b_hh)
            from_inputs = GateProducts(input_weight, arena.get("input_weight"))
            from_states = GateProducts(recurrent, arena.get("state_weight"))
        ordered = arena.get("ordered")
        if ordered is not None:
            ordered[:hidden].copy_(input_weight[2 * hidden :])
            ordered[hidden:].copy_(input_weight[: 2 * hidden])
            to_inputs = large_product(ordered, arena["x_weight"], transposed=True)
        flat, grad_x = output.view(sizes.rows, hidden), totals["x"].view(-1, sizes.inputs)
        last = walk.chunks[-1]

        def gates_built(chunk: Chunk, own: Arena) -> Tensor:
            """Those that were built again: where their gradients will lie, or beside them if those are narrow."""
            return own.get("built", own["grad_gates"])[: chunk.rows]

        def prepare(chunk: Chunk, own: Arena) -> None:
            built = gates_built(chunk, own)
            from_inputs.write(input_rows(call.x, chunk, own), built)
            from_states.add(previous_states(flat, call.states[0], walk, chunk, own), built)
            kernels.gru_rebuild(arena["bias"], built)

        def finish(chunk: Chunk, own: Arena, previous: Tensor) -> None:
            """What is left when the gates' gradients are there."""
            grad_gates, begins = own["grad_gates"][: chunk.rows], chunk is last
            grad_n, grad_rz = grad_gates[:, :hidden], grad_gates[:, hidden : 3 * hidden]
            into, buffer = grad_x[chunk.first : chunk.last], own.get("grad_inputs")
            if ordered is not None:
                shared.later(lambda: to_inputs.write(grad_gates[:, : 3 * hidden], into))
            elif needs.x:
                shared.later(lambda: _write_input_gradients(grad_n, grad_rz, input_weight, into, buffer))
            if not needs.weights:
                return
            inputs, w_ih = input_rows(call.x, chunk, own), totals["w_ih"]
            shared.later(lambda: add_product(sizes, grad_rz, inputs, w_ih[: 2 * hidden], begins), "w_ih of r, z")
            shared.later(lambda: add_product(sizes, grad_n, inputs, w_ih[2 * hidden :], begins), "w_ih of n")
            shared.later(lambda: add_product(sizes, grad_gates[:, hidden:], previous, totals["w_hh"], begins), "w_hh")
            if call.b_ih is not None:
                shared.later(lambda: kernels.add_column_sums(grad_gates, grad_biases), "bias")

        with lanes(sizes.lanes) as shared:
            for chunk, own in shared.over(walk.chunks[::-1], arena, sizes.backward_turns, prepare if keep else None):
                grad_gates = own["grad_gates"][: chunk.rows]
                previous = previous_states(flat, call.states[0], walk, chunk, own)
                its_gates = gates_built(chunk, own) if keep else gates[chunk.first : chunk.last]
                for part in reversed(parts_of(walk, chunk, product)):
                    its = within(part, chunk)
                    kernels.gru_backward(
                        part, packed, grad_output, its_gates[its], previous[its], grad_gates[its], grad_state,
                        sizes.dtype,
                    )  # fmt: skip
                    if product is not None:
                        product.add(grad_gates[its, hidden:], grad_state[: part.rows])
                finish(chunk, own, previous)
        if needs.weights and call.b_ih is not None:
            totals["b_ih"][: 2 * hidden].copy_(grad_biases[hidden : 3 * hidden])
            totals["b_ih"][2 * hidden :].copy_(grad_biases[:hidden])
            totals["b_hh"].copy_(grad_biases[hidden:])


class GateProducts:
    """Products of a chunk's rows with the weight of all gates, into columns for n, r, z and the recurrent part of n."""

    def __init__(self, weight: Tensor, buffer: Tensor | None) -> None:
        self._hidden = hidden = weight.shape[0] // 3
        first = None if buffer is None else packed_numel(1, hidden, weight.shape[1], buffer.dtype)
        self._n = large_product(weight[2 * hidden :], None if buffer is None else buffer[:first])
        self._rz = large_product(weight[: 2 * hidden], None if buffer is None else buffer[first:])

    def write(self, inputs: Tensor, gates: Tensor) -> None:
        """Those with the inputs, for n, r and z."""
        self._n.write(inputs, gates[:, : self._hidden])
        self._rz.write(inputs, gates[:, self._hidden : 3 * self._hidden])

    def add(self, states: Tensor, gates: Tensor) -> None:
        """Those with the states: added for r and z, apart for n."""
        self._rz.add(states, gates[:, self._hidden : 3 * self._hidden])
        self._n.write(states, gates[:, 3 * self._hidden :])


def _write_input_gradients(
    grad_n: Tensor, grad_rz: Tensor, weight: Tensor, into: Tensor, buffer: Tensor | None
) -> None:  # fmt: skip
    """The gradients of inputs, by way of a buffer in the compute type where there is one."""
    hidden = weight.shape[0] // 3
    products = into if buffer is None else buffer[: into.shape[0]]
    torch.mm(grad_rz, weight[: 2 * hidden], out=products).addmm_(grad_n, weight[2 * hidden :])
    if buffer is not None:
        into.copy_(products)


def _biases(arena: Arena, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor:
    """The biases as the gates lie, in the arena's `bias`."""
    into = arena["bias"].zero_()
    hidden = into.shape[0] // 4
    if b_ih is not None:
        into[:hidden].copy_(b_ih[2 * hidden :])
        into[hidden : 3 * hidden].copy_(b_ih[: 2 * hidden])
    if b_hh is not None:
        into[hidden:].add_(widened(arena, "other_bias", b_hh))
    return into


define_operators(Gru())
