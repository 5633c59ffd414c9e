"""The plain recurrent layer, h' = tanh or ReLU of W x + U h + b, over a whole sequence as one operator.

Its output holds all that backward needs, 4 bytes a unit and step in float32, so that there is nothing to choose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from encore.rnn import reference
from encore.rnn.arena import Arena
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
from encore.rnn.sequence import Chunk, Walk

OPERANDS = (
    "Tensor x, Tensor h0, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? batch_sizes, bool reverse, "
    "bool relu"
)


class Elman(Cell):
    name = "elman"
    forward_schema = f"elman_forward({OPERANDS}) -> (Tensor output, Tensor h_n)"
    backward_schema = (
        f"elman_backward(Tensor? grad_output, Tensor? grad_h_n, {OPERANDS}, Tensor output, bool need_x, "
        "bool need_weights) -> (Tensor x, Tensor h0, Tensor w_ih, Tensor w_hh, Tensor bias)"
    )
    operands = ("x", "h0", "w_ih", "w_hh", "b_ih", "b_hh")
    gradients = ("x", "h0", "w_ih", "w_hh", "bias")
    gates = columns = 1
    keeps_gates = False

    def reference(self, reverse: bool, option: int) -> Callable[..., tuple[Tensor, ...]]:
        return functools.partial(reference.elman, bool(option), reverse)

    def results(self, call: Call) -> tuple[Tensor, ...]:
        return (
            call.x.new_empty((*call.x.shape[:-1], call.sizes.hidden)),
            call.x.new_empty((call.sizes.batch, call.sizes.hidden)),
        )

    def forward(self, call: Call, walk: Walk, arena: Arena, results: Sequence[Tensor]) -> None:
        output, h_n = results
        kernels, relu = call.kernels, bool(call.option)
        recurrent = widened(arena, "w_hh", call.w_hh)
        packed, product = recurrent_weight(call.sizes, arena, kernels, recurrent, 1, transposed=False)
        from_inputs = large_product(widened(arena, "w_ih", call.w_ih), arena.get("input_weight"))
        bias = added_biases(arena, call.b_ih, call.b_hh)
        states = loaded_states(arena, call.states[0])
        flat = output.view(call.sizes.rows, call.sizes.hidden)
        turn = 0

        def prepare(chunk: Chunk, own: Arena) -> None:
            from_inputs.write(input_rows(call.x, chunk, own), own["inputs"][: chunk.rows])

        with lanes(call.sizes.lanes) as shared:
            for chunk, own in shared.over(walk.chunks, arena, call.sizes.forward_turns, prepare):
                for part in parts_of(walk, chunk, product):
                    its, into = own["inputs"][within(part, chunk)], flat[part.first : part.last]
                    if product is not None:
                        product.add(states[turn][: part.rows], its)
                    kernels.elman_forward(part, relu, its, bias, packed, states[turn], states[1 - turn], into)
                    turn = (turn + len(part.times)) % 2
        last_states(flat, walk, h_n)

    def backward(
        self, call: Call, walk: Walk, arena: Arena, grad_output: Tensor | None, kept: Sequence[Tensor],
        totals: Mapping[str, Tensor], needs: Needs,
    ) -> None:  # fmt: skip
        sizes, kernels, relu = call.sizes, call.kernels, bool(call.option)
        grad_bias = totals["bias"].zero_()
        recurrent, input_weight = widened(arena, "w_hh", call.w_hh), widened(arena, "w_ih", call.w_ih)
        packed, product = recurrent_weight(sizes, arena, kernels, recurrent, 1, transposed=True)
        to_inputs = large_product(input_weight, arena.get("x_weight"), transposed=True)
        flat, grad_x = kept[0].view(sizes.rows, sizes.hidden), totals["x"].view(-1, sizes.inputs)
        last = walk.chunks[-1]

        def finish(chunk: Chunk, own: Arena) -> None:
            """What is left when the gradients of sums before tanh or ReLU are there."""
            grad_gates, begins = own["grad_gates"][: chunk.rows], chunk is last
            if needs.x:
                into = grad_x[chunk.first : chunk.last]
                shared.later(lambda: write_product(grad_gates, to_inputs, into, own.get("grad_inputs")))
            if not needs.weights:
                return
            inputs = input_rows(call.x, chunk, own)
            previous = previous_states(flat, call.states[0], walk, chunk, own)
            shared.later(lambda: add_product(sizes, grad_gates, inputs, totals["w_ih"], begins), "w_ih")
            shared.later(lambda: add_product(sizes, grad_gates, previous, totals["w_hh"], begins), "w_hh")
            if call.b_ih is not None:
                shared.later(lambda: kernels.add_column_sums(grad_gates, grad_bias), "bias")

        with lanes(sizes.lanes) as shared:
            for chunk, own in shared.over(walk.chunks[::-1], arena, sizes.backward_turns):
                for part in reversed(parts_of(walk, chunk, product)):
                    its, into = own["grad_gates"][within(part, chunk)], flat[part.first : part.last]
                    kernels.elman_backward(part, relu, packed, grad_output, into, its, totals["h0"])
                    if product is not None:
                        product.write(its, totals["h0"][: part.rows])
                finish(chunk, own)


define_operators(Elman())
