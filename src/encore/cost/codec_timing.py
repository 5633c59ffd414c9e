"""Seconds of codecs: timed for a few sizes, and scaled to others.

A codec makes one pass over memory, whatever the shape. So its time is not measured for every layout of a step, as for
other operators, but for contiguous runs: one for each power of two of elements, each type and, if the size of a code
depends on the data, each density. Decoders are timed on the codes of such runs.
"""

from __future__ import annotations

import math

import torch

from encore.codecs import CODECS, Codec, Share
from encore.codecs.integers import width_at
from encore.cost.room import sets_of_operands
from encore.cost.timing import seconds_of
from encore.graph import Graph, Op
from encore.graph.values import Value

SMALLEST, LARGEST = 1 << 14, 1 << 24
"""Elements of the runs that are timed."""
DENSITIES = 16
"""Steps between none and all, to which densities are rounded."""


class CodecCall:
    """The call of a codec's operator, by what its seconds depend on."""

    def __init__(self, graph: Graph, op: Op, codec: Codec) -> None:
        self.codec, self.encodes = codec, op.target is codec.encode
        self.device = _device(graph, op)
        whole, code = (_value(graph, number) for number in ((*op.reads, *op.writes)[:: 1 if self.encodes else -1]))
        assert whole.dtype is not None
        self.dtype = whole.dtype
        self.elements = math.prod(whole.shape)
        self.run = min(max(SMALLEST, 1 << (max(1, self.elements) - 1).bit_length()), LARGEST)
        self.density = 1.0 if codec.exact_size else _density(codec, whole, code.bytes)

    @property
    def key(self) -> str:
        what = "encode" if self.encodes else "decode"
        data = "" if self.codec.exact_size else f" density={self.density:.4g}"
        return f"seconds {what} {self.codec.name} {self.dtype}[{self.run}]{data} {self.device}"

    @property
    def share(self) -> float:
        """The share of the timed run that the call takes."""
        return self.elements / self.run

    @property
    def footprint(self) -> int:
        return 2 * self.run * self.dtype.itemsize

    def time(self) -> float:
        """Seconds for the whole run."""
        calls = []
        for _ in range(sets_of_operands(self.footprint)):
            x = self._sample()
            code = self.codec.encode(*self.codec.encode_args(x))
            if self.encodes:
                calls.append(lambda x=x: self.codec.encode(*self.codec.encode_args(x)))
            else:
                args = self.codec.decode_args(code, x.shape, x.stride(), x.dtype)
                calls.append(lambda args=args: self.codec.decode(*args))
        return seconds_of(calls, device=self.device)

    def _sample(self) -> torch.Tensor:
        """Noise with the zeros that the density leaves, or integers of the range that it stands for."""
        generator = torch.Generator(self.device).manual_seed(0)
        drawn = torch.rand(self.run, generator=generator, device=self.device)
        x = (drawn - 0.5) * 16
        if not self.codec.exact_size and self.codec.share is Share.NUMBER_BYTES:
            x = x.abs_().to(self.dtype)
            x[-1] = 1 << (8 * width_at(self.density, self.dtype) - 2)  # too large for half as many bytes
            return x
        if self.density < 1:
            x *= torch.rand(self.run, generator=generator, device=self.device) < self.density
        if self.dtype is torch.bool:
            return x > 0
        return x.to(self.dtype) if self.dtype.is_floating_point else x.abs().to(self.dtype)  # indices begin at 0


def codec_of(op: Op) -> Codec | None:
    """Return the codec of an operator."""
    for codec in CODECS.values():
        if (op.target is codec.encode and op.args[1:] == codec.options) or (
            op.target is codec.decode and op.args[4:] == codec.options
        ):
            return codec
    return None


def _density(codec: Codec, whole: Value, size: int) -> float:
    """The share of non-zeros at which a code has so many bytes, in steps."""
    assert whole.dtype is not None
    steps = range(1, DENSITIES + 1)
    within = (step for step in steps if codec.nbytes(whole.shape, whole.stride, whole.dtype, step / DENSITIES) >= size)
    return next(within, DENSITIES) / DENSITIES


def _value(graph: Graph, number: int | None) -> Value:
    assert number is not None
    return graph.values[number]


def _device(graph: Graph, op: Op) -> str:
    storage = graph.values[op.reads[0]].storage
    assert storage is not None
    return graph.storages[storage].device
