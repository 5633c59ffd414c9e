"""The instructions of a schedule. Each docstring reads one aloud."""

from __future__ import annotations

from dataclasses import dataclass

from encore.graph import Graph
from encore.schedule.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Run:
    """Run operator `op`; where `over` is set, write its result over the memory of that dying operand."""

    op: int
    over: int | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """Run `ops` as one kernel: it is given `reads` and leaves `writes`; what lives only inside gets no memory. Each
    pair in `over` is a written value and the dying operand whose memory it takes."""

    ops: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    over: tuple[tuple[int, int], ...]
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Store:
    """Begin operator `op`, which puts its operand into a tier. The operand must stay as it is until a `Wait`."""

    op: int


@dataclass(frozen=True, slots=True)
class Load:
    """Begin operator `op`, which brings a value back from a tier: it has memory now, and its bytes at a `Wait`."""

    op: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the transfer that operator `op` began is over."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Forget `value`: its memory goes back once no other name looks at it."""

    value: int


Action = Run | Fused | Store | Load | Wait | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: forward starts from the primals and leaves outputs and `saved`; backward starts from `saved` and the
    tangents and leaves the gradients. The same operator may run in both."""

    graph: Graph
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    saved: tuple[int, ...]

    def describe(self) -> str:
        """The streams as text, a line an action: for eyes and golden tests."""
        lines = []
        for phase, actions in (("forward", self.forward), ("backward", self.backward)):
            lines.append(f"{phase}:")
            lines += [f"  {self._aloud(action)}" for action in actions]
        saved = ", ".join(self.graph.values[value].name for value in self.saved)
        return "\n".join([*lines, f"saved: {saved}"])

    def _aloud(self, action: Action) -> str:
        names = self.graph.values
        if isinstance(action, Free):
            return f"free {names[action.value].name}"
        if isinstance(action, Fused):
            inside = " ".join(self.graph.ops[op].name for op in action.ops)
            left = ", ".join(names[value].name for value in action.writes)
            over = "".join(f", {names[new].name} over {names[old].name}" for new, old in action.over)
            return f"fuse [{inside}] -> {left}{over}"
        op = self.graph.ops[action.op]
        if not isinstance(action, Run):
            return f"{type(action).__name__.lower()} {op.name}"
        operands = ", ".join(names[value].name for value in op.reads)
        over = "" if action.over is None else f" over {names[action.over].name}"
        return f"run {op.name}({operands}){over}"
