"""A warning for a model whose shapes do not repeat, with the dimensions that vary and what to pad them to."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from encore.compiler.sizes import Sizes, named_sizes

WINDOW = 128
"""Calls that are looked at."""
MOST_COMPILED, MOST_SECONDS = 0.9, 0.5
"""The share of these calls that may be compiled, and the share of their time that this may take, without a warning."""
FEW_SIZES = 16
"""How many sizes of a dimension are few."""
SMALLEST_MULTIPLE = 8
NAMED = 4
"""Dimensions in a message."""


class PaddingAdvice:
    """Looks at the sizes of recent calls of one function, and warns once."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.name = name
        self._recent: deque[tuple[Sizes, float, float]] = deque(maxlen=WINDOW)
        """Sizes of a call, when it began, and its seconds if something was compiled in it."""
        self._has_warned = False

    def note(
        self, sizes: Sizes, began: float, compiled: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Note a call that is over. Warn if nearly all recent ones were compiled, and that took most of the time."""
        if self._has_warned:
            return
        now = time.perf_counter()
        self._recent.append((sizes, began, now - began if compiled else 0.0))
        if not compiled or len(self._recent) < WINDOW:
            return
        count = sum(seconds > 0 for *_, seconds in self._recent)
        share = sum(seconds for *_, seconds in self._recent) / (now - self._recent[0][1])
        if count > MOST_COMPILED * WINDOW and share > MOST_SECONDS:
            self._has_warned = True
            names = named_sizes(self.function, args, kwargs)
            advice = advice_for(names, [known for known, *_ in self._recent if len(known) == len(names)])
            self._recent.clear()
            warnings.warn(
                f"encore: {count} of the last {WINDOW} calls of {self.name} were compiled anew, which took {share:.0%} "
                f"of the time: {advice}",
                stacklevel=6,
            )


def advice_for(names: Sequence[str], recent: Sequence[Sizes]) -> str:
    """What varies in these sizes, and what to do about it; `names` has one for each entry of the sizes."""
    found: list[tuple[int, str]] = []
    for place, name in enumerate(names):
        sizes = {known[place] for known in recent}
        if len(sizes) > FEW_SIZES:
            found += _dimensions(name, sizes)
    if not found:
        return (
            "a graph of it depends on something else than the shapes of its arguments, and that does not repeat; "
            "TORCH_LOGS=recompiles names it"
        )
    found.sort(key=lambda one: -one[0])
    rest = len(found) - NAMED
    more = [f"and {rest} more"] if rest > 0 else []
    return "; ".join([*(text for _, text in found[:NAMED]), *more])


def _dimensions(name: str, sizes: set[Any]) -> list[tuple[int, str]]:
    """The dimensions of one argument that have many sizes: how many, and a sentence."""
    if len({len(size) if isinstance(size, tuple) else -1 for size in sizes}) > 1:
        return [(len(sizes), f"{name} has {len(sizes)} shapes; pad it to a few of them")]
    found = []
    for dimension, of_calls in enumerate(zip(*sizes, strict=True)):
        different = set(of_calls)
        if len(different) > FEW_SIZES:
            multiple, padded = _multiple(different)
            text = (
                f"dimension {dimension} of {name} has {len(different)} sizes from {min(different)} to "
                f"{max(different)}; pad it to a multiple of {multiple}, which leaves {padded}"
            )
            found.append((len(different), text))
    return found


def _multiple(sizes: set[int]) -> tuple[int, int]:
    """The smallest power of two whose multiples are few above these sizes, and how many these are."""
    multiple = SMALLEST_MULTIPLE
    while (padded := len({-(-size // multiple) for size in sizes})) > FEW_SIZES:
        multiple *= 2
    return multiple, padded
