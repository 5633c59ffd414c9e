"""Plans on paper: what becomes of which values of which graph, by name, as versioned JSON.

A plan belongs to a graph. It is refused where the graph is another one, with the first lines in which they differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from encore.codecs import CODECS
from encore.errors import PlanError, listed
from encore.graph import Graph
from encore.plan.plan import Plan
from encore.plan.stand_ins import can_move, code_bytes
from encore.schedule import Choice, Encoded, Offloaded, Stashed
from encore.schedule.recompute import owned, recomputable
from encore.schedule.stash import recurrent
from encore.whole_files import write_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LOWERINGS = ("fused", "eager")
"""How a schedule can run; a plan belongs to one of them."""
VERSION = 3
READ = (1, 2, VERSION)
"""Layouts that can be read: the first knew recomputation alone, the second no tiers."""
SHOWN_LINES, SHOWN_LETTERS = 8, 80
MOST, MOST_SLICES, MOST_BYTES = 2**63 - 1, 2**16, 1 << 28
"""Of a number in a plan, of slices, and of a file: more than any plan has."""
SMALL_CODE = 4096
"""A code may be larger than its value by its header and padding."""
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
    lean: bool = False
    """Is the graph rewritten for memory alone?"""

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
            lean=plan.lean,
        )

    @property
    def fingerprint(self) -> str:
        """A name for the graph it belongs to."""
        return _digest(self.operators)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GraphPlan:
        """Read what `to_json` wrote."""
        return cls.parse(json.loads(text), "the plan")

    @classmethod
    def parse(cls, told: Any, where: str) -> GraphPlan:
        """Check and read the fields of one graph's plan."""
        read = Fields(told, where, cls)
        gradients_of = None if told.get("gradients_of") is None else read.names("gradients_of")
        return cls(
            operators=read.names("operators"),
            recompute=read.names("recompute"),
            slices=read.count("slices", least=1, most=MOST_SLICES),
            encode=tuple(
                SavedCode(one.name("value"), one.name("codec"), one.count("bytes", least=1))
                for one in read.each("encode", SavedCode)
            ),
            stash=tuple(
                SavedStash(one.name("operator"), one.count("every", least=1)) for one in read.each("stash", SavedStash)
            ),
            offload=tuple(
                SavedOffload(one.name("value"), one.name("tier")) for one in read.each("offload", SavedOffload)
            ),
            gradients_of=gradients_of,
            lean=read.flag("lean") if "lean" in told else False,
        )

    def choice(
        self,
        captured: Graph,
        rewritten: Graph,
        *,
        lossy: Collection[str] = (),
        tiers: Collection[str] = (),
        made_here: bool = False,
    ) -> Choice:
        """What this plan does with the values of a graph; raises `PlanError` if it was made for another graph, or does
        something that cannot be done. Values that a rewrite has taken away have nothing left to decide. A plan of
        another process of the same run (`made_here`) may name values of rewrites that this process did without."""
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

    def _named(self) -> dict[str, list[str]]:
        """The values that are decided on, by what becomes of them."""
        return {
            "recompute": list(self.recompute),
            "encode": [one.value for one in self.encode],
            "stash": [one.operator for one in self.stash],
            "offload": [one.value for one in self.offload],
        }

    def _check_names(self, known: Collection[str], tangents: Collection[str]) -> None:
        named = {**self._named(), "gradients_of": list(self.gradients_of or ())}
        for field, names in named.items():
            unknown = sorted(set(names).difference(tangents if field == "gradients_of" else known))
            if unknown:
                raise PlanError(
                    f"the plan names {listed(unknown[:SHOWN_LINES])} in {field!r}, which the graph does not have: it "
                    "was changed by hand, or made with other passes (skip=) or on another machine; plan anew"
                )

    def _check_values(self, graph: Graph, numbers: Mapping[str, int]) -> None:
        """What forward lets go must be its own, and come back in one way."""
        named = self._named()
        twice = [name for names in named.values() for name, count in Counter(names).items() if count > 1]
        twice += sorted(set(named["recompute"]).intersection((*named["encode"], *named["offload"])))
        if twice:
            raise PlanError(f"the plan decides twice on {listed(twice[:SHOWN_LINES])}; keep one decision, or plan anew")
        ours = owned(graph)
        may = {"recompute": recomputable(graph), "encode": ours, "offload": ours}
        for field, values in may.items():
            wrong = [name for name in named[field] if name in numbers and numbers[name] not in values]
            if wrong:
                raise PlanError(
                    f"the plan has {listed(wrong[:SHOWN_LINES])} in {field!r}, which cannot be done: a value of "
                    "backward, an output, a view, or an operator that must run once; remove it there, or plan anew"
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
    if size > 2 * graph.values[value].bytes + SMALL_CODE:
        raise PlanError(
            f"the plan has {told.bytes} bytes for the code of {told.value}, which takes {graph.values[value].bytes} "
            "itself; plan anew"
        )
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
        if graph.values[one.output].name == told.operator and 1 <= told.every <= one.steps(graph):
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
            told = json.loads(_text(Path(path)), object_pairs_hook=_object, parse_constant=_constant)
        except RecursionError as error:
            raise PlanError(f"no plan can be read from {path}: it is nested too deeply; {HOW_TO_SAVE}") from error
        except (OSError, ValueError) as error:
            raise PlanError(f"no plan can be read from {path}: {error}; {HOW_TO_SAVE}") from error
        return cls.parse(told, str(path))

    @classmethod
    def parse(cls, told: Any, where: str) -> SavedPlan:
        """Check and read a plan that was JSON."""
        if not isinstance(told, dict) or "encore_plan" not in told:
            raise PlanError(f"{where} does not hold a plan; {HOW_TO_SAVE}")
        layout = told["encore_plan"]
        if type(layout) is not int or layout not in READ:
            raise PlanError(
                f"{where} holds a plan of layout {_shown(layout)}, this Encore reads layouts {listed(READ)}; plan anew"
            )
        read = Fields({name: told[name] for name in told if name != "encore_plan"}, f"{where}: the plan", cls)
        lowering = read.name("lowering")
        if lowering not in LOWERINGS:
            raise PlanError(
                f"{where} holds a plan for lowering={_shown(lowering)}; it can be {listed(LOWERINGS)}. Plan anew"
            )
        graphs = enumerate(read.items("graphs"))
        return cls(lowering, tuple(GraphPlan.parse(one, f"{where}: graphs[{number}]") for number, one in graphs))


class Fields:
    """The fields of a JSON object, read with the checks that their class wants. Every complaint names the field."""

    def __init__(self, told: Any, where: str, kind: type[DataclassInstance]) -> None:
        self.where = where
        if not isinstance(told, dict):
            raise PlanError(f"{where} is {_shown(told)}, not an object; plan anew")
        self.told = told
        known = {field.name for field in dataclasses.fields(kind)}
        unknown = set(told).difference(known)
        if unknown:
            raise PlanError(
                f"{where} has unknown fields {_shown(sorted(unknown))}; there are {listed(known)}. Plan anew"
            )

    def _get(self, field: str) -> Any:
        if field not in self.told:
            raise PlanError(f"{self.where} is damaged: {field!r} is missing; plan anew")
        return self.told[field]

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

    def each(self, field: str, kind: type[DataclassInstance]) -> list[Fields]:
        """The objects of a list, which older layouts do not have."""
        if field not in self.told:
            return []
        return [Fields(one, f"{self.where}.{field}[{number}]", kind) for number, one in enumerate(self.items(field))]


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return content.decode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    told = dict(pairs)
    if len(told) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"{_shown(twice[0])} stands twice in one object")
    return told


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
