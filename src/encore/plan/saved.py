"""Plans on paper: what becomes of which values of which graph, by name, as versioned JSON.

A plan belongs to a graph. It is refused where the graph is another one, with the first lines in which they differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.codecs import CODECS
from encore.errors import PlanError, listed
from encore.graph import Graph
from encore.plan.plan import Plan
from encore.plan.stand_ins import can_move, code_bytes
from encore.schedule import Choice, Encoded, Offloaded, Stashed
from encore.schedule.stash import recurrent
from encore.whole_files import write_whole

VERSION = 3
READ = (1, 2, VERSION)
"""Layouts that can be read: the first knew recomputation alone, the second no tiers."""
SHOWN_LINES = 8
HOW_TO_SAVE = "save one with encore.report(model).plan.save(path)"


@dataclass(frozen=True)
class SavedCode:
    """A value that is held as a code."""

    value: str
    codec: str
    bytes: int
    """What the code may take."""


@dataclass(frozen=True)
class SavedStash:
    """A recurrent operator that keeps a state every so many steps, and no gates."""

    operator: str
    every: int


@dataclass(frozen=True)
class SavedOffload:
    """A value that goes to a tier, as its code where it is encoded."""

    value: str
    tier: str


@dataclass(frozen=True)
class GraphPlan:
    """The plan of one graph."""

    operators: tuple[str, ...]
    """The captured graph, a line an operator: what a plan is checked against."""
    recompute: tuple[str, ...]
    """Values that backward makes again, by name."""
    slices: int = 1
    """Parts that large heads are taken in."""
    encode: tuple[SavedCode, ...] = ()
    stash: tuple[SavedStash, ...] = ()
    offload: tuple[SavedOffload, ...] = ()
    gradients_of: tuple[str, ...] | None = None
    """The tangents that backward is planned for, by name; None for all."""

    @classmethod
    def of(cls, captured: Graph, plan: Plan) -> GraphPlan:
        graph, choice = plan.schedule.graph, plan.choice
        return cls(
            operators=describe(captured),
            recompute=tuple(graph.values[value].name for value in sorted(choice.recompute)),
            slices=plan.slices,
            encode=tuple(
                SavedCode(graph.values[one.value].name, one.codec, one.bytes) for one in sorted(choice.encode)
            ),
            stash=tuple(SavedStash(graph.values[one.output].name, one.every) for one in sorted(choice.stash)),
            offload=tuple(SavedOffload(graph.values[one.value].name, one.tier) for one in sorted(choice.offload)),
            gradients_of=tuple(captured.values[value].name for value in captured.tangents),
        )

    @property
    def fingerprint(self) -> str:
        """A name for the graph it belongs to."""
        return _digest(self.operators)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GraphPlan:
        told = json.loads(text)
        return cls(
            operators=tuple(told["operators"]),
            recompute=tuple(told["recompute"]),
            slices=int(told["slices"]),
            encode=tuple(SavedCode(one["value"], one["codec"], int(one["bytes"])) for one in told.get("encode", ())),
            stash=tuple(SavedStash(one["operator"], int(one["every"])) for one in told.get("stash", ())),
            offload=tuple(SavedOffload(one["value"], one["tier"]) for one in told.get("offload", ())),
            gradients_of=None if told.get("gradients_of") is None else tuple(map(str, told["gradients_of"])),
        )

    def choice(
        self, captured: Graph, rewritten: Graph, *, lossy: Collection[str] = (), tiers: Collection[str] = ()
    ) -> Choice:
        """What this plan does with the values of a graph; raises `PlanError` if it was made for another graph, or does
        something that cannot be done. Values that a rewrite has taken away have nothing left to decide."""
        found = describe(captured)
        if found != self.operators:
            raise PlanError(_difference(self.operators, found))
        numbers = {value.name: value.id for value in rewritten.values if value.producer is not None}
        return Choice(
            recompute=frozenset(numbers[name] for name in self.recompute if name in numbers),
            encode=frozenset(
                _encoded(rewritten, numbers[one.value], one, lossy) for one in self.encode if one.value in numbers
            ),
            stash=frozenset(_stashed(rewritten, one) for one in self.stash if one.operator in numbers),
            offload=frozenset(
                _offloaded(rewritten, numbers[one.value], one, tiers) for one in self.offload if one.value in numbers
            ),
        )


def _encoded(graph: Graph, value: int, told: SavedCode, lossy: Collection[str]) -> Encoded:
    codec = CODECS.get(told.codec)
    if codec is None:
        raise PlanError(
            f"the plan holds {told.value} as {told.codec!r}, which this Encore does not know; it has {listed(CODECS)}. "
            "Plan anew"
        )
    if not codec.lossless and told.codec not in lossy:
        raise PlanError(
            f"the plan holds {told.value} as {told.codec!r}, which loses something; say lossy={told.codec!r} if that "
            "is meant, or plan anew"
        )
    size = code_bytes(graph, value, codec, told.bytes)
    if size is None:
        it = graph.values[value]
        raise PlanError(f"{told.codec!r} cannot hold {told.value} ({it.dtype}, {list(it.shape)}); plan anew")
    return Encoded(value, told.codec, size)


def _offloaded(graph: Graph, value: int, told: SavedOffload, tiers: Collection[str]) -> Offloaded:
    if told.tier not in tiers:
        raise PlanError(f"the plan moves {told.value} to {told.tier!r}; say tiers={told.tier!r}, or plan anew")
    if not can_move(graph, value, told.tier):
        it = graph.values[value]
        raise PlanError(f"{told.value} ({it.dtype}, {list(it.shape)}) cannot go to {told.tier!r}; plan anew")
    return Offloaded(value, told.tier)


def _stashed(graph: Graph, told: SavedStash) -> Stashed:
    for one in recurrent(graph):
        if graph.values[one.output].name == told.operator and told.every >= 1:
            return Stashed(one.output, told.every)
    raise PlanError(
        f"the plan has the operator of {told.operator} keep a state every {told.every} steps, which it cannot; "
        "plan anew"
    )


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
        write_whole(path, self.to_json())

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
        if told["encore_plan"] not in READ:
            raise PlanError(
                f"{where} holds a plan of layout {told['encore_plan']}, this Encore reads layouts {listed(READ)}; "
                "plan anew"
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


def fingerprint(graph: Graph) -> str:
    """A name for a captured graph, the same as that of its plans."""
    return _digest(describe(graph))


def _digest(operators: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(operators).encode()).hexdigest()[:24]


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
