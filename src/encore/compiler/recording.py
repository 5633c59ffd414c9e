"""A step that runs on fake tensors, recorded: which graphs it calls, and every tensor that it makes meanwhile.

A recorded graph runs no operator and saves nothing: its forward returns tensors with the shapes of its outputs, its
backward those of the gradients. Plain code between the graphs runs as it is, on fake tensors, autograd included. So
the recording has the life of every block of memory as Python and autograd alone determine it; what a plan of a graph
saves in addition is added for each plan (`step_plans.py`).
"""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from encore.capture import torch_private
from encore.capture.layouts import TensorLayout
from encore.capture.unused_outputs import NotOptionalError, Tangents, Used, can_run_again
from encore.compiler.backend import GraphCompilation
from encore.compiler.call_plans import CallPlans
from encore.compiler.compiled import CompiledCall
from encore.compiler.session import Mode, Session
from encore.compiler.simulated_sharding import Sharding, SimulatedSharding
from encore.compiler.twin import FakeTwin
from encore.compiler.variants import GraphRunner, about, next_number
from encore.devices import generators_kept
from encore.errors import OptionError
from encore.graph import Graph, Role
from encore.graph.torch_private import FakeTensor, pytree
from encore.graph.values import Value, block_bytes
from encore.options import Options

NEVER = 1 << 62
COMPARED = (
    "values", "storages", "ops", "primals", "tangents", "outputs", "gradients", "literals", "copied_tangents", "leaves",
    "mutated", "returned",
)  # fmt: skip
"""What two graphs have in common that run the same plans."""
BOTH = 4
"""Marks of a call whose forward and backward have run."""


class NotRehearsableError(OptionError):
    """A step that cannot run on fake tensors as it does on real ones."""


@dataclass(slots=True, eq=False)
class FakeBlock:
    """Memory of a storage that the step has made, and its life, in events since the step began."""

    bytes: int
    born: int
    freed: int = NEVER


class FakeMemory:
    """Follows the storages of fake tensors: a mode under which the step runs, and its events."""

    def __init__(self) -> None:
        self.mode = torch_private.WatchedFakeMode(self._see)
        self.now = 0
        self.blocks: list[FakeBlock] = []
        self._alive: dict[int, FakeBlock | None] = {}
        """By address; None for what was there before the step."""

    def mark(self) -> int:
        """Note a moment, and return it."""
        self.now += 1
        return self.now

    def begin(self) -> None:
        """Take all memory that is there for resident: the step begins."""
        self.blocks.clear()
        self._alive = dict.fromkeys(self._alive)

    def add(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Follow a storage from now on."""
        if storage._cdata in self._alive:
            return
        block = FakeBlock(block_bytes(storage.nbytes(), str(device)), self.mark())
        self.blocks.append(block)
        self._alive[storage._cdata] = block
        weakref.finalize(storage, self._free, storage._cdata).atexit = False

    def block_of(self, thing: Any) -> FakeBlock | None:
        """The memory of a tensor; None if it was there before the step."""
        return self._alive.get(thing.untyped_storage()._cdata) if isinstance(thing, torch.Tensor) else None

    def _see(self, results: Any) -> None:
        if torch_private.traces_here():
            return
        for tensor in pytree.tree_leaves(results):
            if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
                self.add(tensor.untyped_storage(), tensor.device)

    def _free(self, address: int) -> None:
        block = self._alive.pop(address, None)
        if block is not None:
            block.freed = self.mark()


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One call of a graph."""

    graph: RecordedGraph
    reads: tuple[FakeBlock | None, ...]
    """The memory of its inputs."""
    outputs: tuple[FakeBlock | None, ...] = ()
    marks: list[int] = field(default_factory=list)
    """Begin and end of its forward, then of its backward."""
    frees_received: bool = False
    """Whether nothing but the call keeps the gradients that it is given."""


class RecordedGraph:
    """A graph of a recorded step, in the place of a `GraphRunner`."""

    saved: tuple[Value, ...] = ()
    """It saves nothing."""

    def __init__(self, compilation: RecordedCompilation, tangents: Tangents, graph: Graph) -> None:
        if not tangents.may_be_missing:
            raise NotRehearsableError(f"{compilation.name} has tensor subclasses, whose step is known once it has run")
        self.compilation = compilation
        self.recording = compilation.recording
        self.tangents = tangents
        self.graph = graph
        self.number = next_number()
        self.used: Used = frozenset()
        """The gradients that it was given."""
        self.facts = functools.cache(self._facts)

    @functools.cached_property
    def calls(self) -> int:
        """About how many calls of it the step has."""
        return about(sum(call.graph is self for call in self.recording.calls))

    @functools.cached_property
    def plans(self) -> CallPlans:
        """The plans of its calls in this step."""
        return self.compilation.plan_calls(self.tangents, self.used, self.calls)

    def is_same(self, graph: Graph, tangents: Tangents) -> bool:
        """Return whether a graph that was captured from the model is this one, so that it can run the same plans."""
        mine, known = self.graph, self.tangents
        constants = [(mine.constants.get(value), one) for value, one in graph.constants.items()]
        return (
            all(getattr(mine, name) == getattr(graph, name) for name in COMPARED)
            and _owned(mine) == _owned(graph)
            and (known.names, known.layouts) == (tangents.names, tangents.layouts)
            and not torch_private.saves_unchecked(tangents.joint.graph)
            and len(mine.constants) == len(constants)
            and all(_is_same_constant(one, other) for one, other in constants)
        )

    def groups(self, inputs: Sequence[Any]) -> torch_private.Groups:
        """Nothing waits for gradients on fake tensors."""
        return ()

    def forward(self, args: list[Any]) -> Any:
        memory = self.recording.memory
        call = RecordedCall(self, tuple(map(memory.block_of, args)))
        self.recording.calls.append(call)
        self.compilation.session.forwards_run += 1
        torch_private.running_node().encore_run = call
        call.marks.append(memory.mark())
        made = self._shapes(self.graph, self.graph.outputs, dict(zip(self.graph.primals, args, strict=True)))
        results = [self.graph.literals.get(place, tensor) for place, tensor in enumerate(made)]
        call.outputs = tuple(map(memory.block_of, results))
        args.clear()
        call.marks.append(memory.mark())
        return results

    def backward(self, args: list[Any]) -> Any:
        tangents, call = self.tangents, torch_private.running_node().encore_run
        given = args[len(args) - len(tangents.names) :]
        args.clear()
        numbers = frozenset(number for number, tangent in enumerate(given) if tangent is not None)
        if not numbers:
            return (None,) * len(tangents.gradients)
        graph, taken = self.facts(numbers)
        self.used |= taken
        call.marks.append(self.recording.memory.mark())
        received = {value: given[number] for value, number in zip(graph.tangents, sorted(taken), strict=True)}
        found = self._shapes(graph, graph.gradients, {value: one for value, one in received.items() if one is not None})
        blocks = [self.recording.memory.block_of(one) for one in received.values()]
        given.clear()
        received.clear()
        call.frees_received = all(block is not None and block.freed != NEVER for block in blocks)
        call.marks.append(self.recording.memory.mark())
        return tuple(one if tangents.gradients[place] & numbers else None for place, one in enumerate(found))

    def _facts(self, numbers: Used) -> tuple[Graph, Used]:
        """The graph for these gradients, or for all, if it cannot be cut down to them."""
        tangents = self.tangents
        if not tangents.optional:
            numbers = tangents.everything
        try:
            return self.compilation.facts(tangents.only(numbers)), numbers
        except NotOptionalError:
            tangents.require_all()
            return self.compilation.facts(tangents.joint), tangents.everything

    def _shapes(self, graph: Graph, wanted: Sequence[int | None], given: Mapping[int, Any]) -> list[Any]:
        """Tensors for some values of the graph. They share memory with each other and with `given` as the values do."""
        memory, storages = self.recording.memory, dict[int | None, tuple[Any, Any]]()
        for number, tensor in given.items():
            if isinstance(tensor, torch.Tensor):
                value = graph.values[number]
                ahead = tensor.storage_offset() * tensor.element_size() - value.offset * tensor.element_size()
                storages[value.storage] = (tensor.untyped_storage(), ahead)
        made: dict[int, Any] = dict(given)
        with torch_private.real_tensors():
            for missing in dict.fromkeys(one for one in wanted if one is not None and one not in made):
                value = graph.values[missing]
                if value.storage is None or value.dtype is None or len(value.stride) != len(value.shape):
                    raise NotRehearsableError(f"{value.name} is no dense tensor: the step is known once it has run")
                device = torch.device(graph.storages[value.storage].device)
                if value.storage not in storages:
                    size = graph.storages[value.storage].bytes
                    storages[value.storage] = (torch.UntypedStorage(size, device="meta"), 0)
                    memory.add(storages[value.storage][0], device)
                storage, ahead = storages[value.storage]
                offset = value.offset + ahead // value.dtype.itemsize
                window = (offset, value.shape, value.stride, value.dtype, device)
                made[missing] = torch_private.fake_window(memory.mode, storage, *window)
        return [None if one is None else made[one] for one in wanted]


def _owned(graph: Graph) -> list[int | None]:
    """Which parameters and buffers a graph has."""
    primals = zip(graph.primals, graph.identities, strict=True)
    return [one for value, one in primals if graph.values[value].role in (Role.PARAMETER, Role.BUFFER)]


def _is_same_constant(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or isinstance(one, FakeTensor):
        return False
    with torch_private.real_tensors():
        return one.dtype == other.dtype and torch.equal(one, other)


class RecordedCompilation(GraphCompilation):
    """Records a graph that is not the whole step, and plans it later. In an estimate a graph that is the whole step is
    planned at once."""

    takes_symbols = False

    def __init__(self, recording: Recording, *args: Any) -> None:
        super().__init__(*args)
        self.recording = recording
        self.name = f"graph {int(self.name.split()[1]) + recording.first_name + len(recording.graphs)}"

    def plan(self, joint: fx.GraphModule, graph: Graph, primals: Sequence[Any]) -> GraphRunner | RecordedGraph:
        if not self.shares and self.recording.is_estimate:
            return super().plan(joint, graph, primals)
        self.number = len(self.recording.graphs)
        tangents = Tangents(joint, len(self.returned))
        if not can_run_again(graph):
            tangents.require_all()
        recorded = RecordedGraph(self, tangents, graph)
        self.recording.graphs.append(recorded)
        return recorded

    def facts(self, joint: fx.GraphModule) -> Graph:
        graph = super().facts(joint)
        identities = self.recording.identities
        graph.identities = [None if one is None else identities.get(one, one) for one in graph.identities]
        return graph


class Recording:
    """A step of a model on fake tensors."""

    def __init__(
        self,
        name: str,
        options: Options,
        *,
        is_estimate: bool = True,
        first_name: int = 0,
        sharding: Sharding | None = None,
    ) -> None:
        self.memory = FakeMemory()
        self.session = Session(name, options, mode=Mode.ESTIMATE)
        """Of the rehearsal: nothing runs in it."""
        self.session.gathers = sharding is not None
        self.sharding = sharding
        """How FSDP2 would shard the model."""
        self.resident: int | None = None
        """Bytes that are there before and after the step of a model that is sharded."""
        self._simulated: SimulatedSharding | None = None
        self.is_estimate = is_estimate
        self.first_name = first_name
        self.graphs: list[RecordedGraph] = []
        self.calls: list[RecordedCall] = []
        self.returned: list[FakeBlock] = []
        """What the model returned, which its caller may keep."""
        self.has_loss = False
        """Whether the model returned a loss."""

    def run(self, twin: FakeTwin) -> None:
        """Run a step. If it calls graphs that are parts of the step, run it again, with the same draws, and record
        that: nothing is compiled any more, which may keep tensors of the first run alive."""
        self.identities = twin.identities
        if self.sharding is not None:
            self._shard(twin, self.sharding)
        compilation = functools.partial(RecordedCompilation, self)
        call = CompiledCall(twin.call, self.session, compilation)
        with _all_generators_kept():
            self._step(call, twin)
        if self.calls:
            self.calls.clear()
            with _all_generators_kept():
                self._step(call, twin)
        self.calls = [one for one in self.calls if len(one.marks) == BOTH]

    def _shard(self, twin: FakeTwin, sharding: Sharding) -> None:
        if not isinstance(twin.call, nn.Module):
            raise OptionError("shards= is for a module, whose blocks FSDP2 shards, and not for a function")
        self._simulated = SimulatedSharding(twin.call, sharding)
        given = [one for one in pytree.tree_leaves((twin.args, twin.kwargs)) if isinstance(one, torch.Tensor)]
        memory = {one.untyped_storage()._cdata: one.nbytes for one in (*twin.call.buffers(), *given)}
        self.resident = sum(memory.values()) + sum(group.memory.shard for group in self._simulated.groups)

    def _step(self, call: CompiledCall, twin: FakeTwin) -> None:
        """Run forward; if it calls graphs that are parts of the step, backward, too."""
        if self._simulated is not None:
            self._simulated.forget()
        self.memory.begin()
        with self.memory.mode, torch.enable_grad():
            loss = self._loss(call(*twin.args, **twin.kwargs))
            if not self.calls or loss is None:
                return
            leaves = list(_leaves_of(loss))
            if all(isinstance(leaf, FakeTensor) for leaf in leaves):
                loss.backward()  # type: ignore[no-untyped-call]
            else:  # gradients must not be stored in real tensors
                torch.autograd.grad(loss, leaves, allow_unused=True)
            self.memory.mark()
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                leaf.grad = None

    def _loss(self, result: Any) -> torch.Tensor | None:
        """A loss that depends on what the model returned: on its scalars, or on all, if there are none."""
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.returned = [block for one in tensors if (block := self.memory.block_of(one)) is not None]
        differentiable = [one for one in tensors if one.requires_grad]
        losses = [one for one in differentiable if not one.dim()]
        self.has_loss = bool(losses)
        if len(losses) == 1 or not differentiable:
            return losses[0] if losses else None
        return _Loss.apply(*(losses or differentiable))  # type: ignore[no-any-return, no-untyped-call]


@contextlib.contextmanager
def _all_generators_kept() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and PyTorch's generators at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with generators_kept():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class _Loss(torch.autograd.Function):
    """A loss of several tensors that takes no memory but for their gradients."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.layouts = [TensorLayout.of(one) for one in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layout.empty() for layout in ctx.layouts)


def _leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that autograd would store gradients in."""
    seen, ahead = set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead += [before for before, _ in node.next_functions]
