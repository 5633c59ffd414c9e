"""The time loop of recurrent layers in one launch: products with the recurrent weight, and the cells behind them.

A grid has a row of programs for each block of the batch. Every program goes through all steps, and in each step through
its share of the units: `PROGRAMS` of them take turns with the tiles of a row. Products read the states that the step
before left, of all units, so that the programs of a row meet once a step: at a barrier of threads if there is one
program, else at a counter in memory (`_meet`), for which all of them have to run at the same time. Such a launch is
cooperative, which the driver rejects if there is no room, instead of waiting for ever. States that other programs wrote
are read past the first cache (`.cg`).

A launch does the steps `begin` to `end`. Programs only meet between two steps of one launch, so that a launch for each
step is the same computation without meetings; the interpreter, which runs one program after the other, is tested so.

Rows lie step after step, `batch` of them each; `REVERSE` goes through them backwards. Rows of which `resets` is true
find states of zero, and hand no gradient back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encore.kernels.gpu.maths import sigmoid, tanh

# ---- what the loops share ------------------------------------------------------------------------------------------


@triton.jit
def _meet(meeting, expected, PROGRAMS: tl.constexpr):
    """Wait for the other programs of a row; `expected` is how many have come when all have, in all meetings so far."""
    tl.debug_barrier()  # all threads of this program have written
    if PROGRAMS > 1:
        counter = meeting + tl.program_id(0).to(tl.int64)
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
        while arrived < expected:
            arrived = tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
        tl.debug_barrier()  # no thread reads before the others have come


@triton.jit
def _row(number, count, batch, REVERSE: tl.constexpr):
    """The first row of a step."""
    place = number
    if REVERSE:
        place = count - 1 - number
    return tl.cast(place, tl.int64) * batch


@triton.jit
def _tile(block, hidden, UNITS: tl.constexpr):
    """The units of a tile, and which of them exist."""
    units = tl.cast(block, tl.int64) * UNITS + tl.arange(0, UNITS)[None, :]
    return units, units < hidden


@triton.jit
def _begins(resets, row, rows, present):
    """Which rows of a step begin a sequence."""
    return tl.load(resets + row + rows, present, 0) != 0


@triton.jit
def _part(left, left_stride, weight, weight_stride, depth, first, rows, present, units, known, DEPTH: tl.constexpr):
    """A piece of rows and the piece of the weight that it is multiplied with."""
    k = tl.cast(first, tl.int64) + tl.arange(0, DEPTH)
    found = tl.load(left + rows * left_stride + k[None, :], present & (k[None, :] < depth), 0.0, cache_modifier=".cg")
    return found, weight + k[:, None] * weight_stride + units, (k[:, None] < depth) & known


@triton.jit
def _add_product(found, at, there, total, PRECISION: tl.constexpr):
    return tl.dot(found, tl.load(at, there, 0.0), total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def _product(
    left, left_stride, weight, depth, rows, present, units, known, hidden, ROWS: tl.constexpr, UNITS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`left @ weight`, for a weight `[depth, hidden]`."""
    total = tl.full((ROWS, UNITS), 0.0, weight.dtype.element_ty)
    for first in range(0, depth, DEPTH):
        found, at, inside = _part(
            left, left_stride, weight, hidden, depth, first, rows, present, units, known, DEPTH
        )  # fmt: skip
        total = _add_product(found, at, inside, total, PRECISION)
    return total


@triton.jit
def _incoming(total, grad_output, row, batch, grad_step, grad_stride, rows, units, inside):
    """What reaches h: from later steps and from the output."""
    if grad_output is not None:
        at = grad_output + row // batch * grad_step + rows * grad_stride + units
        total += tl.load(at, inside, 0.0).to(total.dtype)
    return total


@triton.jit
def _store_four(to, hidden, inside, first, second, third, fourth):
    tl.store(to, first, inside)
    tl.store(to + hidden, second, inside)
    tl.store(to + 2 * hidden, third, inside)
    tl.store(to + 3 * hidden, fourth, inside)


@triton.jit
def _load_four(at, hidden, inside, REAL: tl.constexpr):
    """Gates of a tile, in the type that is computed in."""
    first = tl.load(at, inside, 0.0).to(REAL)
    second = tl.load(at + hidden, inside, 0.0).to(REAL)
    third = tl.load(at + 2 * hidden, inside, 0.0).to(REAL)
    return first, second, third, tl.load(at + 3 * hidden, inside, 0.0).to(REAL)


@triton.jit
def _add_input(total, inputs, bias, at, units, offset, inside, known):
    """A product with states, and the one with inputs and the bias, which lie at an offset."""
    return total + tl.load(inputs + at + offset, inside, 0.0) + tl.load(bias + offset + units, known, 0.0)


# ---- LSTM: gates lie as i, f, g, o ---------------------------------------------------------------------------------


@triton.jit
def _lstm_products(
    source, weight, rows, present, units, known, hidden, ROWS: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of states with the weights of all gates."""
    i = tl.full((ROWS, UNITS), 0.0, weight.dtype.element_ty)
    f = tl.full((ROWS, UNITS), 0.0, weight.dtype.element_ty)
    g = tl.full((ROWS, UNITS), 0.0, weight.dtype.element_ty)
    o = tl.full((ROWS, UNITS), 0.0, weight.dtype.element_ty)
    for first in range(0, hidden, DEPTH):
        h, at, there = _part(
            source, hidden, weight, 4 * hidden, hidden, first, rows, present, units, known, DEPTH
        )  # fmt: skip
        i = _add_product(h, at, there, i, PRECISION)
        f = _add_product(h, at + hidden, there, f, PRECISION)
        g = _add_product(h, at + 2 * hidden, there, g, PRECISION)
        o = _add_product(h, at + 3 * hidden, there, o, PRECISION)
    return i, f, g, o


@triton.jit(do_not_specialize=["begin", "end", "count", "batch"])
def lstm_loop(
    inputs, bias, weight, before, after, cell, output, gates, cells, resets, meeting, begin, end, count, batch, hidden,
    REVERSE: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps forward: c in place; h into `output`, and by turns into `after` and `before`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    present = rows < batch
    hidden = tl.cast(hidden, tl.int64)
    for number in range(begin, end):
        row = _row(number, count, batch, REVERSE)
        source, target = before, after
        if number % 2 == 1:
            source, target = after, before
        for block in range(tl.program_id(1), (hidden + UNITS - 1) // UNITS, PROGRAMS):
            units, known = _tile(block, hidden, UNITS)
            inside = present & known
            i, f, g, o = _lstm_products(
                source, weight, rows, present, units, known, hidden, ROWS, UNITS, DEPTH, PRECISION
            )  # fmt: skip
            at_unit = rows * hidden + units
            c = tl.load(cell + at_unit, inside, 0.0)
            if resets is not None:
                reset = _begins(resets, row, rows, present)
                i, f = tl.where(reset, 0.0, i), tl.where(reset, 0.0, f)
                g, o, c = tl.where(reset, 0.0, g), tl.where(reset, 0.0, o), tl.where(reset, 0.0, c)
            at_gates = (row + rows) * 4 * hidden + units
            i = sigmoid(_add_input(i, inputs, bias, at_gates, units, 0, inside, known))
            f = sigmoid(_add_input(f, inputs, bias, at_gates, units, hidden, inside, known))
            g = tanh(_add_input(g, inputs, bias, at_gates, units, 2 * hidden, inside, known))
            o = sigmoid(_add_input(o, inputs, bias, at_gates, units, 3 * hidden, inside, known))
            c = f * c + i * g
            tl.store(cell + at_unit, c, inside)
            if gates is not None:
                _store_four(gates + at_gates, hidden, inside, i, f, g, o)
            if cells is not None:
                tl.store(cells + (row + rows) * hidden + units, c, inside)
            kept = (o * tanh(c)).to(output.dtype.element_ty)
            tl.store(output + (row + rows) * hidden + units, kept, inside)
            tl.store(target + at_unit, kept.to(c.dtype), inside)  # as it will be read back
        if number + 1 < end:
            _meet(meeting, (number + 1 - begin) * PROGRAMS, PROGRAMS)


@triton.jit(do_not_specialize=["count", "batch"])
def lstm_loop_again(
    gates, bias, entering, resets, cells, count, batch, hidden, REVERSE: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Gates of all steps from products, in place, and c from the c before the first of them."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    units, known = _tile(tl.program_id(1), hidden, UNITS)
    present = rows < batch
    inside = present & known
    hidden = tl.cast(hidden, tl.int64)
    bias_i, bias_f = tl.load(bias + units, known, 0.0), tl.load(bias + hidden + units, known, 0.0)
    bias_g, bias_o = tl.load(bias + 2 * hidden + units, known, 0.0), tl.load(bias + 3 * hidden + units, known, 0.0)
    c = tl.load(entering + rows * hidden + units, inside, 0.0)
    for number in range(count):
        row = _row(number, count, batch, REVERSE)
        at = gates + (row + rows) * 4 * hidden + units
        if resets is not None:
            c = tl.where(_begins(resets, row, rows, present), 0.0, c)
        i = sigmoid(tl.load(at, inside, 0.0) + bias_i)
        f = sigmoid(tl.load(at + hidden, inside, 0.0) + bias_f)
        g = tanh(tl.load(at + 2 * hidden, inside, 0.0) + bias_g)
        o = sigmoid(tl.load(at + 3 * hidden, inside, 0.0) + bias_o)
        c = f * c + i * g
        _store_four(at, hidden, inside, i, f, g, o)
        tl.store(cells + (row + rows) * hidden + units, c, inside)


@triton.jit(do_not_specialize=["begin", "end", "count", "batch", "grad_step"])
def lstm_loop_backward(
    weight, grad_state, grad_output, grad_step, grad_stride, gates, cells, entering, resets, grad_gates, grad_cell,
    meeting, begin, end, count, batch, hidden, REVERSE: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps backward. Turn t has the product of step `count - t` with the weight, and the cell of the step before it;
    the first has no product, the last no cell. Gradients of h and c before the first step come to lie in place."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    present = rows < batch
    hidden = tl.cast(hidden, tl.int64)
    for turn in range(begin, end):
        later, number = count - turn, count - turn - 1
        for block in range(tl.program_id(1), (hidden + UNITS - 1) // UNITS, PROGRAMS):
            units, known = _tile(block, hidden, UNITS)
            inside = present & known
            at_unit = rows * hidden + units
            grad = tl.load(grad_state + at_unit, inside, 0.0)
            if later < count:
                row = _row(later, count, batch, REVERSE)
                left = grad_gates + row * 4 * hidden
                grad = _product(
                    left, 4 * hidden, weight, 4 * hidden, rows, present, units, known, hidden, ROWS, UNITS, DEPTH,
                    PRECISION,
                )  # fmt: skip
                if resets is not None:
                    grad = tl.where(_begins(resets, row, rows, present), 0.0, grad)
            if number < 0:
                tl.store(grad_state + at_unit, grad, inside)
            else:
                row = _row(number, count, batch, REVERSE)
                grad_h = _incoming(grad, grad_output, row, batch, grad_step, grad_stride, rows, units, inside)
                at = gates + (row + rows) * 4 * hidden + units
                i, f, g, o = _load_four(at, hidden, inside, grad.dtype)
                tanh_c = tanh(tl.load(cells + (row + rows) * hidden + units, inside, 0.0))
                left_by = entering
                if number > 0:
                    left_by = cells + _row(number - 1, count, batch, REVERSE) * hidden
                c = tl.load(left_by + at_unit, inside, 0.0)
                grad_c = tl.load(grad_cell + at_unit, inside, 0.0) + grad_h * o * (1.0 - tanh_c * tanh_c)
                grad_before = grad_c * f
                if resets is not None:
                    reset = _begins(resets, row, rows, present)
                    c, grad_before = tl.where(reset, 0.0, c), tl.where(reset, 0.0, grad_before)
                _store_four(
                    grad_gates + (row + rows) * 4 * hidden + units, hidden, inside, grad_c * g * i * (1.0 - i),
                    grad_c * c * f * (1.0 - f), grad_c * i * (1.0 - g * g), grad_h * tanh_c * o * (1.0 - o),
                )  # fmt: skip
                tl.store(grad_cell + at_unit, grad_before, inside)
        if turn + 1 < end:
            _meet(meeting, (turn + 1 - begin) * PROGRAMS, PROGRAMS)


# ---- GRU: gates lie as n, r, z and the recurrent part of n, in the weight as r, z, n -------------------------------


@triton.jit(do_not_specialize=["begin", "end", "count", "batch"])
def gru_loop(
    inputs, bias, weight, before, after, output, gates, resets, meeting, begin, end, count, batch, hidden,
    REVERSE: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps forward: h into `output`, and by turns into `after` and `before`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    present = rows < batch
    hidden = tl.cast(hidden, tl.int64)
    for number in range(begin, end):
        row = _row(number, count, batch, REVERSE)
        source, target = before, after
        if number % 2 == 1:
            source, target = after, before
        for block in range(tl.program_id(1), (hidden + UNITS - 1) // UNITS, PROGRAMS):
            units, known = _tile(block, hidden, UNITS)
            inside = present & known
            r = tl.full((ROWS, UNITS), 0.0, weight.dtype.element_ty)
            z = tl.full((ROWS, UNITS), 0.0, weight.dtype.element_ty)
            part = tl.full((ROWS, UNITS), 0.0, weight.dtype.element_ty)
            for first in range(0, hidden, DEPTH):
                found, at, there = _part(
                    source, hidden, weight, 3 * hidden, hidden, first, rows, present, units, known, DEPTH
                )  # fmt: skip
                r = _add_product(found, at, there, r, PRECISION)
                z = _add_product(found, at + hidden, there, z, PRECISION)
                part = _add_product(found, at + 2 * hidden, there, part, PRECISION)
            at_unit = rows * hidden + units
            h = tl.load(source + at_unit, inside, 0.0, cache_modifier=".cg")
            if resets is not None:
                reset = _begins(resets, row, rows, present)
                r, z = tl.where(reset, 0.0, r), tl.where(reset, 0.0, z)
                part, h = tl.where(reset, 0.0, part), tl.where(reset, 0.0, h)
            at_gates = (row + rows) * 4 * hidden + units
            r = sigmoid(_add_input(r, inputs, bias, at_gates, units, hidden, inside, known))
            z = sigmoid(_add_input(z, inputs, bias, at_gates, units, 2 * hidden, inside, known))
            part += tl.load(bias + 3 * hidden + units, known, 0.0)
            n = tanh(_add_input(r * part, inputs, bias, at_gates, units, 0, inside, known))
            if gates is not None:
                _store_four(gates + at_gates, hidden, inside, n, r, z, part)
            kept = (n + z * (h - n)).to(output.dtype.element_ty)
            tl.store(output + (row + rows) * hidden + units, kept, inside)
            tl.store(target + at_unit, kept.to(h.dtype), inside)  # as it will be read back
        if number + 1 < end:
            _meet(meeting, (number + 1 - begin) * PROGRAMS, PROGRAMS)


@triton.jit(do_not_specialize=["begin", "end", "count", "batch", "grad_step"])
def gru_loop_backward(
    weight, grad_state, grad_output, grad_step, grad_stride, gates, previous, resets, grad_gates, meeting, begin, end,
    count, batch, hidden, REVERSE: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps backward, by turns as an LSTM's. The part of h's gradient that passes by the gates waits in place."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    present = rows < batch
    hidden = tl.cast(hidden, tl.int64)
    for turn in range(begin, end):
        later, number = count - turn, count - turn - 1
        for block in range(tl.program_id(1), (hidden + UNITS - 1) // UNITS, PROGRAMS):
            units, known = _tile(block, hidden, UNITS)
            inside = present & known
            at_unit = rows * hidden + units
            grad = tl.load(grad_state + at_unit, inside, 0.0)
            if later < count:
                row = _row(later, count, batch, REVERSE)
                left = grad_gates + row * 4 * hidden + hidden
                grad += _product(
                    left, 4 * hidden, weight, 3 * hidden, rows, present, units, known, hidden, ROWS, UNITS, DEPTH,
                    PRECISION,
                )  # fmt: skip
                if resets is not None:
                    grad = tl.where(_begins(resets, row, rows, present), 0.0, grad)
            if number >= 0:
                row = _row(number, count, batch, REVERSE)
                grad = _incoming(grad, grad_output, row, batch, grad_step, grad_stride, rows, units, inside)
                at = gates + (row + rows) * 4 * hidden + units
                n, r, z, part = _load_four(at, hidden, inside, grad.dtype)
                h = tl.load(previous + (row + rows) * hidden + units, inside, 0.0).to(grad.dtype)
                grad_n = grad * (1.0 - z) * (1.0 - n * n)
                _store_four(
                    grad_gates + (row + rows) * 4 * hidden + units, hidden, inside, grad_n,
                    grad_n * part * r * (1.0 - r), grad * (h - n) * z * (1.0 - z), grad_n * r,
                )  # fmt: skip
                grad = grad * z
            tl.store(grad_state + at_unit, grad, inside)
        if turn + 1 < end:
            _meet(meeting, (turn + 1 - begin) * PROGRAMS, PROGRAMS)


# ---- the plain layer -----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["begin", "end", "count", "batch"])
def elman_loop(
    inputs, bias, weight, before, after, output, resets, meeting, begin, end, count, batch, hidden,
    RELU: tl.constexpr, REVERSE: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps forward: h into `output`, and by turns into `after` and `before`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    present = rows < batch
    hidden = tl.cast(hidden, tl.int64)
    for number in range(begin, end):
        row = _row(number, count, batch, REVERSE)
        source, target = before, after
        if number % 2 == 1:
            source, target = after, before
        for block in range(tl.program_id(1), (hidden + UNITS - 1) // UNITS, PROGRAMS):
            units, known = _tile(block, hidden, UNITS)
            inside = present & known
            sum = _product(
                source, hidden, weight, hidden, rows, present, units, known, hidden, ROWS, UNITS, DEPTH, PRECISION
            )  # fmt: skip
            if resets is not None:
                sum = tl.where(_begins(resets, row, rows, present), 0.0, sum)
            at_row = (row + rows) * hidden + units
            sum += tl.load(inputs + at_row, inside, 0.0) + tl.load(bias + units, known, 0.0)
            if RELU:
                h = tl.where(sum <= 0, 0.0, sum)  # NaN stays NaN
            else:
                h = tanh(sum)
            kept = h.to(output.dtype.element_ty)
            tl.store(output + at_row, kept, inside)
            tl.store(target + rows * hidden + units, kept.to(h.dtype), inside)  # as it will be read back
        if number + 1 < end:
            _meet(meeting, (number + 1 - begin) * PROGRAMS, PROGRAMS)


@triton.jit(do_not_specialize=["begin", "end", "count", "batch", "grad_step"])
def elman_loop_backward(
    weight, grad_state, grad_output, grad_step, grad_stride, output, resets, grad_gates, meeting, begin, end, count,
    batch, hidden, RELU: tl.constexpr, REVERSE: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps backward, by turns as an LSTM's."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    present = rows < batch
    hidden = tl.cast(hidden, tl.int64)
    for turn in range(begin, end):
        later, number = count - turn, count - turn - 1
        for block in range(tl.program_id(1), (hidden + UNITS - 1) // UNITS, PROGRAMS):
            units, known = _tile(block, hidden, UNITS)
            inside = present & known
            at_unit = rows * hidden + units
            grad = tl.load(grad_state + at_unit, inside, 0.0)
            if later < count:
                row = _row(later, count, batch, REVERSE)
                grad = _product(
                    grad_gates + row * hidden, hidden, weight, hidden, rows, present, units, known, hidden, ROWS, UNITS,
                    DEPTH, PRECISION,
                )  # fmt: skip
                if resets is not None:
                    grad = tl.where(_begins(resets, row, rows, present), 0.0, grad)
            if number < 0:
                tl.store(grad_state + at_unit, grad, inside)
            else:
                row = _row(number, count, batch, REVERSE)
                grad = _incoming(grad, grad_output, row, batch, grad_step, grad_stride, rows, units, inside)
                at_row = (row + rows) * hidden + units
                h = tl.load(output + at_row, inside, 0.0).to(grad.dtype)
                if RELU:
                    grad = tl.where(h <= 0, 0.0, grad)  # a gradient passes through NaN, as in PyTorch
                else:
                    grad = grad * (1.0 - h * h)
                tl.store(grad_gates + at_row, grad, inside)
        if turn + 1 < end:
            _meet(meeting, (turn + 1 - begin) * PROGRAMS, PROGRAMS)
