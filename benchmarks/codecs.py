"""The speed of encodings: encoding and decoding compared with a copy of the same activation, interleaved.

A ratio of 1 is the speed at which memory is copied: bytes of the activation over seconds, over those of `memcpy` into
memory that is there already. Codecs allocate their results, as they do in a step. The copy goes first and last by
round, so that a machine that slows down slows both; ratios are medians over the rounds. Several activations are used
one after the other, so that none is found in a cache; each is small enough for the allocator to give the same memory
again, since fresh pages cost more than either side.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.codecs import CODECS

ops = torch.ops.encore

ELEMENTS = 1 << 22
"""16 MiB of float32."""
SETS = 6
"""Activations that are used one after the other."""
ROUNDS = 18
DENSITY = 0.4
"""Of what a ReLU leaves behind."""
BARS = {"bits": 0.5, "pool": 0.5, "sparse": 0.25, "floats": 0.5}
"""What each kind is to reach."""
FLOATS = ("fp16", "bf16", "fp10", "fp8_e4m3", "fp8_e5m2", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Throughput:
    """One operator on one activation."""

    name: str
    kind: str
    nbytes: int
    """Of the activation: what a copy would copy."""
    code_bytes: int
    seconds: float
    against_copy: float
    """Speed over that of a copy of the activation."""

    @property
    def bar(self) -> float | None:
        return BARS.get(self.kind)


@dataclass(frozen=True, slots=True)
class Case:
    """A call on an activation."""

    map: Tensor
    call: Callable[[], Any]
    code_bytes: int


Make = Callable[[int], Case]
"""From a seed."""


def run_codecs(*, elements: int = ELEMENTS, rounds: int = ROUNDS) -> list[Throughput]:
    """Measure every encoding and every operator that reads codes."""
    with torch.no_grad():
        return [
            _measured(name, kind, [make(seed) for seed in range(SETS)], rounds) for name, kind, make in _cases(elements)
        ]


def _measured(name: str, kind: str, cases: list[Case], rounds: int) -> Throughput:
    target = torch.empty_like(cases[0].map)
    for case in cases:
        case.call()
        target.copy_(case.map)
    seconds, ratios = [], []
    for turn in range(rounds):
        case, other = cases[turn % SETS], cases[(turn + SETS // 2) % SETS]
        copy = functools.partial(target.copy_, other.map)
        if turn % 2:
            copied, coded = _seconds(copy), _seconds(case.call)
        else:
            coded, copied = _seconds(case.call), _seconds(copy)
        seconds.append(coded)
        ratios.append(copied / coded)
    nbytes = target.numel() * target.element_size()
    return Throughput(name, kind, nbytes, cases[0].code_bytes, statistics.median(seconds), statistics.median(ratios))


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    kept = call()
    taken = time.perf_counter() - started
    del kept  # given back off the clock
    return taken


def _cases(elements: int) -> Iterator[tuple[str, str, Make]]:
    def dense(seed: int) -> Tensor:
        return torch.randn(elements, generator=torch.Generator().manual_seed(seed))

    def relu(seed: int) -> Tensor:
        x = dense(seed)
        return x * (torch.rand(elements, generator=torch.Generator().manual_seed(seed)) < DENSITY)

    def mask(seed: int) -> Tensor:
        return dense(seed) > 0

    def indices(seed: int) -> Tensor:
        return torch.randint(50_000, (elements // 2,), generator=torch.Generator().manual_seed(seed))

    yield from _pair("bits", "bits", mask)
    yield "encode_sign", "bits", _on(dense, lambda x, bits: ops.encode_sign(x))
    yield "encode_inside", "bits", _on(dense, lambda x, bits: ops.encode_inside(x, -1.0, 1.0))
    yield "masked_by_bits", "bits", _on(dense, ops.masked_by_bits)
    yield "masked_by_bits, slope", "bits", _on(dense, lambda x, bits: ops.masked_by_bits(x, bits, 0.01))
    for size, stride in ((2, 2), (3, 2), (3, 1)):
        for label, last in (("", False), (", channels last", True)):
            yield from _pooling(f"{size}x{size} by {stride}{label}", elements, size, stride, last)
    yield from _pair("sparse", "sparse", relu)
    yield from _pair("sparse_fp8_e4m3", "sparse", relu)
    yield from _pair("uint16", "integers", indices)
    yield from _pair("integers", "integers", indices)
    for name in FLOATS:
        yield from _pair(name, "floats", dense)


def _on(map_of: Callable[[int], Tensor], run: Callable[[Tensor, Tensor], Any]) -> Make:
    def make(seed: int) -> Case:
        x = map_of(seed)
        bits = ops.encode_sign(x)
        return Case(x, lambda: run(x, bits), bits.numel())

    return make


def _pair(name: str, kind: str, map_of: Callable[[int], Tensor]) -> Iterator[tuple[str, str, Make]]:
    codec = CODECS[name]

    def encoding(seed: int) -> Case:
        x = map_of(seed)
        args = codec.encode_args(x)
        return Case(x, lambda: codec.encode(*args), codec.encode(*args).numel())

    def decoding(seed: int) -> Case:
        x = map_of(seed)
        code = codec.encode(*codec.encode_args(x))
        args = codec.decode_args(code, x.shape, x.stride(), x.dtype)
        return Case(x, lambda: codec.decode(*args), code.numel())

    yield f"encode {name}", kind, encoding
    yield f"decode {name}", kind, decoding


def _pooling(name: str, elements: int, size: int, stride: int, last: bool) -> Iterator[tuple[str, str, Make]]:
    padding = size // 2 if size > 2 else 0
    window = ([size, size], [stride, stride], [padding, padding], [1, 1], False)
    layout = torch.channels_last if last else torch.contiguous_format

    def feature_map(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(max(1, elements // (64 * 56 * 56)), 64, 56, 56, generator=generator)
        return x.relu_().contiguous(memory_format=layout)

    def forward(seed: int) -> Case:
        x = feature_map(seed)
        return Case(x, lambda: ops.max_pool_map(x, *window), ops.max_pool_map(x, *window)[1].numel())

    def backward(seed: int) -> Case:
        x = feature_map(seed)
        grad, positions = ops.max_pool_map(x, *window)
        args = (grad, positions, x.shape, last, *window)
        return Case(x, lambda: ops.max_pool_map_backward(*args), positions.numel())

    yield f"pool {name}", "pool", forward
    yield f"pool {name}, backward", "pool", backward


def table(found: list[Throughput]) -> str:
    """As text, a line an operator; a star where the bar is missed."""
    lines = [f"{'':<36}{'of a copy':>10}{'bar':>6}{'GB/s':>8}{'code':>8}"]
    for one in found:
        bar = "" if one.bar is None else f"{one.bar:.2f}"
        missed = "*" if one.bar is not None and one.against_copy < one.bar else ""
        speed, share = one.nbytes / one.seconds / 1e9, one.code_bytes / one.nbytes
        lines.append(f"{one.name:<36}{one.against_copy:>10.2f}{bar:>6}{speed:>8.1f}{share:>8.1%} {missed}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run_codecs()))
