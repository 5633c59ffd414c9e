"""Encode: keep a code of it, and decode that right before backward reads it.

Which codecs there are, and what their codes take, is in `codecs/`. A codec is priced on a graph of nothing but its two
operators.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from encore.codecs import CODECS, Codec, Densities
from encore.errors import PlanError, listed
from encore.fates.fate import Fate, Given, OpSeconds, Terms, Writer
from encore.fates.ownership import fills_its_memory, owned
from encore.graph import Graph, Op, Role, Storage, Value
from encore.graph.ops import classify
from encore.graph.values import Ref, block_bytes

LEAST_SAVED = 0.1
"""Share of a value's bytes that a code must save to be a candidate."""
LEAST_BYTES = 4096
"""Values below are not encoded: the calls would cost more than the bytes are worth."""
SMALL_CODE = 4096
"""A code may be larger than its value by its header and padding."""

aten = torch.ops.aten
POOLS = frozenset({aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default})
"""Operators whose second result is a position within a plane of their operand."""


@dataclass(frozen=True, slots=True)
class Encode(Fate):
    """Keep a code in its place, and decode it right before backward reads it."""

    kind: ClassVar[str] = "encode"
    fields: ClassVar[Mapping[str, type]] = {"value": str, "codec": str, "bytes": int}
    value: int
    codec: str
    bytes: int
    """What the code takes; the most it may take, where that depends on the data."""
    encode_seconds: float = field(default=0.0, compare=False)
    restore_seconds: float = field(default=0.0, compare=False)

    @property
    def label(self) -> str:
        return self.codec

    @property
    def held(self) -> int:
        return self.bytes

    @property
    def encoding(self) -> Encode:
        return self

    @property
    def code(self) -> str:
        return self.codec

    @property
    def lossless(self) -> bool:
        return CODECS[self.codec].lossless

    @property
    def why(self) -> str:
        return CODECS[self.codec].what

    def bytes_by_data(self, value: Value) -> tuple[int, float | None] | None:
        codec = CODECS[self.codec]
        if codec.exact_size or value.dtype is None:
            return None
        dense = codec.nbytes(value.shape, value.stride, value.dtype)
        return dense, codec.density(self.bytes, value.shape, value.stride, value.dtype)

    # -- in the step -------------------------------------------------------------------------------------------------

    def restore(self, writer: Writer) -> int:
        return self.decoded(writer, self.encoded(writer))

    def encoded(self, writer: Writer) -> int:
        """The code, which forward makes once and keeps."""
        return writer.once(self, lambda: self._encode(writer))

    def _encode(self, writer: Writer) -> int:
        value, codec = writer.graph.values[self.value], CODECS[self.codec]
        assert value.storage is not None
        device, name = writer.graph.storages[value.storage].device, f"{value.name}_{self.codec}"
        args = codec.encode_args(Ref(self.value))
        return writer.in_forward(self.value, name, codec.encode, args, (self.bytes,), torch.uint8, device)

    def decoded(self, writer: Writer, code: int) -> int:
        """The value as it comes out of a code."""
        value, codec = writer.graph.values[self.value], CODECS[self.codec]
        assert value.dtype is not None
        args = codec.decode_args(Ref(code), value.shape, value.stride, value.dtype)
        return writer.in_backward(self.value, "decoded", codec.decode, args, like=self.value)

    # -- candidates --------------------------------------------------------------------------------------------------

    @classmethod
    def candidates(cls, graph: Graph, values: Collection[int], terms: Terms, found: Sequence[Fate]) -> list[Encode]:
        """Of the codecs that take a value and save something, each that is smaller than the faster ones."""
        prices = _Prices(terms.seconds)
        codes: list[Encode] = []
        for value in sorted(owned(graph).intersection(values)) if terms.codecs else ():
            priced = [
                cls(value, codec.name, size, *prices(graph, value, codec, size))
                for codec, size in codes_of(graph, value, terms.codecs, terms.densities)
                if codec.lossless or terms.admits(graph.values[value].name, codec.name)
            ]
            least: int | None = None
            for code in sorted(priced, key=lambda code: (code.seconds, code.bytes)):
                if least is None or code.bytes < least:
                    least = code.bytes
                    codes.append(code)
        return codes

    # -- plan files --------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, graph: Graph, value: int, entry: Mapping[str, Any], given: Given) -> Encode:
        name, spelled, planned = entry["value"], entry["codec"], entry["bytes"]
        codec = CODECS.get(spelled)
        if codec is None:
            raise PlanError(
                f"the plan keeps {name} as {spelled!r}, which this Encore does not know; it has {listed(CODECS)}. "
                "Plan anew"
            )
        if not codec.lossless and spelled not in given.lossy:
            raise PlanError(
                f"the plan keeps {name} as {spelled!r}, which is lossy; allow it with lossy={spelled!r}, or plan anew"
            )
        size, it = code_bytes(graph, value, codec, planned), graph.values[value]
        if size is None:
            raise PlanError(f"{spelled!r} cannot encode {name} ({it.dtype}, {list(it.shape)}); plan anew")
        if size > 2 * it.bytes + SMALL_CODE:
            raise PlanError(
                f"the plan has {planned} bytes for the code of {name}, which takes {it.bytes} itself; plan anew"
            )
        return cls(value, spelled, size)


def codes_of(graph: Graph, number: int, codecs: Collection[str], densities: Densities) -> Iterator[tuple[Codec, int]]:
    """The codecs that are worth keeping a value in, and the bytes that each takes for it."""
    value = graph.values[number]
    if value.bytes < LEAST_BYTES:
        return
    for name in codecs:
        known = densities.get(CODECS[name].share, {})
        size = code_bytes(graph, number, CODECS[name], density=known.get(value.name))
        if size is not None and size <= (1 - LEAST_SAVED) * value.bytes:
            yield CODECS[name], size


def code_bytes(
    graph: Graph, number: int, codec: Codec, planned: int | None = None, *, density: float | None = None
) -> int | None:
    """What a codec takes for a value, or may take: as it was `planned`, where that depends on the data. None where it
    does not take the value."""
    value = graph.values[number]
    if value.storage is None or value.dtype is None or not fills_its_memory(graph, value):
        return None
    if not codec.accepts(value.shape, value.dtype) or not _in_range(graph, number, codec):
        return None
    if planned is not None and not codec.exact_size:
        return planned
    return codec.nbytes(value.shape, value.stride, value.dtype, density)


def _in_range(graph: Graph, number: int, codec: Codec) -> bool:
    """Codecs for indices up to a largest one take those of pooling windows, and nothing whose range is not known."""
    if codec.max_index is None:
        return True
    maker = graph.producer(number)
    if maker is None or maker.target not in POOLS or maker.writes.index(number) != 1:
        return False
    return math.prod(graph.values[maker.reads[0]].shape[-2:]) - 1 <= codec.max_index


class _Prices:
    """Seconds of codecs, asked once for every layout of a value."""

    def __init__(self, seconds: OpSeconds) -> None:
        self.seconds = seconds
        self.known: dict[tuple[object, ...], tuple[float, float]] = {}

    def __call__(self, graph: Graph, number: int, codec: Codec, size: int) -> tuple[float, float]:
        value = graph.values[number]
        assert value.storage is not None
        device = graph.storages[value.storage].device
        key = (codec.name, value.shape, value.stride, value.dtype, device, size)
        if key not in self.known:
            bench, encode, decode = workbench(value, device, codec, size)
            self.known[key] = self.seconds(bench, encode), self.seconds(bench, decode)
        return self.known[key]


def workbench(value: Value, device: str, codec: Codec, size: int) -> tuple[Graph, Op, Op]:
    """A graph that encodes a value and decodes it, with its two operators."""
    assert value.dtype is not None
    whole, code = block_bytes(value.bytes, device), block_bytes(size, device)
    storages = [Storage(0, whole, device, [0]), Storage(1, code, device, [1]), Storage(2, whole, device, [2])]
    values = [
        Value(0, value.name, 0, value.shape, value.stride, value.dtype, value.bytes, None, Role.INPUT, readers=[0]),
        Value(1, "code", 1, (size,), (1,), torch.uint8, size, 0, readers=[1]),
        Value(2, "again", 2, value.shape, value.stride, value.dtype, value.bytes, 1),
    ]
    encode = _op(0, codec.encode, codec.encode_args(Ref(0)), 0, 1)
    decode = _op(1, codec.decode, codec.decode_args(Ref(1), value.shape, value.stride, value.dtype), 1, 2)
    return Graph(values, storages, [encode, decode], [0], [], [2], [None]), encode, decode


def _op(number: int, target: Any, args: tuple[Any, ...], read: int, written: int) -> Op:
    return Op(number, "", target, args, {}, (read,), (written,), False, classify(target), "", "")
