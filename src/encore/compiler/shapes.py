"""The compiled callables of one function, for each shape of its arguments; the least recently used are dropped.

Dynamo looks through the graphs of a function one after the other, and evaluates the guards of each until one holds.
Here a call picks a Dynamo callable by the shapes of its tensors, and Dynamo keeps the graphs of each callable
apart (`isolate_recompiles`): guards cost the same at the first shape and at the hundredth, and graphs can be
dropped shape by shape. What else a graph depends on (attributes of modules, types, modes) is left to Dynamo's guards.

The first shape is captured as it is. When a second one comes, dimensions that differ are traced with symbols: one
capture serves all sizes of them, and a further shape is planned and nothing else (`SymbolicCallable`). Code that needs
numbers (a loop over time steps), and a step of several graphs that is rehearsed, is captured for each shape.

`MOST_GRAPHS` bounds what is kept, or, for a model of many graphs, those of `LEAST_SHAPES` shapes. A shape that was
dropped is compiled again when it comes back, and backward of a forward that ran before still runs: autograd keeps what
it needs. With `recompile_limit=`, all shapes share one callable, which Dynamo bounds by running further shapes as
plain PyTorch.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from encore.capture import torch_private
from encore.compiler.padding import PaddingAdvice
from encore.compiler.session import Session
from encore.compiler.sizes import Dimensions, Sizes, differing, is_within, sized_tensors, sizes_of

MOST_GRAPHS = 128
"""Graphs that are kept of one function, over all shapes. Each takes 2 MB (three layers) to 5 MB (two bidirectional LSTM
layers): of PyTorch's objects, of the plan, and of the generated code."""

LEAST_SHAPES = 16
"""Shapes that are kept however many graphs each has: a model of more graphs than `MOST_GRAPHS` is not compiled again in
every step."""

MOST_CAPTURED = 8
"""How many shapes of a callable with symbols may be captured, since its guards depend on sizes; beyond that, at most a
half of all, or further shapes get callables of their own."""

log = logging.getLogger("encore")


@dataclass(slots=True, eq=False)
class SymbolicCallable:
    """A Dynamo callable for all shapes that differ in some dimensions alone."""

    planned: Callable[..., Any]
    like: Sizes
    """One of the shapes."""
    dimensions: Dimensions
    """What differs."""
    captured: int = 0
    """Shapes for which it was captured."""
    served: int = 0
    """All shapes that it was called with."""

    @property
    def is_useful(self) -> bool:
        return self.captured <= max(MOST_CAPTURED, self.served // 2)

    def serves(self, sizes: Sizes) -> bool:
        return is_within(sizes, self.like, self.dimensions)


@dataclass(slots=True, eq=False)
class ShapeEntry:
    """What has been compiled for one shape."""

    planned: Callable[..., Any]
    """Dynamo's callable."""
    symbolic: SymbolicCallable | None = None
    """The callable, if it serves other shapes, too."""
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
        self._symbolic: list[SymbolicCallable] = []
        """The latest last."""
        self._traces_symbols = session.runs and session.options.recompile_limit is None
        """Whether further callables may be traced with symbols."""
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
        began, known = time.perf_counter(), self._entries.get(sizes)
        before = 0 if known is None else len(known.graphs)
        if known is None:
            result = self._first_call(sizes, args, kwargs)
        else:
            self._entries.move_to_end(sizes)
            result = self._run(known, args, kwargs)
        if not limited:
            entry = self._entries[sizes]
            compiled = len(entry.graphs) > before
            if compiled:
                entry.of_first_call = entry.of_first_call or len(entry.graphs)
                self._drop_oldest(max(MOST_GRAPHS, LEAST_SHAPES * entry.of_first_call))
            self._advice.note(sizes, began, compiled, args, kwargs)
        return result

    def _first_call(self, sizes: Sizes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call with shapes that are not known: through a callable with symbols, if there is one or can be one."""
        symbolic = self._symbolic_callable(sizes)
        if symbolic is None:
            entry = self._entries[sizes] = ShapeEntry(self._compiled())
            return self._run(entry, args, kwargs)
        entry = self._entries[sizes] = ShapeEntry(symbolic.planned, symbolic)
        session, captured = self.session, len(self.session.graphs_keep_symbols)
        forwards_before = session.forwards_run
        tensors = sized_tensors(args, kwargs)
        found = ((tensors[place], dimensions) for place, dimensions in symbolic.dimensions.items())
        marked = [(tensor, dimensions) for tensor, dimensions in found if tensor is not None]
        try:
            with torch_private.symbolic_dimensions(marked):
                result = self._run(entry, args, kwargs)
        except torch_private.CaptureFailed as error:
            if session.forwards_run != forwards_before:
                raise
            why = next(iter(str(error).splitlines()), type(error).__name__)
            log.info("%s cannot be captured with symbols for sizes: %s", session.name, why)
            self._traces_symbols = False
            entry = self._entries[sizes] = ShapeEntry(self._compiled())
            return self._run(entry, args, kwargs)
        except Exception:
            if not entry.graphs:  # what is tried again is traced with symbols again
                del self._entries[sizes]
            raise
        kept = session.graphs_keep_symbols[captured:]
        symbolic.served += 1
        symbolic.captured += bool(kept)
        if not all(kept) or not symbolic.is_useful:
            log.info("%s is captured for each shape: its code depends on sizes", session.name)
            self._traces_symbols = False
        return result

    def _symbolic_callable(self, sizes: Sizes) -> SymbolicCallable | None:
        """The callable that serves shapes that are not known; None if they are to have their own."""
        if not self._traces_symbols or self.session.step.has_rehearsed:
            return None
        serving = next((one for one in reversed(self._symbolic) if one.serves(sizes)), None)
        if serving is not None:
            return serving
        others = [known for known in self._entries if differing(known, sizes) is not None]
        if not others:
            return None
        dimensions: Dimensions = {}
        for known in others:
            for place, found in (differing(known, sizes) or {}).items():
                dimensions[place] = dimensions.get(place, frozenset()) | found
        if not is_within(sizes, sizes, dimensions):
            return None
        self._symbolic.append(SymbolicCallable(self._compiled(), sizes, dimensions))
        return self._symbolic[-1]

    def _compiled(self) -> Callable[..., Any]:
        planned = torch_private.dynamo_compile(self.plain, self._backend, self.session.options.recompile_limit)
        self._regions.add(torch_private.region_of(planned))
        return planned

    def _run(self, entry: ShapeEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.session.filing_graphs(entry.graphs):
            return entry.planned(*args, **kwargs)

    def clear(self) -> None:
        """Drop all shapes: each is compiled again when it comes."""
        for sizes in list(self._entries):
            self._drop(sizes)
        for symbolic in self._symbolic:
            self._drop_callable(symbolic.planned)
        self._symbolic.clear()

    def _drop_oldest(self, most: int) -> None:
        """Drop the least recently used shapes until at most so many graphs are left; the latest, too, if its own graphs
        are too many."""
        kept = sum(len(entry.graphs) for entry in self._entries.values())
        while kept > most:
            kept -= self._drop(next(iter(self._entries)))

    def _drop(self, sizes: Sizes) -> int:
        """Drop a shape; return how many graphs it had."""
        entry = self._entries.pop(sizes)
        if entry.symbolic is None:
            self._drop_callable(entry.planned)
        self.session.forget(entry.graphs)
        return len(entry.graphs)

    def _drop_callable(self, planned: Callable[..., Any]) -> None:
        region = torch_private.region_of(planned)
        torch_private.drop_regions({region})
        self._regions.discard(region)
