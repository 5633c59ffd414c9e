"""What becomes of an activation from its last use in forward to its uses in backward: one file a kind.

A kind says what the search, the schedule, prices, plan files and reports need to know of it (`fate.py`); `KINDS` is the
table of those that a plan may choose next to keeping. What may not live here: which value has which fate.
"""

from encore.fates.encode import Encode, code_bytes, codes_of
from encore.fates.fate import Decision, Fate, Given, Terms, Writer
from encore.fates.keep import Keep
from encore.fates.link import Link
from encore.fates.offload import Offload
from encore.fates.ownership import fills_its_memory, owned, owners
from encore.fates.recompute import Recompute, recomputable
from encore.fates.stash import Stash

KINDS: dict[str, type[Fate]] = {kind.kind: kind for kind in (Recompute, Encode, Stash, Offload)}
"""By name, in the order in which their candidates are made and plan files list them."""


def method_names() -> tuple[str, ...]:
    """What `methods=` may name."""
    return tuple(name for name, kind in KINDS.items() if kind.is_method)


__all__ = [
    "KINDS",
    "Decision",
    "Encode",
    "Fate",
    "Given",
    "Keep",
    "Link",
    "Offload",
    "Recompute",
    "Stash",
    "Terms",
    "Writer",
    "code_bytes",
    "codes_of",
    "fills_its_memory",
    "method_names",
    "owned",
    "owners",
    "recomputable",
]
