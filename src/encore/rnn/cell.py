"""Descriptions of recurrent cells: operands, results, buffers, and what a pass over a chunk does differently.

`lstm.py`, `gru.py` and `elman.py` describe a `RecurrentCell` each, with a forward and a backward pass (`passes.py`);
`operators.py` makes the operators `encore::<name>_forward` and `encore::<name>_backward` of a description.

A forward operator takes the tensors of `operands`, `batch_sizes`, `reverse`, one option, and `resets`, which may be
left out; it returns the output, the last states, and what only backward reads. A backward operator takes the gradients
of output and last states, all that forward took (`resets` at the very end), the output with what was kept, and whether
the input and the weights need gradients.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from encore.rnn.arena import Buffers
from encore.rnn.layer import LayerSizes, check_resets, kernels_for, sizes_of
from encore.rnn.sequence import kept_rows
from encore.rnn.steps import StepKernels

OPTIONAL = ("b_ih", "b_hh", "w_hr")
RESETS = "Tensor? resets=None"
"""The last argument of the operators. Calls without it are what they were before there was one."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of a forward operator by name, checked against each other."""

    x: Tensor
    states: tuple[Tensor, ...]
    """h, and c of an LSTM, before the first step."""
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None
    batch_sizes: Tensor | None
    reverse: bool
    option: int
    """`keep` of an LSTM and a GRU, `relu` of a plain layer."""
    resets: Tensor | None
    """`[T, B]`, booleans: the state of a row is zero before the steps at which it is true, in the order of the walk."""
    sizes: LayerSizes
    kernels: StepKernels

    @property
    def projected(self) -> bool:
        return self.w_hr is not None


@dataclass(frozen=True, slots=True)
class Needs:
    """Which gradients are needed, in addition to those of the states."""

    x: bool
    weights: bool


class RecurrentCell(abc.ABC):
    """One kind of recurrent layer."""

    name: ClassVar[str]
    operands: ClassVar[tuple[str, ...]] = ("x", "h0", "w_ih", "w_hh", "b_ih", "b_hh")
    """The tensors that forward takes, x and the states first."""
    state_names: ClassVar[tuple[str, ...]] = ("h0",)
    gradients: ClassVar[tuple[str, ...]] = ("x", "h0", "w_ih", "w_hh", "bias")
    """Operands whose gradients backward returns; `bias` is that of both biases."""
    gates: ClassVar[int]
    """Rows of the weights for each unit."""
    columns: ClassVar[int]
    """Numbers for each unit in buffers of gates."""
    keeps_gates: ClassVar[bool] = True
    """Whether gates can be kept: the option is `keep` then, else `relu`."""
    keeps_cells: ClassVar[bool] = False
    """Whether there are states that are kept every `keep` steps, which is the length of a chunk then."""

    @abc.abstractmethod
    def reference(self, reverse: bool, option: int, resets: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
        """The layer in differentiable operators."""

    # ---- arguments and results --------------------------------------------------------------------------------------

    @property
    def kept(self) -> tuple[str, ...]:
        """Results that only backward reads."""
        return ("gates",) * self.keeps_gates + ("cells",) * self.keeps_cells

    @property
    def arguments(self) -> str:
        """Of the forward operator, in a schema."""
        tensors = (f"Tensor{'?' if name in OPTIONAL else ''} {name}" for name in self.operands)
        option = "int keep" if self.keeps_gates else "bool relu"
        return f"{', '.join(tensors)}, Tensor? batch_sizes, bool reverse, {option}"

    def forward_schema(self) -> str:
        last = (f"{name[0]}_n" for name in self.state_names)
        results = ", ".join(f"Tensor {name}" for name in ("output", *last, *self.kept))
        return f"{self.name}_forward({self.arguments}, {RESETS}) -> ({results})"

    def backward_schema(self) -> str:
        grads = "".join(f"Tensor? grad_{name}, " for name in ("output", *(f"{name[0]}_n" for name in self.state_names)))
        kept = ", ".join(f"Tensor {name}" for name in ("output", *self.kept))
        results = ", ".join(f"Tensor {name}" for name in self.gradients)
        needs = "bool need_x, bool need_weights"
        return f"{self.name}_backward({grads}{self.arguments}, {kept}, {needs}, {RESETS}) -> ({results})"

    def call(self, *args: Any) -> LayerCall:
        """Check the arguments of the forward operator."""
        named = dict(zip(self.operands, args, strict=False))
        batch_sizes, reverse, option, *rest = args[len(self.operands) :]
        resets = rest[0] if rest else None
        check_resets(f"{self.name}_forward", named["x"], batch_sizes, resets)
        keep = option if self.keeps_gates else 0
        return LayerCall(
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
            resets=resets,
            sizes=sizes_of(self.name, self.gates, named, batch_sizes, keep, self.keeps_cells),
            kernels=kernels_for(named["x"].device),
        )

    def results(self, call: LayerCall) -> tuple[Tensor, ...]:
        """What forward returns, not yet filled in."""
        x, sizes = call.x, call.sizes
        found = [x.new_empty((*x.shape[:-1], sizes.width)), *(state.new_empty(state.shape) for state in call.states)]
        if self.keeps_gates:
            found.append(x.new_empty((0 if sizes.keep else sizes.rows, self.columns * sizes.hidden)))
        if self.keeps_cells:
            rows = kept_rows(sizes.steps, sizes.batch, sizes.rows, sizes.keep)
            found.append(x.new_empty((rows, sizes.hidden), dtype=sizes.real))
        return tuple(found)

    def empty_gradients(self, call: LayerCall, needs: Needs) -> dict[str, Tensor]:
        """What backward returns, not yet filled in; empty tensors for what is not needed."""
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

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def forward_buffers(self, call: LayerCall) -> Buffers:
        """The workspace of forward."""
        sizes, real, rows = call.sizes, call.sizes.real, call.sizes.chunk_rows
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "bias": ((self.columns * sizes.hidden,), real),
            "states": ((2, sizes.batch, sizes.width), sizes.operand),
        }
        found |= self._weight(call, self.gates, sizes.hidden, sizes.width)
        if sizes.narrow:
            found |= self._packed(call, "input_weight", sizes.inputs)
        if sizes.wide:
            found |= self._wide_weights(call)
        if sizes.mixed:
            found["other_bias"] = (self.gates * sizes.hidden,), real
        if sizes.keep or sizes.mixed or not self.keeps_gates:
            found["inputs"] = (rows, self.columns * sizes.hidden), real
        if not sizes.x_in_place:
            found["x"] = (rows, sizes.inputs), sizes.operand
        return {**found, **self._resets(call)}

    def backward_buffers(self, call: LayerCall, needs: Needs) -> Buffers:
        """The workspace of backward."""
        sizes, real, rows = call.sizes, call.sizes.real, call.sizes.chunk_rows
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "grad_gates": ((rows, self.columns * sizes.hidden), sizes.operand),
            **self._resets(call),
        }
        found |= self._weight(call, 1, sizes.width, self.gates * sizes.hidden)
        if sizes.keep:
            found |= self._rebuild_buffers(call)
        if sizes.narrow and needs.x:
            numel = call.kernels.packed_numel(1, sizes.inputs, self.gates * sizes.hidden, sizes.operand)
            found["x_weight"] = (numel,), sizes.operand
        if sizes.wide:
            found |= self._wide_weights(call)
        if sizes.wide and needs.x:
            found["grad_inputs"] = (rows, sizes.inputs), real
        if sizes.mixed:
            found["grad_h0"] = (sizes.batch, sizes.width), real
        if sizes.mixed and needs.weights:
            found["grad_w_ih"] = (self.gates * sizes.hidden, sizes.inputs), real
            found["grad_w_hh"] = (self.gates * sizes.hidden, sizes.width), real
            if "bias" in self.gradients:
                found["grad_bias"] = (self.gates * sizes.hidden,), real
        if sizes.keep or needs.weights:
            found["previous"] = (rows, sizes.width), sizes.operand
            if not sizes.x_in_place:
                found["x"] = (rows, sizes.inputs), sizes.operand
        return found

    def _resets(self, call: LayerCall) -> Buffers:
        """Room for a contiguous copy of the resets, if they are not contiguous."""
        if call.resets is None or call.resets.is_contiguous():
            return {}
        return {"resets": ((call.sizes.rows,), torch.bool)}

    def _rebuild_buffers(self, call: LayerCall) -> Buffers:
        """What recomputing gates takes."""
        sizes, real = call.sizes, call.sizes.real
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"bias": ((self.columns * sizes.hidden,), real)}
        if sizes.mixed:
            found["other_bias"] = (self.gates * sizes.hidden,), real
        if sizes.narrow:
            found |= self._packed(call, "input_weight", sizes.inputs)
            found |= self._packed(call, "state_weight", sizes.width)
            found["built"] = (sizes.chunk_rows, self.columns * sizes.hidden), real
        return found

    def _weight(self, call: LayerCall, gates: int, units: int, depth: int) -> Buffers:
        """A buffer for the recurrent weight as the layout has it."""
        sizes = call.sizes
        if sizes.weight == "packed":
            numel = call.kernels.packed_numel(gates, units, depth, sizes.operand)
        else:
            numel = gates * units * depth if sizes.weight == "transposed" else 0
        return {"weight": ((numel,), sizes.operand)} if numel else {}

    def _packed(self, call: LayerCall, name: str, depth: int) -> Buffers:
        """A buffer for a weight as narrow large products read it."""
        numel = call.kernels.packed_numel(1, self.gates * call.sizes.hidden, depth, call.sizes.operand)
        return {name: ((numel,), call.sizes.operand)}

    def _wide_weights(self, call: LayerCall) -> Buffers:
        weights = {"w_ih": call.w_ih, "w_hh": call.w_hh, "w_hr": call.w_hr}
        return {
            name: (tuple(weight.shape), call.sizes.real) for name, weight in weights.items() if weight is not None
        }  # fmt: skip
