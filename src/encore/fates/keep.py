"""Keep: the activation stays in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from encore.fates.fate import Fate


@dataclass(frozen=True, slots=True)
class Keep(Fate):
    """Keep it in memory, as it is."""

    kind: ClassVar[str] = "keep"
    value: int
