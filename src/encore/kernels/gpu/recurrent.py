"""The cells of recurrent layers, the counterpart of `recurrent.cpp`: all pointwise work of a step in one pass.

The product with the recurrent weight is cuBLAS's, before or after. Pointers are those of a step's first row; a row of
gates holds 4 times `hidden` numbers. `active` rows take part. Outputs that are not needed are None. If a kernel may
overwrite what it reads (gradients of gates over gates), each program reads its own tile before it writes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encore.kernels.gpu.maths import sigmoid, tanh


@triton.jit
def _tile(active, hidden, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Rows, units, which of them exist, and the width of a row in 64 bits: offsets are made of these."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    units = tl.program_id(1).to(tl.int64) * UNITS + tl.arange(0, UNITS)[None, :]
    return rows, units, (rows < active) & (units < hidden), tl.cast(hidden, tl.int64)


@triton.jit
def _incoming(grad_state, grad_output, grad_stride, rows, units, width, inside):
    """What reaches h: from later steps and from the output."""
    grad = tl.load(grad_state + rows * width + units, inside, 0.0)
    if grad_output is not None:
        grad += tl.load(grad_output + rows * grad_stride + units, inside, 0.0).to(grad.dtype)
    return grad


# ---- LSTM: gates lie as i, f, g, o ---------------------------------------------------------------------------------


@triton.jit
def _lstm_gates(products, bias, rows, units, hidden, inside):
    """Gates from products with inputs and states."""
    at = products + rows * 4 * hidden + units
    bias_at = bias + units
    known = units < hidden
    i = sigmoid(tl.load(at, inside, 0.0) + tl.load(bias_at, known, 0.0))
    f = sigmoid(tl.load(at + hidden, inside, 0.0) + tl.load(bias_at + hidden, known, 0.0))
    g = tanh(tl.load(at + 2 * hidden, inside, 0.0) + tl.load(bias_at + 2 * hidden, known, 0.0))
    o = sigmoid(tl.load(at + 3 * hidden, inside, 0.0) + tl.load(bias_at + 3 * hidden, known, 0.0))
    return i, f, g, o


@triton.jit
def _store_gates(gates, rows, units, hidden, inside, first, second, third, fourth):
    at = gates + rows * 4 * hidden + units
    tl.store(at, first, inside)
    tl.store(at + hidden, second, inside)
    tl.store(at + 2 * hidden, third, inside)
    tl.store(at + 3 * hidden, fourth, inside)


@triton.jit
def _previous(left, found, initial, resets, rows, units, hidden, active, inside):
    """The c that a step finds: the step before left that of `found` rows, the others have their initial one, and those
    that begin a sequence have zero."""
    at = rows * hidden + units
    there = rows < found
    state = tl.where(
        there, tl.load(left + at, inside & there, 0.0), tl.load(initial + at, inside & (rows >= found), 0.0)
    )
    if resets is not None:
        state = tl.where(tl.load(resets + rows, rows < active, 0) != 0, 0.0, state)
    return state


@triton.jit(do_not_specialize=["active"])
def lstm_cell(
    products, bias, cell, raw, output, after, gates, cells, active, hidden, ROWS: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """A step forward: c in place, and h into `output` and `after`, or into `raw` if it is projected later."""
    rows, units, inside, hidden = _tile(active, hidden, ROWS, UNITS)
    i, f, g, o = _lstm_gates(products, bias, rows, units, hidden, inside)
    at = rows * hidden + units
    c = f * tl.load(cell + at, inside, 0.0) + i * g
    tl.store(cell + at, c, inside)
    h = o * tanh(c)
    if gates is not None:
        _store_gates(gates, rows, units, hidden, inside, i, f, g, o)
    if cells is not None:
        tl.store(cells + at, c, inside)
    if raw is not None:
        tl.store(raw + at, h, inside)
    else:
        kept = h.to(output.dtype.element_ty)
        tl.store(output + at, kept, inside)
        tl.store(after + at, kept.to(h.dtype), inside)  # as it will be read back


@triton.jit(do_not_specialize=["found", "active"])
def lstm_cell_again(
    gates, bias, left, found, initial, resets, cells, raw, active, hidden, ROWS: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """Gates from products, in place, and c from the c before it; `raw` is h before its projection."""
    rows, units, inside, hidden = _tile(active, hidden, ROWS, UNITS)
    i, f, g, o = _lstm_gates(gates, bias, rows, units, hidden, inside)
    c = f * _previous(left, found, initial, resets, rows, units, hidden, active, inside) + i * g
    _store_gates(gates, rows, units, hidden, inside, i, f, g, o)
    at = rows * hidden + units
    tl.store(cells + at, c, inside)
    if raw is not None:
        tl.store(raw + at, o * tanh(c), inside)


@triton.jit(do_not_specialize=["found", "active"])
def lstm_cell_backward(
    grad_state, grad_output, grad_stride, gates, cells, left, found, initial, resets, grad_gates, grad_cell, active,
    hidden, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """A step backward: gradients of the gates, and of the c before the step in place."""
    rows, units, inside, hidden = _tile(active, hidden, ROWS, UNITS)
    grad_h = _incoming(grad_state, grad_output, grad_stride, rows, units, hidden, inside)
    from_ = gates + rows * 4 * hidden + units
    i = tl.load(from_, inside, 0.0).to(grad_h.dtype)
    f = tl.load(from_ + hidden, inside, 0.0).to(grad_h.dtype)
    g = tl.load(from_ + 2 * hidden, inside, 0.0).to(grad_h.dtype)
    o = tl.load(from_ + 3 * hidden, inside, 0.0).to(grad_h.dtype)
    at = rows * hidden + units
    tanh_c = tanh(tl.load(cells + at, inside, 0.0))
    before = _previous(left, found, initial, resets, rows, units, hidden, active, inside)
    grad_c = tl.load(grad_cell + at, inside, 0.0) + grad_h * o * (1.0 - tanh_c * tanh_c)
    _store_gates(
        grad_gates, rows, units, hidden, inside, grad_c * g * i * (1.0 - i), grad_c * before * f * (1.0 - f),
        grad_c * i * (1.0 - g * g), grad_h * tanh_c * o * (1.0 - o),
    )  # fmt: skip
    tl.store(grad_cell + at, grad_c * f, inside)


@triton.jit(do_not_specialize=["active"])
def incoming(
    grad_state, grad_output, grad_stride, total, active, width, ROWS: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """What reaches h of a step, before its projection is differentiated."""
    rows, units, inside, width = _tile(active, width, ROWS, UNITS)
    grad = _incoming(grad_state, grad_output, grad_stride, rows, units, width, inside)
    tl.store(total + rows * width + units, grad, inside)


# ---- GRU: gates lie as n, r, z and the recurrent part of n ---------------------------------------------------------


@triton.jit
def _gru_gates(products, bias, rows, units, hidden, inside):
    at = products + rows * 4 * hidden + units
    bias_at = bias + units
    known = units < hidden
    r = sigmoid(tl.load(at + hidden, inside, 0.0) + tl.load(bias_at + hidden, known, 0.0))
    z = sigmoid(tl.load(at + 2 * hidden, inside, 0.0) + tl.load(bias_at + 2 * hidden, known, 0.0))
    part = tl.load(at + 3 * hidden, inside, 0.0) + tl.load(bias_at + 3 * hidden, known, 0.0)
    n = tanh(tl.load(at, inside, 0.0) + tl.load(bias_at, known, 0.0) + r * part)
    return n, r, z, part


@triton.jit(do_not_specialize=["active"])
def gru_cell(
    products, bias, before, after, output, gates, active, hidden, ROWS: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    rows, units, inside, hidden = _tile(active, hidden, ROWS, UNITS)
    n, r, z, part = _gru_gates(products, bias, rows, units, hidden, inside)
    at = rows * hidden + units
    h = n + z * (tl.load(before + at, inside, 0.0) - n)
    if gates is not None:
        _store_gates(gates, rows, units, hidden, inside, n, r, z, part)
    kept = h.to(output.dtype.element_ty)
    tl.store(output + at, kept, inside)
    tl.store(after + at, kept.to(h.dtype), inside)  # as it will be read back


@triton.jit(do_not_specialize=["active"])
def gru_gates(gates, bias, active, hidden, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Gates from products with inputs and states, in place."""
    rows, units, inside, hidden = _tile(active, hidden, ROWS, UNITS)
    n, r, z, part = _gru_gates(gates, bias, rows, units, hidden, inside)
    _store_gates(gates, rows, units, hidden, inside, n, r, z, part)


@triton.jit(do_not_specialize=["active"])
def gru_cell_backward(
    grad_state, grad_output, grad_stride, gates, previous, grad_gates, active, hidden, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """A step backward: gradients of the gates, and the part of h's gradient that passes by them, in place."""
    rows, units, inside, hidden = _tile(active, hidden, ROWS, UNITS)
    grad = _incoming(grad_state, grad_output, grad_stride, rows, units, hidden, inside)
    from_ = gates + rows * 4 * hidden + units
    n = tl.load(from_, inside, 0.0).to(grad.dtype)
    r = tl.load(from_ + hidden, inside, 0.0).to(grad.dtype)
    z = tl.load(from_ + 2 * hidden, inside, 0.0).to(grad.dtype)
    part = tl.load(from_ + 3 * hidden, inside, 0.0).to(grad.dtype)
    at = rows * hidden + units
    grad_n = grad * (1.0 - z) * (1.0 - n * n)
    grad_z = grad * (tl.load(previous + at, inside, 0.0).to(grad.dtype) - n) * z * (1.0 - z)
    _store_gates(
        grad_gates, rows, units, hidden, inside, grad_n, grad_n * part * r * (1.0 - r), grad_z, grad_n * r
    )  # fmt: skip
    tl.store(grad_state + at, grad * z, inside)


# ---- the plain layer -----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["active"])
def elman_cell(
    products, bias, after, output, active, hidden, RELU: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    rows, units, inside, hidden = _tile(active, hidden, ROWS, UNITS)
    at = rows * hidden + units
    sum = tl.load(products + at, inside, 0.0) + tl.load(bias + units, units < hidden, 0.0)
    if RELU:
        h = tl.where(sum <= 0, 0.0, sum)  # NaN stays NaN
    else:
        h = tanh(sum)
    kept = h.to(output.dtype.element_ty)
    tl.store(output + at, kept, inside)
    tl.store(after + at, kept.to(h.dtype), inside)  # as it will be read back


@triton.jit(do_not_specialize=["active"])
def elman_cell_backward(
    grad_state, grad_output, grad_stride, output, grad_gates, active, hidden, RELU: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    rows, units, inside, hidden = _tile(active, hidden, ROWS, UNITS)
    grad = _incoming(grad_state, grad_output, grad_stride, rows, units, hidden, inside)
    at = rows * hidden + units
    h = tl.load(output + at, inside, 0.0).to(grad.dtype)
    if RELU:
        grad = tl.where(h <= 0, 0.0, grad)  # a gradient passes through NaN, as in PyTorch
    else:
        grad = grad * (1.0 - h * h)
    tl.store(grad_gates + at, grad, inside)


# ---- biases --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])
def column_sums(matrix, sums, count, width, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """`sums += matrix.sum(0)`, always in the same order."""
    units = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)[None, :]
    known = units < width
    total = tl.load(sums + units, known, 0.0)
    for first in range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None].to(tl.int64)
        some = tl.load(matrix + rows * width + units, known & (rows < count), 0.0)
        total += tl.reduce(some, 0, tl.standard._sum_combine, keep_dims=True)
    tl.store(sums + units, total, known)
