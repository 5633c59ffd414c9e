"""Masks in bits: what comes back is what went in, and readers of bits return what PyTorch's formulas do."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encore import EncoreError
from encore.codecs import CODECS
from encore.codecs.layout import elements_of, layout_of
from encore.cost.allocations import measure_cpu
from support.codec_inputs import (
    FLOATS,
    WAYS,
    float_tensors,
    laid_out,
    layouts,
    round_trip,
    same_bits,
    same_numbers,
    told_workspace,
    way,
)

ops = torch.ops.encore
aten = torch.ops.aten


@settings(deadline=None, max_examples=100)
@given(layout=layouts(), seed=st.integers(0, 1000), how=st.sampled_from(WAYS))
def test_booleans_come_back(layout: tuple[tuple[int, ...], str], seed: int, how: str) -> None:
    shape, kind = layout
    x = laid_out(torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4, kind)
    with way(how):
        _, back = round_trip("bits", x)
    assert same_bits(back, x)


def test_the_format() -> None:
    x = torch.tensor([1, 0, 0, 0, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
    for how in WAYS:
        with way(how):
            assert ops.encode_bits(x).tolist() == [0b11000001, 0b10]


@settings(deadline=None, max_examples=100)
@given(y=float_tensors(), how=st.sampled_from(WAYS))
def test_signs_and_ranges(y: Tensor, how: str) -> None:
    with way(how):
        cases = {
            "relu": (ops.encode_sign(y), ~(y <= 0)),
            "leaky": (ops.encode_sign(y, nan_passes=False), y > 0),
            "hardtanh": (ops.encode_inside(y, -0.75, 1.0), (y > -0.75) & (y < 1)),
            "nan": (ops.encode_inside(y, 0.0, 6.0, nan_passes=True), ~((y <= 0) | (y >= 6))),
        }
        for name, (code, expected) in cases.items():
            for dtype in (torch.bool, y.dtype):
                found = ops.decode_bits(code, y.shape, y.stride(), dtype)
                assert same_bits(found, expected.to(dtype)), name


@settings(deadline=None, max_examples=150)
@given(
    y=float_tensors(), kind=st.sampled_from(["as y", "contiguous", "permuted", "expanded"]), how=st.sampled_from(WAYS)
)
def test_readers_return_what_formulas_do(y: Tensor, kind: str, how: str) -> None:
    values = torch.randn(y.shape).to(y.dtype)
    values[torch.rand(y.shape) < 0.1] = float("nan")
    values[torch.rand(y.shape) < 0.1] = -0.0
    values[torch.rand(y.shape) < 0.1] = float("inf")
    grad = torch.empty_like(y).copy_(values) if kind == "as y" else laid_out(values, kind)
    stride = None if grad.stride() == y.stride() else y.stride()
    with way(how):
        sign, above = ops.encode_sign(y), ops.encode_sign(y, nan_passes=False)
        inside = ops.encode_inside(y, -1.0, 1.0)
        pairs = [
            (ops.masked_by_bits(grad, sign, stride=stride), aten.threshold_backward(grad, y, 0)),
            (ops.masked_by_bits(grad, above, 0.01, stride), aten.leaky_relu_backward(grad, y, 0.01, False)),
        ]
        if not y.isnan().any():  # PyTorch's answer depends on where in a row of vectors it stands
            expected = aten.hardtanh_backward(grad, y, -1, 1)
            found = ops.masked_by_bits(grad, inside, stride=stride)
            pairs.append((found, expected if stride is None else torch.empty_like(found).copy_(expected)))
    for found, expected in pairs:
        assert found.stride() == expected.stride()
        assert same_numbers(found, expected)


def test_large_ones_use_all_threads() -> None:
    y = torch.randn(3, 700001)
    grad = torch.randn_like(y)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        code = ops.encode_sign(y)
        assert same_bits(ops.masked_by_bits(grad, code), aten.threshold_backward(grad, y, 0))
        assert same_bits(ops.decode_bits(code, y.shape, y.stride(), torch.bool), y > 0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 5).to(dtype).transpose(0, 2)
    if dtype is torch.bool:
        torch.library.opcheck(ops.encode_bits.default, (x,))
        return
    code, gradient = ops.encode_sign(x), torch.randn(5, 4, 3).to(dtype)
    torch.library.opcheck(ops.encode_sign.default, (x,))
    torch.library.opcheck(ops.encode_inside.default, (x, -1.0, 1.0))
    torch.library.opcheck(ops.decode_bits.default, (code, x.shape, x.stride(), dtype))
    torch.library.opcheck(ops.masked_by_bits.default, (x, code))
    torch.library.opcheck(ops.masked_by_bits.default, (gradient, code, 0.1, x.stride()))


def test_nothing_but_the_result_is_allocated() -> None:
    y = torch.randn(64, 1000)
    code = ops.encode_sign(y)
    mask = y > 0
    for operator, args in [
        (ops.encode_sign.default, (y,)),
        (ops.encode_sign.default, (y[:, ::2],)),
        (ops.encode_bits.default, (mask,)),
        (ops.decode_bits.default, (code, y.shape, y.stride(), torch.float32)),
        (ops.masked_by_bits.default, (y, code)),
        (ops.masked_by_bits.default, (y.t().contiguous().t(), code, 0.0, y.stride())),
    ]:
        measured = measure_cpu(functools.partial(operator, *args))
        assert measured.step_peak - measured.left == told_workspace(operator, *args), operator


def test_refusals() -> None:
    with pytest.raises(EncoreError, match=r"encode_bits takes 'torch.bool'; got torch.float32"):
        ops.encode_bits(torch.ones(3))
    with pytest.raises(EncoreError, match=r"encode_sign takes .*; got torch.int64"):
        ops.encode_sign(torch.ones(3, dtype=torch.int64))
    with pytest.raises(EncoreError, match=r"code of 1 bytes where size and stride call for 2"):
        ops.decode_bits(torch.zeros(1, dtype=torch.uint8), [9], [1], torch.bool)
    with pytest.raises(EncoreError, match=r"code of 1 bytes"):
        ops.masked_by_bits(torch.ones(9), torch.zeros(1, dtype=torch.uint8))
    assert not CODECS["bits"].accepts((3,), torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts_by_name(dtype: torch.dtype) -> None:
    x = torch.arange(24.0).to(dtype).view(2, 3, 4)
    assert layout_of((2, 3, 4), (12, 4, 1)).count == 24
    assert layout_of((5, 2, 3, 4), (0, 12, 4, 1)).count == 24
    assert layout_of((2, 3, 2), (12, 4, 2)).order == (0, 1, 2)
    assert layout_of((3, 4), (1, 1)).count == 6
    assert torch.equal(elements_of(x.transpose(0, 2)), x.view(-1))
    assert torch.equal(elements_of(x[..., ::2]), x[..., ::2].reshape(-1))


def test_without_a_compiler_one_warning_and_the_same_codes(tmp_path: Path) -> None:
    program = (
        "import warnings, torch, encore.codecs\n"
        "y = torch.randn(1000, generator=torch.Generator().manual_seed(0))\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    codes = [torch.ops.encore.encode_sign(y) for _ in range(2)]\n"
        "ours = [str(warning.message) for warning in seen if 'encore' in str(warning.message)]\n"
        "assert len(ours) == 1 and 'C++ compiler' in ours[0], ours\n"
        "print(codes[1].tolist())\n"
    )
    environment = {**os.environ, "CXX": "no-such-compiler", "ENCORE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    y = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert done.stdout.strip() == str(ops.encode_sign(y).tolist())
