"""cuDNN's recurrent layers as a pair of operators: `torch.nn`'s layers on CUDA devices.

PyTorch's own operators cannot be captured: without data the flat buffer of the weights cannot be found, and the bytes
that forward keeps for backward (the reserve) are unknown. So `cudnn_layers` finds the buffer when it runs, and asks
cuDNN for the reserve once for every kind of call. Where there is no CUDA device, `GUESSED_UNITS` describes the reserve.

cuDNN's backward writes over the reserve. A second backward of the same step raises autograd's error about a tensor that
was modified in place. Dropout between layers draws from a state of cuDNN's own, one a device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from encore.devices import is_here
from encore.rnn.registry import MADE_UP
from encore.rnn.torch_private import without_modes

aten = torch.ops.aten

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
GATES = (1, 1, 4, 3)
GUESSED_UNITS = 2
"""Numbers a unit and step in the reserve, beyond the gates."""
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

OPTIONS = "int stride, int mode, int layers, bool bidirectional, float dropout, bool train, bool flat"
"""`stride` is the number of weights of a layer and direction; `flat` is whether the weights are expected to be views of
one buffer, as a module's are: other weights are copied to one, which is a workspace."""
OPERANDS = f"Tensor x, Tensor h0, Tensor? c0, Tensor[] weights, {OPTIONS}"
TAKEN = 11


def run_cudnn(
    kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *, layers: int, bidirectional: bool,
    dropout: float, train: bool, flat: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The output and the last states of recurrent layers, by cuDNN."""
    stride = len(weights) // (layers * (2 if bidirectional else 1))
    h0, c0 = states[0], states[1] if len(states) > 1 else None
    dropout = dropout if layers > 1 and train else 0.0
    operator = torch.ops.encore.cudnn_layers_dropout if dropout else torch.ops.encore.cudnn_layers
    output, h_n, c_n, _ = operator(
        x, h0, c0, list(weights), stride, MODES[kind], layers, bidirectional, dropout, train, flat
    )
    return (output, h_n) if c0 is None else (output, h_n, c_n)


def is_supported(tensors: Sequence[Tensor]) -> bool:
    """Return whether PyTorch gives a call on these tensors to cuDNN."""
    x = tensors[0]
    same = {(tensor.device, tensor.dtype) for tensor in tensors} == {(x.device, x.dtype)}
    whole = all(tensor.numel() for tensor in tensors)
    return x.device.type == "cuda" and same and whole and x.dtype in TYPES and torch.backends.cudnn.enabled


def _sizes(h0: Tensor, weights: Sequence[Tensor], mode: int) -> tuple[int, int]:
    """The size of the hidden state, and of its projection (0 without)."""
    hidden = weights[0].shape[0] // GATES[mode]
    return hidden, h0.shape[2] if h0.shape[2] != hidden else 0


# -- weights: views of one flat buffer


@functools.cache
def _layout(
    shapes: tuple[tuple[int, ...], ...], stride: int, mode: int, layers: int, bidirectional: bool, projection: int,
    hidden: int, dtype: torch.dtype, device: torch.device,
) -> tuple[tuple[int, ...], int]:  # fmt: skip
    """Where in the buffer each weight begins, and the buffer's elements: as cuDNN wants it, or in order without one."""
    if not is_here(device):
        sizes = [math.prod(shape) for shape in shapes]
        return tuple(sum(sizes[:position]) for position in range(len(sizes))), sum(sizes)
    with without_modes(), torch.no_grad(), torch.accelerator.device_index(device.index):
        made = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        width = made[0].shape[1]
        aten._cudnn_rnn_flatten_weight(made, stride, width, mode, hidden, projection, layers, False, bidirectional)
        return tuple(int(weight.storage_offset()) for weight in made), made[
            0
        ].untyped_storage().nbytes() // dtype.itemsize


def _layout_of(h0: Tensor, weights: Sequence[Tensor], options: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    stride, mode, layers, bidirectional = options[:4]
    hidden, projection = _sizes(h0, weights, mode)
    shapes = tuple(tuple(weight.shape) for weight in weights)
    return _layout(shapes, stride, mode, layers, bidirectional, projection, hidden, h0.dtype, h0.device)


def _flat(h0: Tensor, weights: Sequence[Tensor], options: Sequence[Any]) -> tuple[Tensor, list[Tensor]]:
    """The buffer of the weights, and the weights as views of it; copied together if they lie elsewhere."""
    offsets, elements = _layout_of(h0, weights, options)
    first, storage = weights[0].storage_offset() - offsets[0], weights[0].untyped_storage()
    places = zip(weights, offsets, strict=True)
    if first >= 0 and (first + elements) * h0.itemsize <= storage.nbytes() and all(
        weight.untyped_storage().data_ptr() == storage.data_ptr()
        and weight.storage_offset() == first + offset
        and weight.is_contiguous()
        for weight, offset in places
    ):  # fmt: skip
        return h0.new_empty(0).set_(storage, first, (elements,), (1,)), list(weights)
    buffer = h0.new_empty(elements)
    views = [buffer[begin : begin + it.numel()].view(it.shape) for it, begin in zip(weights, offsets, strict=True)]
    for view, weight in zip(views, weights, strict=True):
        view.copy_(weight)
    return buffer, views


@functools.cache
def _dropout_state(device: torch.device, dropout: float) -> Tensor:
    seed = int(torch.empty((), dtype=torch.int64).random_())
    return aten._cudnn_init_dropout_state(dropout, True, seed, dtype=torch.uint8, device=device)


# -- forward


def _forward(x: Tensor, h0: Tensor, c0: Tensor | None, weights: list[Tensor], *options: Any) -> tuple[Tensor, ...]:
    stride, mode, layers, bidirectional, dropout, train, _ = options
    hidden, projection = _sizes(h0, weights, mode)
    with torch.accelerator.device_index(x.device.index):
        buffer, views = _flat(h0, weights, options)
        state = _dropout_state(x.device, dropout) if dropout else None
        output, h_n, c_n, reserve, _ = aten._cudnn_rnn(
            x, views, stride, buffer, h0, c0, mode, hidden, projection, layers, False, dropout, train, bidirectional,
            [], state,
        )  # fmt: skip
    return output, h_n, x.new_empty(0) if c0 is None else c_n, reserve


def _fake_forward(
    x: Tensor, h0: Tensor, c0: Tensor | None, weights: list[Tensor], *options: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    bidirectional, _, train, _ = options[3:]
    output = x.new_empty((*x.shape[:2], h0.shape[2] * (2 if bidirectional else 1)))
    c_n = x.new_empty(0) if c0 is None else c0.new_empty(c0.shape)
    reserve = _reserve_bytes(
        tuple(x.shape), tuple(h0.shape), None if c0 is None else tuple(c0.shape),
        tuple(tuple(weight.shape) for weight in weights), options, x.dtype, x.device,
    ) if train else 0  # fmt: skip
    return output, h0.new_empty(h0.shape), c_n, x.new_empty(reserve, dtype=torch.uint8)


@functools.cache
def _reserve_bytes(
    x: tuple[int, ...], h0: tuple[int, ...], c0: tuple[int, ...] | None, weights: tuple[tuple[int, ...], ...],
    options: tuple[Any, ...], dtype: torch.dtype, device: torch.device,
) -> int:  # fmt: skip
    """The bytes that forward keeps: cuDNN's answer, where it is here and has the memory to run once."""
    mode, layers, bidirectional = options[1:4]
    if is_here(device):
        with without_modes(), torch.no_grad():
            try:
                tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape in (x, h0, *weights)]
                cells = None if c0 is None else torch.zeros(c0, dtype=dtype, device=device)
                return _forward(tensors[0], tensors[1], cells, tensors[2:], *options)[3].nbytes
            except torch.OutOfMemoryError:
                pass
    hidden = weights[0][0] // GATES[mode]
    return x[0] * x[1] * layers * (2 if bidirectional else 1) * hidden * (GATES[mode] + GUESSED_UNITS) * dtype.itemsize


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[3], *([output[2]] if inputs[2] is None else []))
    ctx.save_for_backward(*inputs[:3], output[0], output[3], *inputs[3])
    ctx.options = inputs[4:TAKEN]


def _differentiate(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    x, h0, c0, output, reserve, *weights = ctx.saved_tensors
    grad_x, grad_h0, grad_c0, flat = torch.ops.encore.cudnn_layers_backward(
        *given[:3], x, h0, c0, weights, output, reserve, *ctx.options
    )
    offsets, _ = _layout_of(h0, weights, ctx.options)
    places = zip(weights, offsets, strict=True)
    grads = [flat[begin : begin + weight.numel()].view(weight.shape) for weight, begin in places]
    return grad_x, grad_h0, None if c0 is None else grad_c0, grads, *[None] * (TAKEN - 4)


# -- backward


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grads, (x, h0, c0, weights, output, reserve, *options) = args[:3], args[3:]
    stride, mode, layers, bidirectional, dropout, train, _ = options
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    hidden, projection = _sizes(h0, weights, mode)
    torch.autograd.graph.increment_version(reserve)
    with torch.accelerator.device_index(x.device.index):
        buffer, views = _flat(h0, weights, options)
        state = _dropout_state(x.device, dropout) if dropout else None
        grad_x, grad_h0, grad_c0, found = aten._cudnn_rnn_backward(
            x, views, stride, buffer, h0, c0, output, *grads, mode, hidden, projection, layers, False, dropout, train,
            bidirectional, [], state, reserve, [True, True, c0 is not None, True],
        )  # fmt: skip
    elements = _layout_of(h0, weights, options)[1]
    flat = x.new_empty(0).set_(found[0].untyped_storage(), 0, (elements,), (1,))
    return grad_x, grad_h0, x.new_empty(0) if c0 is None else grad_c0, flat


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    x, h0, c0, weights, _, _, *options = args[3:]
    elements = _layout_of(h0, weights, options)[1]
    grad_c0 = x.new_empty(0) if c0 is None else c0.new_empty(c0.shape)
    return x.new_empty(x.shape), h0.new_empty(h0.shape), grad_c0, x.new_empty(elements)


def _made_up(first: int) -> Any:
    """Made-up weights lie in one buffer if the step's do; forward's reserve is real, for backward."""

    def made_up(args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, h0, c0, weights = args[first : first + 4]
        options = args[4:] if first == 0 else args[first + 6 :]
        views = _flat(h0, weights, options)[1] if options[-1] else list(weights)
        if first == 0:
            return (*args[:3], views, *options)
        output, *_, reserve = _forward(x, h0, c0, views, *options)
        return (*args[: first + 3], views, output, reserve, *options)

    return made_up


_library = torch.library.Library("encore", "FRAGMENT")


def _define(schema: str, run: Any, fake: Any, first: int, tags: tuple[Any, ...] = ()) -> None:
    """Define an operator, without a workspace: that is measured. `first` is the position of x."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"encore::{name}", fake, lib=_library)
    if first == 0:
        torch.library.register_autograd(f"encore::{name}", _differentiate, setup_context=_save, lib=_library)
    MADE_UP[getattr(torch.ops.encore, name).default] = _made_up(first)


RESULTS = "(Tensor output, Tensor h_n, Tensor c_n, Tensor reserve)"
_define(f"cudnn_layers({OPERANDS}) -> {RESULTS}", _forward, _fake_forward, 0)
_define(
    f"cudnn_layers_dropout({OPERANDS}) -> {RESULTS}", _forward, _fake_forward, 0, (torch.Tag.nondeterministic_seeded,)
)
_define(
    "cudnn_layers_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor x, Tensor h0, Tensor? c0, "
    f"Tensor[] weights, Tensor output, Tensor reserve, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward, _fake_backward, 3,
)  # fmt: skip
