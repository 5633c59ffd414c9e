"""Functions of numbers that Triton's language does not have, from those that it has.

The libraries that come with Triton have a tanh, but its interpreter cannot call them. This one is a polynomial near 0,
where a quotient of exponentials loses digits, and such a quotient elsewhere. The polynomials are Chebyshev fits of
(tanh(x) / x - 1) / x^2 on |x| < 0.64: off by 5e-8 and 2e-16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    fading = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x >= 0, 1.0, fading) / (1.0 + fading)


@triton.jit
def tanh(x):
    size = tl.abs(x)
    fading = tl.exp(-2.0 * size)
    far = (1.0 - fading) / (1.0 + fading)
    small = tl.where(size < 0.64, x, 0.0)  # a square of others might overflow
    square = small * small
    if x.dtype == tl.float64:
        sum = square * -0.0000166058227231921143 + 0.0000783828227827529828
        sum = sum * square - 0.000229793919814418834
        sum = sum * square + 0.000586999443198910357
        sum = sum * square - 0.00145519170456754035
        sum = sum * square + 0.00359203949639450269
        sum = sum * square - 0.00886322787368415153
        sum = sum * square + 0.0218694881481064063
        sum = sum * square - 0.0539682539581310545
        sum = sum * square + 0.133333333333230033
        sum = sum * square - 0.333333333333333159
    else:
        sum = square * -0.00599296124851342588 + 0.0209241481771848358
        sum = sum * square - 0.0538351412628640857
        sum = sum * square + 0.13332663479504804
        sum = sum * square - 0.333333278640488552
    near = small + small * (square * sum)
    return tl.where(size < 0.64, near, tl.where(x < 0, -far, far))


@triton.jit
def wide(x):
    """In the type that is computed in."""
    if x.dtype == tl.float64:
        real = x
    else:
        real = x.to(tl.float32)
    return real


@triton.jit
def wide_zeros(pointer, SIZE: tl.constexpr):
    """Sums to begin with, for numbers that lie there."""
    if pointer.dtype.element_ty == tl.float64:
        none = tl.full((SIZE,), 0.0, tl.float64)
    else:
        none = tl.full((SIZE,), 0.0, tl.float32)
    return none
