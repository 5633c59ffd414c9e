"""What may be held in a value's place, on offer to the search: bytes, and seconds to make it and to have the value
back.

A codec (`codecs/`) holds a value as fewer bytes. A recurrent operator can keep less than its gates
(`schedule/stash.py`). A tier (`tiers/`) holds a value, or its code, in no bytes of memory at all. Codecs and recurrent
operators are priced on a workbench, a graph of nothing but the operators in question, so that whoever
tells seconds and workspaces of a step's operators tells these, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from encore.codecs import CODECS, Codec, Densities
from encore.graph import Graph, Op, Role, Storage, Value
from encore.graph.ops import classify
from encore.graph.values import Ref, block_bytes, span_bytes
from encore.plan.admission import Admitted
from encore.schedule import Encoded, Fused, Link, Offloaded, Stashed
from encore.schedule.recompute import owned
from encore.schedule.simulate import Workspace
from encore.schedule.stash import keep_less, recurrent

LEAST_SAVED = 0.1
"""Share of a value's bytes that a code must save to be offered."""
LEAST_BYTES = 4096
"""Values below are not encoded: the calls would cost more than the bytes are worth."""
LEAST_MOVED = 1 << 16
"""Values below, and codes below, are never moved to a tier."""
SEEN = 0.25
"""Share of a transfer's time that is taken for its cost before anybody has looked at what it can hide behind."""


aten = torch.ops.aten
POOLS = frozenset({aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default})
"""Operators whose second result is a position within a plane of their operand."""


class Seconds(Protocol):
    """What things cost: `encore.cost.Seconds`."""

    def __call__(self, graph: Graph, op: Op | Fused, over: int | None = None) -> float: ...

    def inside(self, graph: Graph, op: Op) -> float: ...


@dataclass(frozen=True, slots=True)
class Encoding:
    """A code in a value's place."""

    encoded: Encoded
    make: float
    restore: float

    @property
    def value(self) -> int:
        return self.encoded.value

    @property
    def targets(self) -> tuple[int, ...]:
        return (self.encoded.value,)

    @property
    def seconds(self) -> float:
        return self.make + self.restore

    @property
    def label(self) -> str:
        return self.encoded.codec

    @property
    def held(self) -> int:
        """Bytes in the value's place."""
        return self.encoded.bytes


@dataclass(frozen=True, slots=True)
class Stash:
    """A recurrent operator that keeps less."""

    stashed: Stashed
    shrunk: tuple[tuple[int, int], ...]
    """The results that shrink, with the bytes they take then."""
    aside: tuple[tuple[int, int], ...]
    """Operators, with the bytes they take aside beyond those they take as they are."""
    seconds: float
    """Extra, forward and backward."""

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(value for value, _ in self.shrunk)

    @property
    def label(self) -> str:
        return f"stash {self.stashed.every}"


@dataclass(frozen=True, slots=True)
class Offload:
    """A value in a tier, or its code."""

    offloaded: Offloaded
    size: int
    """Bytes that move."""
    link: Link
    encoding: Encoding | None = None

    @property
    def value(self) -> int:
        return self.offloaded.value

    @property
    def targets(self) -> tuple[int, ...]:
        return (self.offloaded.value,)

    @property
    def held(self) -> int:
        """Bytes in the value's place."""
        return 0

    @property
    def make(self) -> float:
        """Seconds that coding takes in forward; what transfers cost is known of whole plans only."""
        return self.encoding.make if self.encoding else 0.0

    @property
    def restore(self) -> float:
        """The same in backward."""
        return self.encoding.restore if self.encoding else 0.0

    @property
    def seconds(self) -> float:
        """About what it costs, if most of its transfers hide behind computing."""
        transfers = self.link.store_seconds(self.size) + self.link.load_seconds(self.size)
        return self.make + self.restore + self.link.lost_seconds(self.size) + SEEN * transfers

    @property
    def label(self) -> str:
        tier = f"to {self.offloaded.tier}"
        return tier if self.encoding is None else f"{self.encoding.label} {tier}"


StandIn = Encoding | Stash | Offload


@dataclass(frozen=True, slots=True)
class Methods:
    """What a planner may do with a value besides keeping it."""

    recompute: bool = True
    codecs: tuple[str, ...] = ()
    """Codecs it may use."""
    stash: bool = False
    """May recurrent operators build gates again, which rounds differently?"""
    move: bool = False
    """May values go to tiers?"""

    def narrower(self) -> list[Methods]:
        """Every set of methods within this one, the narrow before the wide, itself last: codecs that lose something
        only beside those that lose nothing."""
        lossless = tuple(name for name in self.codecs if CODECS[name].lossless)
        found = itertools.product(
            dict.fromkeys((False, self.move)),
            dict.fromkeys(((), lossless, self.codecs)),
            dict.fromkeys((False, self.stash)),
            dict.fromkeys((False, self.recompute)),
        )
        return [Methods(recompute, codecs, stash, move) for move, codecs, stash, recompute in found]

    def within(self, other: Methods) -> bool:
        """May the other do all that this one may?"""
        return (
            self.recompute <= other.recompute
            and set(self.codecs) <= set(other.codecs)
            and self.stash <= other.stash
            and self.move <= other.move
        )


def allowed_methods(names: Collection[str], lossy: Collection[str]) -> Methods:
    """What the user lets a planner do: methods by name, and all lossless codecs along with the given lossy ones."""
    known = CODECS.items() if "encode" in names else ()
    return Methods(
        recompute="recompute" in names,
        codecs=tuple(name for name, codec in known if codec.lossless or name in lossy),
        stash="stash" in names,
    )


def encodings(
    graph: Graph,
    values: Collection[int],
    codecs: Collection[str],
    seconds: Seconds,
    densities: Densities,
    admitted: Admitted | None = None,
) -> list[Encoding]:
    """The codes on offer for these values: of the codecs that take them and save something, each that is smaller than
    the faster ones. Of lossy ones only those that are `admitted`, if that is restricted."""
    prices = _Prices(seconds)
    found = []
    for value in sorted(owned(graph).intersection(values)) if codecs else ():
        codes = [
            Encoding(Encoded(value, codec.name, size), *prices(graph, value, codec, size))
            for codec, size in codes_of(graph, value, codecs, densities)
            if codec.lossless or admitted is None or (graph.values[value].name, codec.name) in admitted
        ]
        least: int | None = None
        for code in sorted(codes, key=lambda code: (code.seconds, code.encoded.bytes)):
            if least is None or code.encoded.bytes < least:
                least = code.encoded.bytes
                found.append(code)
    return found


def offloads(
    graph: Graph, values: Collection[int], links: Mapping[str, Link], codes: Sequence[Encoding]
) -> list[Offload]:
    """The values that could go to a tier, each as it is and, where it has one, as its smallest code."""
    smallest: dict[int, Encoding] = {}
    for code in codes:
        known = smallest.get(code.value)
        exact = CODECS[code.encoded.codec].exact_size  # what a tier brings back has the size it was planned with
        if exact and code.held >= LEAST_MOVED and (known is None or code.held < known.held):
            smallest[code.value] = code
    found = []
    for value in sorted(owned(graph).intersection(values)) if links else ():
        for tier, link in links.items():
            if can_move(graph, value, tier):
                offloaded = Offloaded(value, tier)
                found.append(Offload(offloaded, graph.values[value].bytes, link))
                if value in smallest:
                    found.append(Offload(offloaded, smallest[value].held, link, smallest[value]))
    return found


def can_move(graph: Graph, number: int, tier: str) -> bool:
    """Is it worth a tier's while? Host memory is where a CPU's values are already."""
    value = graph.values[number]
    if value.storage is None or value.dtype is None or value.bytes < LEAST_MOVED or not fills_its_memory(graph, value):
        return False
    return tier != "host" or graph.storages[value.storage].device.startswith("cuda")


def codes_of(graph: Graph, number: int, codecs: Collection[str], densities: Densities) -> Iterator[tuple[Codec, int]]:
    """The codecs that are worth holding a value in, and the bytes that each takes for it."""
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
    cannot hold the value."""
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


def fills_its_memory(graph: Graph, value: Value) -> bool:
    """Is every byte of its storage an element of it, and only one?"""
    assert value.storage is not None
    storage = graph.storages[value.storage]
    return (
        value.offset == 0
        and span_bytes(value) == value.bytes
        and block_bytes(value.bytes, storage.device) == storage.bytes
    )


class _Prices:
    """Seconds of codecs, asked once for every layout of a value."""

    def __init__(self, seconds: Seconds) -> None:
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


# -- recurrent operators ---------------------------------------------------------------------------------------------


def stashes(graph: Graph, values: Collection[int], seconds: Seconds, workspace: Workspace) -> list[Stash]:
    """Every way in which recurrent operators could keep less of these values, smallest intervals first."""
    layers = [one for one in recurrent(graph) if set(one.residue) <= set(values)]
    found = []
    for every in sorted({every for one in layers for every in one.intervals(graph)}):
        chosen = [one for one in layers if every in one.intervals(graph)]
        less = keep_less(graph, [Stashed(one.output, every) for one in chosen])
        for one in chosen:
            shrunk = tuple((value, less.bytes_of(value)) for value in one.residue)
            pairs = [(op, less.ops[op.id]) for op in (one.forward, one.backward)]
            aside = tuple((op.id, workspace(less, lean) - workspace(graph, op)) for op, lean in pairs)
            extra = sum(seconds(less, lean) - seconds(graph, op) for op, lean in pairs)
            found.append(Stash(Stashed(one.output, every), shrunk, aside, max(0.0, extra)))
    return found
