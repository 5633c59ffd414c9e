"""Additive attention's scores and their gradients, the counterpart of `scores.cpp`.

A program takes one query and a tile of keys, or goes through queries (keys) for the gradient of a tile of keys (a
query): the middle, `[batch, queries, keys, hidden]`, exists a tile at a time, in registers. With a LayerNorm, four
numbers a score are kept while backward runs: the mean and the rate of its row, and the means of its gradient, plain and
along the row. Sums come out in an order that shapes alone decide: nothing is added in order of arrival.

Rows lie anywhere, numbers of a row side by side; `query_row` and its kin are strides. `EPS` is None without LayerNorm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encore.kernels.gpu.maths import tanh, wide, wide_zeros


@triton.jit
def _units(first, hidden, UNITS: tl.constexpr):
    units = tl.cast(first, tl.int64) + tl.arange(0, UNITS)[None, :]
    return units, units < hidden


@triton.jit
def _middle(query, keys, bias, units, known, inside):
    """A tile of the middle: a query, a tile of keys, and the bias."""
    sum = wide(tl.load(query + units, known, 0.0)) + wide(tl.load(keys + units, inside, 0.0))
    if bias is not None:
        sum += wide(tl.load(bias + units, known, 0.0))
    return sum


@triton.jit
def _moments(query, keys, bias, there, hidden, EPS: tl.constexpr, UNITS: tl.constexpr, KEYS: tl.constexpr):
    """Mean and rate, one over the deviation, of each row of a tile."""
    total = wide_zeros(query, KEYS)[:, None]
    for first in range(0, hidden, UNITS):
        units, known = _units(first, hidden, UNITS)
        sum = _middle(query, keys, bias, units, known, there & known)
        total += tl.reduce(tl.where(known, sum, 0.0), 1, tl.standard._sum_combine, keep_dims=True)
    mean = total / hidden
    total = wide_zeros(query, KEYS)[:, None]
    for first in range(0, hidden, UNITS):
        units, known = _units(first, hidden, UNITS)
        sum = _middle(query, keys, bias, units, known, there & known) - mean
        total += tl.reduce(tl.where(known, sum * sum, 0.0), 1, tl.standard._sum_combine, keep_dims=True)
    return mean, tl.rsqrt(total / hidden + EPS)


@triton.jit
def _scaled(x, norm_weight, norm_bias, units, known):
    """What LayerNorm makes of normalised numbers."""
    if norm_weight is not None:
        x = x * wide(tl.load(norm_weight + units, known, 0.0))
    if norm_bias is not None:
        x = x + wide(tl.load(norm_bias + units, known, 0.0))
    return x


@triton.jit(do_not_specialize=["queries", "count", "tiles"])
def score_forward(
    query, keys, weight, bias, norm_weight, norm_bias, result, queries, count, tiles, hidden, query_batch, query_row,
    key_batch, key_row, EPS: tl.constexpr, KEYS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The scores of one query with a tile of keys."""
    row = tl.program_id(0).to(tl.int64) // tiles
    batch = row // queries
    which = tl.program_id(0).to(tl.int64) % tiles * KEYS + tl.arange(0, KEYS)[:, None]
    there = which < count
    query_at = query + batch * query_batch + row % queries * query_row
    keys_at = keys + batch * key_batch + which * key_row
    if EPS is not None:
        mean, rate = _moments(query_at, keys_at, bias, there, hidden, EPS, UNITS, KEYS)
    total = wide_zeros(query, KEYS)[:, None]
    for first in range(0, hidden, UNITS):
        units, known = _units(first, hidden, UNITS)
        x = _middle(query_at, keys_at, bias, units, known, there & known)
        if EPS is not None:
            x = _scaled((x - mean) * rate, norm_weight, norm_bias, units, known)
        parts = wide(tl.load(weight + units, known, 0.0)) * tanh(x)
        total += tl.reduce(tl.where(known, parts, 0.0), 1, tl.standard._sum_combine, keep_dims=True)
    tl.store(result + row * count + which, total, there)


@triton.jit(do_not_specialize=["queries", "count", "tiles", "rows"])
def score_moments(
    query, keys, weight, bias, norm_weight, norm_bias, grad, moments, queries, count, tiles, rows, hidden, query_batch,
    query_row, key_batch, key_row, grad_batch, grad_row, EPS: tl.constexpr, KEYS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """What LayerNorm's backward needs of each row of the middle: `moments` is `[4, rows, count]`."""
    row = tl.program_id(0).to(tl.int64) // tiles
    batch = row // queries
    which = tl.program_id(0).to(tl.int64) % tiles * KEYS + tl.arange(0, KEYS)[:, None]
    there = which < count
    query_at = query + batch * query_batch + row % queries * query_row
    keys_at = keys + batch * key_batch + which * key_row
    mean, rate = _moments(query_at, keys_at, bias, there, hidden, EPS, UNITS, KEYS)
    given = wide(tl.load(grad + batch * grad_batch + row % queries * grad_row + which, there, 0.0))
    plain = wide_zeros(query, KEYS)[:, None]
    along = wide_zeros(query, KEYS)[:, None]
    for first in range(0, hidden, UNITS):
        units, known = _units(first, hidden, UNITS)
        x = (_middle(query_at, keys_at, bias, units, known, there & known) - mean) * rate
        t = tanh(_scaled(x, norm_weight, norm_bias, units, known))
        found = given * wide(tl.load(weight + units, known, 0.0)) * (1.0 - t * t)
        if norm_weight is not None:
            found = found * wide(tl.load(norm_weight + units, known, 0.0))
        found = tl.where(known, found, 0.0)
        plain += tl.reduce(found, 1, tl.standard._sum_combine, keep_dims=True)
        along += tl.reduce(found * x, 1, tl.standard._sum_combine, keep_dims=True)
    size = tl.cast(rows, tl.int64) * count
    at = moments + row * count + which
    tl.store(at, mean, there)
    tl.store(at + size, rate, there)
    tl.store(at + 2 * size, plain / hidden, there)
    tl.store(at + 3 * size, along / hidden, there)


@triton.jit
def _back(
    x, given, weight, norm_weight, norm_bias, moments, at, size, there, units, known, EPS: tl.constexpr
):  # fmt: skip
    """From a tile of the middle: tanh's value, its gradient, the normalised numbers, and the middle's gradient."""
    if EPS is not None:
        mean = tl.load(moments + at, there, 0.0)
        rate = tl.load(moments + at + size, there, 0.0)
        x = (x - mean) * rate
        t = tanh(_scaled(x, norm_weight, norm_bias, units, known))
    else:
        t = tanh(x)
    found = given * wide(tl.load(weight + units, known, 0.0)) * (1.0 - t * t)
    grad = found
    if EPS is not None:
        if norm_weight is not None:
            grad = grad * wide(tl.load(norm_weight + units, known, 0.0))
        grad = grad - tl.load(moments + at + 2 * size, there, 0.0)
        grad = (grad - x * tl.load(moments + at + 3 * size, there, 0.0)) * rate
    return t, found, x, tl.where(there & known, grad, 0.0)


@triton.jit(do_not_specialize=["queries", "count", "tiles", "rows"])
def score_keys_backward(
    query, keys, weight, bias, norm_weight, norm_bias, grad, moments, grad_keys, queries, count, tiles, rows, hidden,
    query_batch, query_row, key_batch, key_row, grad_batch, grad_row, EPS: tl.constexpr, ADD: tl.constexpr,
    KEYS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of keys: a sum over queries, onto what is there if `ADD`."""
    batch = tl.program_id(0).to(tl.int64) // tiles
    which = tl.program_id(0).to(tl.int64) % tiles * KEYS + tl.arange(0, KEYS)[:, None]
    there = which < count
    units, known = _units(tl.program_id(1).to(tl.int64) * UNITS, hidden, UNITS)
    inside = there & known
    keys_at = keys + batch * key_batch + which * key_row
    into = grad_keys + (batch * count + which) * hidden + units
    size = tl.cast(rows, tl.int64) * count
    total = wide(tl.load(keys_at + units, inside, 0.0)) * 0.0
    if ADD:
        total = wide(tl.load(into, inside, 0.0))
    for number in range(queries):
        row = tl.cast(number, tl.int64)
        x = _middle(query + batch * query_batch + row * query_row, keys_at, bias, units, known, inside)
        given = wide(tl.load(grad + batch * grad_batch + row * grad_row + which, there, 0.0))
        at = (batch * queries + row) * count + which
        _tanh, _found, _normal, back = _back(
            x, given, weight, norm_weight, norm_bias, moments, at, size, there, units, known, EPS
        )  # fmt: skip
        total += back
    tl.store(into, total, inside)


@triton.jit(do_not_specialize=["queries", "count", "rows", "groups"])
def score_queries_backward(
    query, keys, weight, bias, norm_weight, norm_bias, grad, moments, grad_query, sums, queries, count, rows, groups,
    hidden, query_batch, query_row, key_batch, key_row, grad_batch, grad_row, EPS: tl.constexpr, KEYS: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Gradients of every `groups`th query, and of what all of them share: `sums` is `[4, groups, hidden]`."""
    units, known = _units(tl.program_id(1).to(tl.int64) * UNITS, hidden, UNITS)
    size = tl.cast(rows, tl.int64) * count
    for_weight = wide(tl.load(weight + units, known, 0.0)) * 0.0
    for_bias = for_weight
    for_norm_weight = for_weight
    for_norm_bias = for_weight
    for number in range(tl.program_id(0), rows, groups):
        row = tl.cast(number, tl.int64)
        batch = row // queries
        query_at = query + batch * query_batch + row % queries * query_row
        total = for_weight * 0.0
        for first in range(0, count, KEYS):
            which = tl.cast(first, tl.int64) + tl.arange(0, KEYS)[:, None]
            there = which < count
            keys_at = keys + batch * key_batch + which * key_row
            x = _middle(query_at, keys_at, bias, units, known, there & known)
            given = wide(tl.load(grad + batch * grad_batch + row % queries * grad_row + which, there, 0.0))
            at = row * count + which
            t, found, normal, back = _back(
                x, given, weight, norm_weight, norm_bias, moments, at, size, there, units, known, EPS
            )  # fmt: skip
            total += tl.reduce(back, 0, tl.standard._sum_combine, keep_dims=True)
            if sums is not None:
                for_weight += tl.reduce(given * t, 0, tl.standard._sum_combine, keep_dims=True)
                if EPS is not None:
                    for_norm_weight += tl.reduce(found * normal, 0, tl.standard._sum_combine, keep_dims=True)
                    for_norm_bias += tl.reduce(found, 0, tl.standard._sum_combine, keep_dims=True)
        for_bias += total
        if grad_query is not None:
            tl.store(grad_query + row * hidden + units, total, known)
    if sums is not None:
        into = sums + tl.program_id(0).to(tl.int64) * hidden + units
        apart = tl.cast(hidden, tl.int64) * groups
        tl.store(into, for_weight, known)
        tl.store(into + apart, for_bias, known)
        tl.store(into + 2 * apart, for_norm_weight, known)
        tl.store(into + 3 * apart, for_norm_bias, known)
