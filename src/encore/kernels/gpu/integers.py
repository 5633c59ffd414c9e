"""Integers in fewer bytes, the counterpart of `integers.cpp`: what is left above a base, and back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["base", "count"])
def narrow(source, out, base, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    above = tl.load(source + at, inside, 0).to(tl.int64) - base
    tl.store(out + at, above.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["base", "count"])
def widen(source, out, base, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    whole = tl.load(source + at, inside, 0).to(tl.int64) + base
    tl.store(out + at, whole.to(out.dtype.element_ty), inside)
