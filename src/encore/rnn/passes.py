"""One call of a recurrent operator: a pass over the chunks of its sequence, forward or backward.

Forward, the products of a chunk with the inputs are one matrix product, then its steps run. Backward, the steps of a
chunk run, then gradients of inputs and weights are matrix products and sums over its rows; gates that were not kept are
recomputed before, with two products. Each kind of cell overrides what it does differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from encore.rnn import native
from encore.rnn.arena import Arena
from encore.rnn.cell import LayerCall, Needs, RecurrentCell
from encore.rnn.layer import input_rows, last_states, previous_states, walk_of
from encore.rnn.products import LargeProduct, StepProduct, large_product, step_product
from encore.rnn.sequence import Chunk
from encore.rnn.steps import BackwardSteps, ForwardSteps, RebuiltGates, clear_reset


class LayerPass:
    """What forward and backward share: operands in the type of products, biases, and the recurrent weight."""

    def __init__(self, cell: RecurrentCell, call: LayerCall, arena: Arena) -> None:
        self.cell, self.call, self.arena = cell, call, arena
        self.sizes, self.kernels = call.sizes, call.kernels
        self.walk = walk_of(call.sizes, call.batch_sizes, call.reverse)
        self.w_ih = self.widened("w_ih", call.w_ih)
        self.w_hh = self.widened("w_hh", call.w_hh)
        self.resets = None if call.resets is None else self._resets(call.resets)

    def widened(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in the compute type: itself, or a copy in the arena's buffer of that name."""
        buffer = self.arena.get(name)
        return tensor if buffer is None else buffer.copy_(tensor)

    def _resets(self, resets: Tensor) -> Tensor:
        """One boolean a row, contiguous."""
        buffer = self.arena.get("resets")
        if buffer is not None:
            buffer.view(resets.shape).copy_(resets)
        return resets.view(-1) if buffer is None else buffer

    def large_product(self, weight: Tensor, name: str) -> LargeProduct:
        """Products of a chunk's rows with a weight, which the arena's buffer of that name may have room for."""
        return large_product(weight, self.arena.get(name))

    def biases(self) -> Tensor:
        """The sum of the biases, in the arena's `bias`; a narrow one is widened in `other_bias` first."""
        into = self.arena["bias"].zero_()
        for bias in (self.call.b_ih, self.call.b_hh):
            if bias is not None:
                into.add_(self.widened("other_bias", bias))
        return into

    def recurrent_weight(self, *, transposed: bool) -> tuple[Tensor | None, StepProduct | None]:
        """The weight packed for the kernels, or a product for the steps, as the layout says."""
        buffer = self.arena.get("weight")
        if self.sizes.weight != "packed":
            return None, step_product(self.w_hh, transposed, buffer)
        assert buffer is not None
        gates = 1 if transposed else self.cell.gates
        self.kernels.pack(self.w_hh, gates, transposed=transposed, out=buffer)
        return buffer, None

    def parts_of(self, chunk: Chunk, product: StepProduct | None) -> tuple[Chunk, ...]:
        """What the kernels run at a time: all steps, or single ones if PyTorch multiplies."""
        return (chunk,) if product is None else self.walk.single_steps(chunk)


class ForwardPass(LayerPass):
    """Fills in the results of a forward operator."""

    def __init__(self, cell: RecurrentCell, call: LayerCall, arena: Arena, results: Sequence[Tensor]) -> None:
        super().__init__(cell, call, arena)
        self.output = results[0].view(self.sizes.rows, self.sizes.width)
        self.states = results[1 : 1 + len(call.states)]
        self.kept = dict(zip(cell.kept, results[1 + len(call.states) :], strict=True))

    def run(self) -> None:
        arena = self.arena
        weight, product = self.recurrent_weight(transposed=False)
        from_inputs = self.large_product(self.w_ih, "input_weight")
        bias = self.biases()
        h = arena["states"]
        for buffer in h:  # rows that no step writes are right in either
            buffer.copy_(self.call.states[0])
        turn = 0
        for chunk in self.walk.chunks:
            buffer = arena.get("inputs")
            inputs = self.kept["gates"][chunk.in_memory] if buffer is None else buffer[: chunk.rows]
            from_inputs.write(input_rows(self.call.x, chunk, arena), inputs)
            self.enter(chunk)
            for part in self.parts_of(chunk, product):
                its = inputs[part.within(chunk)]
                if product is not None:
                    states = h[turn][: part.rows]
                    clear_reset(states, self.resets, part.in_memory)
                    self.add_recurrent(product, states, its)
                self.kernels.forward(self.cell.name, self.steps(part, its, bias, weight, h[turn], h[1 - turn]))
                turn = (turn + len(part.times)) % 2
        self.finish()
        last_states(self.output, self.walk, self.states[0])

    def enter(self, chunk: Chunk) -> None:
        """Before the steps of a chunk."""

    def add_recurrent(self, product: StepProduct, states: Tensor, inputs: Tensor) -> None:
        """Add a step's product with the recurrent weight to those with the inputs."""
        product.add(states, inputs)

    def steps(
        self, part: Chunk, inputs: Tensor, bias: Tensor, weight: Tensor | None, before: Tensor, after: Tensor
    ) -> ForwardSteps:
        rows = part.in_memory
        gates = None if self.sizes.keep or "gates" not in self.kept else self.kept["gates"][rows]
        steps = ForwardSteps(part, inputs, bias, weight, before, after, self.output[rows], gates)
        steps.resets = None if self.resets is None else self.resets[rows]
        return steps

    def finish(self) -> None:
        """After the last chunk."""


class BackwardPass(LayerPass):
    """Adds up the gradients of a backward operator. Those of the states start with what came from behind the last
    step."""

    def __init__(
        self, cell: RecurrentCell, call: LayerCall, arena: Arena, needs: Needs, grad_output: Tensor | None,
        results: Sequence[Tensor], totals: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__(cell, call, arena)
        self.needs, self.grad_output, self.totals = needs, grad_output, totals
        self.output = results[0].view(self.sizes.rows, self.sizes.width)
        self.kept = dict(zip(cell.kept, results[1:], strict=True))
        self.grad_x = totals["x"].view(-1, self.sizes.inputs)

    def run(self) -> None:
        sizes, arena, needs = self.sizes, self.arena, self.needs
        weight, product = self.recurrent_weight(transposed=True)
        if sizes.keep:
            self.biases()
            self.from_inputs = self.large_product(self.w_ih, "input_weight")
            self.from_states = self.large_product(self.w_hh, "state_weight")
        self.begin()
        for chunk in self.walk.chunks[::-1]:
            grad_gates = arena["grad_gates"][: chunk.rows]
            inputs = input_rows(self.call.x, chunk, arena) if sizes.keep or needs.weights else None
            previous = None
            if arena.get("previous") is not None:
                previous = previous_states(
                    self.output, self.call.states[0], self.walk, chunk, arena["previous"], self.resets
                )  # fmt: skip
            gates = self.kept["gates"][chunk.in_memory] if "gates" in self.kept else None
            if inputs is not None and previous is not None and sizes.keep:
                gates = arena.get("built", arena["grad_gates"])[: chunk.rows]
                self.rebuild(chunk, inputs, previous, gates)
            self.enter(chunk, gates)
            for part in reversed(self.parts_of(chunk, product)):
                its = part.within(chunk)
                steps = BackwardSteps(
                    part, sizes.dtype, weight, self.grad_output, grad_gates[its], self.totals["h0"],
                    None if gates is None else gates[its], self.output[part.in_memory],
                    None if previous is None else previous[its],
                )  # fmt: skip
                steps.resets = None if self.resets is None else self.resets[part.in_memory]
                self.kernels.backward(self.cell.name, self.complete(steps, chunk))
                if product is not None:
                    grad_state = self.totals["h0"][: part.rows]
                    self.carry(product, grad_gates[its], grad_state)
                    clear_reset(grad_state, self.resets, part.in_memory)
            if needs.x:
                self.write_input_gradients(grad_gates, self.grad_x[chunk.in_memory])
            if needs.weights and inputs is not None and previous is not None:
                self.add_weight_gradients(chunk, grad_gates, inputs, previous)
        self.finish()

    def begin(self) -> None:
        """Before the first chunk."""
        self.grad_bias = self.totals["bias"].zero_()
        self.to_inputs = large_product(self.w_ih, self.arena.get("x_weight"), transposed=True)

    def rebuild(self, chunk: Chunk, inputs: Tensor, previous: Tensor, gates: Tensor) -> None:
        """Recompute the gates of a chunk: where their gradients will lie, or in a buffer if those are narrow."""
        self.from_inputs.write(inputs, gates)
        self.from_states.add(previous, gates)
        steps = RebuiltGates(chunk, self.arena["bias"], gates)
        steps.resets = None if self.resets is None else self.resets[chunk.in_memory]
        self.kernels.rebuild(self.cell.name, self.rebuilt(steps))

    def rebuilt(self, gates: RebuiltGates) -> RebuiltGates:
        """With what only this kind of cell recomputes."""
        return gates

    def enter(self, chunk: Chunk, gates: Tensor | None) -> None:
        """Before the steps of a chunk."""

    def complete(self, steps: BackwardSteps, chunk: Chunk) -> BackwardSteps:
        """With what only this kind of cell reads."""
        return steps

    def carry(self, product: StepProduct, grad_gates: Tensor, grad_state: Tensor) -> None:
        """The gradient of the h before a step."""
        product.write(grad_gates, grad_state)

    def write_input_gradients(self, grad_gates: Tensor, into: Tensor) -> None:
        """Gradients of a chunk's inputs, by way of a buffer in the compute type if there is one."""
        buffer = self.arena.get("grad_inputs")
        products = into if buffer is None else buffer[: into.shape[0]]
        self.write_input_products(grad_gates, products)
        if buffer is not None:
            into.copy_(products)

    def write_input_products(self, grad_gates: Tensor, into: Tensor) -> None:
        self.to_inputs.write(grad_gates, into)

    def add_weight_gradients(self, chunk: Chunk, grad_gates: Tensor, inputs: Tensor, previous: Tensor) -> None:
        self.add_product(chunk, grad_gates, inputs, self.totals["w_ih"])
        self.add_product(chunk, grad_gates, previous, self.totals["w_hh"])
        if self.call.b_ih is not None:
            self.kernels.add_column_sums(grad_gates, self.grad_bias)

    def add_product(self, chunk: Chunk, left: Tensor, right: Tensor, into: Tensor) -> None:
        """`into += left^T @ right`; `=` for the first of a sum, whose memory is not initialized."""
        first = chunk is self.walk.chunks[-1]
        if self.sizes.narrow:
            native.multiply_columns(left, right, into, add=not first)
        elif first:
            torch.mm(left.t(), right, out=into)
        else:
            into.addmm_(left.t(), right)

    def finish(self) -> None:
        """After the last chunk."""
