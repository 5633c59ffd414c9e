"""Plans on paper: what becomes of which values of which graph, by name, as versioned JSON.

A plan belongs to a graph. It is rejected where the graph is another one, with the first lines in which they differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from encore.errors import PlanError, listed
from encore.fates import KINDS, Fate, Given, Link
from encore.graph import Graph
from encore.plan.plan import Plan
from encore.whole_files import write_whole

LOWERINGS = ("fused", "eager")
"""How a schedule can run; a plan belongs to one of them."""
VERSION = 3
READ = (1, 2, VERSION)
"""Layouts that can be read: the first knew recomputation alone, the second no tiers."""
SHOWN_LINES, SHOWN_LETTERS = 8, 80
MOST, MOST_SLICES, MOST_BYTES = 2**63 - 1, 2**16, 1 << 28
"""Of a number in a plan, of slices, and of a file: more than any plan has."""
HOW_TO_SAVE = "save one with encore.report(model).plan.save(path)"


Entry = str | Mapping[str, Any]
"""A value and its fate in a plan file: the value's name, or an object with the fields of the fate."""


@dataclass(frozen=True)
class GraphPlan:
    """The plan of one graph."""

    operators: tuple[str, ...]
    """The captured graph, a line an operator: what a plan is checked against."""
    fates: Mapping[str, Sequence[Entry]] = field(default_factory=dict)
    """What becomes of values that are not kept as they are, by kind."""
    slices: int = 1
    """Parts that large heads are taken in."""
    gradients_of: tuple[str, ...] | None = None
    """The tangents that backward is planned for, by name; None for all."""
    lean: bool = False
    """Whether the graph is rewritten for memory alone."""

    @classmethod
    def of(cls, captured: Graph, plan: Plan) -> GraphPlan:
        graph = plan.schedule.graph
        entries: dict[str, list[Entry]] = {kind: [] for kind in KINDS}
        for fate in sorted(plan.fates, key=lambda fate: fate.value):
            for one in (fate, *fate.also):
                entries[one.kind].append(_entry(graph, one))
        return cls(
            operators=describe(captured),
            fates={kind: tuple(found) for kind, found in entries.items()},
            slices=plan.slices,
            gradients_of=tuple(captured.values[value].name for value in captured.tangents),
            lean=plan.lean,
        )

    @property
    def fingerprint(self) -> str:
        """A name for the graph it belongs to."""
        return _digest(self.operators)

    def as_data(self) -> dict[str, Any]:
        """What its JSON has."""
        data = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {"operators": data.pop("operators"), **data.pop("fates"), **data}

    def to_json(self) -> str:
        return json.dumps(self.as_data())

    @classmethod
    def from_json(cls, text: str) -> GraphPlan:
        """Read what `to_json` wrote."""
        return cls.parse(json.loads(text), "the plan")

    @classmethod
    def parse(cls, data: Any, where: str) -> GraphPlan:
        """Check and read the fields of one graph's plan."""
        read = Fields(data, where, {"operators", *KINDS, "slices", "gradients_of", "lean"})
        gradients_of = None if data.get("gradients_of") is None else read.names("gradients_of")
        return cls(
            operators=read.names("operators"),
            fates={name: read.entries(kind) for name, kind in KINDS.items()},
            slices=read.count("slices", least=1, most=MOST_SLICES),
            gradients_of=gradients_of,
            lean=read.flag("lean") if "lean" in data else False,
        )

    def fates_in(
        self,
        captured: Graph,
        rewritten: Graph,
        *,
        lossy: Collection[str] = (),
        links: Mapping[str, Link] | None = None,
        made_here: bool = False,
    ) -> frozenset[Fate]:
        """The fates of the values of a graph; raises `PlanError` if the plan was made for another graph, or does
        something that cannot be done. Values that a rewrite has removed are left out. A plan of another process of the
        same run (`made_here`) may name values of rewrites that this process did without."""
        found = describe(captured)
        if found != self.operators:
            raise PlanError(_difference(self.operators, found))
        # A rewrite may use one name in both phases; decisions are about the value of forward.
        made = [value for value in rewritten.values if value.producer is not None]
        made.sort(key=lambda value: value.producer is not None and rewritten.ops[value.producer].forward)
        numbers = {value.name: value.id for value in made}
        if not made_here:
            tangents = {captured.values[value].name for value in captured.tangents}
            self._check_names({value.name for value in captured.values}.union(numbers), tangents)
        self._check_values(rewritten, numbers)
        fates: dict[tuple[bool, int], Fate] = {}
        for name, kind in KINDS.items():
            for entry in self.fates.get(name, ()):
                value = numbers.get(_subject(kind, entry))
                if value is not None:
                    given = Given(lossy, links or {}, fates.get((kind.in_place, value)))
                    fields = entry if isinstance(entry, Mapping) else {}
                    fates[kind.in_place, value] = kind.read(rewritten, value, fields, given)
        return frozenset(fates.values())

    def _named(self) -> dict[str, list[str]]:
        """The values that are decided on, by what becomes of them."""
        return {name: [_subject(kind, one) for one in self.fates.get(name, ())] for name, kind in KINDS.items()}

    def _check_names(self, known: Collection[str], tangents: Collection[str]) -> None:
        named = {**self._named(), "gradients_of": list(self.gradients_of or ())}
        for kind, names in named.items():
            unknown = sorted(set(names).difference(tangents if kind == "gradients_of" else known))
            if unknown:
                raise PlanError(
                    f"the plan names {listed(unknown[:SHOWN_LINES])} in {kind!r}, which the graph does not have: it "
                    "was changed by hand, or made with other passes (skip=) or on another machine; plan anew"
                )

    def _check_values(self, graph: Graph, numbers: Mapping[str, int]) -> None:
        """Every value has one fate, of a kind that it can have."""
        named = self._named()
        twice = [name for names in named.values() for name, count in Counter(names).items() if count > 1]
        restored = [kind for kind in KINDS.values() if not kind.in_place]
        for one, other in itertools.combinations(restored, 2):
            if one.kind not in other.joins and other.kind not in one.joins:
                twice += sorted(set(named[one.kind]).intersection(named[other.kind]))
        if twice:
            raise PlanError(f"the plan decides twice on {listed(twice[:SHOWN_LINES])}; keep one decision, or plan anew")
        for name, kind in KINDS.items():
            allowed = kind.allowed_values(graph)
            wrong = [one for one in named[name] if one in numbers and numbers[one] not in allowed]
            if wrong:
                raise PlanError(
                    f"the plan has {listed(wrong[:SHOWN_LINES])} in {name!r}, which cannot be done: a value of "
                    "backward, an output, a view, or an operator that must run once; remove it there, or plan anew"
                )


def _entry(graph: Graph, fate: Fate) -> Entry:
    name = graph.values[fate.value].name
    if not fate.fields:
        return name
    subject, *others = fate.fields
    return {subject: name, **{field: getattr(fate, field) for field in others}}


def _subject(kind: type[Fate], entry: Entry) -> str:
    """The name of the value that an entry is about."""
    return entry if isinstance(entry, str) else str(entry[next(iter(kind.fields))])


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
        graphs = [graph.as_data() for graph in self.graphs]
        return json.dumps({"encore_plan": VERSION, "lowering": self.lowering, "graphs": graphs}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write it as JSON; the file is there whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> SavedPlan:
        """Read what `save` wrote; raises `PlanError` for anything else."""
        try:
            data = json.loads(_text(Path(path)), object_pairs_hook=_object, parse_constant=_constant)
        except RecursionError as error:
            raise PlanError(f"no plan can be read from {path}: it is nested too deeply; {HOW_TO_SAVE}") from error
        except (OSError, ValueError) as error:
            raise PlanError(f"no plan can be read from {path}: {error}; {HOW_TO_SAVE}") from error
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: Any, where: str) -> SavedPlan:
        """Check and read a plan that was JSON."""
        if not isinstance(data, dict) or "encore_plan" not in data:
            raise PlanError(f"{where} does not hold a plan; {HOW_TO_SAVE}")
        layout = data["encore_plan"]
        if type(layout) is not int or layout not in READ:
            raise PlanError(
                f"{where} holds a plan of layout {_shown(layout)}, this Encore reads layouts {listed(READ)}; plan anew"
            )
        read = Fields(data, f"{where}: the plan", {"encore_plan", "lowering", "graphs"})
        lowering = read.name("lowering")
        if lowering not in LOWERINGS:
            raise PlanError(
                f"{where} holds a plan for lowering={_shown(lowering)}; it can be {listed(LOWERINGS)}. Plan anew"
            )
        graphs = enumerate(read.items("graphs"))
        return cls(lowering, tuple(GraphPlan.parse(one, f"{where}: graphs[{number}]") for number, one in graphs))


class Fields:
    """The fields of a JSON object, read with checks. Every message names the field."""

    def __init__(self, data: Any, where: str, known: Collection[str]) -> None:
        self.where = where
        if not isinstance(data, dict):
            raise PlanError(f"{where} is {_shown(data)}, not an object; plan anew")
        self.data = data
        unknown = set(data).difference(known)
        if unknown:
            raise PlanError(
                f"{where} has unknown fields {_shown(sorted(unknown))}; there are {listed(known)}. Plan anew"
            )

    def _get(self, field: str) -> Any:
        if field not in self.data:
            raise PlanError(f"{self.where} is damaged: {field!r} is missing; plan anew")
        return self.data[field]

    def _wrong(self, field: str, value: Any, wanted: str) -> PlanError:
        return PlanError(f"{self.where} is damaged: {field!r} is {_shown(value)}, not {wanted}; plan anew")

    def name(self, field: str) -> str:
        value = self._get(field)
        if not isinstance(value, str):
            raise self._wrong(field, value, "a name")
        return value

    def flag(self, field: str) -> bool:
        value = self._get(field)
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def count(self, field: str, *, least: int, most: int = MOST) -> int:
        value = self._get(field)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(field, value, f"a whole number from {least} to {most}")
        return value

    def items(self, field: str) -> list[Any]:
        value = self._get(field)
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        return value

    def names(self, field: str) -> tuple[str, ...]:
        values = self.items(field)
        for value in values:
            if not isinstance(value, str):
                raise self._wrong(field, value, "a list of names")
        return tuple(values)

    def entries(self, kind: type[Fate]) -> Sequence[Entry]:
        """The list of a kind of fates; older layouts do not have all."""
        if not kind.fields:
            return self.names(kind.kind)
        found: list[Entry] = []
        for number, one in enumerate(self.items(kind.kind) if kind.kind in self.data else ()):
            read = Fields(one, f"{self.where}.{kind.kind}[{number}]", kind.fields)
            typed = kind.fields.items()
            found.append(
                {name: read.name(name) if wanted is str else read.count(name, least=1) for name, wanted in typed}
            )
        return tuple(found)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return content.decode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"{_shown(twice[0])} stands twice in one object")
    return data


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that a plan can have")


def _shown(value: Any) -> str:
    """A value for a message, in a line of bounded length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists in lists in lists
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."


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
