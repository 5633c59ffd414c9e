"""Judgements that serve other sizes: what was measured for graphs of one structure.

A graph of another length asks about the same products at other sizes. The answer is that of the nearest sizes that were
judged before, as long as none of them is more than `RANGE` times as large or as small; beyond that, it is judged anew.
A graph does not answer its own questions: two layers of one model may differ in nothing but their sizes.
"""

from __future__ import annotations

import math
import re

RANGE = 4.0
"""How many times as large or small as one that was judged a size may be."""

Sizes = tuple[int, ...]


class KnownRatios:
    """Ratios of times by question, as the graphs of one structure asked them."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Sizes, float]] = {}
        self._new: dict[str, dict[Sizes, float]] = {}

    def near(self, question: str) -> float | None:
        """The ratio at the nearest sizes; None if there are none within the range."""
        text, sizes = _without_sizes(question)
        known = self._known.get(text, {})
        within = [other for other in known if all(_factor(*pair) <= RANGE for pair in zip(sizes, other, strict=True))]
        if not within:
            return None
        nearest = min(within, key=lambda other: math.prod(map(_factor, sizes, other)))
        return known[nearest]

    def note(self, question: str, ratio: float) -> None:
        """Note a judgement of the graph that is rewritten now."""
        text, sizes = _without_sizes(question)
        self._new.setdefault(text, {})[sizes] = ratio

    def finish(self) -> None:
        """The graph is rewritten: what was noted serves the next ones."""
        for text, ratios in self._new.items():
            self._known.setdefault(text, {}).update(ratios)
        self._new.clear()


def _without_sizes(question: str) -> tuple[str, Sizes]:
    """A question with its sizes taken out: the numbers in lists and shapes, and no others."""
    sizes = re.compile(r"(?<=[\[( ])\d+(?=[\]), ])")
    return sizes.sub("n", question), tuple(map(int, sizes.findall(question)))


def _factor(one: int, other: int) -> float:
    return 1.0 if one == other else max(one, other) / max(1e-9, min(one, other))
