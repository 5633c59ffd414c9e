"""Codecs with the GPU's kernels, in Triton's interpreter: the same codes as the CPU's, to the last bit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from encore.codecs import CODECS, native, sparse
from encore.codecs.floats import FORMATS
from encore.errors import OptionError
from support.codec_inputs import laid_out
from support.gpu_kernels import interpreted, only_program, same_bits, taken_aside

gpu = pytest.importorskip("encore.codecs.gpu")
encore: Any = torch.ops.encore

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in {name for name, _ in gpu.FUNCTIONS}:
        monkeypatch.setattr(gpu, family, interpreted(family))


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Operators on tensors of the CPU call what they call on a GPU's."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(native, "on_gpu", lambda *arguments: True)
        yield


def both(call: Any, *arguments: Any) -> tuple[Any, Any]:
    """What the CPU's kernels make of it, and what the GPU's do."""
    expected = call(*arguments)
    with as_on_gpus():
        return expected, call(*arguments)


def awkward(dtype: torch.dtype, count: int = 1100) -> Tensor:
    """Numbers of all sizes and both signs, zeros, subnormal ones, infinities and NaN; not a whole number of bytes."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(count - 9, generator=generator, dtype=torch.float64)
    spread *= torch.exp2(torch.randint(-30, 18, (count - 9,), generator=generator).double())
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-40, -6e-8, 1.0]
    return torch.cat((spread, torch.tensor(special, dtype=torch.float64))).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_bits(dtype: torch.dtype) -> None:
    x, grad = awkward(dtype), awkward(dtype).flip(0)
    for nan_passes in (False, True):
        assert same_bits(*both(encore.encode_sign, x, nan_passes))
        assert same_bits(*both(encore.encode_inside, x, -1.0, 6.5, nan_passes))
    code = encore.encode_sign(x)
    assert same_bits(*both(encore.decode_bits, code, x.shape, x.stride(), dtype))
    assert same_bits(*both(encore.masked_by_bits, grad, code))
    expected, found = both(encore.masked_by_bits, grad, code, 0.01)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, 8, 1023, 2049])
def test_bits_of_booleans(count: int) -> None:
    x = torch.randn(count) > 0
    expected, code = both(encore.encode_bits, x)
    assert same_bits(code, expected)
    assert same_bits(*both(encore.decode_bits, code, x.shape, x.stride(), torch.bool))


def test_bits_beyond_32() -> None:
    """The last tile of more elements than 32 bits count, in memory of which next to nothing is touched."""
    count = (1 << 31) + 1000
    source, code = torch.empty(count, dtype=torch.bool), torch.empty(count // 8, dtype=torch.uint8)
    source[-1000:] = torch.randn(1000) > 0
    with only_program(count // gpu.BLOCK):
        gpu.call("bits", "pack_bools", source, count, code)
    beyond = count % gpu.BLOCK
    assert same_bits(code[-beyond // 8 :], encore.encode_bits(source[-beyond:]))


@pytest.mark.parametrize(
    ("format_", "dtype"), [(name, dtype) for name, small in FORMATS.items() for dtype in small.dtypes]
)
def test_floats(format_: str, dtype: torch.dtype) -> None:
    x = awkward(dtype)
    if FORMATS[format_].most:
        x[64:960] = x[64:960].nan_to_num(0).clamp(-1e4, 1e4)  # groups without infinities and NaN
        x[128:192] = 0
    expected, code = both(encore.encode_floats, x, format_)
    assert same_bits(code, expected)
    assert same_bits(*both(encore.decode_floats, code, x.shape, x.stride(), dtype, format_))


@pytest.mark.parametrize(
    ("density", "values", "dtype"),
    [
        *((density, "", dtype) for density in (0.0, 0.3, 1.0) for dtype in (torch.float32, torch.float16, torch.int64)),
        *((0.3, values, dtype) for values, small in FORMATS.items() for dtype in small.dtypes),
        (1.0, "int4", torch.float32),
    ],
)
def test_sparse(density: float, values: str, dtype: torch.dtype) -> None:
    numbers = awkward(torch.float32).nan_to_num(0) if dtype is torch.int64 else awkward(dtype)
    drawn = torch.rand(len(numbers), generator=torch.Generator().manual_seed(1))
    x = torch.where(drawn < density, numbers.to(dtype), 0)
    if values and FORMATS[values].most:
        x[:900] = x[:900].nan_to_num(0).clamp(-1e4, 1e4)  # groups without infinities and NaN, and some with
    expected, code = both(encore.encode_sparse, x, values)
    assert same_bits(code, expected)
    assert same_bits(*both(encore.decode_sparse, code, x.shape, x.stride(), dtype, values))


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_nothing_and_one_number(name: str, shape: tuple[int, ...]) -> None:
    codec, dtype = CODECS[name], held_by(name)
    x = torch.ones(shape).to(dtype)
    expected, code = both(codec.encode, *codec.encode_args(x))
    assert same_bits(code, expected)
    assert same_bits(*both(codec.decode, *codec.decode_args(code, x.shape, x.stride(), dtype)))


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("kind", ["permuted", "gaps", "expanded", "offset", "windows", "channels_last"])
def test_any_layout(name: str, kind: str) -> None:
    codec, dtype = CODECS[name], held_by(name)
    drawn = torch.randn((3, 5, 4, 7), generator=torch.Generator().manual_seed(0)).mul_(9).relu_()
    x = laid_out(drawn.to(dtype), kind)
    expected, code = both(codec.encode, *codec.encode_args(x))
    assert same_bits(code, expected)
    wanted, found = both(codec.decode, *codec.decode_args(code, x.shape, x.stride(), dtype))
    assert same_bits(found, wanted)
    assert found.stride() == x.stride()


def held_by(name: str) -> torch.dtype:
    """A type that the codec holds."""
    return next(dtype for dtype in (torch.float32, torch.int64, torch.bool) if CODECS[name].accepts((), dtype))


@pytest.mark.parametrize("kind", ["permuted", "gaps", "channels_last"])
def test_readers_of_bits_in_any_layout(kind: str) -> None:
    map_, grad = (laid_out(torch.randn(3, 5, 4, 7), kind) for _ in range(2))
    code = encore.encode_sign(map_)
    for stride in (map_.stride(), torch.empty(3, 5, 4, 7).stride()):
        for slope in (0.0, 0.1):
            expected, found = both(encore.masked_by_bits, grad, code, slope, stride)
            assert same_bits(found, expected)
            assert found.stride() == expected.stride()


def test_sparse_that_does_not_fit_is_refused() -> None:
    code = encore.encode_sparse(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    code[:8].view(torch.int64).fill_(2)
    code = torch.cat((code, code))
    with as_on_gpus(), pytest.raises(OptionError, match="does not fit"):
        encore.decode_sparse(code, [8], [1], torch.float32)


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (torch.int64, -5, 250),
        (torch.int32, -300, 32000),
        (torch.int16, -5, 250),
        (torch.int64, -(1 << 30), 1 << 31),
        (torch.int64, -(1 << 40), 1 << 40),
    ],
)
def test_integers(dtype: torch.dtype, least: int, most: int) -> None:
    x = torch.randint(least, most, (1500,)).to(dtype)
    expected, code = both(encore.encode_integers, x)
    assert same_bits(code, expected)
    assert same_bits(*both(encore.decode_integers, code, x.shape, x.stride(), dtype))


@pytest.mark.parametrize(
    ("size", "last", "window", "dtype"),
    [
        ((2, 3, 7, 6), False, ((3, 3), (2, 2), (1, 1), (1, 1), False), torch.float32),
        ((2, 3, 7, 6), True, ((2, 2), (2, 2), (0, 0), (1, 1), True), torch.float64),
        ((1, 2, 9, 8), False, ((5, 5), (1, 2), (2, 2), (1, 1), False), torch.float32),
        ((1, 2, 5, 6, 7), False, ((2, 3, 2), (1, 2, 2), (1, 1, 0), (1, 1, 2), False), torch.bfloat16),
        ((2, 4, 3, 5, 5), True, ((2, 2, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1), False), torch.float16),
    ],
)
def test_pooling(size: tuple[int, ...], last: bool, window: tuple[Any, ...], dtype: torch.dtype) -> None:
    x = torch.randn(size).mul_(4).round_().div_(2).to(dtype)  # with ties
    x.view(-1)[3::11] = torch.nan
    x.view(-1)[7::13] = -torch.inf
    if last:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    (y, map_), (our_y, our_map) = both(encore.max_pool_map, x, *window)
    torch.testing.assert_close(our_y, y, rtol=0, atol=0, equal_nan=True)
    assert same_bits(our_map, map_)
    grad = torch.randn(y.shape).to(dtype).contiguous(
        memory_format=torch.channels_last if last and x.dim() == 4 else torch.contiguous_format
    )  # fmt: skip
    expected, found = both(encore.max_pool_map_backward, grad, map_, x.shape, last, *window)
    # The CPU rounds to a narrow type after every number that it adds, the GPU once.
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 0)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_every_family_has_its_kernels() -> None:
    """`is_compiled` answers for all of them at once."""
    sources = Path(native.__file__).parent.glob("*.py")
    asked_for = {name for source in sources for name in re.findall(r'has_kernels\("(\w+)"', source.read_text())}
    assert asked_for == set(native.ON_GPUS) == {name for name, _ in gpu.FUNCTIONS}


@pytest.mark.parametrize("values", ["", "fp10", "int4"])
def test_memory_aside_is_as_told(monkeypatch: pytest.MonkeyPatch, values: str) -> None:
    """Sparse codes are the only ones that take some."""
    x = torch.randn(3000).relu_()
    monkeypatch.setattr(sparse, "is_compiled", lambda device: True)
    monkeypatch.setattr(native, "on_gpu", lambda *arguments: True)
    aside, _ = taken_aside(lambda: encore.encode_sparse(x, values))
    told = sparse._workspace(x.numel(), x.dtype, torch.device("cuda"), values)
    least = told - 4 * int((x == 0).sum()) if values else told
    assert least <= aside <= told + 64  # and a few numbers on their way to the CPU


def test_chosen_for_cuda() -> None:
    assert native.is_compiled("cuda")
    assert native.is_compiled("cuda:0")
    assert native.has_kernels("bits", torch.device("cuda"))
    assert not native.has_kernels("no such", torch.device("cuda"))
    assert not native.has_kernels("bits", torch.device("xpu"))
