"""Passes as tables: where a pattern fits and a condition holds, a replacement takes the operator's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from encore.graph import Graph, Op
from encore.graph.editor import Editor
from encore.graph.values import Ref
from encore.rewrite.matching import AnyTensor, Argument, Match, OpPattern, Scope, matches
from encore.rewrite.op_builder import OpBuilder


class NewOp:
    """A call to add to the graph. Its arguments are new calls, names of a match, or plain values."""

    __slots__ = ("after", "arguments", "before", "kwargs", "target")

    def __init__(self, target: Any, *arguments: Any, before: str = "", after: str = "", **kwargs: Any) -> None:
        self.target = target
        self.arguments = arguments
        self.kwargs = kwargs
        self.before = before
        """The captured operator right before which it runs: by default the one that is replaced."""
        self.after = after
        """The captured tensor right after whose operator it runs, in the same phase."""


def always(match: Match) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table. The replacement is the call whose result the operator's readers get; or a function, where
    one expression does not say it."""

    pattern: OpPattern
    replacement: NewOp | Callable[[OpBuilder, Match], None]
    condition: Callable[[Match], bool] = always


def apply_rules(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """The graph after replacing every operator to which a rule applies. Of several rules, the first one does."""
    scope, builder = Scope(graph), OpBuilder(Editor(graph))
    for op in graph.ops:
        found = ((rule, match) for rule in rules for match in matches(scope, rule.pattern, op) if rule.condition(match))
        for rule, match in found:
            if isinstance(rule.replacement, NewOp):
                builder.replace(op, *call_of(builder, rule.replacement, match))
            else:
                rule.replacement(builder, match)
            break
    return builder.editor.finish()


def call_of(builder: OpBuilder, new: NewOp, match: Match) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of a new call, after adding those whose results it reads."""
    args = tuple(_argument(builder, argument, match) for argument in new.arguments)
    kwargs = {name: _argument(builder, argument, match) for name, argument in new.kwargs.items()}
    return new.target, args, kwargs


def result_in(builder: OpBuilder, new: NewOp, match: Match) -> int:
    """The result of a new call, where it wants to run. One that is there already is not added again."""
    target, args, kwargs = call_of(builder, new, match)
    packet = target.overloadpacket.__name__
    if not new.after:
        op: Op = match[new.before] if new.before else match.op
        return builder.before(op, f"{match.op.name}_{packet}", target, args, **kwargs)
    maker = match.graph.producer(match[new.after])
    assert maker is not None
    name = f"{match.value(new.after).name}_{packet}_{len(builder.shared)}"
    key = (target, args, maker.id)
    if key not in builder.shared:
        builder.shared[key] = builder.after(maker, name, target, args, **kwargs)
    return builder.shared[key]


def _argument(builder: OpBuilder, template: Any, match: Match) -> Any:
    match template:
        case AnyTensor():
            return Ref(match[template.name])
        case Argument():
            return match[template.name]
        case NewOp():
            return Ref(result_in(builder, template, match))
    return template
