"""Every codec of the table: what it promises about bits, errors and bytes holds for any tensor."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from encore import EncoreError
from encore.codecs import CODECS, sparse
from encore.codecs.floats import FORMATS
from encore.cost.allocations import measure_cpu
from support.codec_inputs import (
    FLOATS,
    WAYS,
    float_tensors,
    is_gathered,
    laid_out,
    layouts,
    round_trip,
    same_bits,
    told_workspace,
    way,
)

ops = torch.ops.encore
LOSSY = sorted(name for name, codec in CODECS.items() if not codec.lossless)
INTEGERS = (torch.int64, torch.int32, torch.int16)


def some(name: str) -> Tensor:
    """A tensor that the codec holds."""
    if name == "bits":
        return torch.rand(4, 300) > 0.5
    if CODECS[name].accepts((4, 300), torch.float32):
        return torch.randn(4, 300).relu_()
    most = CODECS[name].max_index
    return torch.randint(200 if most is None else min(200, most + 1), (4, 300))


@settings(deadline=None, max_examples=120)
@given(x=float_tensors(), how=st.sampled_from(WAYS))
def test_sparse_comes_back(x: Tensor, how: str) -> None:
    with way(how):
        code, back = round_trip("sparse", x)
        assert same_bits(back, x)
    with way(WAYS[1 - WAYS.index(how)]):
        assert torch.equal(ops.encode_sparse(x), code)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), name=st.sampled_from(LOSSY), how=st.sampled_from(WAYS))
def test_errors_are_bounded(data: st.DataObject, name: str, how: str) -> None:
    codec = CODECS[name]
    dtypes = tuple(dtype for dtype in FLOATS if codec.accepts((), dtype))
    x = data.draw(float_tensors(dtypes))
    with way(how):
        code, back = round_trip(name, x)
    with way(WAYS[1 - WAYS.index(how)]):
        assert x.isnan().any() or torch.equal(codec.encode(*codec.encode_args(x)), code)  # the sign of NaN may differ
        other = codec.decode(*codec.decode_args(code, x.shape, x.stride(), x.dtype))
        assert same_bits(other.where(~other.isnan(), 0), back.where(~back.isnan(), 0))
    finite = x.isfinite()
    assert torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back[~finite & ~x.isnan()], x[~finite & ~x.isnan()])
    assert back[finite].isfinite().all()
    assert codec.error is not None
    off = (back.double() - x.double()).abs()
    assert (off[finite] <= codec.error(x)[finite]).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_of_subnormal_numbers_are_bounded(name: str, dtype: torch.dtype) -> None:
    """They lie as far apart as the smallest of them, whatever their size."""
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    x = torch.tensor([11.0, 4.0, -7.0, 1.0], dtype=torch.float64).mul(smallest).to(dtype)
    _, back = round_trip(name, x)
    error = CODECS[name].error
    assert error is not None
    assert ((back.double() - x.double()).abs() <= error(x)).all()


@settings(deadline=None, max_examples=100)
@given(
    layout=layouts(),
    dtype=st.sampled_from(INTEGERS),
    ends=st.tuples(
        st.integers(-(2**62), 2**62), st.sampled_from([0, 1, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**60])
    ),
    how=st.sampled_from(WAYS),
)
def test_integers_come_back(
    layout: tuple[tuple[int, ...], str], dtype: torch.dtype, ends: tuple[int, int], how: str
) -> None:
    info = torch.iinfo(dtype)
    low = max(info.min, min(ends[0], info.max - 1))
    high = min(info.max, low + ends[1])
    x = laid_out(torch.randint(low, high, layout[0]) if high > low else torch.full(layout[0], low), layout[1]).to(dtype)
    with way(how):
        _, back = round_trip("integers", x)
    assert same_bits(back, x)


@settings(deadline=None, max_examples=60)
@given(
    layout=layouts(), dtype=st.sampled_from(INTEGERS), name=st.sampled_from(["uint8", "uint16", "uint32"]),
    how=st.sampled_from(WAYS),
)  # fmt: skip
def test_integers_of_a_known_range(
    layout: tuple[tuple[int, ...], str], dtype: torch.dtype, name: str, how: str
) -> None:
    most = min(CODECS[name].options[0], torch.iinfo(dtype).max)
    x = laid_out(torch.randint(most + 1, layout[0]), layout[1]).to(dtype)
    with way(how):
        _, back = round_trip(name, x)
    assert same_bits(back, x)


def test_the_whole_range_of_int64() -> None:
    x = torch.tensor([-(2**63), 0, 2**63 - 1])
    for how in WAYS:
        with way(how):
            _, back = round_trip("integers", x)
            assert torch.equal(back, x)
            assert ops.encode_integers(x).numel() == 16 + 24


def test_sizes_by_the_number() -> None:
    shape, stride = (10, 100), (100, 1)
    expected = {
        "bits": (125, torch.bool), "uint8": (1000, torch.int64), "uint16": (2000, torch.int64),
        "uint32": (4000, torch.int64), "integers": (8016, torch.int64), "sparse": (4008, torch.float32),
        "fp16": (2000, torch.float32), "bf16": (2000, torch.float32), "fp10": (1336, torch.float32),
        "fp8_e4m3": (1000, torch.float32), "fp8_e5m2": (1000, torch.bfloat16), "int8": (1064, torch.float16),
        "int4": (564, torch.float32), "sparse_fp8_e4m3": (1008, torch.float32),
        "sparse_fp8_e5m2": (1008, torch.float32), "sparse_fp10": (1344, torch.float32),
        "sparse_fp16": (2008, torch.float32), "sparse_bf16": (2008, torch.float32),
        "sparse_int8": (1072, torch.float32), "sparse_int4": (572, torch.bfloat16),
    }  # fmt: skip
    assert set(expected) == set(CODECS)
    for name, (nbytes, dtype) in expected.items():
        assert CODECS[name].nbytes(shape, stride, dtype) == nbytes, name
    assert CODECS["sparse"].nbytes(shape, stride, torch.float32, 0.25) == 8 + 128 + 1000
    assert CODECS["sparse_int8"].nbytes(shape, stride, torch.float32, 0.25) == 8 + 128 + 4 * 4 + 250
    assert CODECS["sparse_int4"].nbytes(shape, stride, torch.float32, 0.25) == 8 + 128 + 4 * 4 + 125
    widths = [CODECS["integers"].nbytes(shape, stride, torch.int64, share) for share in (0.0, 0.125, 0.2, 0.5, 1.0)]
    assert widths == [1016, 1016, 2016, 4016, 8016]


def test_sparse_takes_what_it_needs() -> None:
    x = torch.zeros(1000)
    assert ops.encode_sparse(x).numel() == 8 + 128
    x[::4] = -0.0
    assert ops.encode_sparse(x).numel() == 8 + 128 + 1000
    assert ops.encode_sparse(torch.ones(1000)).numel() == 8 + 4000
    assert ops.encode_sparse(x, "fp8_e4m3").numel() == 8 + 128 + 250
    assert ops.encode_sparse(x, "int8").numel() == 8 + 128 + 16 + 250


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_non_zeros_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and scales that parts of a map share come out as if there had been but one part."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)).relu_() * torch.logspace(-2, 2, 5000)
    whole, back = round_trip(f"sparse_{name}", x)
    kept = x[x != 0]
    by_itself = ops.decode_floats(ops.encode_floats(kept, name), kept.shape, kept.stride(), kept.dtype, name)
    assert same_bits(back[x != 0], by_itself)
    assert not back[x == 0].any()
    monkeypatch.setattr(sparse, "PART", 64 * 7)
    parts, again = round_trip(f"sparse_{name}", x)
    assert torch.equal(parts, whole)
    assert same_bits(again, back)


@pytest.mark.parametrize(
    ("format", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_formats_that_pytorch_has(format: str, dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() <= FORMATS[format].largest)]
    back = round_trip(format, x)[1]
    assert same_bits(back, x.to(dtype).to(torch.float32))


def test_e4m3_is_pytorchs_up_to_416() -> None:
    x = torch.randn(200_000) * torch.logspace(-5, 2, 200_000)
    x = x[x.abs() <= 416]
    assert same_bits(round_trip("fp8_e4m3", x)[1], x.to(torch.float8_e4m3fn).float())
    assert FORMATS["fp8_e4m3"].largest == 416
    assert round_trip("fp8_e4m3", torch.tensor([450.0, float("inf")]))[1].tolist() == [416, float("inf")]


def test_every_code_of_ten_bits() -> None:
    codes = torch.arange(1024)
    words = torch.nn.functional.pad(codes, (0, 2)).view(-1, 3)
    packed = (words[:, 0] | words[:, 1] << 10 | words[:, 2] << 20).to(torch.int32).view(torch.uint8)
    numbers = ops.decode_floats(packed, [1024], [1], torch.float32, "fp10")
    assert torch.equal(numbers[:512].where(~numbers[:512].isnan(), 0), ((codes[:512] << 6).to(torch.int16).view(
        torch.float16).float()).where(~numbers[:512].isnan(), 0))  # fmt: skip
    kept = ~numbers.isnan()
    again = ops.decode_floats(ops.encode_floats(numbers, "fp10"), [1024], [1], torch.float32, "fp10")
    assert same_bits(again[kept], numbers[kept])


@pytest.mark.parametrize("name", sorted(CODECS))
def test_fake_tensors_and_opcheck(name: str) -> None:
    codec, x = CODECS[name], some(name)
    code = codec.encode(*codec.encode_args(x))
    arguments = codec.decode_args(code, x.shape, x.stride(), x.dtype)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(codec.encode, codec.encode_args(x), test_utils=tests)
    torch.library.opcheck(codec.decode, arguments, test_utils=tests)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert codec.encode(*codec.encode_args(fake)).numel() == codec.nbytes(x.shape, x.stride(), x.dtype)
    meta = codec.encode(*codec.encode_args(x.to("meta")))
    assert meta.numel() == codec.nbytes(x.shape, x.stride(), x.dtype)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("gaps", [False, True])
def test_what_is_taken_aside(name: str, gaps: bool) -> None:
    codec, x = CODECS[name], some(name)
    x = x[:, ::2] if gaps else x
    assert is_gathered(x) == gaps
    code = codec.encode(*codec.encode_args(x))
    for operator, args in [
        (codec.encode, codec.encode_args(x)),
        (codec.decode, codec.decode_args(code, x.shape, x.stride(), x.dtype)),
    ]:
        measured = measure_cpu(functools.partial(operator, *args))
        aside, told = measured.step_peak - measured.left, told_workspace(operator, *args)
        assert aside <= told
        assert aside == told or name.startswith("sparse_") or told == 16


@pytest.mark.parametrize("name", sorted(CODECS))
def test_large_ones_on_two_threads(name: str) -> None:
    codec = CODECS[name]
    x = some(name).repeat(300, 3)[:, 1:].contiguous()
    one = codec.encode(*codec.encode_args(x))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = codec.encode(*codec.encode_args(x))
        assert torch.equal(one, two)
        back = codec.decode(*codec.decode_args(two, x.shape, x.stride(), x.dtype))
    finally:
        torch.set_num_threads(before)
    assert same_bits(back, codec.decode(*codec.decode_args(one, x.shape, x.stride(), x.dtype)))
    if codec.lossless:
        assert same_bits(back, x)


def test_refusals() -> None:
    with pytest.raises(EncoreError, match=r"numbers from 0 to 255, and found 0 to 256"):
        ops.encode_integers(torch.tensor([0, 256]), 255)
    with pytest.raises(EncoreError, match=r"encode_integers takes .*; got torch.float32"):
        ops.encode_integers(torch.ones(3))
    with pytest.raises(EncoreError, match=r"bytes that encode_integers did not make"):
        ops.decode_integers(torch.full((40,), 9, dtype=torch.uint8), [3], [1], torch.int64)
    with pytest.raises(EncoreError, match=r"no format 'fp7' .* 'bf16', 'fp10'"):
        ops.encode_floats(torch.ones(3), "fp7")
    with pytest.raises(EncoreError, match=r"encode_floats\(fp16\) takes 'torch.float32'; got torch.float64"):
        ops.encode_floats(torch.ones(3, dtype=torch.float64), "fp16")
    with pytest.raises(EncoreError, match=r"encode_sparse takes .*; got torch.bool"):
        ops.encode_sparse(torch.ones(3, dtype=torch.bool))
    with pytest.raises(EncoreError, match=r"code of 8 bytes"):
        ops.decode_floats(torch.zeros(8, dtype=torch.uint8), [9], [1], torch.float32, "fp8_e4m3")
    for how in WAYS:
        with way(how):
            code = ops.encode_sparse(torch.tensor([0.0, 0, 1] * 100))
            with pytest.raises(EncoreError, match=r"code that does not fit|bytes where size and stride call for"):
                ops.decode_sparse(code, [200], [1], torch.float32)
            broken = ops.encode_sparse(torch.tensor([0.0, 1, 0, 2] * 100))
            broken[8] ^= 1
            with pytest.raises(EncoreError, match=r"200 non-zeros in 400 elements"):
                ops.decode_sparse(broken, [400], [1], torch.float32)
