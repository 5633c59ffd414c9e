"""The input of the pipeline: one joint graph of a step, and facts about the step around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from encore.capture.unused_outputs import Used
from encore.compiler.fuse import Fusions
from encore.compiler.session import CapturedGraph, Session
from encore.graph import Graph
from encore.options import Options
from encore.plan import Plan


@dataclass(frozen=True, slots=True)
class Captured:
    """A joint graph to compile, for one set of gradients."""

    session: Session
    options: Options
    """Those of the session, with a percentage as budget in bytes, once the whole step is known."""
    name: str
    number: int
    """Its place among the graphs of the session."""
    joint: fx.GraphModule
    graph: Graph
    """The facts about `joint`."""
    used: Used
    """The gradients that backward is planned for."""
    primals: list[Any]
    """The tensors that the step was called with; none once the graph is compiled."""
    before: tuple[CapturedGraph, ...]
    """The graphs of the step up to this one."""
    break_reason: str
    """Why the graph ended before the model did; empty for the last one."""
    break_line: str
    lifted: bool
    """Whether recurrent layers were replaced by Encore's operators while it was traced."""
    notes: tuple[str, ...]
    """Why a promise may not hold for it."""
    calls: int = 0
    """How many of its calls share the budget of a step; 0 if one call of it is the step."""
    fusions: Fusions = field(default_factory=Fusions)
    """Those of its plans."""

    @property
    def exact(self) -> bool:
        """Whether results equal eager PyTorch's bit for bit."""
        return self.options.lowering == "eager"

    @property
    def runs(self) -> bool:
        """Whether the step runs. An estimate runs and measures nothing."""
        return self.session.runs

    @property
    def earlier(self) -> list[Plan]:
        """The plans of the step up to this graph."""
        return [graph.plan for graph in self.before]

    def share_of(self, bound: float) -> float:
        """The share of a bound on the gradient error that is this graph's. Errors in the input gradients of a graph
        reach the graphs before it, so shares add up: a half for the first graph of a step that breaks, a quarter for
        the second, and so on; the last gets the rest."""
        return bound * 0.5 ** (len(self.before) + bool(self.break_reason))
