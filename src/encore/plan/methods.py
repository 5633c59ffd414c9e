"""What a planner may do with an activation besides keeping it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from encore.codecs import CODECS
from encore.fates import KINDS, Encode, Recompute


@dataclass(frozen=True, slots=True)
class Methods:
    """Kinds of fates, by name, and the codecs that may be used."""

    kinds: frozenset[str] = frozenset({Recompute.kind})
    """All kinds but encoding, which the codecs allow."""
    codecs: tuple[str, ...] = ()

    def narrower(self) -> list[Methods]:
        """Every set of methods within this one, the narrow before the wide, itself last: lossy codecs only together
        with the lossless ones."""
        lossless = tuple(name for name in self.codecs if CODECS[name].lossless)
        found = [Methods(frozenset())]
        for name in KINDS:
            if name == Encode.kind:
                found = [
                    Methods(one.kinds, codecs) for codecs in dict.fromkeys(((), lossless, self.codecs)) for one in found
                ]
            elif name in self.kinds:
                found += [Methods(one.kinds | {name}, one.codecs) for one in found]
        return found

    def within(self, other: Methods) -> bool:
        """Return whether the other set allows all that this one allows."""
        return self.kinds <= other.kinds and set(self.codecs) <= set(other.codecs)


def allowed_methods(names: Collection[str], lossy: Collection[str]) -> Methods:
    """What the user allows: methods by name, and all lossless codecs along with the given lossy ones."""
    known = CODECS.items() if Encode.kind in names else ()
    codecs = tuple(name for name, codec in known if codec.lossless or name in lossy)
    return Methods(frozenset(names) - {Encode.kind}, codecs)
