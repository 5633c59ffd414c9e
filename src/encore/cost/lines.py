"""The lines of Python that allocate, from the profiler's tree of events: calls of Python functions, operators in them,
allocations in those.

An allocation in backward belongs to the line that ran the operator in forward: both have autograd's sequence number.

Known shortcoming: the profiler records calls, not lines. An operator that is written as such (`a * b`) is known by the
function that it is in, and by the calls before and after it there: its place is a range of lines.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

LIBRARIES = frozenset({"torch", "encore"})
"""Packages whose functions are not the user's code."""
PASSED_THROUGH = frozenset({"contextlib.py", "functools.py", "logging", "threading.py", "typing.py", "weakref.py"})
"""Modules of the standard library that call back into the user's code."""
INSTALLED = ("site-packages/torch/", "site-packages/encore/", "src/encore/")


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory was allocated."""

    line: str = ""
    """`file.py:12`; `file.py:12-14` if the operator is somewhere between these lines; empty if unknown."""
    function: str = ""
    operator: str = ""


@dataclass(frozen=True, slots=True)
class PlacedEvent:
    """An allocation (positive bytes) or release (negative)."""

    time: int
    bytes: int
    address: int
    place: Place


@dataclass(frozen=True, slots=True)
class _Context:
    """Where the walk through the tree stands."""

    place: Place = Place()
    in_backward: bool = False
    sequence: int = -1
    """Of the backward node that runs."""


def placed_events(roots: list[Any]) -> list[PlacedEvent]:
    """Every allocation and reported release in the tree of the profiler, with its place, in order of time."""
    found: list[tuple[int, int, int, _Context]] = []
    forward: dict[int, Place] = {}
    waiting = [(event, _Context()) for event in reversed(roots)]
    while waiting:
        event, context = waiting.pop()
        kind, fields = event.tag.name, event.extra_fields
        if kind == "Allocation":
            found.append((event.start_time_ns, fields.alloc_size, fields.ptr or 0, context))
            continue
        if kind == "TorchOp":
            context = _inside_operator(fields, context)
            if not context.in_backward and fields.sequence_number >= 0:
                forward[fields.sequence_number] = context.place  # the last one with a number has made its node
            children: Iterator[tuple[Any, _Context]] = ((child, context) for child in event.children)
        else:
            children = _inside_call(event, context)
        waiting.extend(reversed(list(children)))
    return [
        PlacedEvent(time, size, address, _resolved(context, forward))
        for time, size, address, context in sorted(found, key=lambda one: one[0])
    ]


def calls(roots: list[Any], function: str) -> bool:
    """Return whether a Python function of this name was called."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        called = _frame(event, "callsite")
        if called is not None and called[2] == function:
            return True
        waiting.extend(event.children)
    return False


def own_events(events: Iterable[PlacedEvent]) -> list[PlacedEvent]:
    """The allocations, and the releases of these.

    Of memory that was there before, PyTorch reports some releases, with wrong sizes: it remembers what was allocated
    under an earlier profiler, also if that was freed without one and the address used again. Releases in other threads
    (those of a process group, which free its buffers) are not reported: where memory is allocated, nothing else is.
    """
    allocated: dict[int, int] = {}
    addresses: list[int] = []
    own = []
    for event in events:
        if event.bytes > 0:
            for address in _overlapping(event, allocated, addresses):
                own.append(PlacedEvent(event.time, -allocated.pop(address), address, event.place))
                addresses.remove(address)
            allocated[event.address] = event.bytes
            bisect.insort(addresses, event.address)
            own.append(event)
        elif event.address in allocated:
            del allocated[event.address], addresses[bisect.bisect_left(addresses, event.address)]
            own.append(event)
    return own


def _overlapping(event: PlacedEvent, allocated: Mapping[int, int], addresses: Sequence[int]) -> list[int]:
    """The blocks, in order of address, that share memory with one that is allocated now."""
    first = max(0, bisect.bisect_right(addresses, event.address) - 1)
    last = bisect.bisect_left(addresses, event.address + event.bytes)
    return [one for one in addresses[first:last] if one + allocated[one] > event.address]


def _resolved(context: _Context, forward: dict[int, Place]) -> Place:
    origin = forward.get(context.sequence)
    if origin is None or not origin.line:
        return context.place
    return Place(origin.line, origin.function, context.place.operator)


def _inside_operator(fields: Any, context: _Context) -> _Context:
    name = str(fields.name)
    if fields.scope.name == "BACKWARD_FUNCTION":
        place = Place(context.place.line, context.place.function, name.removeprefix("torch::autograd::"))
        return _Context(place, True, fields.sequence_number)
    if name.startswith("autograd::engine"):
        return _Context(context.place, True, context.sequence)
    if context.place.operator or name.startswith("profiler::"):
        return context
    place = Place(context.place.line, context.place.function, name.removeprefix("aten::"))
    return _Context(place, context.in_backward, context.sequence)


def _inside_call(event: Any, context: _Context) -> Iterator[tuple[Any, _Context]]:
    """The children of a Python call, each with the line of the user's code that it runs for."""
    called = _frame(event, "callsite")
    if called is None or not is_users(called[0]):
        yield from ((child, _from_line(child, context)) for child in event.children)
        return
    file, first, function = called
    lines = [_line_in(child, file, function) for child in event.children]
    after: list[int | None] = [None] * len(lines)
    coming: int | None = None
    for number in reversed(range(len(lines))):
        coming = lines[number] or coming
        after[number] = coming
    before = first
    for child, line, later in zip(event.children, lines, after, strict=True):
        before = line or before
        ends = sorted({before, before if later is None or line else later})
        place = Place(f"{PurePath(file).name}:{'-'.join(map(str, ends))}", function)
        yield child, _Context(place, context.in_backward, context.sequence)


def _from_line(child: Any, context: _Context) -> _Context:
    """A call out of the user's code that another function's event holds: its line is exact."""
    caller = _frame(child, "caller")
    if caller is None or not is_users(caller[0]):
        return context
    place = Place(f"{PurePath(caller[0]).name}:{caller[1]}", caller[2])
    return _Context(place, context.in_backward, context.sequence)


def _line_in(child: Any, file: str, function: str) -> int | None:
    caller = _frame(child, "caller")
    return caller[1] if caller is not None and (caller[0], caller[2]) == (file, function) else None


def _frame(event: Any, end: str) -> tuple[str, int, str] | None:
    """File, line and function that a Python call came from (`caller`) or went to (`callsite`); None if it has none, or
    if the profiler has lost its name, as it does of code that was freed meanwhile."""
    if event.tag.name != "PyCall" and (end == "callsite" or event.tag.name != "PyCCall"):
        return None
    try:
        frame = getattr(event.extra_fields, end)
        return frame.file_name, frame.line_number, frame.function_name
    except UnicodeDecodeError:
        return None


def is_users(file: str) -> bool:
    """Return whether a file, as the profiler names it, is neither PyTorch's, nor Encore's, nor generated."""
    parts = PurePath(file).parts
    if not parts or file.startswith("<") or parts[0] in PASSED_THROUGH or parts[0] in LIBRARIES:
        return False
    return not any(place in file for place in INSTALLED)
