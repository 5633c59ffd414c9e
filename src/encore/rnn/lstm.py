"""LSTM over a whole sequence as one operator: one layer, one direction, time-major or packed.

EcoRNN's layer (Zheng et al., 2018) with less kept. Forward: products with the inputs for a chunk of time as one matrix
product, and for each step the recurrent product with the cell behind it in one pass. What backward needs is chosen by
`keep`. 0 keeps i, f, g, o and c of every step beside the output: 24 bytes a unit and step in float32, the fastest.
K keeps c every K steps: 4 + 4 / K bytes. The output already holds every h, so that backward builds all gates of K
steps again with two matrix products, and c by one pointwise pass from the c that was kept. Gradients of weights and
inputs are matrix products over a chunk; the two biases share one gradient.
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
    added_biases,
    input_rows,
    last_states,
    loaded_states,
    parts_of,
    previous_states,
    recurrent_weight,
    widened,
    within,
    write_product,
)
from encore.rnn.products import large_product
from encore.rnn.sequence import Chunk, Walk, kept_rows

WEIGHTS = "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr"


class Lstm(Cell):
    name = "lstm"
    forward_schema = (
        f"lstm_forward(Tensor x, Tensor h0, Tensor c0, {WEIGHTS}, Tensor? batch_sizes, bool reverse, int keep) -> "
        "(Tensor output, Tensor h_n, Tensor c_n, Tensor gates, Tensor cells)"
    )
    backward_schema = (
        "lstm_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor x, Tensor h0, Tensor c0, "
        f"{WEIGHTS}, Tensor? batch_sizes, bool reverse, int keep, Tensor output, Tensor gates, Tensor cells, "
        "bool need_x, bool need_weights) -> "
        "(Tensor x, Tensor h0, Tensor c0, Tensor w_ih, Tensor w_hh, Tensor bias, Tensor w_hr)"
    )
    operands = ("x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr")
    state_names = ("h0", "c0")
    gradients = ("x", "h0", "c0", "w_ih", "w_hh", "bias", "w_hr")
    gates = columns = 4
    keeps_cells = True

    def reference(self, reverse: bool, option: int) -> Callable[..., tuple[Tensor, ...]]:
        return functools.partial(reference.lstm, reverse)

    def results(self, call: Call) -> tuple[Tensor, ...]:
        x, (h0, c0), sizes = call.x, call.states, call.sizes
        return (
            x.new_empty((*x.shape[:-1], sizes.width)),
            h0.new_empty(h0.shape),
            c0.new_empty(c0.shape),
            x.new_empty((0 if sizes.keep else sizes.rows, 4 * sizes.hidden)),
            x.new_empty((kept_rows(sizes.steps, sizes.batch, sizes.rows, sizes.keep), sizes.hidden), dtype=sizes.real),
        )

    def forward_layout(self, call: Call) -> Layout:
        sizes, real = call.sizes, call.sizes.real
        layout = dict(super().forward_layout(call))
        if call.projected:
            layout["raw"] = (sizes.batch, sizes.hidden), real
            layout["projection"] = (call.kernels.packed_numel(1, sizes.width, sizes.hidden, real),), real
        if sizes.mixed:
            layout["cell"] = (sizes.batch, sizes.hidden), real
        return layout

    def forward(self, call: Call, walk: Walk, arena: Arena, results: Sequence[Tensor]) -> None:
        output, h_n, c_n, gates, cells = results
        sizes, kernels, keep = call.sizes, call.kernels, call.sizes.keep
        recurrent = widened(arena, "w_hh", call.w_hh)
        packed, product = recurrent_weight(sizes, arena, kernels, recurrent, 4, transposed=False)
        if call.w_hr is not None:
            kernels.pack(widened(arena, "w_hr", call.w_hr), 1, transposed=False, out=arena["projection"])
        from_inputs = large_product(widened(arena, "w_ih", call.w_ih), arena.get("input_weight"))
        bias = added_biases(arena, call.b_ih, call.b_hh)
        h0, c0 = call.states
        states, cell = loaded_states(arena, h0), arena.get("cell", c_n).copy_(c0)
        flat = output.view(sizes.rows, sizes.width)
        turn = 0

        def inputs_of(chunk: Chunk, own: Arena) -> Tensor:
            buffer = own.get("inputs")
            return gates[chunk.first : chunk.last] if buffer is None else buffer[: chunk.rows]

        def prepare(chunk: Chunk, own: Arena) -> None:
            from_inputs.write(input_rows(call.x, chunk, own), inputs_of(chunk, own))

        with lanes(sizes.lanes) as shared:
            for chunk, own in shared.over(walk.chunks, arena, sizes.forward_turns, prepare):
                if keep and chunk is not walk.chunks[0]:
                    active = chunk.active[0]
                    cells[chunk.kept : chunk.kept + active] = cell[:active]
                inputs = inputs_of(chunk, own)
                for part in parts_of(walk, chunk, product):
                    rows, its = slice(part.first, part.last), inputs[within(part, chunk)]
                    if product is not None:
                        product.add(states[turn][: part.rows], its)
                    kernels.lstm_forward(
                        part, its, bias, packed, arena.get("projection"), states[turn], states[1 - turn], cell,
                        arena.get("raw"), flat[rows], None if keep else gates[rows], None if keep else cells[rows],
                    )  # fmt: skip
                    turn = (turn + len(part.times)) % 2
        if keep:
            cells[walk.kept :].zero_()  # shapes alone do not tell how many rows a packed sequence needs
        if c_n is not cell:
            c_n.copy_(cell)
        last_states(flat, walk, h_n)

    def backward_layout(self, call: Call, needs: Needs) -> Layout:
        sizes, real = call.sizes, call.sizes.real
        layout = dict(super().backward_layout(call, needs))
        if call.projected:
            layout["projection"] = (call.kernels.packed_numel(1, sizes.hidden, sizes.width, real),), real
        if sizes.mixed or not call.states[1].is_contiguous():
            layout["c0"] = (sizes.batch, sizes.hidden), real
        if sizes.mixed:
            layout["grad_c0"] = (sizes.batch, sizes.hidden), real
            if call.projected and needs.weights:
                layout["grad_w_hr"] = (sizes.width, sizes.hidden), real
        return layout

    def backward_chunk_layout(self, call: Call, needs: Needs) -> Layout:
        sizes, real, rows = call.sizes, call.sizes.real, call.sizes.chunk_rows
        layout = dict(super().backward_chunk_layout(call, needs))
        if sizes.keep:
            layout["cells"] = (rows, sizes.hidden), real
        if call.projected:
            layout["grad_projected"] = (rows, sizes.width), real
            layout["raw"] = (rows, sizes.hidden), real
            if not sizes.keep:
                layout["tanh"] = (rows, sizes.hidden), real
        return layout

    def backward(
        self, call: Call, walk: Walk, arena: Arena, grad_output: Tensor | None, kept: Sequence[Tensor],
        totals: Mapping[str, Tensor], needs: Needs,
    ) -> None:  # fmt: skip
        output, gates, cells = kept
        sizes, kernels, keep, hidden = call.sizes, call.kernels, call.sizes.keep, call.sizes.hidden
        grad_bias = totals["bias"].zero_()
        recurrent, input_weight = widened(arena, "w_hh", call.w_hh), widened(arena, "w_ih", call.w_ih)
        h0, first_c = call.states[0], widened(arena, "c0", call.states[1])
        packed, product = recurrent_weight(sizes, arena, kernels, recurrent, 4, transposed=True)
        if call.w_hr is not None:
            kernels.pack(widened(arena, "w_hr", call.w_hr), 1, transposed=True, out=arena["projection"])
        if keep:
            added_biases(arena, call.b_ih, call.b_hh)
            from_inputs = large_product(input_weight, arena.get("input_weight"))
            from_states = large_product(recurrent, arena.get("state_weight"))
        to_inputs = large_product(input_weight, arena.get("x_weight"), transposed=True)
        flat, grad_x = output.view(sizes.rows, sizes.width), totals["x"].view(-1, sizes.inputs)
        first, last = walk.chunks[0], walk.chunks[-1]

        def entering(chunk: Chunk) -> tuple[Tensor, int]:
            """c before the chunk, and for how many rows it is known."""
            if not keep:
                return cells[chunk.before_row :], chunk.before_active
            return (first_c, sizes.batch) if chunk is first else (cells[chunk.kept :], chunk.active[0])

        def operands(chunk: Chunk, own: Arena) -> tuple[Tensor, Tensor]:
            return input_rows(call.x, chunk, own), previous_states(flat, h0, walk, chunk, own)

        def gates_built(chunk: Chunk, own: Arena) -> Tensor:
            """Those that were built again: where their gradients will lie, or beside them if those are narrow."""
            return own.get("built", own["grad_gates"])[: chunk.rows]

        def prepare(chunk: Chunk, own: Arena) -> None:
            inputs, previous = operands(chunk, own)
            built = gates_built(chunk, own)
            from_inputs.write(inputs, built)
            from_states.add(previous, built)
            raw = own["raw"][: chunk.rows] if call.projected else None
            kernels.lstm_rebuild(
                chunk, arena["bias"], *entering(chunk), first_c, built, own["cells"][: chunk.rows], raw
            )

        def finish(chunk: Chunk, own: Arena) -> None:
            """What is left when the gates' gradients are there."""
            grad_gates, begins = own["grad_gates"][: chunk.rows], chunk is last
            if needs.x:
                into = grad_x[chunk.first : chunk.last]
                shared.later(lambda: write_product(grad_gates, to_inputs, into, own.get("grad_inputs")))
            if not needs.weights:
                return
            inputs, previous = operands(chunk, own)
            shared.later(lambda: add_product(sizes, grad_gates, inputs, totals["w_ih"], begins), "w_ih")
            shared.later(lambda: add_product(sizes, grad_gates, previous, totals["w_hh"], begins), "w_hh")
            if call.b_ih is not None:
                shared.later(lambda: kernels.add_column_sums(grad_gates, grad_bias), "bias")
            if call.projected:
                grads, raw = own["grad_projected"][: chunk.rows], own["raw"][: chunk.rows]
                shared.later(lambda: add_product(sizes, grads, raw, totals["w_hr"], begins), "w_hr")

        with lanes(sizes.lanes) as shared:
            for chunk, own in shared.over(walk.chunks[::-1], arena, sizes.backward_turns, prepare if keep else None):
                rows = slice(chunk.first, chunk.last)
                grad_gates = own["grad_gates"][: chunk.rows]
                grad_projected = own["grad_projected"][: chunk.rows] if call.projected else None
                if keep:
                    its_gates, its_cells = gates_built(chunk, own), own["cells"][: chunk.rows]
                else:
                    its_gates, its_cells = gates[rows], cells[rows]
                    if call.projected:
                        tanh = torch.tanh(its_cells, out=own["tanh"][: chunk.rows])
                        own["raw"][: chunk.rows].copy_(its_gates[:, 3 * hidden :]).mul_(tanh)
                for part in reversed(parts_of(walk, chunk, product)):
                    its = within(part, chunk)
                    if part.times[0] != chunk.times[0]:
                        enter, known = its_cells[part.before_row - chunk.first :], part.before_active
                    else:
                        enter, known = entering(chunk)
                    kernels.lstm_backward(
                        part, packed, arena.get("projection"), grad_output, its_gates[its], its_cells[its], enter,
                        known, first_c, grad_gates[its], totals["h0"], totals["c0"],
                        None if grad_projected is None else grad_projected[its], sizes.dtype,
                    )  # fmt: skip
                    if product is not None:
                        product.write(grad_gates[its], totals["h0"][: part.rows])
                finish(chunk, own)


define_operators(Lstm())
