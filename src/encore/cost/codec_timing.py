"""Seconds of codecs: timed for a few sizes, and scaled to others.

A codec makes one straight pass over memory, whatever the shape. So it is not every layout of a step that is timed, as
for other operators, but one run of elements for each power of two, a type and, where the size of a code depends on the
data, a density. Decoders get what the encoder makes of such data.
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
"""Steps between none and all, in which densities are told apart."""


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
        """Of the run that is timed."""
        return self.elements / self.run

    @property
    def footprint(self) -> int:
        return 2 * self.run * self.dtype.itemsize

    def time(self) -> float:
        """Seconds for the whole run."""
        calls = []
        for _ in range(sets_of_operands(self.footprint)):
            x = self._made_up()
            code = self.codec.encode(*self.codec.encode_args(x))
            if self.encodes:
                calls.append(lambda x=x: self.codec.encode(*self.codec.encode_args(x)))
            else:
                args = self.codec.decode_args(code, x.shape, x.stride(), x.dtype)
                calls.append(lambda args=args: self.codec.decode(*args))
        return seconds_of(calls, cuda=self.device.startswith("cuda"))

    def _made_up(self) -> torch.Tensor:
        """Noise, with as many zeros as the density leaves, or integers that reach as far as it says."""
        generator = torch.Generator(self.device).manual_seed(0)
        drawn = torch.rand(self.run, generator=generator, device=self.device)
        x = (drawn - 0.5) * 16
        if not self.codec.exact_size and self.codec.share is Share.NUMBER_BYTES:
            x = x.abs_().to(self.dtype)
            x[-1] = 1 << (8 * width_at(self.density, self.dtype) - 2)  # beyond what half as many bytes hold
            return x
        if self.density < 1:
            x *= torch.rand(self.run, generator=generator, device=self.device) < self.density
        if self.dtype is torch.bool:
            return x > 0
        return x.to(self.dtype) if self.dtype.is_floating_point else x.abs().to(self.dtype)  # indices begin at 0


def codec_of(op: Op) -> Codec | None:
    """The codec whose operator this is."""
    for codec in CODECS.values():
        if (op.target is codec.encode and op.args[1:] == codec.options) or (
            op.target is codec.decode and op.args[4:] == codec.options
        ):
            return codec
    return None


def _density(codec: Codec, whole: Value, size: int) -> float:
    """The share of non-zeros at which a code comes to so many bytes, in steps."""
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
