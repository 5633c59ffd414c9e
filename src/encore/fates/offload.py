"""Offload: move it, or its code, to a tier after forward, and load it before backward reads it.

When transfers begin and end is decided for the whole step (`schedule/transfers.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from encore.codecs import CODECS
from encore.devices import KINDS, kind_of
from encore.errors import PlanError
from encore.fates.encode import Encode
from encore.fates.fate import Decision, Fate, Given, OpSeconds, Terms, Writer
from encore.fates.link import Link
from encore.fates.ownership import fills_its_memory, owned
from encore.graph import Graph, Op
from encore.graph.tier_ops import TOKEN_DTYPE, LoadFrom, StoreTo, is_transfer
from encore.graph.values import Ref

LEAST_MOVED = 1 << 16
"""Values below, and codes below, are never moved to a tier."""
SEEN = 0.25
"""Share of a transfer's time that counts as its cost before it is known what the transfer can hide behind."""


@dataclass(frozen=True, slots=True)
class Offload(Fate):
    """Move it to a tier after forward, and bring it back before backward reads it."""

    kind: ClassVar[str] = "offload"
    is_method: ClassVar[bool] = False
    fields: ClassVar[Mapping[str, type]] = {"value": str, "tier": str}
    joins: ClassVar[frozenset[str]] = frozenset({"encode"})
    value: int
    tier: str
    coded: Encode | None = None
    """The code that moves; None if the value itself moves."""
    moved: int = field(default=0, compare=False)
    link: Link | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        return f"{self.coded.label} {self._way}" if self.coded else self._way

    @property
    def _way(self) -> str:
        return f"to {self.tier}"

    @property
    def encoding(self) -> Encode | None:
        return self.coded

    @property
    def also(self) -> Sequence[Fate]:
        return (self.coded,) if self.coded else ()

    @property
    def encode_seconds(self) -> float:
        """What coding takes in forward; what transfers cost is known of whole plans only."""
        return self.coded.encode_seconds if self.coded else 0.0

    @property
    def restore_seconds(self) -> float:
        return self.coded.restore_seconds if self.coded else 0.0

    @property
    def seconds(self) -> float:
        """About what it costs, if most of its transfers hide behind computing."""
        assert self.link is not None, "a candidate has a way to its tier"
        transfers = self.link.store_seconds(self.moved) + self.link.load_seconds(self.moved)
        return self.encode_seconds + self.restore_seconds + self.link.lost_seconds(self.moved) + SEEN * transfers

    @property
    def restored_once(self) -> bool:
        return self.coded is None

    @property
    def code(self) -> str:
        return self.label

    @property
    def lossless(self) -> bool:
        return self.coded is None or self.coded.lossless

    @property
    def why(self) -> str:
        return "moves while others compute"

    def decisions(self, before: Graph, after: Graph, ops: Sequence[Op], seconds: OpSeconds) -> Mapping[int, Decision]:
        """Its seconds are those by which computing takes longer during its transfers, and what coding takes; what a
        step waits for transfers is known for all of them together."""
        if not ops:
            return {}
        assert self.link is not None, "a plan has a way to its tiers"
        coding = sum(seconds(after, op) for op in ops if not is_transfer(op.target))
        return {self.value: Decision(self, self.why, coding + self.link.lost_seconds(self.moved))}

    # -- in the step -------------------------------------------------------------------------------------------------

    def restore(self, writer: Writer) -> int:
        """Forward saves a token, by which backward asks for what was stored."""
        if self.coded is None:
            return self._load(writer, self.value)
        code = self.coded.encoded(writer)
        return self.coded.decoded(writer, writer.once(self, lambda: self._load(writer, code)))

    def _load(self, writer: Writer, moved: int) -> int:
        value = writer.values[moved]
        name, store = f"{value.name}_store", StoreTo(self.tier)
        token = writer.in_forward(self.value, name, store, (Ref(moved),), (1,), TOKEN_DTYPE, "cpu")
        args = (Ref(token), value.shape, value.stride, value.dtype)
        return writer.in_backward(self.value, "load", LoadFrom(self.tier), args, like=moved)

    # -- candidates --------------------------------------------------------------------------------------------------

    @classmethod
    def candidates(cls, graph: Graph, values: Collection[int], terms: Terms, found: Sequence[Fate]) -> list[Offload]:
        """The values that could go to a tier, each as it is and, where it has one, as its smallest code."""
        smallest: dict[int, Encode] = {}
        for code in found:
            if isinstance(code, Encode) and CODECS[code.codec].exact_size and code.bytes >= LEAST_MOVED:
                known = smallest.get(code.value)  # what is reloaded has the size it was planned with
                smallest[code.value] = code if known is None or code.bytes < known.bytes else known
        offloads = []
        for value in sorted(owned(graph).intersection(values)) if terms.links else ():
            for tier, link in terms.links.items():
                if can_move(graph, value, tier):
                    offloads.append(cls(value, tier, None, graph.values[value].bytes, link))
                    if value in smallest:
                        offloads.append(cls(value, tier, smallest[value], smallest[value].bytes, link))
        return offloads

    # -- plan files --------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, graph: Graph, value: int, entry: Mapping[str, Any], given: Given) -> Offload:
        name, tier, it = entry["value"], entry["tier"], graph.values[value]
        if tier not in given.links:
            raise PlanError(f"the plan moves {name} to {tier!r}; allow it with tiers={tier!r}, or plan anew")
        if not can_move(graph, value, tier):
            raise PlanError(f"{name} ({it.dtype}, {list(it.shape)}) cannot go to {tier!r}; plan anew")
        coded = given.before.encoding if given.before else None
        return cls(value, tier, coded, coded.bytes if coded else it.bytes, given.links[tier])


def can_move(graph: Graph, number: int, tier: str) -> bool:
    """Return whether a value is large enough to move, and not there already: host memory is where a CPU's values
    are."""
    value = graph.values[number]
    if value.storage is None or value.dtype is None or value.bytes < LEAST_MOVED or not fills_its_memory(graph, value):
        return False
    return tier != "host" or not KINDS[kind_of(graph.storages[value.storage].device)].is_host
