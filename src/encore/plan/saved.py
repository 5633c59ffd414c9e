"""Plans on paper: which values of which graph are recomputed, by name, as versioned JSON.

A plan belongs to a graph. It is refused where the graph is another one, with the first lines in which they differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.errors import PlanError
from encore.graph import Graph
from encore.plan.plan import Plan

VERSION = 1
SHOWN_LINES = 8
HOW_TO_SAVE = "save one with encore.report(model).plan.save(path)"


@dataclass(frozen=True)
class GraphPlan:
    """The plan of one graph."""

    operators: tuple[str, ...]
    """The captured graph, a line an operator: what a plan is checked against."""
    recompute: tuple[str, ...]
    """Values that backward makes again, by name."""
    slices: int = 1
    """Parts that large heads are taken in."""

    @classmethod
    def of(cls, captured: Graph, plan: Plan) -> GraphPlan:
        names = plan.schedule.graph.values
        return cls(describe(captured), tuple(names[value].name for value in sorted(plan.dropped)), plan.slices)

    @property
    def fingerprint(self) -> str:
        """A name for the graph it belongs to."""
        return hashlib.sha256("\n".join(self.operators).encode()).hexdigest()[:24]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GraphPlan:
        told = json.loads(text)
        return cls(tuple(told["operators"]), tuple(told["recompute"]), int(told["slices"]))

    def dropped(self, captured: Graph, rewritten: Graph) -> frozenset[int]:
        """The values of a graph that this plan recomputes; raises `PlanError` if it was made for another graph.
        Values that a rewrite has taken away have nothing left to recompute."""
        found = describe(captured)
        if found != self.operators:
            raise PlanError(_difference(self.operators, found))
        numbers = {value.name: value.id for value in rewritten.values if value.producer is not None}
        return frozenset(numbers[name] for name in self.recompute if name in numbers)


@dataclass(frozen=True)
class SavedPlan:
    """The plans of a model's graphs, in the order in which they were captured."""

    lowering: str
    graphs: tuple[GraphPlan, ...]

    def of_graph(self, number: int) -> GraphPlan:
        """The plan of the graph that is captured at this place."""
        if number >= len(self.graphs):
            raise PlanError(f"the plan is for {len(self.graphs)} graphs, the model has more; plan anew")
        return self.graphs[number]

    def to_json(self) -> str:
        return json.dumps({"encore_plan": VERSION, **dataclasses.asdict(self)}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write it as JSON; the file is there whole or not at all."""
        target = Path(path)
        beside = target.with_name(f"{target.name}.part")
        beside.write_text(self.to_json())
        beside.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> SavedPlan:
        """Read what `save` wrote; raises `PlanError` for anything else."""
        try:
            told = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise PlanError(f"no plan can be read from {path}: {error}; {HOW_TO_SAVE}") from error
        return cls.parse(told, str(path))

    @classmethod
    def parse(cls, told: Any, where: str) -> SavedPlan:
        if not isinstance(told, Mapping) or "encore_plan" not in told:
            raise PlanError(f"{where} does not hold a plan; {HOW_TO_SAVE}")
        if told["encore_plan"] != VERSION:
            raise PlanError(
                f"{where} holds a plan of layout {told['encore_plan']}, this Encore reads layout {VERSION}; plan anew"
            )
        try:
            graphs = tuple(GraphPlan.from_json(json.dumps(graph)) for graph in told["graphs"])
            return cls(str(told["lowering"]), graphs)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{where} holds a damaged plan ({error!r} is missing or misplaced); plan anew") from error


def describe(graph: Graph) -> tuple[str, ...]:
    """The graph as text: operators, what they read, the shapes they make."""
    lines = []
    for op in graph.ops:
        reads = ", ".join(graph.values[value].name for value in op.reads)
        shapes = ", ".join(str(list(graph.values[value].shape)) for value in op.writes if value is not None)
        lines.append(f"{op.name} = {op.target}({reads}) -> {shapes}")
    return tuple(lines)


def _difference(planned: tuple[str, ...], found: tuple[str, ...]) -> str:
    changed = [
        line
        for line in difflib.unified_diff(planned, found, lineterm="", n=0)
        if line[:1] in "+-" and not line.startswith(("+++", "---"))
    ]
    more = f"\n  ... and {len(changed) - SHOWN_LINES} more lines" if len(changed) > SHOWN_LINES else ""
    return (
        f"the plan was made for another graph ({len(planned)} operators, here {len(found)}); plan anew. "
        "It differs ('-' planned, '+' here):\n" + "\n".join(f"  {line}" for line in changed[:SHOWN_LINES]) + more
    )
