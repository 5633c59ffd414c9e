"""A backward whose gradients leave as soon as they are final, for hooks that wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from encore.errors import ReplayError
from encore.lower import BackwardInParts


class Delivery:
    """One backward that runs in parts: each node of autograd takes its gradients when its turn comes."""

    def __init__(self, parts: BackwardInParts, args: list[Any], name: str, finish: Callable[[float], None]) -> None:
        self.name = name
        self._finish = finish
        self._cuts = list(parts.cuts)
        self._position = -1
        self._watched = [
            (until, args[place], args[place]._version)
            for place, until in parts.read_until.items()
            if isinstance(args[place], torch.Tensor)
        ]
        self._ready: list[Any] = []
        self._found: dict[int, Any] = {}
        self._steps: Any = parts.start(args, self._ready)
        self._began = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Return whether all gradients have been computed and taken."""
        return self._steps is None and not self._found

    def take(self, places: Sequence[int]) -> list[Any]:
        """Run on until these gradients are there, and return them; nothing here refers to them any more."""
        while self._steps is not None and not self._found.keys() >= set(places):
            self._go_on()
        return [self._found.pop(place, None) for place in places]

    def _go_on(self) -> None:
        self._require_unchanged()
        try:
            next(self._steps)
        except StopIteration as end:
            self._steps = None
            self._found.update({place: gradient for place, gradient in enumerate(end.value) if gradient is not None})
            self._finish(time.perf_counter() - self._began)
            return
        cut = self._cuts.pop(0)
        self._position = cut.after
        self._found.update(zip(cut.places, self._ready, strict=True))
        self._ready.clear()

    def _require_unchanged(self) -> None:
        """Raise if a hook has written to a parameter that the rest of backward reads."""
        self._watched = [watched for watched in self._watched if watched[0] > self._position]
        for _, tensor, version in self._watched:
            if tensor._version != version:
                raise ReplayError(
                    f"a parameter of shape {list(tensor.shape)} has been modified by an inplace operation while "
                    f"backward of {self.name} still needs it; hooks may write to a parameter once it has received its "
                    "gradient"
                )
