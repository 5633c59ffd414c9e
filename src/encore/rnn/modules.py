"""`encore.nn`: the recurrent modules of `torch.nn` on Encore's operators.

Each is a subclass of its namesake with the same arguments, parameters, `state_dict` keys and results, and one keyword
more: `stash`, what a layer keeps for backward. `"fast"` keeps the gates, `"lean"` recomputes them, and a
number of steps lies between two kept cell states of an LSTM (`"lean"` chooses it). Calls of LSTM, GRU and RNN take
`resets`: the steps before which the state is zeroed, for sequences that lie one behind the other.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from encore.errors import OperandError, OptionError
from encore.rnn.packed_rows import BatchSizes, CapturedSequence, PackedRows, block_of
from encore.rnn.stack import Layer, elman_layer, gru_layer, lstm_layer, run_layers
from encore.rnn.tuning import lean_steps, left_to_torch


def checked_stash(stash: str | int) -> str | int:
    valid = isinstance(stash, int) and not isinstance(stash, bool) and stash >= 1
    if not valid and stash not in ("fast", "lean"):
        raise OptionError(
            f'stash must be "fast", "lean" or the number of steps between kept cell states (1 or more); got {stash!r}'
        )
    return stash


class _Stashing:
    """The keyword that all modules here have beyond `torch.nn`'s, whose class follows them among their bases."""

    def __init__(self, *args: Any, stash: str | int = "fast", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stash = checked_stash(stash)


class _Layers(_Stashing):
    """Layers and directions of a recurrent module, whatever its cell."""

    # What torch.nn.RNNBase gives them.
    num_layers: int
    bidirectional: bool
    batch_first: bool
    dropout: float
    training: bool
    bias: bool
    hidden_size: int
    proj_size: int

    @abc.abstractmethod
    def _layer(self, batch: int) -> Layer:
        """One layer in one direction, for a batch of that size."""

    def _kept(self, batch: int) -> int:
        """The operators' `keep`. If no gradient will be needed, nothing is kept."""
        if self.stash == "fast" and torch.is_grad_enabled():
            return 0
        if isinstance(self.stash, int):
            return self.stash
        return lean_steps(batch, self.hidden_size)

    def _weights(self, layer: int, direction: int) -> list[Tensor | None]:
        """Input weight, recurrent weight, their biases, and the projection."""
        suffix = f"_l{layer}{'_reverse' if direction else ''}"
        names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"]
        return [getattr(self, name + suffix, None) for name in names]

    def _run(
        self, x: Tensor, states: Sequence[Tensor], batch_sizes: Tensor | None, in_block: bool, resets: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """All layers on a time-major or packed input."""
        directions = 2 if self.bidirectional else 1
        weights = [self._weights(layer, way) for layer in range(self.num_layers) for way in range(directions)]
        x, *states = autocast([x, *states])  # type: ignore[assignment, list-item]
        return run_layers(
            self._layer(states[0].shape[1]), x, states, [autocast(each) for each in weights], batch_sizes,
            directions=directions, dropout=self.dropout if self.training else 0.0, in_block=in_block,
            resets=resets,
        )  # fmt: skip


class _Recurrent(_Layers):
    """`forward` of the modules that run over sequences."""

    STATES: ClassVar[int] = 1

    def _checked_forward(
        self: Any, input: Any, hx: Any, resets: Tensor | None
    ) -> tuple[Tensor | PackedSequence, tuple[Tensor, ...]]:  # fmt: skip
        packed = isinstance(input, PackedSequence)
        if resets is not None:
            resets = self._time_major(input, resets)
        batched = True
        if packed:
            data, batch_sizes, sorted_indices, unsorted_indices = input
            if hx is not None:
                hx = self.permute_hidden(hx, sorted_indices)
        else:
            data, batch_sizes, unsorted_indices = input, None, None
            if data.dim() not in (2, 3):
                raise ValueError(
                    f"{type(self).__name__}: Expected input to be 2D or 3D, got {data.dim()}D instead"
                )  # fmt: skip
            batched = data.dim() == 3
            if not batched:
                data = data.unsqueeze(0 if self.batch_first else 1)
                hx = self._batched_states(hx)
        if hx is None:
            hx = self._zero_states(data, batch_sizes)
        self._check_states(hx)
        try:
            self.check_forward_args(data, hx, batch_sizes)
        except ValueError as wrong:  # nn.LSTM leaves packed ones to a product, which raises a RuntimeError
            raise OperandError(str(wrong)) from None
        states = self._states(hx)
        if not packed and self.batch_first:
            data = data.transpose(0, 1)
        if not isinstance(batch_sizes, BatchSizes) and data.shape[0] == 0:
            raise OperandError("a sequence must have at least one step; got an input without any")
        in_block = isinstance(batch_sizes, BatchSizes)
        sizes = batch_sizes.numbers if in_block else batch_sizes
        output, last = self._run(block_of(data, batch_sizes) if in_block else data, states, sizes, in_block, resets)
        if packed:
            rows: Any = PackedRows(output, sizes) if in_block else output
            kind = CapturedSequence if in_block else PackedSequence
            result = kind(rows, batch_sizes, sorted_indices, unsorted_indices)
            return result, tuple(
                state if unsorted_indices is None else state.index_select(1, unsorted_indices) for state in last
            )
        if self.batch_first:
            output = output.transpose(0, 1)
        if not batched:
            return output.squeeze(0 if self.batch_first else 1), tuple(state.squeeze(1) for state in last)
        return output, last

    def _time_major(self: Any, input: Any, resets: Tensor) -> Tensor:
        """Resets as `[T, B]`, checked against the input."""
        name = type(self).__name__
        if isinstance(input, PackedSequence):
            raise OperandError(
                f"{name} takes no resets with a PackedSequence, whose rows are one sequence each; put sequences one "
                "behind the other in a padded input, with resets at their first steps"
            )
        shape = tuple(input.shape[:-1])
        if not isinstance(resets, Tensor) or resets.dtype != torch.bool or tuple(resets.shape) != shape:
            given = f"{resets.dtype} {tuple(resets.shape)}" if isinstance(resets, Tensor) else type(resets).__name__
            raise OperandError(
                f"{name} takes resets as booleans, one for each step of each sequence, here of the shape {shape}; got "
                f"{given}"
            )
        if resets.dim() == 1:
            return resets.unsqueeze(1)
        return resets.transpose(0, 1) if self.batch_first else resets

    def _zero_states(self: Any, data: Tensor, batch_sizes: Tensor | None) -> Any:
        count, batch, width = self.get_expected_hidden_size(data, batch_sizes)
        h = torch.zeros((count, batch, width), dtype=data.dtype, device=data.device)
        if self.STATES == 1:
            return h
        return h, torch.zeros((count, batch, self.hidden_size), dtype=data.dtype, device=data.device)

    def _states(self, hx: Any) -> tuple[Tensor, ...]:
        return (hx[0], hx[1]) if self.STATES > 1 else (hx,)

    def _batched_states(self, hx: Any) -> Any:
        if hx is None:
            return None
        states = self._states(hx)
        if any(state.dim() != 2 for state in states):
            shapes = ", ".join(f"{state.dim()}-D" for state in states)
            raise RuntimeError(f"For unbatched 2-D input, hx should also be 2-D but got {shapes} tensor")
        batched = tuple(state.unsqueeze(1) for state in states)
        return batched if self.STATES > 1 else batched[0]

    def extra_repr(self: Any) -> str:
        return nn.RNNBase.extra_repr(self) + _stash_text(self.stash)

    def _check_states(self, hx: Any) -> None:
        states = self._states(hx)
        if any(state.dim() != 3 for state in states):
            shapes = ", ".join(f"{state.dim()}-D" for state in states)
            raise RuntimeError(f"For batched 3-D input, hx should also be 3-D but got {shapes} tensor")


class _OneState(_Recurrent):
    """`forward` of modules whose only state is h."""

    def forward(self, input: Any, hx: Tensor | None = None, resets: Tensor | None = None) -> Any:
        output, (h_n,) = self._checked_forward(input, hx, resets)
        return output, h_n


class LSTM(_Recurrent, nn.LSTM):
    """`torch.nn.LSTM` that keeps what `stash` says. Small ones that keep everything are `torch.nn`'s own."""

    STATES = 2

    def forward(
        self, input: Any, hx: tuple[Tensor, Tensor] | None = None, resets: Tensor | None = None
    ) -> Any:  # fmt: skip
        if resets is None and self._left_to_torch(input):
            return nn.LSTM.forward(self, input, hx)
        return self._checked_forward(input, hx, resets)

    def _left_to_torch(self, input: Any) -> bool:
        """Return whether `torch.nn`'s layer is faster here (`tuning.py`); false for a call that is being traced."""
        if self.stash != "fast" or type(input) is not Tensor or input.dim() != 3 or torch.compiler.is_compiling():
            return False
        if self.proj_size or torch.is_autocast_enabled(input.device.type):
            return False
        steps, batch = input.shape[:2][:: -1 if self.batch_first else 1]
        facts = (self.hidden_size, steps, batch, input.dtype, input.device.type)
        return left_to_torch("lstm", self.input_size, *facts)

    def _layer(self, batch: int) -> Layer:
        return lstm_layer(self._kept(batch))


class GRU(_OneState, nn.GRU):
    """`torch.nn.GRU` that keeps what `stash` says."""

    def _layer(self, batch: int) -> Layer:
        return gru_layer(self._kept(batch))


class RNN(_OneState, nn.RNN):
    """`torch.nn.RNN`, tanh or ReLU. Its output is all that backward needs, so that every `stash` is the same."""

    def _layer(self, batch: int) -> Layer:
        return elman_layer(self.mode == "RNN_RELU")


class _Cell(_Stashing):
    """`forward` of the modules that do one step.

    `"fast"` is `torch.nn`'s own step: over one step there is nothing to batch, and an operator in Python around it
    would take longer than the step of a small cell. What it keeps, 20 bytes a unit for an LSTM, is no more than
    Encore's.
    """

    STATES: ClassVar[int] = 1

    def _step(self: Any, input: Tensor, hx: Any) -> tuple[Tensor, ...]:
        if input.dim() not in (1, 2):
            raise ValueError(f"{type(self).__name__}: Expected input to be 1D or 2D, got {input.dim()}D instead")
        if self.STATES > 1 and isinstance(hx, Tensor):
            raise TypeError(f"{type(self).__name__}: Expected hx to be a tuple of tensors, got one tensor")
        states = None if hx is None else (hx if self.STATES > 1 else (hx,))
        for state in states or ():
            if state.dim() != input.dim():
                problem = f"Expected hx to be {input.dim()}D like the input, got {state.dim()}D instead"
                raise OperandError(f"{type(self).__name__}: {problem}")
        if self.stash == "fast" and self._fits(input):
            found = super().forward(input, hx)  # type: ignore[misc]  # torch.nn's, by the order of bases
            return found if isinstance(found, tuple) else (found,)
        rows = input if input.dim() == 2 else input.unsqueeze(0)
        if states is None:
            states = (rows.new_zeros((rows.shape[0], self.hidden_size)),) * self.STATES
        elif input.dim() == 1:
            states = tuple(state.unsqueeze(0) for state in states)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        tensors = [rows.unsqueeze(0), *states, *(getattr(self, name) for name in names)]
        ended = self._operator(*autocast(tensors))
        return ended if input.dim() == 2 else tuple(state.squeeze(0) for state in ended)

    def _fits(self: Any, input: Tensor) -> bool:
        """Return whether `torch.nn` computes the same: under autocast it stays in float32. Wrong widths fail later."""
        return input.shape[-1] == self.input_size and not torch.is_autocast_enabled(input.device.type)

    def _keep(self: Any) -> int:
        return 0 if self.stash == "fast" and torch.is_grad_enabled() else 1


class LSTMCell(_Cell, nn.LSTMCell):
    """`torch.nn.LSTMCell` that keeps what `stash` says."""

    STATES = 2

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        h, c = self._step(input, hx)
        return h, c

    def _operator(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops.encore.lstm_forward(*tensors, None, None, False, self._keep())[1:3]


class GRUCell(_Cell, nn.GRUCell):
    """`torch.nn.GRUCell` that keeps what `stash` says."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return self._step(input, hx)[0]

    def _operator(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops.encore.gru_forward(*tensors, None, False, self._keep())[1:2]


class RNNCell(_Cell, nn.RNNCell):
    """`torch.nn.RNNCell`, tanh or ReLU; every `stash` is the same."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return self._step(input, hx)[0]

    def _operator(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops.encore.elman_forward(*tensors, None, False, self.nonlinearity == "relu")[1:2]


def autocast(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Under autocast, everything in its type; as they are otherwise."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    narrowed = (torch.float32, torch.float16, torch.bfloat16)
    return [tensor.to(dtype) if tensor is not None and tensor.dtype in narrowed else tensor for tensor in tensors]


def _stash_text(stash: str | int) -> str:
    return "" if stash == "fast" else f", stash={stash!r}"
