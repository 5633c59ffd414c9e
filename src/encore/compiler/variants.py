"""The plans of one graph, one for each set of outputs that receive gradients, and the callables that run them.

Which outputs receive a gradient is only known in backward, and forward must save for it. So forward expects what the
backwards before it were given. The first forward expects gradients for scalar outputs only, if there are any: losses,
next to the logits or hidden states that Hugging Face's models return. If a backward is given a gradient that forward
did not expect, forward runs a second time, with a plan for all gradients seen so far, from the inputs and generator
states of the first; inputs that have changed since are an error. Gradients that are missing though they were expected
are zeros. An input that depends on no gradient that was given gets none, as in eager.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from encore.capture import torch_private
from encore.capture.unused_outputs import Tangents, Used
from encore.compiler.delivery import Delivery
from encore.compiler.session import CapturedGraph, Session
from encore.devices import default_generator, is_here
from encore.errors import ReplayError
from encore.graph import Graph, OpClass, Role
from encore.graph.values import Value
from encore.lower import Lowered
from encore.plan import GraphPlan

if TYPE_CHECKING:
    from encore.compiler.call_plans import CallPlans
    from encore.compiler.step_calls import Call

_numbers = itertools.count()


def next_number() -> int:
    """A number that no other graph of the process has."""
    return next(_numbers)


def about(count: int) -> int:
    """A number of calls that loops of similar lengths share."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan for some set of gradients."""

    used: Used
    captured: CapturedGraph
    lowered: Lowered

    @property
    def graph(self) -> Graph:
        return self.captured.plan.schedule.graph


PlanCalls = Callable[[Used, int], "CallPlans"]
"""Plans for so many calls of the graph in one step, for a set of gradients."""
PlanVariant = Callable[[Used, Sequence[Any], bool], Variant]
"""Plan the graph for a set of gradients, given its inputs; True if it is planned in backward."""


class GraphRunner:
    """What AOTAutograd calls for one graph."""

    def __init__(
        self,
        session: Session,
        tangents: Tangents,
        first: Variant,
        plan: PlanVariant,
        plan_calls: PlanCalls,
        *,
        is_whole: bool,
        number: int,
    ) -> None:
        self.session = session
        self.tangents = tangents
        self.current = first
        self.variants = {first.used: first}
        self._plan = plan
        self._plan_calls = functools.cache(plan_calls)
        self.number = number
        self.is_whole = is_whole
        """Whether one call of the graph is one call of the model."""
        self._picked: Variant | None = None
        """The plan that the next forward runs, if that has been asked for."""
        self.place = len(session.plans_of_step_so_far())
        """How many graphs of the step run before this one."""

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.place, self.tangents.kinds)

    @property
    def saved(self) -> list[Value]:
        """The values that forward saves for backward with the current plan."""
        schedule = self.current.captured.plan.schedule
        return [schedule.graph.values[value] for value in schedule.saved]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A name for its graph, which others that are alike have, too."""
        unplanned = self.current.captured.unplanned
        return GraphPlan.of(unplanned.schedule.graph, unplanned).fingerprint

    # -- forward -----------------------------------------------------------------------------------------------------

    def groups(self, inputs: Sequence[Any]) -> torch_private.Groups:
        """The inputs by number, in the order in which backward can give their gradients away, for the plan that the
        next forward runs; none if it runs as a whole."""
        variant = self._picked = self.session.step.variant(self) or self._expected(inputs)
        graph, captured = variant.graph, variant.captured
        whole = self.session.checks or captured.lossy_check is not None or captured.lessons is not None
        if whole or not len(graph.primals) == len(graph.gradients) == len(inputs):
            return ()
        return [cut.places for cut in variant.lowered.in_parts().cuts]

    def forward(self, args: list[Any]) -> Any:
        session = self.session
        if session.one_graph:
            session.begin_call()
        node = torch_private.running_node()
        picked, self._picked = self._picked, None
        planned = picked or (None if node is None else session.step.variant(self))
        variant = planned or self._expected(args)
        captured = variant.captured
        call = None if session.checking else session.step.forward_begins(self, captured, args)
        session.note_forward(captured)
        if node is not None:
            node.encore_run = _Run(variant, self._inputs(variant, args), call)
        before, lessons = session.waited, captured.lessons
        if lessons is not None:
            lessons.begin_step()

        def timed(args: list[Any]) -> Any:
            began = time.perf_counter()
            made = captured.seconds_of_first("first forward", variant.lowered.forward, args)
            if lessons is not None:
                lessons.ran(began)
            return made

        check = None if session.checking else captured.lossy_check
        result = timed(args) if check is None else check.forward(timed, args)
        captured.stalled["forward"] = session.waited - before
        session.waiting_since = time.perf_counter()
        session.step.forward_ends(call, result)
        return _without_bases(result, len(variant.graph.outputs))

    def _expected(self, args: Sequence[Any]) -> Variant:
        """The variant for the gradients seen so far."""
        seen = self.session.gradients_seen.get(self.key)
        if seen is not None and seen != self.current.used and self.tangents.optional and self.session.runs:
            planned = self.session.options.plan is not None
            if not (planned and seen < self.current.used):  # a plan that was given is kept for as long as it serves
                self.current = self._variant(seen, args, in_backward=False)
        return self.current

    @property
    def has_variants(self) -> bool:
        """Return whether each call may run another variant: backward knows which one forward ran."""
        return self.tangents.may_be_missing

    def call_plans(self, count: int) -> CallPlans:
        """The plans for about so many calls in one step, for the gradients seen so far: loops of similar lengths share
        theirs."""
        seen = self.session.gradients_seen.get(self.key) or self.current.used
        return self._plan_calls(seen if self.tangents.optional else self.tangents.everything, about(count))

    def _variant(self, used: Used, args: Sequence[Any], *, in_backward: bool) -> Variant:
        if used not in self.variants:
            self.variants[used] = self._plan(used, args, in_backward)
        return self.variants[used]

    def _inputs(self, variant: Variant, args: Sequence[Any]) -> _Inputs | None:
        """What a second forward would need, if a second one may be needed."""
        if variant.used == self.tangents.everything or not self.session.runs:
            return None
        confirmed = self.key in self.session.gradients_seen
        return _Inputs(variant.graph, args, weakly=confirmed and self.place > 0)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, args: list[Any]) -> Any:
        node = torch_private.running_node()
        if node is None:  # all gradients are there
            return self._timed_backward(self.current, args, None)
        run: _Run = node.encore_run
        first = len(args) - len(self.tangents.names)
        given = args[first:]
        del args[first:]
        numbers = frozenset(number for number, tangent in enumerate(given) if tangent is not None)
        if not numbers:
            args.clear()
            return (None,) * len(self.tangents.gradients)
        variant = run.variant
        if not numbers <= variant.used:
            args.clear()
            variant, saved = self._forward_again(run, numbers)
            args.extend(saved)
            del saved
        self._learn(numbers)
        layouts = self.tangents.layouts
        used = sorted(variant.used)
        args.extend(layouts[number].zeros() if given[number] is None else given[number] for number in used)
        given.clear()
        if not torch_private.keeps_graph():
            run.inputs = None
        depends = self.tangents.gradients
        wanted = [bool(depends[place] & numbers) for place in range(len(depends))]
        chain = torch_private.chain_of(node)
        if chain is not None:
            return self._deliver(chain, variant, args, run.call, wanted)
        found = self._timed_backward(variant, args, run.call)
        return tuple(gradient if wanted[place] else None for place, gradient in enumerate(found))

    def _deliver(
        self, chain: torch_private.Chain, variant: Variant, args: list[Any], call: Call | None, wanted: list[bool]
    ) -> Any:
        """Run backward until the gradients of the first node are there; later nodes have it run on."""
        session, captured, number = self.session, variant.captured, torch_private.backward_number()
        session.note_backward()
        session.step.backward_begins(call)

        def finish(seconds: float) -> None:
            captured.seconds.setdefault("first backward", seconds)
            session.step.backward_ends(call)

        delivery = Delivery(variant.lowered.in_parts(), args, captured.name, finish)

        def take(places: Sequence[int]) -> list[Any]:
            found = delivery.take(places)
            if delivery.is_over:
                chain.running.pop(number, None)
            return [gradient if wanted[place] else None for place, gradient in zip(places, found, strict=True)]

        chain.running[number] = take
        first = dict(zip(chain.first, take(chain.first), strict=True))
        return tuple(first.pop(place, None) for place in range(len(wanted)))

    def _timed_backward(self, variant: Variant, args: list[Any], call: Call | None) -> Any:
        session, captured = self.session, variant.captured
        session.note_backward()
        given = len(variant.graph.tangents)
        session.step.backward_begins(call, args[len(args) - given :] if call is not None else ())
        before, lessons = session.waited, captured.lessons

        def timed(args: list[Any]) -> Any:
            began = time.perf_counter()
            made = captured.seconds_of_first("first backward", variant.lowered.backward, args)
            if lessons is not None:
                lessons.ran(began)
                lessons.end_step()
                captured.lessons = None if lessons.over else lessons
            return made

        check = None if session.checking else captured.lossy_check
        result = timed(args) if check is None else check.backward(timed, args)
        captured.stalled["backward"] = session.waited - before
        session.step.backward_ends(call)
        return result

    def _learn(self, given: Used) -> None:
        if self.session.learns_gradients:
            seen = self.session.gradients_seen
            seen[self.key] = seen.get(self.key, frozenset()) | given

    def _forward_again(self, run: _Run, given: Used) -> tuple[Variant, list[Any]]:
        """A forward that saves for gradients which the first did not expect."""
        name = run.variant.captured.name
        unexpected = ", ".join(self.tangents.names[number] for number in sorted(given - run.variant.used))
        if run.inputs is None:
            raise ReplayError(
                f"backward of {name} was given gradients that its forward did not expect ({unexpected}), after the "
                "graph was freed; call the first backward with retain_graph=True"
            )
        if self.session.learns_gradients:
            warnings.warn(
                f"encore: backward of {name} was given gradients that no step before had ({unexpected}). Forward runs "
                "a second time for this step, outside of the budget; the next step is planned with them",
                stacklevel=2,
            )
        seen = self.session.gradients_seen.get(self.key, frozenset())
        self._learn(given)  # a step that is repeated after an error is planned with them
        primals = run.inputs.unchanged(name)
        variant = self._variant(seen | given, primals, in_backward=True)
        with torch.no_grad(), run.inputs.as_drawn():
            results = variant.lowered.forward(primals)
        return variant, list(results[len(variant.graph.outputs) :])


@dataclass(slots=True)
class _Run:
    """One forward whose backward may come."""

    variant: Variant
    inputs: _Inputs | None
    call: Call | None
    """Its record in the step."""


class _Inputs:
    """What a forward was called with: tensors, their versions, and the states of the generators it draws from."""

    def __init__(self, graph: Graph, args: Sequence[Any], *, weakly: bool) -> None:
        """Weak references are held to inputs that a graph before has made: they are not there to stay."""
        self.graph = graph
        self.held: list[Any] = []
        self.versions: list[int] = []
        for value, given in zip(graph.primals, args, strict=True):
            tensor = isinstance(given, torch.Tensor)
            self.versions.append(_version(given) if tensor else 0)
            if not tensor or isinstance(given, torch.nn.Parameter):
                self.held.append(given)
            elif weakly and graph.values[value].role is Role.INPUT:
                self.held.append(weakref.ref(given))
            else:
                self.held.append(given.detach())  # by itself: an input that is written to may depend on this very node
        draws = any(op.kind is OpClass.RANDOM and op.forward for op in graph.ops)
        self.states = _generator_states(graph) if draws else {}

    def unchanged(self, name: str) -> list[Any]:
        """The tensors, as they were."""
        return [self._unchanged(place, value, name) for place, value in enumerate(self.graph.primals)]

    def _unchanged(self, place: int, value: int, name: str) -> Any:
        held, what = self.held[place], self.graph.values[value]
        tensor = held() if isinstance(held, weakref.ref) else held
        if not isinstance(held, torch.Tensor | weakref.ref):
            return held
        why = ""
        if tensor is None:
            why = "has been freed"
        elif value not in self.graph.mutated and _version(tensor) != self.versions[place]:
            why = "has been modified by an inplace operation"
        elif tensor.numel() and not tensor.untyped_storage().nbytes():
            why = "has lost its memory"
        if why:
            raise ReplayError(
                f"backward of {name} was given a gradient that no step before had, so that forward would have to run "
                f"a second time, but its input of shape {list(what.shape)} {why} since. Repeat the step: the next "
                "forward expects this gradient"
            )
        return tensor

    @contextlib.contextmanager
    def as_drawn(self) -> Iterator[None]:
        """Generators stand where they stood before the forward, for the time being."""
        now = {device: _state(device) for device in self.states}
        try:
            for device, state in self.states.items():
                _set_state(device, state)
            yield
        finally:
            for device, state in now.items():
                _set_state(device, state)


def _without_bases(results: Sequence[Any], outputs: int) -> Sequence[Any]:
    """What forward returns, its outputs as tensors of their own: how a plan lays them into memory must not make them
    views, which autograd and hooks of modules treat differently."""
    made = results[:outputs]
    if not any(isinstance(one, torch.Tensor) and one._base is not None for one in made):
        return results
    plain = (one.detach() if isinstance(one, torch.Tensor) and one._base is not None else one for one in made)
    return (*plain, *results[outputs:])


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _generator_states(graph: Graph) -> dict[str, bytes]:
    devices = {storage.device for storage in graph.storages}
    return {device: _state(device) for device in devices if is_here(device)}


def _state(device: str) -> bytes:
    """As bytes of Python's: tensors would count as the step's."""
    return default_generator(device).get_state().numpy().tobytes()


def _set_state(device: str, state: bytes) -> None:
    default_generator(device).set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
