"""What a kind of recurrent layer says about itself, and the pair of operators that this becomes.

`lstm.py`, `gru.py` and `elman.py` describe a `Cell` each: which tensors its operators take, what they keep for
backward, which buffers they work in, and how they walk a sequence. All the rest is the same for every kind and stands
here: the block of memory that a call takes aside and how large it is, shapes without data, and autograd. Operators are
named `encore::<name>_forward` and `encore::<name>_backward`.

A forward operator takes the tensors of `Cell.operands`, `batch_sizes`, `reverse` and one option; it returns the output,
the last states, and what only backward reads. A backward operator takes the gradients of output and last states, all
that forward took, the output with what was kept, and whether the input and the weights need gradients.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from encore.rnn import reference
from encore.rnn.arena import Arena, Layout, in_turns, layout_bytes
from encore.rnn.layer import Sizes, copied_bytes, kernels_for, sizes_of, started, usable_gradient, walk_of
from encore.rnn.products import buffer_numel
from encore.rnn.registry import MADE_UP, define
from encore.rnn.sequence import Walk, made_up_sizes


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a forward operator by name, checked against each other."""

    x: Tensor
    states: tuple[Tensor, ...]
    """h, and c where there is one, before the first step."""
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None
    batch_sizes: Tensor | None
    reverse: bool
    option: int
    """The operator's last argument: an LSTM's and a GRU's `keep`, a plain layer's `relu`."""
    sizes: Sizes
    kernels: ModuleType

    @property
    def projected(self) -> bool:
        return self.w_hr is not None


@dataclass(frozen=True, slots=True)
class Needs:
    """Which gradients are asked for, beside those of the states."""

    x: bool
    weights: bool


class Cell(abc.ABC):
    """One kind of recurrent layer."""

    name: ClassVar[str]
    forward_schema: ClassVar[str]
    backward_schema: ClassVar[str]
    operands: ClassVar[tuple[str, ...]]
    """The tensors that forward takes, x and the states first."""
    state_names: ClassVar[tuple[str, ...]] = ("h0",)
    gradients: ClassVar[tuple[str, ...]]
    """Of which operands backward returns gradients; `bias` is that of both biases."""
    gates: ClassVar[int]
    """Rows of the weights for each unit."""
    columns: ClassVar[int]
    """Numbers for each unit in buffers of gates."""
    keeps_gates: ClassVar[bool] = True
    """Can gates be kept? The option is `keep` then."""
    keeps_cells: ClassVar[bool] = False
    """Are there states that are kept every `keep` steps? Chunks are as long then."""

    @abc.abstractmethod
    def results(self, call: Call) -> tuple[Tensor, ...]:
        """What forward returns, not yet filled in: the output, the last states, and what is kept."""

    @abc.abstractmethod
    def forward(self, call: Call, walk: Walk, arena: Arena, results: Sequence[Tensor]) -> None:
        """Fill in the results."""

    @abc.abstractmethod
    def backward(
        self, call: Call, walk: Walk, arena: Arena, grad_output: Tensor | None, kept: Sequence[Tensor],
        totals: Mapping[str, Tensor], needs: Needs,
    ) -> None:  # fmt: skip
        """Fill in the gradients. Those of the states start with what came from behind the last step."""

    @abc.abstractmethod
    def reference(self, reverse: bool, option: int) -> Callable[..., tuple[Tensor, ...]]:
        """The layer in differentiable operators."""

    def call(self, *args: Any) -> Call:
        """Check what the forward operator was given."""
        named = dict(zip(self.operands, args, strict=False))
        batch_sizes, reverse, option = args[len(self.operands) :]
        keep = option if self.keeps_gates else 0
        return Call(
            x=named["x"],
            states=tuple(named[name] for name in self.state_names),
            w_ih=named["w_ih"],
            w_hh=named["w_hh"],
            b_ih=named["b_ih"],
            b_hh=named["b_hh"],
            w_hr=named.get("w_hr"),
            batch_sizes=batch_sizes,
            reverse=reverse,
            option=option,
            sizes=sizes_of(self.name, self.gates, named, batch_sizes, keep, self.keeps_cells),
            kernels=kernels_for(named["x"].device),
        )

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def forward_layout(self, call: Call) -> Layout:
        """What forward takes aside for the whole of a call."""
        sizes, real = call.sizes, call.sizes.real
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "bias": ((self.columns * sizes.hidden,), real),
            "states": ((2, sizes.batch, sizes.width), sizes.operand),
        }
        layout |= self._weight(call, self.gates, sizes.hidden, sizes.width)
        if sizes.narrow:
            layout |= self._packed(call, "input_weight", sizes.inputs)
        if sizes.wide:
            layout |= self._wide_weights(call)
        if sizes.mixed:
            layout["other_bias"] = (self.gates * sizes.hidden,), real
        return layout

    def forward_chunk_layout(self, call: Call) -> Layout:
        """What forward takes aside for a chunk."""
        sizes, real = call.sizes, call.sizes.real
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if sizes.keep or sizes.mixed or not self.keeps_gates:
            layout["inputs"] = (sizes.chunk_rows, self.columns * sizes.hidden), real
        if not sizes.x_in_place:
            layout["x"] = (sizes.chunk_rows, sizes.inputs), sizes.operand
        return layout

    def backward_layout(self, call: Call, needs: Needs) -> Layout:
        """What backward takes aside for the whole of a call."""
        sizes, real = call.sizes, call.sizes.real
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        layout |= self._weight(call, 1, sizes.width, self.gates * sizes.hidden)
        if sizes.keep:
            layout["bias"] = (self.columns * sizes.hidden,), real
            if sizes.mixed:
                layout["other_bias"] = (self.gates * sizes.hidden,), real
            if sizes.narrow:
                layout |= self._packed(call, "input_weight", sizes.inputs)
                layout |= self._packed(call, "state_weight", sizes.width)
        if sizes.narrow and needs.x:
            numel = call.kernels.packed_numel(1, sizes.inputs, self.gates * sizes.hidden, sizes.operand)
            layout["x_weight"] = (numel,), sizes.operand
        if sizes.wide:
            layout |= self._wide_weights(call)
        if sizes.mixed:
            layout["grad_h0"] = (sizes.batch, sizes.width), real
            if needs.weights:
                layout["grad_w_ih"] = (self.gates * sizes.hidden, sizes.inputs), real
                layout["grad_w_hh"] = (self.gates * sizes.hidden, sizes.width), real
                if "bias" in self.gradients:
                    layout["grad_bias"] = (self.gates * sizes.hidden,), real
        return layout

    def backward_chunk_layout(self, call: Call, needs: Needs) -> Layout:
        """What backward takes aside for a chunk."""
        sizes, real, rows = call.sizes, call.sizes.real, call.sizes.chunk_rows
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "grad_gates": ((rows, self.columns * sizes.hidden), sizes.operand),
        }
        if sizes.keep and sizes.narrow:
            layout["built"] = (rows, self.columns * sizes.hidden), real
        if sizes.keep or needs.weights:
            layout["previous"] = (rows, sizes.width), sizes.operand
            if not sizes.x_in_place:
                layout["x"] = (rows, sizes.inputs), sizes.operand
        if sizes.wide and needs.x:
            layout["grad_inputs"] = (rows, sizes.inputs), real
        return layout

    def _weight(self, call: Call, gates: int, units: int, depth: int) -> Layout:
        """A buffer for the recurrent weight as the layout has it."""
        sizes = call.sizes
        if sizes.packs:
            numel = call.kernels.packed_numel(gates, units, depth, sizes.operand)
        else:
            numel = buffer_numel(sizes.weight, sizes.batch, gates * units, depth)
        return {"weight": ((numel,), sizes.operand)} if numel else {}

    def _packed(self, call: Call, name: str, depth: int) -> Layout:
        """A buffer for a weight as narrow large products read it."""
        numel = call.kernels.packed_numel(1, self.gates * call.sizes.hidden, depth, call.sizes.operand)
        return {name: ((numel,), call.sizes.operand)}

    def _wide_weights(self, call: Call) -> Layout:
        weights = {"w_ih": call.w_ih, "w_hh": call.w_hh, "w_hr": call.w_hr}
        return {
            name: (tuple(weight.shape), call.sizes.real) for name, weight in weights.items() if weight is not None
        }  # fmt: skip

    def empty_gradients(self, call: Call, needs: Needs) -> dict[str, Tensor]:
        """What backward returns, not yet filled in; empty where nobody asks."""
        biases = self.gates * call.sizes.hidden if needs.weights and call.b_ih is not None else 0
        shapes: dict[str, tuple[int, ...]] = {
            "x": tuple(call.x.shape) if needs.x else (0, call.sizes.inputs),
            **{name: tuple(state.shape) for name, state in zip(self.state_names, call.states, strict=True)},
            "w_ih": tuple(call.w_ih.shape) if needs.weights else (0,),
            "w_hh": tuple(call.w_hh.shape) if needs.weights else (0,),
            **dict.fromkeys(("bias", "b_ih", "b_hh"), (biases,)),
            "w_hr": tuple(call.w_hr.shape) if needs.weights and call.w_hr is not None else (0,),
        }
        return {name: call.x.new_empty(shapes[name]) for name in self.gradients}


def define_operators(cell: Cell) -> None:
    """Make a cell's operators known to PyTorch."""
    tensors, states = len(cell.operands), len(cell.state_names)
    taken = tensors + 3  # with batch_sizes, reverse and the option
    grads = states + 1

    def forward_layout(call: Call) -> Layout:
        return {**cell.forward_layout(call), **in_turns(cell.forward_chunk_layout(call), call.sizes.forward_turns)}

    def backward_layout(call: Call, needs: Needs) -> Layout:
        turns = in_turns(cell.backward_chunk_layout(call, needs), call.sizes.backward_turns)
        return {**cell.backward_layout(call, needs), **turns}

    def forward(*args: Any) -> tuple[Tensor, ...]:
        call = cell.call(*args)
        results = cell.results(call)
        if call.sizes.rows:  # else a batch of none
            arena = Arena(forward_layout(call), call.x.device)
            walk = walk_of(call.sizes, call.batch_sizes, call.reverse)
            cell.forward(call, walk, arena, results)
            for result in (results[0], *results[grads:]):
                _clear_behind(walk, call.sizes, result)
        return results

    def fake_forward(*args: Any) -> tuple[Tensor, ...]:
        return cell.results(cell.call(*args))

    def forward_workspace(*args: Any) -> int:
        call = cell.call(*args)
        return layout_bytes(forward_layout(call)) + _temporary_bytes(call) if call.sizes.rows else 0

    def backward(*args: Any) -> tuple[Tensor, ...]:
        call, needs = cell.call(*args[grads : grads + taken]), Needs(*args[-2:])
        results = cell.empty_gradients(call, needs)
        if call.sizes.rows == 0:
            return tuple(result.zero_() for result in results.values())
        grad_output = usable_gradient(args[0])
        arena = Arena(backward_layout(call, needs), call.x.device)
        totals = {name: arena.get(f"grad_{name}", result) for name, result in results.items()}
        for name, grad in zip(cell.state_names, args[1:grads], strict=True):
            started(totals[name], grad)
        walk = walk_of(call.sizes, call.batch_sizes, call.reverse)
        cell.backward(call, walk, arena, grad_output, args[grads + taken : -2], totals, needs)
        _clear_behind(walk, call.sizes, results["x"])
        for name, result in results.items():
            if result is not totals[name] and result.numel():  # without a bias, its sum is there and its gradient not
                result.copy_(totals[name])
        return tuple(results.values())

    def fake_backward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(cell.empty_gradients(cell.call(*args[grads : grads + taken]), Needs(*args[-2:])).values())

    def backward_workspace(*args: Any) -> int:
        call = cell.call(*args[grads : grads + taken])
        if call.sizes.rows == 0:
            return 0
        layout = backward_layout(call, Needs(*args[-2:]))
        return layout_bytes(layout) + _temporary_bytes(call) + copied_bytes(args[0])

    # ---- autograd ---------------------------------------------------------------------------------------------------

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        kept = output[grads:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*inputs[: tensors + 1], output[0], *kept)
        ctx.others = inputs[tensors + 1 :]

    def differentiate(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, need = ctx.saved_tensors, ctx.needs_input_grad
        found = backward_operator(
            *given[:grads], *saved[: tensors + 1], *ctx.others, *saved[tensors + 1 :], need[0],
            any(need[grads:tensors]),
        )  # fmt: skip
        by_name = dict(zip(cell.gradients, found, strict=True))
        if "bias" in by_name:
            both = need[cell.operands.index("b_ih")] and need[cell.operands.index("b_hh")]
            by_name["b_ih"] = by_name["bias"]
            by_name["b_hh"] = by_name["bias"].clone() if both else by_name["bias"]  # two parameters share no memory
        chosen = [by_name[name] if needed else None for name, needed in zip(cell.operands, need, strict=False)]
        return (*chosen, None, None, None)

    def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: grads + tensors + 1])
        ctx.others = inputs[grads + tensors + 1 : grads + taken]
        ctx.count = len(inputs)

    def differentiate_again(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, batch_sizes = ctx.saved_tensors
        wanted = [cell.operands.index("b_ih" if name == "bias" else name) for name in cell.gradients]
        found = reference.differentiate_twice(
            cell.reference(*ctx.others), saved[:grads], saved[grads:], batch_sizes, given, wanted
        )
        return (*found, *[None] * (ctx.count - len(found)))

    def full(first: int) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """Made-up operands, of which x is the first of forward's: batch sizes that go with them."""

        def made_up(args: tuple[Any, ...]) -> tuple[Any, ...]:
            sizes = args[first + tensors]
            if sizes is not None:
                sizes.copy_(torch.tensor(made_up_sizes(len(args[first]), len(sizes), len(args[first + 1]))))
            return args

        return made_up

    define(cell.forward_schema, forward, fake_forward, forward_workspace, differentiate, save)
    define(cell.backward_schema, backward, fake_backward, backward_workspace, differentiate_again, save_backward)
    backward_operator = getattr(torch.ops.encore, f"{cell.name}_backward").default
    MADE_UP[getattr(torch.ops.encore, f"{cell.name}_forward").default] = full(0)
    MADE_UP[backward_operator] = full(grads)


def _clear_behind(walk: Walk, sizes: Sizes, rows: Tensor) -> None:
    """Rows of a block that belong to no sequence are zero."""
    if walk.rows < sizes.rows == rows.shape[0]:
        rows[walk.rows :].zero_()


def _temporary_bytes(call: Call) -> int:
    return call.kernels.temporary_bytes(call.sizes.batch, call.sizes.hidden, call.sizes.real)
