"""What has been compiled for one model, and which of it a step really ran."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from encore.checking import checks_enabled
from encore.compiler.bypass import BypassWatch
from encore.compiler.known_structures import KnownStructures
from encore.compiler.lossy_check import LossyCheck
from encore.compiler.plain_saves import PlainSaves
from encore.compiler.step import StepPlanner
from encore.compiler.watch import CodeWatch
from encore.cost import LinkLessons, ScaledSeconds, Seconds, Workspaces, assumed_link, known_link, link_to
from encore.devices import is_here
from encore.fates import Link
from encore.lower import Transport
from encore.options import Options, tier_name
from encore.plan import Candidate, Plan
from encore.plan.goal import Footprint
from encore.tiers import FOR_STEPS, Tier
from encore.tiers.disk import default_folder

if TYPE_CHECKING:
    from encore.compiler.sharded import ShardedModel

Arguments = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A callable, and what it is called with."""


class Mode(enum.Enum):
    """What graphs are compiled for."""

    RUN = "run"
    """Steps run; operators are measured."""
    ESTIMATE = "estimate"
    """Nothing runs and nothing is measured: tensors have shapes and no memory."""


@dataclass(slots=True)
class CapturedGraph:
    """One graph of a model (a model that breaks has several), with its plan."""

    name: str
    unplanned: Plan
    plan: Plan
    limit: int | None = None
    """The budget in bytes that the plan was chosen for."""
    footprint: Footprint | None = None
    """What that budget bounds instead of allocated bytes."""
    break_reason: str = ""
    """Why the graph ended before the model did; empty for the last one."""
    break_line: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    """First-step time by stage."""
    sources: tuple[str, str] = ("", "")
    """The Python that runs: forward, backward."""
    rewrites: tuple[str, ...] = ()
    """Passes that changed the graph."""
    kernels_compiled: int = 0
    """How many of its kernels were neither in memory nor on disk."""
    offers: tuple[Candidate, ...] = ()
    """The plans there are to pick from; an estimate keeps them."""
    watches: tuple[CodeWatch, ...] = ()
    """What looks at codes that can surprise, while the step runs."""
    choices: tuple[tuple[int, float], ...] = ()
    """What there was to pick from, as numbers: the step peak and the overhead of every offer."""
    stalled: dict[str, float] = field(default_factory=dict)
    """Seconds that forward and backward have stood still for transfers, when they last ran."""
    notes: tuple[str, ...] = ()
    """Why a promise may not hold for it."""
    lossy_check: LossyCheck | None = None
    """What measures the gradient error of its lossy codecs, if it has some."""
    lessons: LinkLessons | None = None
    """What looks at the first steps, if they move feature maps."""

    def seconds_of_first(self, stage: str, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run, and take the time if this stage has none yet."""
        if stage in self.seconds:
            return run(args)
        started = time.perf_counter()
        result = run(args)
        self.seconds[stage] = time.perf_counter() - started
        return result


@dataclass(slots=True)
class PlainGraph:
    """A graph that runs as plain PyTorch, and why."""

    name: str
    reason: str


class _StepClock:
    """Numbers steps across sessions: the first forward after a backward begins a new one."""

    def __init__(self) -> None:
        self.step = 0
        self.backward_began = False

    def forward(self) -> int:
        if self.backward_began:
            self.step += 1
            self.backward_began = False
        return self.step


def _nothing() -> None:
    pass


_births = itertools.count()
_clock = _StepClock()


class Session:
    """The compiled graphs of one model. Each forward notes itself, so that the report knows what makes up a step."""

    on_first_batch: Callable[[Session, Arguments], None] | None = None
    """What the first batch is needed for before the training begins."""
    sharded: ShardedModel | None = None
    """What FSDP2 shards of the model, if it does; known once it has been called."""
    gathers = False
    """Whether parameters are only there while they are used."""
    begins_with_root = False
    """Whether a step begins with a module around those that are compiled, which says so."""
    checking = False
    """Whether a check runs the graphs now, and not the user."""
    packs = False
    """Whether a packed sequence has been captured."""

    def __init__(self, name: str, options: Options, *, mode: Mode = Mode.RUN, one_graph: bool = False) -> None:
        self.name = name
        self.mode = mode
        self.one_graph = one_graph
        """`torch.compile` does not say which model a graph belongs to: each has a session of its own."""
        self.options = options
        self.checks = self.runs and checks_enabled()
        """Whether every graph is checked: see `encore.checking`."""
        self.graphs_keep_symbols: list[bool] = []
        """For each graph that was captured, whether it serves all sizes of what was to be traced with symbols."""
        self._outside = 0
        self.workspaces = Workspaces(run=self.runs)
        self.seconds = Seconds(run=self.runs)
        self.scaled_seconds = ScaledSeconds(self.seconds)  # of graphs whose plans are carried over
        self.structures = KnownStructures()  # what was decided for the structures of its graphs
        self._graphs: dict[int, CapturedGraph] = {}  # by number, in the order in which they were captured
        self.captured_so_far = 0
        """How many graphs have been captured, those that were dropped since included."""
        self._runners: dict[int, int] = {}  # the numbers by which programs know the graphs
        self._droppers: dict[int, Callable[[], None]] = {}  # what drops a graph that is one of several sizes
        self._filed: list[int] = []  # where the numbers of graphs go that are captured now
        self.plain: list[PlainGraph] = []
        self.tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        """Parameters of the graphs, by `id`."""
        self.forwards_run = 0
        self.waiting_since: float | None = None
        """When the user's code, or Dynamo tracing it, took over: what comes next was waited for since then."""
        self.gradients_seen: dict[tuple[Any, ...], frozenset[int]] = {}
        """For each graph of a step, by its place and the kinds of its outputs: those that backwards gave gradients for,
        by number. It is the same for inputs of other sizes."""
        self.learns_gradients = True
        """Whether the backwards that run now belong to training."""
        self.sent_tangents: dict[str, list[torch.Tensor]] = {}
        """By fingerprint of a graph that is to be planned again: the gradients that its outputs were sent."""
        self.excesses = collections.Counter[str]()
        """By fingerprint of a graph: how often its lossy codecs have exceeded their bound."""
        self.plan_again = False
        """Whether the next call is planned anew."""
        self.bypass: BypassWatch | None = None
        """What warns if the model is trained without its plans."""
        self.calls = 0
        """Calls with gradients enabled."""
        self.why_plain = ""
        """Why calls that lead to gradients ran as plain PyTorch, if any did."""
        self._calls_running = 0
        self.started: Arguments | None = None
        """The call of the model that runs, with its arguments, until a graph of it has been captured."""
        self.born = next(_births)
        self.last_step_number = -1
        self._step: list[CapturedGraph] = []
        self._largest_steps: dict[int, int] = {}
        """By number of graphs: the bytes that so many graphs of a step take unplanned, at most."""
        self._lock = threading.Lock()
        self.step = StepPlanner(self)
        self.plain_saves = PlainSaves(lambda: self.transports)
        """The hooks that plain code between the graphs saves through, where the budget needs it."""
        self.codes: frozenset[CodeType] = frozenset()
        """The code of the model, by which a graph of all of it is known."""
        sessions.add(self)

    @property
    def graphs(self) -> list[CapturedGraph]:
        """The graphs that are kept, each with its latest plan."""
        return list(self._graphs.values())

    def add(self, graph: CapturedGraph, runner: int) -> int:
        """Add a graph that was captured, and the number of its runner; return the number of the graph."""
        number = self.captured_so_far
        self.captured_so_far += 1
        self._graphs[number], self._runners[number] = graph, runner
        self._filed.append(number)
        return number

    def when_dropped(self, number: int, drop: Callable[[], None]) -> None:
        """Call a function when a graph is dropped."""
        self._droppers[number] = drop

    def replan(self, number: int, graph: CapturedGraph) -> None:
        """Note another plan of a graph, if it has not been dropped."""
        if number in self._graphs:
            self._graphs[number] = graph

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop graphs, and the plans of steps that call them."""
        for number in numbers:
            self._graphs.pop(number, None)
            self._droppers.pop(number, _nothing)()
        self.step.forget({self._runners.pop(number) for number in numbers if number in self._runners})

    @contextlib.contextmanager
    def filing_graphs(self, numbers: list[int]) -> Iterator[None]:
        """Add the numbers of graphs that are captured inside to a list."""
        before, self._filed = self._filed, numbers
        try:
            yield
        finally:
            self._filed = before

    @property
    def runs(self) -> bool:
        """Return whether steps run."""
        return self.mode is Mode.RUN

    @functools.cached_property
    def transports(self) -> dict[str, Transport]:
        """The tiers that feature maps may go to, opened, by name; they are freed with their last user."""
        opened = [tier if isinstance(tier, Tier) else FOR_STEPS[tier]() for tier in self._useful_tiers()]
        return {tier.name: Transport(tier) for tier in opened}

    @functools.cached_property
    def links(self) -> dict[str, Link]:
        """How fast the way to each of them is."""
        if self.runs:
            return {name: link_to(transport.tier) for name, transport in self.transports.items()}
        places = {
            tier_name(tier): str(default_folder()) if tier == "disk" else getattr(tier, "place", "")
            for tier in self._useful_tiers()
        }
        return {name: known_link(name, place) or assumed_link() for name, place in places.items()}

    def _useful_tiers(self) -> list[str | Tier]:
        """Without a GPU, host memory is where feature maps are already."""
        return [tier for tier in self.options.tiers if tier_name(tier) != "host" or is_here("cuda")]

    @property
    def waited(self) -> float:
        """Seconds that steps have stood still for tiers so far."""
        opened: dict[str, Transport] = self.__dict__.get("transports", {})
        return sum(transport.waited for transport in opened.values())

    def begin_call(self) -> None:
        """The user calls the model: a step begins."""
        if self.checking:
            return
        self.step.begin()
        self._step = []
        self.waiting_since = time.perf_counter()

    @contextlib.contextmanager
    def planned_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """The user calls the model, or a part of it that is compiled by itself, within a call of the model."""
        if self.bypass is not None:
            self.bypass.stop()
        if self._calls_running == 0 and self.on_first_batch is not None:
            self.on_first_batch(self, (call, args, kwargs))
            self.on_first_batch = None
        if self._calls_running == 0 and not self.begins_with_root:
            self.begin_call()
            self.started = (call, args, kwargs)
        self.calls += 1
        self._calls_running += 1
        try:
            yield
        finally:
            self._calls_running -= 1
            if not self._calls_running:
                self.started = None

    @property
    def is_called(self) -> bool:
        """Return whether a call of the model runs or is traced."""
        return self._calls_running > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """A copy of a model is compiled by itself, with the same options."""
        copied = Session(self.name, self.options)
        copied.on_first_batch = self.on_first_batch
        return copied

    def is_whole(self, traced: Sequence[CodeType]) -> bool:
        """Return whether a graph that was traced from this code, the outermost first, is all of the model."""
        if self.gathers:
            return False
        return self.one_graph or not self.codes or not traced or traced[0] in self.codes

    def note_forward(self, graph: CapturedGraph) -> None:
        if self.checking:
            return
        with self._lock:
            self._step.append(graph)
            self.forwards_run += 1
            self.last_step_number = _clock.forward()

    def count_outside(self, size: int) -> None:
        """Packing allocates these bytes outside of all graphs: they count as resident from now on."""
        if size > self._outside:
            self.options = dataclasses.replace(self.options, resident=self.options.resident + size - self._outside)
            self._outside = size

    @property
    def packed_bytes(self) -> int:
        """Bytes that packing allocates in a step, which count as resident."""
        return self._outside

    def note_backward(self) -> None:
        if self.checking:
            return
        self.step.backward_runs()
        _clock.backward_began = True

    def plans_of_step_so_far(self) -> list[Plan]:
        """The plans that the running step has been through when its next graph is planned."""
        return [graph.plan for graph in self._step]

    def graphs_of_step_so_far(self) -> list[CapturedGraph]:
        """The graphs that the running step has been through when its next graph is planned."""
        return list(self._step)

    def graphs_before(self, graph: CapturedGraph) -> list[CapturedGraph]:
        """The graphs of the latest step up to this graph."""
        names = [other.name for other in self._step]
        return self._step[: names.index(graph.name) if graph.name in names else 0]

    def largest_step(self, graphs: int) -> int:
        """The largest number of bytes that the first `graphs` graphs of a planned step would have taken unplanned."""
        return max((session._largest_steps.get(graphs, 0) for session in self._of_this_model()), default=0)

    def note_step(self, graphs: int, unplanned: int) -> None:
        """Note the bytes that the first `graphs` graphs of a step take unplanned, now that they are planned."""
        self._largest_steps[graphs] = max(unplanned, self._largest_steps.get(graphs, 0))

    def _of_this_model(self) -> list[Session]:
        """This session; through `torch.compile`, those of all shapes: graphs with the same parameters and options."""
        if not self.one_graph:
            return [self]
        parameters = {number for number, reference in self.tensors.items() if reference() is not None}
        alike = (session for session in sessions if session.one_graph and session.options == self.options)
        return [session for session in alike if session.owns_any(parameters)]

    @contextlib.contextmanager
    def learning_nothing(self) -> Iterator[None]:
        """Backwards that run inside are no training steps: later ones are not planned by the gradients they had."""
        self.learns_gradients = False
        try:
            yield
        finally:
            self.learns_gradients = True

    @contextlib.contextmanager
    def check_running(self) -> Iterator[None]:
        """What runs inside is a check: no step, and nothing to learn from."""
        self.checking = True
        try:
            with self.learning_nothing():
                yield
        finally:
            self.checking = False

    def remember_tensors(self, inputs: Any) -> None:
        for tensor in inputs:
            if isinstance(tensor, torch.nn.Parameter):
                self.tensors[id(tensor)] = weakref.ref(tensor)

    def owns_any(self, parameters: set[int]) -> bool:
        return any(number in parameters and reference() is not None for number, reference in self.tensors.items())

    @property
    def last_step(self) -> list[CapturedGraph]:
        """The graphs of the latest step, in the order their forwards ran."""
        return list(self._step) or list(self.graphs)


sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Every session whose compiled functions are still alive."""
