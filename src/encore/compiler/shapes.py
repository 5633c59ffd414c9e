"""The compiled callables of one function, one for each shape of its arguments; the least recently used are dropped.

Dynamo looks through the graphs of a function one after the other, and evaluates the guards of each until one holds.
Here a call picks a Dynamo callable by the shapes of its tensors, and Dynamo keeps the graphs of each callable
apart (`isolate_recompiles`): guards cost the same at the first shape and at the hundredth, and graphs can be
dropped shape by shape. What else a graph depends on (attributes of modules, types, modes) is left to Dynamo's guards.

`MOST_GRAPHS` bounds what is kept, or, for a model of many graphs, those of `LEAST_SHAPES` shapes. A shape that was
dropped is compiled again when it comes back, and backward of a forward that ran before still runs: autograd keeps what
it needs. With `recompile_limit=`, all shapes share one callable, which Dynamo bounds by running further shapes as
plain PyTorch.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from encore.capture import torch_private
from encore.compiler.padding import PaddingAdvice
from encore.compiler.session import Session
from encore.compiler.sizes import Sizes, sizes_of

MOST_GRAPHS = 128
"""Graphs that are kept of one function, over all shapes. Each takes 2 MB (three layers) to 5 MB (two bidirectional LSTM
layers): of PyTorch's objects, of the plan, and of the generated code."""

LEAST_SHAPES = 16
"""Shapes that are kept however many graphs each has: a model of more graphs than `MOST_GRAPHS` is not compiled again in
every step."""


@dataclass(slots=True, eq=False)
class ShapeEntry:
    """What has been compiled for one shape."""

    planned: Callable[..., Any]
    """Dynamo's callable."""
    graphs: list[int] = field(default_factory=list)
    """The numbers of its graphs in the session."""
    of_first_call: int = 0
    """How many of these its first call compiled."""


class CompiledShapes:
    """The compiled callables of one function."""

    def __init__(self, plain: Callable[..., Any], session: Session, backend: Callable[..., Any]) -> None:
        self.plain = plain
        self.session = session
        self._backend = backend
        self._entries: OrderedDict[Sizes, ShapeEntry] = OrderedDict()
        """By shapes, the latest used last."""
        self._regions: set[int] = set()
        """The numbers by which Dynamo keeps their graphs apart."""
        self._advice = PaddingAdvice(plain, session.name)
        weakref.finalize(self, torch_private.drop_regions, self._regions).atexit = False

    def __len__(self) -> int:
        return len(self._entries)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the callable of these shapes."""
        limited = self.session.options.recompile_limit is not None
        sizes = () if limited else sizes_of(args, kwargs)
        entry = self._entries.get(sizes)
        if entry is None:
            limit = self.session.options.recompile_limit
            entry = ShapeEntry(torch_private.dynamo_compile(self.plain, self._backend, limit))
            self._entries[sizes] = entry
            self._regions.add(torch_private.region_of(entry.planned))
        else:
            self._entries.move_to_end(sizes)
        began, before = time.perf_counter(), len(entry.graphs)
        with self.session.filing_graphs(entry.graphs):
            result = entry.planned(*args, **kwargs)
        if not limited:
            compiled = len(entry.graphs) > before
            if compiled:
                entry.of_first_call = entry.of_first_call or len(entry.graphs)
                self._drop_oldest(max(MOST_GRAPHS, LEAST_SHAPES * entry.of_first_call))
            self._advice.note(sizes, began, compiled, args, kwargs)
        return result

    def clear(self) -> None:
        """Drop all shapes: each is compiled again when it comes."""
        for sizes in list(self._entries):
            self._drop(sizes)

    def _drop_oldest(self, most: int) -> None:
        """Drop the least recently used shapes until at most so many graphs are left; the latest, too, if its own graphs
        are too many."""
        kept = sum(len(entry.graphs) for entry in self._entries.values())
        while kept > most:
            kept -= self._drop(next(iter(self._entries)))

    def _drop(self, sizes: Sizes) -> int:
        """Drop a shape; return how many graphs it had."""
        entry = self._entries.pop(sizes)
        region = torch_private.region_of(entry.planned)
        torch_private.drop_regions({region})
        self._regions.discard(region)
        self.session.forget(entry.graphs)
        return len(entry.graphs)
