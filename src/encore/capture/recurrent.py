"""`torch.nn.LSTM`, `GRU` and `RNN`, unchanged, as Encore's whole-sequence operators.

All layers and directions of such a module are one call of `aten::lstm` or its kin. Where a step is traced for the fused
lowering, that call becomes one `encore::lstm_forward` a layer and direction (`rnn/stack.py`): its workspace is known
to the byte, and what it leaves for backward is among its results. The call stays ATen's

- in the eager lowering, which promises eager's very bits, and after `skip="recurrent"`;
- on devices other than the CPU, which have kernels of their own (cuDNN);
- where there is no C++ compiler for the steps of Encore's operators: without it they are slower than ATen's.
  One warning says so;
- inside `torch.func` and forward-mode differentiation, which Encore's operators know nothing of;
- for types that they do not compute in, mixed ones, and empty inputs: ATen knows what to say.

A packed sequence has as many rows as its data say, so Dynamo ends its graph where one is made, and the layers that take
it run between two graphs. There, while a compiled model runs, the same operators are put in place of `aten::lstm` and
its kin by a kernel of the dispatcher's. No plan holds them: they keep gates and states, or under a budget only what
backward can build those from. Calls that lead to no gradient, and those under hooks on saved tensors
(`torch.utils.checkpoint` runs them once more when no compiled model does), stay ATen's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.capture import torch_private
from encore.kernels import BuildError
from encore.options import Options
from encore.rnn import native
from encore.rnn.layer import TYPES
from encore.rnn.sequence import can_walk
from encore.rnn.stack import Layer, elman_layer, gru_layer, lstm_layer, run_layers
from encore.rnn.tuning import lean_steps

aten = torch.ops.aten

_lifted: ContextVar[list[Any] | None] = ContextVar("encore: recurrent layers lifted", default=None)
_between: ContextVar[Between | None] = ContextVar("encore: a compiled model runs", default=None)


@dataclass(slots=True)
class Between:
    """How layers run between the graphs of a compiled model."""

    lean: bool
    """Are gates built again in backward?"""
    calls: int = 0
    """Calls that Encore's operators have taken."""


@contextlib.contextmanager
def lifting(options: Options) -> Iterator[list[Any]]:
    """Recurrent layers that are traced inside become Encore's operators, where the options have it so; the calls that
    did are in the list."""
    calls: list[Any] = []
    token = _lifted.set(calls if options.lowering == "fused" and "recurrent" not in options.skip else None)
    try:
        yield calls
    finally:
        _lifted.reset(token)


def between_graphs(options: Options) -> Between | None:
    """How packed layers run between the graphs of a model that is compiled with these options; None: as ATen's."""
    if options.lowering != "fused" or "recurrent" in options.skip:
        return None
    return Between(lean=options.budget is not None)


@contextlib.contextmanager
def running(between: Between | None) -> Iterator[None]:
    """A compiled model runs inside."""
    token = _between.set(between)
    try:
        with _packed_calls_taken() if between is not None else contextlib.nullcontext():
            yield
    finally:
        _between.reset(token)


def told_of_packing(between: Between | None) -> str:
    """What to say of a graph that ends where a sequence is packed."""
    said = "packed sizes depend on data, so the layer runs between two graphs, "
    if between is None or not _steps_are_compiled():
        return said + "as torch.nn's; encore.nn's LSTM, GRU and RNN keep less there"
    return said + "by Encore's operators; what it keeps is in no prediction"


@dataclass(frozen=True, slots=True)
class Cell:
    """What tells the kinds of layers apart."""

    states: int
    gates: int
    layer: Callable[[int], Layer]
    """One layer in one direction, from the operators' `keep`."""


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one of these operators by name."""

    x: Tensor
    batch_sizes: Tensor | None
    hx: Any
    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


KINDS = {
    aten.lstm: Cell(2, 4, lstm_layer),
    aten.gru: Cell(1, 3, gru_layer),
    aten.rnn_tanh: Cell(1, 1, lambda keep: elman_layer(relu=False)),
    aten.rnn_relu: Cell(1, 1, lambda keep: elman_layer(relu=True)),
}
PACKED: dict[Any, Cell] = {kind.data: cell for kind, cell in KINDS.items()}
CELLS: dict[Any, Cell] = {kind.input: cell for kind, cell in KINDS.items()} | PACKED


def lifted(operator: Any) -> Callable[..., Any]:
    """What tracing runs for one of these operators, and for a packed one the dispatcher."""
    unchanged = torch_private.composite(operator)

    def run_padded(x: Tensor, hx: Any, *others: Any) -> Any:
        found = _run(operator, Call(x, None, hx, *others))
        return unchanged(x, hx, *others) if found is None else found

    def run_packed(x: Tensor, batch_sizes: Tensor, hx: Any, *others: Any) -> Any:
        packed: tuple[Any, ...] = (*others, False)  # rows of a packed sequence lie by time
        found = _run(operator, Call(x, batch_sizes, hx, *packed))
        return unchanged(x, batch_sizes, hx, *others) if found is None else found

    return run_packed if operator in PACKED else run_padded


def _run(operator: Any, call: Call) -> tuple[Tensor, ...] | None:
    """The call by Encore's operators; None where it is left to ATen."""
    cell, x = CELLS[operator], call.x
    states = list(call.hx) if cell.states > 1 else [call.hx]
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *states, *call.params))
    traced, between = _lifted.get(), _between.get()
    not_here = between is None or call.batch_sizes is None or not differentiable or torch_private.saves_are_hooked()
    if traced is None and not_here:
        return None
    directions = 2 if call.bidirectional else 1
    layers = _by_layer(call.params, call.has_biases, call.num_layers * directions)
    types = _result_types(operator, [x, *states, *call.params], projected=layers[0][-1] is not None)
    if types is None or not _can_walk(call, states[0]):
        return None
    keeps_all = differentiable
    if traced is not None:
        traced.append(operator)
    elif between is not None:
        between.calls += 1
        keeps_all = not between.lean
    output, last = run_layers(
        cell.layer(0 if keeps_all else lean_steps(*states[0].shape[1:])),
        (x.transpose(0, 1) if call.batch_first else x).to(types[0]),
        [state.to(types[0]) for state in states],
        [[None if weight is None else weight.to(types[0]) for weight in weights] for weights in layers],
        call.batch_sizes,
        directions=directions,
        dropout=call.dropout if call.train else 0.0,
    )
    ended = (state.to(dtype) for state, dtype in zip(last, types[1:], strict=True))
    return (output.transpose(0, 1) if call.batch_first else output, *ended)


_taking = threading.Lock()
_taken: list[torch.library.Library] = []
"""One entry for each compiled model that runs, all the same."""


@contextlib.contextmanager
def _packed_calls_taken() -> Iterator[None]:
    """Packed calls come here before they are decomposed, while compiled models run; other threads get ATen's."""
    with _taking:
        _taken.append(_taken[0] if _taken else _take_packed_calls())
    try:
        yield
    finally:
        with _taking:
            library = _taken.pop()
            if not _taken:
                library._destroy()
                _forget_dispatch()


def _take_packed_calls() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for operator, kernel in _kernels().items():
        library.impl(operator, kernel, "AutogradCPU")
    _forget_dispatch()
    return library


def _forget_dispatch() -> None:
    for operator in PACKED:
        operator._dispatch_cache.clear()


@functools.cache
def _kernels() -> dict[Any, Callable[..., Any]]:
    return {operator: _dispatched(operator) for operator in PACKED}


def _dispatched(operator: Any) -> Callable[..., Any]:
    instead = lifted(operator)

    def kernel(*args: Any) -> Any:
        # Dynamo asks for shapes, and had better end its graph: one that has this call has one number of rows.
        elsewhere = _between.get() is None or torch_private.is_plain_fake(args[0])
        if _lifted.get() is None and elsewhere:
            return torch_private.as_without_us(operator)(*args)
        return instead(*args)

    untraced: Callable[..., Any] = torch.compiler.disable(kernel)  # Dynamo looks at all that is called between graphs
    return untraced


def _can_walk(call: Call, h: Tensor) -> bool:
    """Are the sizes of a packed batch, where one sees them, as `pack_padded_sequence` makes them?"""
    if call.batch_sizes is None or torch_private.is_plain_fake(call.batch_sizes):
        return True
    return h.dim() == 3 and can_walk(call.batch_sizes.tolist(), h.shape[1], call.x.shape[0])


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
    """Types of output and last states of a call, computed in that of the output; None where it is left to ATen."""
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
    """What autocast makes of these types differs from cell to cell (an LSTM's c stays in float32 if h is projected, a
    GRU's h does always): ATen is asked, by a call of one unit."""
    gates, width, hidden = CELLS[operator].gates, 1, 2 if projected else 1
    sizes = [(gates * hidden, 1), (gates * hidden, width), *([(width, hidden)] if projected else [])]
    with torch_private.beside_tracing(), warnings.catch_warnings(action="ignore"):
        widths = (1, width, hidden)[: len(initial)]
        x, *states = (torch.zeros(1, 1, size, dtype=dtype) for size, dtype in zip(widths, initial, strict=True))
        sequence = (x[0], torch.ones(1, dtype=torch.int64)) if operator in PACKED else (x,)
        order = () if operator in PACKED else (False,)
        params = [torch.zeros(size, dtype=weights) for size in sizes]
        hx = states if len(states) > 1 else states[0]
        try:
            results = torch_private.composite(operator)(*sequence, hx, params, False, 1, 0.0, False, False, *order)
        except RuntimeError:  # refused: so will the call be
            return None
    return tuple(result.dtype for result in results)


torch_private.INSTEAD.update({operator: lifted(operator) for operator in CELLS})
