"""Compression of dense maps: lossless, and offered only where it pays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from coded import float_tensors, same_bits
from encore import EncoreError
from encore.codecs import CODECS
from encore.codecs.planes import PLANES, Probe, offered, probe

ops = torch.ops.encore


@settings(deadline=None, max_examples=60)
@given(x=float_tensors())
def test_what_went_in_comes_back(x: Tensor) -> None:
    code = ops.encode_planes(x)
    assert code.numel() <= PLANES.nbytes(x.shape, x.stride(), x.dtype)
    back = ops.decode_planes(code, x.shape, x.stride(), x.dtype)
    assert back.stride() == x.stride()
    assert same_bits(back, x)


def test_noise_does_not_pay_and_is_not_in_the_table() -> None:
    assert probe(torch.randn(1 << 18)).ratio < 1.3
    assert offered(torch.randn(1 << 18), rate=0.0) is None
    assert "planes" not in CODECS


def test_it_pays_where_it_saves_and_keeps_up() -> None:
    steps = torch.arange(1 << 18).div(1 << 14, rounding_mode="floor").float()
    found = probe(steps)
    assert found.ratio > 10
    assert offered(steps, rate=0.0) is PLANES
    assert offered(steps, rate=1e15) is None
    assert not Probe(2.0, 1e9, 1e8).pays(5e8)
    assert ops.encode_planes(steps).numel() < steps.numel() / 2


def test_fakes_and_refusals() -> None:
    x = torch.randn(3, 5)
    torch.library.opcheck(PLANES.encode, (x,), test_utils=["test_schema", "test_faketensor"])
    with FakeTensorMode() as mode:
        assert ops.encode_planes(mode.from_tensor(x)).numel() == 68
    code = ops.encode_planes(torch.zeros(300))
    with pytest.raises(EncoreError, match=r"found 1200 bytes where size and stride call for 400"):
        ops.decode_planes(code, [100], [1], torch.float32)
    code[10] ^= 0xFF
    with pytest.raises(EncoreError, match=r"bytes that encode_planes did not make"):
        ops.decode_planes(code, [300], [1], torch.float32)
    with pytest.raises(EncoreError, match=r"encode_planes holds"):
        ops.encode_planes(torch.ones(3, dtype=torch.int64))
    with pytest.raises(EncoreError, match=r"needs some elements"):
        probe(torch.empty(0))
