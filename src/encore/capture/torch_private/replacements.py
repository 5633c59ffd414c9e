"""Functions and classes that Dynamo reads as others, while a compiled model runs."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch._dynamo.trace_rules
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable


@dataclasses.dataclass(frozen=True, slots=True)
class Replacement:
    """What Dynamo traces in place of a function."""

    traced: Any
    """The function that is traced."""
    outside: str
    """The name of the function that runs where the graph ends at a call of it."""
    module: str
    """The module that defines it."""


_replacing = threading.Lock()


_replaced: Counter[Any] = Counter()
"""How many running compiled models have replaced a reader, by its key in Dynamo's tables."""


@contextlib.contextmanager
def replaced_readers(
    readers: Mapping[Any, Callable[..., Any]], of_types: Mapping[type, Callable[..., Any]] | None = None
) -> Iterator[None]:
    """Have Dynamo read these functions and classes, and instances of these types, by the readers given for them,
    instead of its own."""
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
        (VariableBuilder._id_dispatch(), {id(thing): reader for thing, reader in readers.items()}),
        (VariableBuilder._type_dispatch(), dict(of_types or {})),
    ]
    with _replacing:
        for table, entries in tables:
            _replaced.update(list(entries))
            table.update(entries)
    try:
        yield
    finally:
        with _replacing:
            for table, entries in tables:
                _replaced.subtract(list(entries))
                for key in entries:
                    if not _replaced[key]:
                        table.pop(key, None)


def traced_as(replacement: Callable[[Callable[..., Any]], Replacement | None]) -> Callable[..., Any]:
    """A reader that takes a function for its current replacement; without one, it reads as Dynamo does."""

    def build(builder: VariableBuilder, function: Callable[..., Any]) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        found = replacement(function)
        if found is not None:
            _load_outside(builder, found)
            return UserFunctionVariable(found.traced)
        usual: Any = torch._dynamo.trace_rules.lookup(function)
        return usual.create_with_source(function, source=builder.get_source())

    return build


def _load_outside(builder: VariableBuilder, found: Replacement) -> None:
    """Where the graph ends at a call of the function being read, call `found.outside` instead."""
    unread = builder.tx.output.variable_tracker_cache.get(builder.source)
    if unread is not None:
        unread.source = AttrSource(builder.tx.import_source(found.module), found.outside)


def constructed_as(other: type, first: type, replacement: Callable[[type], Replacement | None]) -> Callable[..., Any]:
    """A reader for a class: calls with a first argument of type `first` construct `other`, and calls with a tensor are
    calls of its current replacement."""

    class Constructor(UserDefinedClassVariable):
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            if args and args[0].python_type() is first:
                source = AttrSource(tx.import_source(other.__module__), other.__name__)
                return VariableTracker.build(tx, other, source).call_function(tx, args, kwargs)
            found = replacement(self.value) if args and args[0].is_tensor() else None
            if found is None:
                return super().call_function(tx, args, kwargs)
            return UserFunctionVariable(found.traced).call_function(tx, args, kwargs)

    def build(builder: VariableBuilder, value: type) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        found = replacement(value)
        if found is not None:
            _load_outside(builder, found)
        return Constructor(value, source=builder.get_source())

    return build
