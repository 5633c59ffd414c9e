"""What a graph is when the pipeline gets it: one joint graph of a step, with what is known of the step around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from encore.capture.unused_outputs import Used
from encore.compiler.session import CapturedGraph, Session
from encore.graph import Graph
from encore.options import Options
from encore.plan import Plan


@dataclass(frozen=True, slots=True)
class Captured:
    """A joint graph to compile, for one set of gradients."""

    session: Session
    options: Options
    """Those of the session, with a budget in bytes once the step is known that a percentage is of."""
    name: str
    number: int
    """Its place among the graphs of the session."""
    joint: fx.GraphModule
    graph: Graph
    """The facts about `joint`."""
    used: Used
    """The gradients that backward is planned for."""
    primals: Sequence[Any]
    """The tensors that the step was called with."""
    before: tuple[CapturedGraph, ...]
    """The graphs of the step up to this one."""
    break_reason: str
    """Why the graph ended before the model did; empty for the last one."""
    break_line: str
    lifted: bool
    """Were recurrent layers replaced by Encore's operators while it was traced?"""
    notes: tuple[str, ...]
    """Why a promise may not hold for it."""
    calls: int = 0
    """How many of its calls share the budget of a step; 0 if one call of it is the step."""

    @property
    def exact(self) -> bool:
        """Are results bit for bit those of eager PyTorch?"""
        return self.options.lowering == "eager"

    @property
    def runs(self) -> bool:
        """Does the step run? An estimate runs and measures nothing."""
        return self.session.runs

    @property
    def earlier(self) -> list[Plan]:
        """The plans of the step up to this graph."""
        return [graph.plan for graph in self.before]

    def share_of(self, bound: float) -> float:
        """What this graph may use of a bound on the gradient error. Errors of a later graph's input gradients pass on
        to earlier graphs, so shares add up: a half for the first graph of a step that breaks, a quarter for the second,
        and so on; the last takes what is left."""
        return bound * 0.5 ** (len(self.before) + bool(self.break_reason))
