"""Straight-line Python for a stream of actions: one line for each operator, and a `del` for every free.

The callables are *boxed*: they take one list and empty it, so that a `del` deletes the last reference. A reference to
the argument list would keep every saved tensor alive until backward has returned.
"""

from __future__ import annotations

import functools
import linecache
import math
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encore.graph import Graph, Op, Role
from encore.graph.ops import OUT_ARGUMENT, OUT_VARIANT, WRITES_FIRST
from encore.graph.tier_ops import StoreTo, is_transfer
from encore.graph.torch_private import OpOverload
from encore.graph.values import Ref
from encore.lower.calls import callable_for
from encore.lower.checked import CheckedPhase, Phase, made_by
from encore.lower.kernels import CompiledKernel
from encore.lower.transport import Transport
from encore.schedule import (
    Action,
    Cut,
    Free,
    Fused,
    Load,
    Run,
    Schedule,
    Store,
    Wait,
    gradient_cuts,
    last_reads,
)

Boxed = Callable[[list[Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A step that can run. `forward([primals])` returns outputs + saved, `backward([saved + tangents])` gradients."""

    forward: Boxed
    backward: Boxed
    forward_source: str
    backward_source: str
    in_parts: Callable[[], BackwardInParts]
    """The same backward for gradients that leave as soon as they are final, written when it is first wanted."""


@dataclass(frozen=True, slots=True)
class BackwardInParts:
    """A backward that is cut where gradients of parameters are final."""

    cuts: tuple[Cut, ...]
    start: Callable[[list[Any], list[Any]], Generator[None, None, tuple[Any, ...]]]
    """`start(saved + tangents, ready)` stops at every cut, with its gradients in the list `ready`, which the caller
    empties, and returns the others, with None in the places of those that have left."""
    read_until: Mapping[int, int]
    """By place among the saved tensors: of parameters and buffers, the position of their last reader."""


def lower(
    schedule: Schedule,
    name: str = "step",
    kernels: Mapping[str, CompiledKernel] | None = None,
    watches: Mapping[int, Callable[..., Any]] | None = None,
    transports: Mapping[str, Transport] | None = None,
    *,
    checked: bool = False,
) -> Lowered:
    """Compile both streams to functions. `kernels` are those of the fused actions, by key; `watches` are called in
    place of operators of forward, by number; `transports` move offloaded values, by the name of their tier. If
    `checked`, the functions look after every action for values that it should not have changed."""
    graph, transports = schedule.graph, transports or {}
    forward_source, forward = _Writer(graph, kernels or {}, watches or {}, transports, checked=checked).write(
        f"{name}_forward", schedule.forward, graph.primals, (*graph.outputs, *schedule.saved), graph.literals
    )
    backward_source, backward = _Writer(graph, kernels or {}, transports=transports, checked=checked).write(
        f"{name}_backward", schedule.backward, (*schedule.saved, *graph.tangents), graph.gradients
    )

    def in_parts() -> BackwardInParts:
        """Without cuts if every action is checked."""
        cuts = () if checked else gradient_cuts(schedule)
        writer = _Writer(graph, kernels or {}, transports=transports)
        given = (*schedule.saved, *graph.tangents)
        _, start = writer.write(f"{name}_backward_in_parts", schedule.backward, given, graph.gradients, cuts=cuts)
        return BackwardInParts(cuts, start, _read_until(schedule))  # type: ignore[arg-type]

    return Lowered(forward, backward, forward_source, backward_source, functools.cache(in_parts))


def _read_until(schedule: Schedule) -> dict[int, int]:
    graph, last = schedule.graph, last_reads(schedule)
    kept = (Role.PARAMETER, Role.BUFFER)
    found = ((place, graph.values[value]) for place, value in enumerate(schedule.saved))
    return {
        place: last.get(value.storage, -1) for place, value in found if value.role in kept and value.storage is not None
    }


class _Writer:
    """Writes one function, collecting the objects its text refers to."""

    def __init__(
        self,
        graph: Graph,
        kernels: Mapping[str, CompiledKernel],
        watches: Mapping[int, Callable[..., Any]] = types.MappingProxyType({}),
        transports: Mapping[str, Transport] = types.MappingProxyType({}),
        *,
        checked: bool = False,
    ) -> None:
        self.graph = graph
        self.kernels = kernels
        self.watches = watches
        self.transports = transports
        self.checked = checked
        self.scope: dict[str, Any] = {"inf": math.inf, "nan": math.nan}
        self.named: dict[int, str] = {}
        self.movers: dict[tuple[str, str], str] = {}
        self.lines: list[str] = []

    def write(
        self,
        name: str,
        actions: Sequence[Action],
        given: Sequence[int],
        results: Iterable[int | None],
        literals: Mapping[int, Any] | None = None,
        cuts: Sequence[Cut] | None = None,
    ) -> tuple[str, Boxed]:
        """Write a function. `literals` are the results that are not values, by position. With `cuts`, a generator,
        which stops at each of them."""
        results, left = list(results), list(cuts or ())
        self.lines = [f"def {name}(args):" if cuts is None else f"def {name}(args, ready):"]
        if given:
            self._line(f"{''.join(f'{self._variable(value)}, ' for value in given)}= args")
        self._line("args.clear()")
        self._claim(actions)
        if self.checked:
            self._begin_check(name, actions, given)
        freed: list[int] = []
        for position, action in enumerate(actions):
            if isinstance(action, Free):
                freed.append(action.value)
                continue
            self._flush(freed)
            while left and left[0].after < position:
                self._hand_over(left.pop(0), results)
            if isinstance(action, Fused):
                self._call_kernel(action)
            elif isinstance(action, Run):
                self._line(self._statement(action))
            else:
                self._line(self._transfer(action))
            if self.checked:
                made = "".join(f", {self._variable(value)}" for value in made_by(self.graph, action))
                self._line(f"checking.after({position}{made})")
        self._flush(freed)
        if cuts is not None:
            for cut in left:
                self._hand_over(cut, results)
            self._line("if False: yield")
        returned = ", ".join(
            repr((literals or {}).get(position)) if value is None else self._read(value)
            for position, value in enumerate(results)
        )
        self._line(f"return ({returned},)" if returned else "return ()")
        source = "\n".join(self.lines) + "\n"
        return source, self._evaluate(name, source)

    def _evaluate(self, name: str, source: str) -> Boxed:
        filename = f"<encore {name} {id(self):x}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        exec(compile(source, filename, "exec"), self.scope)  # the text is ours: operators and names from the graph
        function = self.scope.pop(name)
        function._boxed_call = True
        weakref.finalize(function, linecache.cache.pop, filename, None)
        return function

    def _hand_over(self, cut: Cut, results: list[int | None]) -> None:
        """Stop with these results in `ready`, and without a name for them: autograd takes them as they are."""
        names = "".join(f"{self._variable(value)}, " for place in cut.places if (value := results[place]) is not None)
        self._line(f"ready.extend(({names}))")
        self._line(f"del {names.removesuffix(', ')}")
        self._line("yield")
        for place in cut.places:
            results[place] = None

    def _line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def _flush(self, freed: list[int]) -> None:
        if freed:
            if self.checked:
                self._line(f"checking.free({', '.join(map(str, freed))})")
            self._line(f"del {', '.join(map(self._variable, freed))}")
            freed.clear()

    def _begin_check(self, name: str, actions: Sequence[Action], given: Sequence[int]) -> None:
        begin = self._bind(functools.partial(CheckedPhase, Phase(self.graph, name, actions, given)), "check")
        self._line(f"checking = {begin}({', '.join(map(self._variable, given))})")

    # -- one statement -----------------------------------------------------------------------------------------------

    def _statement(self, action: Run) -> str:
        op = self.graph.ops[action.op]
        arguments = [self._text(argument) for argument in op.args]
        keywords = [f"{key}={self._text(argument)}" for key, argument in op.kwargs.items()]
        target = op.target
        if action.over is not None and target in OUT_VARIANT:
            target = OUT_VARIANT[target]
            keywords.append(f"{OUT_ARGUMENT[target]}={self._variable(action.over)}")
        elif action.over is not None:
            target = WRITES_FIRST[target]
        if is_transfer(target):
            name = self._mover(target.tier, "store_now" if isinstance(target, StoreTo) else "load")
        else:
            called = self.watches[op.id] if op.id in self.watches else callable_for(target)
            name = self._bind(called, _label(target))
        call = f"{name}({', '.join(arguments + keywords)})"
        return f"{self._targets(op)} = {call}"

    def _claim(self, actions: Sequence[Action]) -> None:
        """Reserve space in the tiers for all that the phase will store, before it begins."""
        sizes: dict[str, list[int]] = {}
        for action in actions:
            op = self.graph.ops[action.op] if isinstance(action, Run | Store) else None
            if op is not None and isinstance(op.target, StoreTo):
                sizes.setdefault(op.target.tier, []).append(self.graph.bytes_of(op.reads[0]))
        for tier, wanted in sizes.items():
            self._line(f"{self._bind(functools.partial(self.transports[tier].prepare, tuple(wanted)), 'prepare')}()")

    def _transfer(self, action: Store | Load | Wait) -> str:
        """A store, a load or a wait. A loaded value has its name from its wait on."""
        op = self.graph.ops[action.op]
        tier, given = op.target.tier, [self._text(argument) for argument in op.args]
        if isinstance(action, Store):
            return f"{self._targets(op)} = {self._mover(tier, 'store')}({given[0]})"
        if isinstance(action, Load):
            return f"{self._mover(tier, 'fetch')}({given[0]})"
        if isinstance(op.target, StoreTo):
            return f"{self._mover(tier, 'stored')}({self._targets(op)})"
        return f"{self._targets(op)} = {self._mover(tier, 'load')}({', '.join(given)})"

    def _mover(self, tier: str, name: str) -> str:
        """The name of a method of a tier's transport."""
        if (tier, name) not in self.movers:
            self.movers[tier, name] = self._bind(getattr(self.transports[tier], name), name)
        return self.movers[tier, name]

    def _call_kernel(self, action: Fused) -> None:
        """A kernel returns the results that it allocates; one that it writes over an operand is that operand,
        renamed."""
        over = dict(action.over)
        made = [self._variable(value) for value in action.writes if value not in over]
        kernel = self._bind(self.kernels[action.kernel.key].call, f"kernel_{action.kernel.key[:8]}")
        call = f"{kernel}([{', '.join(self._read(value) for value in action.reads)}])"
        self._line(f"{', '.join(made)}, = {call}" if made else call)
        for value, operand in over.items():
            self._line(f"{self._variable(value)} = {self._variable(operand)}")

    def _targets(self, op: Op) -> str:
        if not op.returns_tuple:
            return self._variable(op.writes[0]) if op.writes[0] is not None else "_"
        names = ["_" if value is None else self._variable(value) for value in op.writes]
        return f"{', '.join(names)}," if len(names) == 1 else ", ".join(names)

    def _variable(self, value: int) -> str:
        return f"v{value}"

    def _read(self, value: int) -> str:
        if value in self.graph.constants:
            return self._bind(self.graph.constants[value], "constant")
        return self._variable(value)

    def _text(self, argument: Any) -> str:
        if isinstance(argument, Ref):
            return self._read(argument.value)
        if argument is None or isinstance(argument, bool | int | str) or type(argument) is float:
            return repr(argument)
        if isinstance(argument, list):
            return f"[{', '.join(self._text(item) for item in argument)}]"
        if isinstance(argument, tuple):
            return f"({''.join(f'{self._text(item)}, ' for item in argument)})"
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{key!r}: {self._text(item)}" for key, item in argument.items()) + "}"
        if isinstance(argument, slice):
            return f"slice({', '.join(self._text(part) for part in (argument.start, argument.stop, argument.step))})"
        return self._bind(argument, type(argument).__name__)

    def _bind(self, thing: Any, label: str) -> str:
        """A name in the function's scope for an object that has no literal."""
        if id(thing) not in self.named:
            name = f"{label}_{len(self.named)}"
            self.named[id(thing)] = name
            self.scope[name] = thing
        return self.named[id(thing)]


def _label(target: Any) -> str:
    text = str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", "call")
    return "".join(letter if letter.isalnum() else "_" for letter in text).strip("_")
