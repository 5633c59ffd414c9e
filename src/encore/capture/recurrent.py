"""`torch.nn.LSTM`, `GRU` and `RNN`, unchanged, as Encore's whole-sequence operators.

All layers and directions of such a module are one call of `aten::lstm`, `aten::gru` or similar. If a step is traced for
the fused lowering, that call becomes one `encore::lstm_forward` a layer and direction (`rnn/stack.py`): its workspace
is known to the byte, and what it saves for backward is among its results. The call stays ATen's

- in the eager lowering, whose results are bit-identical to eager's, and after `skip="recurrent"`;
- on devices other than the CPU, which have kernels of their own (cuDNN);
- without a C++ compiler for the steps of Encore's operators, which are slower than ATen's without one (a warning is
  given once);
- inside `torch.func` and forward-mode differentiation, which Encore's operators do not support;
- for types that they do not support, mixed types and empty inputs, for which ATen has its own errors.

A packed sequence inside a captured model lies in a block whose shape is known (`packing.py`). Its layers are one call
of `encore::packed_layers`, which becomes the same operators, or in the cases above ATen's layers on the packed rows
(`rnn/packed_aten.py`). A `PackedSequence` that was constructed otherwise breaks the graph, and its layers run as
PyTorch's between two graphs: no prediction counts what they save.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.capture import torch_private
from encore.errors import OperandError
from encore.kernels import BuildError
from encore.rnn import cudnn, native
from encore.rnn.layer import TYPES
from encore.rnn.packing import dropped_rows
from encore.rnn.stack import Layer, elman_layer, gru_layer, lstm_layer, run_layers
from encore.rnn.tuning import lean_steps

aten = torch.ops.aten

_lifted: ContextVar[list[Any] | None] = ContextVar("encore: recurrent layers lifted", default=None)


@contextlib.contextmanager
def lifting(lowering: str, skip: Collection[str]) -> Iterator[list[Any]]:
    """Replace recurrent layers by Encore's operators while they are traced for the fused lowering; the list collects
    the calls that were replaced."""
    calls: list[Any] = []
    token = _lifted.set(calls if lowering == "fused" and "recurrent" not in skip else None)
    try:
        yield calls
    finally:
        _lifted.reset(token)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How the kinds of layers differ."""

    states: int
    gates: int
    layer: Callable[[int], Layer]
    """One layer in one direction, from the operators' `keep`."""


@dataclass(frozen=True, slots=True)
class AtenLayerCall:
    """The arguments of one of these operators by name."""

    x: Tensor
    batch_sizes: Tensor | None
    """Of packed rows in a block (`rnn/packing.py`)."""
    hx: Any
    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


KINDS = {
    aten.lstm: LayerKind(2, 4, lstm_layer),
    aten.gru: LayerKind(1, 3, gru_layer),
    aten.rnn_tanh: LayerKind(1, 1, lambda keep: elman_layer(relu=False)),
    aten.rnn_relu: LayerKind(1, 1, lambda keep: elman_layer(relu=True)),
}
PACKED: dict[Any, LayerKind] = {kind.data: cell for kind, cell in KINDS.items()}
CELLS: dict[Any, LayerKind] = {kind.input: cell for kind, cell in KINDS.items()} | PACKED


def lifted(operator: Any) -> Callable[..., Any]:
    """Return the function that tracing runs for one of these operators."""
    unchanged = torch_private.composite(operator)

    def run(x: Tensor, hx: Any, *others: Any) -> Any:
        call = AtenLayerCall(x, None, hx, *others)
        found = _by_cudnn(operator, call) if x.device.type == "cuda" else _run(operator, call)
        return unchanged(x, hx, *others) if found is None else found

    return run


def _run(operator: Any, call: AtenLayerCall) -> tuple[Tensor, ...] | None:
    """Run the call with Encore's operators; None if it is left to ATen."""
    cell, x = CELLS[operator], call.x
    states = list(call.hx) if cell.states > 1 else [call.hx]
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *states, *call.params))
    traced = _lifted.get()
    if traced is None:
        return None
    directions = 2 if call.bidirectional else 1
    layers = _by_layer(call.params, call.has_biases, call.num_layers * directions)
    types = _result_types(operator, [x, *states, *call.params], projected=layers[0][-1] is not None)
    if types is None:
        return None
    traced.append(operator)
    output, last = run_layers(
        cell.layer(0 if differentiable else lean_steps(*states[0].shape[1:])),
        (x.transpose(0, 1) if call.batch_first else x).to(types[0]),
        [state.to(types[0]) for state in states],
        [[None if weight is None else weight.to(types[0]) for weight in weights] for weights in layers],
        call.batch_sizes,
        directions=directions,
        dropout=call.dropout if call.train else 0.0,
        in_block=call.batch_sizes is not None,
    )
    ended = (state.to(dtype) for state, dtype in zip(last, types[1:], strict=True))
    return (output.transpose(0, 1) if call.batch_first else output, *ended)


def _by_cudnn(operator: Any, call: AtenLayerCall) -> tuple[Tensor, ...] | None:
    """Run the call with cuDNN, as PyTorch does on CUDA; None if PyTorch does not."""
    states = list(call.hx) if CELLS[operator].states > 1 else [call.hx]
    tensors = [call.x, *states, *call.params]
    if torch.is_autocast_enabled("cuda"):
        tensors = [tensor.to(torch.get_autocast_dtype("cuda")) for tensor in tensors]
    if torch_private.is_transformed() or not cudnn.is_supported(tensors):
        return None
    x, states, params = tensors[0], tensors[1 : 1 + len(states)], tensors[1 + len(states) :]
    flat = all(one is other for one, other in zip(params, call.params, strict=True))  # casts have memory of their own
    output, *ended = cudnn.run_cudnn(
        operator.overloadpacket.__name__, x.transpose(0, 1) if call.batch_first else x, states, params,
        layers=call.num_layers, bidirectional=call.bidirectional, dropout=call.dropout, train=call.train, flat=flat,
    )  # fmt: skip
    return (output.transpose(0, 1) if call.batch_first else output, *ended)


def packed_layers(
    rows: Tensor, batch_sizes: Tensor, hx: list[Tensor], params: list[Tensor], kind: str, has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """Run all layers on rows in a block: with Encore's operators, or with ATen's, one layer at a time."""
    operator = getattr(aten, kind).data
    call = AtenLayerCall(
        rows, batch_sizes, hx if len(hx) > 1 else hx[0], params, has_biases, num_layers, dropout, train, bidirectional,
        batch_first=False,
    )  # fmt: skip
    found = _run(operator, call)
    return list(_by_aten(operator, call) if found is None else found)


def _by_aten(operator: Any, call: AtenLayerCall) -> tuple[Tensor, ...]:
    """Run the call with ATen's layers, one operator each (`rnn/packed_aten.py`)."""
    cell, x, directions = CELLS[operator], call.x, 2 if call.bidirectional else 1
    states = list(call.hx) if cell.states > 1 else [call.hx]
    layers = _by_layer(call.params, call.has_biases, call.num_layers * directions)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    ended: list[list[Tensor]] = [[] for _ in states]
    for first in range(0, len(layers), directions):
        if first and call.dropout and call.train:
            x = dropped_rows(x, call.batch_sizes, call.dropout)
        initial = [state[first : first + directions] for state in states]
        types: tuple[torch.dtype, ...] | None = (x.dtype, *(state.dtype for state in initial))
        if autocast is not None:
            types = _autocast_types(operator, autocast, types, call.params[0].dtype, layers[first][-1] is not None)
        if types is None:
            raise OperandError(
                f"{operator} does not accept these types under autocast: {x.dtype} with weights of "
                f"{call.params[0].dtype}; cast the input or the weights to one type"
            )
        reverse = layers[first + 1] if directions > 1 else [None] * len(layers[first])
        x, *last = torch.ops.encore.packed_aten_forward(
            x, *initial, *[None] * (2 - len(initial)), *layers[first], *reverse, call.batch_sizes,
            operator.overloadpacket.__name__, autocast, *types, *[types[0]] * (3 - len(types)),
        )  # fmt: skip
        for mine, state in zip(ended, last, strict=False):
            mine.append(state)
    return (x, *(each[0] if len(each) == 1 else torch.cat(each) for each in ended))


_library = torch.library.Library("encore", "FRAGMENT")
_library.define(
    "packed_layers(Tensor rows, Tensor batch_sizes, Tensor[] hx, Tensor[] params, str kind, bool has_biases, "
    "int num_layers, float dropout, bool train, bool bidirectional) -> Tensor[]"
)
_library.impl("packed_layers", packed_layers, "CompositeImplicitAutograd")


def _by_layer(params: Sequence[Tensor], has_biases: bool, count: int) -> list[list[Tensor | None]]:
    """For each layer and direction: input weight, recurrent weight, their biases, and the projection."""
    each = len(params) // count
    layers = []
    for first in range(0, len(params), each):
        matrices, others = params[first : first + 2], params[first + 2 : first + each]
        biases, projection = (others[:2], others[2:]) if has_biases else ((None, None), others)
        layers.append([*matrices, *biases, *(projection or (None,))])
    return layers


def _result_types(operator: Any, tensors: Sequence[Tensor], projected: bool) -> tuple[torch.dtype, ...] | None:
    """The types of the output and of the last states of a call; None if it is left to ATen."""
    if not all(tensor.device.type == "cpu" and tensor.dtype in TYPES and tensor.numel() for tensor in tensors):
        return None
    if torch_private.is_transformed() or not _steps_are_compiled():
        return None
    types = tuple(tensor.dtype for tensor in tensors)
    initial, weights = types[: 1 + CELLS[operator].states], types[-1]
    if not torch.is_autocast_enabled("cpu"):
        return initial if len(set(types)) == 1 else None
    uniform = {*types[len(initial) :]} == {weights}
    return _autocast_types(operator, torch.get_autocast_dtype("cpu"), initial, weights, projected) if uniform else None


@functools.cache
def _steps_are_compiled() -> bool:
    try:
        native.recurrent_library()
    except BuildError as error:
        warnings.warn(
            f"encore: torch.nn's recurrent layers run as PyTorch's own operators, which keep more: {error}. "
            "Install a C++ compiler, or set CXX to one",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _autocast_types(
    operator: Any, autocast: torch.dtype, initial: tuple[torch.dtype, ...], weights: torch.dtype, projected: bool
) -> tuple[torch.dtype, ...] | None:
    """The result types under autocast differ between kinds of layers (an LSTM's c stays in float32 if h is projected, a
    GRU's h always does), so they are taken from a call of ATen's layer with one unit."""
    gates, width, hidden = CELLS[operator].gates, 1, 2 if projected else 1
    sizes = [(gates * hidden, 1), (gates * hidden, width), *([(width, hidden)] if projected else [])]
    with torch_private.outside_tracing(), warnings.catch_warnings(action="ignore"):
        widths = (1, width, hidden)[: len(initial)]
        x, *states = (torch.zeros(1, 1, size, dtype=dtype) for size, dtype in zip(widths, initial, strict=True))
        sequence = (x[0], torch.ones(1, dtype=torch.int64)) if operator in PACKED else (x,)
        order = () if operator in PACKED else (False,)
        params = [torch.zeros(size, dtype=weights) for size in sizes]
        hx = states if len(states) > 1 else states[0]
        try:
            results = torch_private.composite(operator)(*sequence, hx, params, False, 1, 0.0, False, False, *order)
        except RuntimeError:  # ATen rejects these types, and will reject the call
            return None
    return tuple(result.dtype for result in results)


torch_private.TRACED_KERNELS.update({kind.input: lifted(kind.input) for kind in KINDS})
