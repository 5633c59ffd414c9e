"""A training step as the calls it makes: of which graphs, in which order, and what is in memory around each.

A budget is a bound on the whole step. A step that is one call of one graph is planned when that graph is captured. Code
that Dynamo cuts into several graphs, or that calls one graph in a loop, is rehearsed on fake tensors before anything
runs (`rehearsal.py`), and all its calls are planned together. A step that cannot be rehearsed is known once it has run,
so it is planned in three steps:

1. The first step runs with the plans that save least. Its calls are recorded: which call made the tensors that another
   one reads, and which outputs are still alive when.
2. The second step runs with the plans of the lowest peak for these calls, and is observed: the allocator's events give
   what is alive at the begin and end of every call, plain code included. If captured graphs alone take more than the
   budget, that is an error after it.
3. All calls are planned together for the budget (`plan/calls.py`), around what was observed.

The second step of a rehearsed program is observed, too. If an observed step takes another peak than predicted, or more
than the budget, its calls are planned once more. Then the plans stay.

A step that makes other calls than any step before (a longer loop, another branch) is a program of its own. While it
follows a known program call by call, it uses the plans of that one; from where it leaves all known ones, the plans that
save least.

Known shortcomings: the allocator is only observed on CPUs, and while no other profiler runs; elsewhere plain code
counts as far as the outputs of captured graphs live on. Backwards are taken to run in the reverse order of the
forwards, as autograd runs them within one `backward()`; other orders are predicted less closely. Programs are learned
by each rank for itself, so with several ranks each graph is planned when it is captured; but for models that FSDP2
shards, whose ranks decide together (`ranks.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from encore.capture import torch_private
from encore.compiler.device_budget import on_devices
from encore.compiler.measured_steps import MeasuredSteps
from encore.compiler.step_calls import Call, Program, arounds, outside_peak, step_peak, within_budget
from encore.cost.observation import Observation, Segment
from encore.errors import BudgetError
from encore.plan.budget import budget_error, stack_plans
from encore.plan.calls import Around, SharedBudget, SharedChoice
from encore.reports.steps import MeasuredStep
from encore.units import bytes_text

if TYPE_CHECKING:
    from encore.compiler.call_plans import CallPlans
    from encore.compiler.recording import RecordedGraph
    from encore.compiler.session import CapturedGraph, Session
    from encore.compiler.step_plans import StepPlans
    from encore.compiler.variants import GraphRunner, Variant

ROUNDS = 4
"""How often a program is planned at most."""
MOST_PROGRAMS = 512
"""Programs that a session remembers; the oldest goes first."""

log = logging.getLogger("encore")


class StepPlanner:
    """Follows the steps of one session and plans their calls together."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self.programs: dict[tuple[int, ...], Program] = {}
        self._followers: dict[int, Program] = {}
        """By the hash of a beginning of a program: the longest program that begins like this."""
        self.calls: list[Call] = []
        """Of the running step."""
        self._beginning = 0
        self._backwards = 0
        self._observation: Observation | None = None
        self._wanted = False
        """Whether steps are planned."""
        self.measured = MeasuredSteps()
        self._end = 0
        """The mark at the end of the latest backward pass, while the step is observed."""
        self._awaits_end = False
        self._records = True
        """Whether calls are recorded: not once the steps that run are known."""
        self.last: Program | None = None
        self.rehearsed: StepPlans | None = None
        """The plans of the step as it was rehearsed last."""
        self.has_rehearsed = False
        """Whether a step of the session is one of several calls, and was rehearsed."""
        self._may_rehearse = True
        self._warned_of_several = False
        self._forwards = 0
        """Calls since the latest backward, if each is planned by itself."""

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None, "a step outlives its session"
        return session

    @property
    def is_wanted(self) -> bool:
        """Return whether there is a budget that a step of several calls must be planned for."""
        session = self.session
        options = session.options
        planned = session.runs and not session.one_graph and options.plan is None
        alone = session.sharded is not None or not torch_private.has_ranks()
        return planned and options.budget is not None and alone

    @property
    def is_rehearsed(self) -> bool:
        """Return whether a step of several calls is rehearsed for every shape, from its capture on."""
        return self.is_wanted and self._may_rehearse

    @property
    def program(self) -> Program | None:
        """What is known of the latest step, if it has several calls."""
        calls = tuple(call.runner.number for call in self.calls)
        return self.programs.get(calls) if calls else self.last

    def latest_measured(self) -> MeasuredStep | None:
        """The latest step that was measured: the one that is over but not finished, if it is."""
        observation, calls = self._observation, self.calls
        if observation is not None and observation.is_over and all(len(call.marks) == 4 for call in calls):
            program = self.program
            if program is not None:
                self._measure(calls, observation, observation.stop(), (program.resident, program.limit))
            elif len(calls) == 1 and calls[0].runner.is_whole:
                self._measure(calls, observation, observation.stop(), self._bound_alone(calls[0]))
        return self.measured.latest

    # -- what a running step reports ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """The user calls the model. If backward has run since the last call, a step is over: plan its calls."""
        self._wanted = self.is_wanted
        if not self._wanted:
            self._count_unbounded()
            return
        if self._backwards:
            self._finish()
        else:
            self.calls = [call for call in self.calls if call.is_pending]
            self._beginning = _hash_of(call.runner.number for call in self.calls)
        if not self.calls:
            self.stop_observing()  # of a step that was given up
            self._end, self._awaits_end = 0, False
            self._observation = self.measured.begin(self.session, wanted=self._should_observe())
            self._records = self._records or self._observation is not None

    def _count_unbounded(self) -> None:
        """A call begins that is planned by itself. Warn if several keep activations at once, as the microbatches of a
        pipeline stage do."""
        session = self.session
        if session.options.budget is None or not torch_private.has_ranks() or self._warned_of_several:
            return
        self._forwards += 1
        kept = sum(plan.timeline.saved for plan in session.plans_of_step_so_far())
        if self._forwards < 2 or not kept:
            return
        self._warned_of_several = True
        warnings.warn(
            f"encore: {session.name} was called {self._forwards} times before a backward, as stages of a pipeline are. "
            f"With several ranks a budget bounds one call ({session.options.budget} here), and each further call that "
            f"waits for its backward keeps {bytes_text(kept)} beside it: subtract that from the budget, or give it as "
            "resident=",
            stacklevel=2,
        )

    def backward_runs(self) -> None:
        """A backward of the session runs."""
        self._forwards = 0

    def rehearse(self) -> None:
        """A graph of the running call turns out to be a part of the step. If it is the first one, rehearse the step and
        plan its calls."""
        session, started = self.session, self.session.started
        session.started = None
        if session.sharded is not None or session.checking:
            return
        if started is None or not (self._wanted and self._may_rehearse) or self.calls:
            return
        from encore.compiler.rehearsal import rehearsed_step  # which compiles, and so imports this module

        budget = session.options.budget
        assert budget is not None
        planned = rehearsed_step(session, *started)
        self._may_rehearse = planned is not None
        if planned is None:
            return
        limit = planned.limit(budget, self._largest())
        if limit is not None and planned.taken(planned.within(limit)) > limit:
            planned.search()
        if limit is not None and not planned.fits_without_plain(limit):
            planned.require_room(budget, limit, returned=False)
        if limit is not None and planned.footprint is not None:
            planned.require_room(budget, limit)
        program = planned.program(planned.chosen(limit), limit)
        program.rounds, program.was_rehearsed = 2, True
        self.rehearsed, self.has_rehearsed = planned, True
        self._add(program)
        self._follow(program)
        self._log(program)

    def first_variant(self, graph: RecordedGraph) -> Variant:
        """The variant that the first call of a graph is planned to run in the rehearsed step."""
        assert self.rehearsed is not None
        program = self.programs[self.rehearsed.numbers]
        return program.variants[program.calls.index(graph.number)]

    def variant(self, runner: GraphRunner) -> Variant | None:
        """The variant that the next call of a graph is planned to run; None if no program says."""
        if not self._followers:
            return None
        program = self._followers.get(hash((self._beginning, runner.number)))
        place = len(self.calls)
        if program is None or program.calls[place] != runner.number or not program.variants:
            return None
        variant = program.variants[place]
        if not self.session.gradients_seen.get(runner.key, frozenset()) <= variant.used:
            program.forget_plans()  # an output that received no gradient before has received one since
            self._records = True
            return None
        return variant

    def forward_begins(self, runner: GraphRunner, captured: CapturedGraph, args: Sequence[Any]) -> Call | None:
        if not self._wanted:
            return None
        if not self.calls and self._observation is not None and not self._is_observed_from(runner):
            self.stop_observing()
        call = Call(runner, captured)
        if self._records:
            call.reads = tuple(_address(one) for one in args)
            call.alive_around.append(self._outputs_alive())
        self.calls.append(call)
        self._beginning = hash((self._beginning, runner.number))
        self._mark(call)
        return call

    def forward_ends(self, call: Call | None, results: Sequence[Any]) -> None:
        if call is None:
            return
        if not self._records:
            tensor = next((made for made in results if isinstance(made, torch.Tensor)), None)
            call.made = () if tensor is None else (StorageWeakRef(tensor.untyped_storage()),)
            return
        graph = call.captured.plan.schedule.graph
        kept = {graph.values[value].storage for value in call.captured.plan.schedule.saved}
        found, every = {}, []
        for value, made in zip(graph.returned, results, strict=False):
            storage = graph.values[value].storage
            if not isinstance(made, torch.Tensor):
                continue
            memory = made.untyped_storage()
            every.append(StorageWeakRef(memory))
            if storage not in graph.external and storage not in kept:
                found[every[-1].cdata] = (every[-1], memory.nbytes())
        call.made = tuple(every)
        call.outputs = tuple(found.values())
        self._mark(call)

    def backward_begins(self, call: Call | None, received: Sequence[Any] = ()) -> None:
        if call is None or call.backward_place >= 0:  # the graph was retained, and backward runs once more
            return
        call.backward_place = self._backwards
        self._backwards += 1
        if self._records:
            call.alive_around.append(self._outputs_alive())
            call.received = tuple(StorageWeakRef(one.untyped_storage()) for one in received)
        self._mark(call)
        if self._observation is not None and not self._awaits_end:
            self._awaits_end = True
            torch_private.at_end_of_backward(self._backward_is_over)

    def backward_ends(self, call: Call | None) -> None:
        if call is not None:
            call.frees_received = bool(call.received) and all(one.expired() for one in call.received)
        if call is not None and len(call.marks) == 3:
            self._mark(call)

    def _backward_is_over(self) -> None:
        self._awaits_end = False
        if self._observation is not None:
            self._end = self._observation.mark()
            self._observation.is_over = not any(call.is_pending for call in self.calls)

    def _mark(self, call: Call) -> None:
        if self._observation is not None:
            call.marks.append(self._observation.mark())

    def _outputs_alive(self) -> int:
        storages = {one.cdata: size for call in self.calls for one, size in call.outputs if not one.expired()}
        return sum(storages.values())

    # -- planning ----------------------------------------------------------------------------------------------------

    def stop_observing(self) -> list[Segment] | None:
        """End the observation of a step, if one runs: PyTorch has one profiler a thread."""
        observation, self._observation = self._observation, None
        return None if observation is None else observation.stop()

    def _should_observe(self) -> bool:
        return any(program.variants and not program.settled for program in self.programs.values())

    def _is_observed_from(self, runner: GraphRunner) -> bool:
        """Return whether a step that begins with this graph is to be measured, or one that plans are made from. The
        programs of other lengths do not count, of which some are never settled."""
        if self.measured.is_due:
            return True
        begun = (program for program in self.programs.values() if program.calls[0] == runner.number)
        return any(program.variants and not program.settled for program in begun)

    def _finish(self) -> None:
        calls, observation, segments = self.calls, self._observation, self.stop_observing()
        self.calls, self._beginning, self._backwards = [], 0, 0
        calls = [call for call in calls if call.backward_place >= 0]
        if segments is not None and not all(len(call.marks) == 4 for call in calls):
            segments = None
        key = tuple(call.runner.number for call in calls)
        program = self.programs.get(key)
        whole = len(calls) == 1 and calls[0].runner.is_whole
        if not calls or (whole and program is None and not self._exceeds_alone(calls[0], observation, segments)):
            self.last, self._records = None, False
            return
        if program is None:  # plans of a single graph were chosen already: now around what was observed
            sharded = self.session.sharded is not None
            program = Program(key, whole=whole, sharded=sharded, rounds=int(whole))
            self._add(program)
        self.last = program
        if segments is not None:
            first, last = calls[0].marks[0], max(call.marks[3] for call in calls)
            if self.session.sharded is not None:  # gathering and reducing around all calls counts, too
                first, last = -1, max(self._end, last)
            program.observed = max(segment.peak for segment in segments[first + 1 : last + 1])
        if not program.settled:
            was_recorded = all(len(call.alive_around) == 2 for call in calls)
            self._records = True  # the next step, if this one was not
            if was_recorded and all(call.runner.has_variants for call in calls):
                self._plan(program, calls, segments, observation)
        self._records = self._records and not program.settled
        if program.settled:
            step = self._measure(calls, observation, segments, (program.resident, program.limit))
            exceeds = step is not None and step.excess > 0
            if exceeds and self._saves_less(program, observation):
                program.settled, self._records = False, True
                return
            self.measured.tell(self.session, step, program.floor + program.resident)

    def _add(self, program: Program) -> None:
        self.programs[program.calls] = program
        if len(self.programs) > MOST_PROGRAMS:
            oldest = self.programs.pop(next(iter(self.programs)))
            self._followers = {key: one for key, one in self._followers.items() if one is not oldest}

    def forget(self, numbers: Set[int]) -> None:
        """Drop the programs that call graphs with these numbers."""
        dropped = [program for calls, program in self.programs.items() if not numbers.isdisjoint(calls)]
        for program in dropped:
            del self.programs[program.calls]
        if dropped:
            self._followers.clear()
            for program in self.programs.values():
                if program.variants:
                    self._follow(program)
        if self.rehearsed is not None and not numbers.isdisjoint(self.rehearsed.numbers):
            self.rehearsed = None

    def _measure(
        self,
        calls: Sequence[Call],
        observation: Observation | None,
        segments: Sequence[Segment] | None,
        bound: tuple[int, int | None],
    ) -> MeasuredStep | None:
        """What the step that is over took, if it was observed; `bound` are its resident bytes and its budget."""
        ran = [number for call in calls if segments is not None for number in (call.marks[1], call.marks[3])]
        last = max([self._end, *ran])
        key = tuple(call.runner.number for call in calls)
        return self.measured.note(self.session, key, observation, segments, ran, last, bound)

    def _bound_alone(self, call: Call) -> tuple[int, int | None]:
        """The resident bytes and the budget of a step that is one call."""
        return stack_plans([call.captured.plan]).resident + self.session.options.resident, call.captured.limit

    def _exceeds_alone(self, call: Call, observation: Observation | None, segments: Sequence[Segment] | None) -> bool:
        """Return whether a step of one graph took more than its budget and can be planned again."""
        if observation is None:
            self.measured.skip((call.runner.number,))
            self.measured.tell(self.session, None)
            return False
        step = self._measure([call], observation, segments, self._bound_alone(call))
        if step is not None and call.runner.has_variants and step.excess:
            return True
        self.measured.tell(self.session, step)
        return False

    def _plan(
        self, program: Program, calls: list[Call], segments: list[Segment] | None, observation: Observation | None
    ) -> None:
        """Choose plans for all calls: those of the lowest peak first, to be observed; then those for the budget."""
        if program.was_rehearsed:  # its graphs were compiled while it ran: the next step is observed
            program.was_rehearsed = False
            return
        if program.rounds >= ROUNDS or (program.rounds > 1 and (segments is None or program.is_as_predicted)):
            self._settle(program, calls)
            return
        plans = self._plans(calls)
        around = self._around(calls, segments)
        program.around = tuple(around)
        program.rounds += 1
        program.resident = self.session.options.resident
        sharded = self.session.sharded
        program.resident += (
            stack_plans([one.kept for one in plans.values()]).resident if sharded is None else sharded.resident
        )
        of_calls = [plans[call.runner] for call in calls]
        least = 0 if sharded is None or segments is None else outside_peak(calls, segments, self._end)
        program.unplanned = max(least, step_peak(around, [one.unplanned for one in of_calls]))
        self._bound(program, of_calls)
        settled, tries = False, 0
        while not settled:  # compiled kernels may take other workspaces than was predicted
            found = SharedBudget(around, [one.costs for one in of_calls], least=least)
            program.floor = found.floor
            shared = within_budget(found, program, of_calls)
            if shared is None and program.limit is not None and any(one.search() for one in plans.values()):
                continue
            error = None
            if shared is None and program.limit is not None and program.rounds > 1:
                least_costs = [one.costs for one in of_calls]
                fits = SharedBudget([Around(0, 0)] * len(calls), least_costs).floor + program.resident <= program.limit
                if not (fits and self._saves_less(program, observation)):
                    error = self._without_room(program, found.lowest(), plans, calls, around)
            self.measured.lines_wanted |= shared is None and program.limit is not None and program.rounds > 1
            if shared is None or program.rounds == 1:
                shared = found.lowest()
            if sharded is not None:
                when = f"round {program.rounds}, try {tries}"
                shared = sharded.agreement.decided(when, of_calls, around, error or shared, least)
            elif error is not None:
                raise error
            tries += 1
            picked = list(zip(of_calls, shared.plans, strict=True))
            before = [of_graph.costs[number] for of_graph, number in picked]
            program.variants = tuple(of_graph.variant(number) for of_graph, number in picked)
            program.shared = shared
            settled = before == [of_graph.costs[number] for of_graph, number in picked]
        self._follow(program)
        self._log(program)

    def _plans(self, calls: Sequence[Call]) -> dict[GraphRunner, CallPlans]:
        """The plans of every graph, for as many calls of it as the step has. Blocks that are compiled one by one are
        graphs of their own, which are alike."""
        runners = dict.fromkeys(call.runner for call in calls)
        alike: dict[GraphRunner, object] = {one: one for one in runners}
        if self.session.begins_with_root:
            alike = {one: one.fingerprint for one in runners}
        counts = Counter(alike[call.runner] for call in calls)
        return {one: one.call_plans(counts[alike[one]]) for one in runners}

    def _bound(self, program: Program, plans: Sequence[CallPlans]) -> None:
        """Find the budget in bytes: None for the lowest reachable peak. A percentage is one of the largest step so
        far."""
        program.limit, program.footprint = None, None
        session, budget = self.session, self.session.options.budget
        if budget is None or budget.is_floor:
            return
        graphs, sharded = [one.kept.schedule.graph for one in plans], session.sharded is not None
        bound = on_devices(budget, graphs, session.options, session.workspaces, sharded=sharded)
        program.limit, program.footprint = bound.resolve(self._largest()), bound.footprint

    def _settle(self, program: Program, calls: list[Call]) -> None:
        """Let the plans stay; ranks of a sharded model take over those of the rank that was first."""
        program.settled = True
        sharded, mine = self.session.sharded, program.shared
        if sharded is None or mine is None:
            return
        of_runner = self._plans(calls)
        plans = [of_runner[call.runner] for call in calls]
        taken = sharded.agreement.decided("settled", plans, program.around, mine)
        if taken is not mine:
            program.shared = taken
            program.variants = tuple(one.variant(number) for one, number in zip(plans, taken.plans, strict=True))
            self._follow(program)

    def _around(self, calls: list[Call], segments: list[Segment] | None) -> list[Around]:
        """What was around the calls of a step that ran."""
        sharded = self.session.sharded
        if sharded is None or segments is not None:
            return arounds(calls, segments)
        return sharded.around(arounds(calls, None, reduces=True))

    def _log(self, program: Program) -> None:
        log.info(
            "a step of %d calls of %d graphs: peak %s, everything kept %s, %d plans",
            len(program.calls),
            len(set(program.calls)),
            bytes_text(0 if program.shared is None else program.shared.step_peak),
            bytes_text(program.unplanned),
            len(set(map(id, program.variants))),
        )

    def _saves_less(self, program: Program, observation: Observation | None) -> bool:
        """Have plain code between the graphs save less from the next step on, and plan again when that was observed;
        False if it cannot. Whether the code allows hooks is known of a step whose Python calls were recorded."""
        saves = self.session.plain_saves  # whose codes must not hold gathered parameters
        if self.session.sharded is not None or program.whole or observation is None or not saves.may_save_less:
            return False
        if observation.lines and not (observation.allows_hooks and saves.save_less()):
            return False
        self.measured.lines_wanted |= not observation.lines
        program.rounds = 1
        return True

    def _largest(self) -> int:
        return max((one.resident + one.unplanned for one in self.programs.values()), default=0)

    def _follow(self, program: Program) -> None:
        beginning = 0
        for number in program.calls:
            beginning = hash((beginning, number))
            known = self._followers.get(beginning)
            if known is None or len(known.calls) <= len(program.calls):
                self._followers[beginning] = program

    def _without_room(
        self,
        program: Program,
        lowest: SharedChoice,
        plans: Mapping[GraphRunner, CallPlans],
        calls: Sequence[Call],
        around: Sequence[Around],
    ) -> BudgetError | None:
        """The error if captured graphs alone exceed the budget; if plain code does, the settled step is warned of."""
        assert program.limit is not None
        picked = [(plans[call.runner], number) for call, number in zip(calls, lowest.plans, strict=True)]
        costs = [of_graph.costs[number] for of_graph, number in picked]
        captured = step_peak([dataclasses.replace(one, between=0) for one in around], costs) + program.resident
        floor, tiers = lowest.step_peak + program.resident, bool(self.session.options.tiers)
        if program.footprint is not None:
            captured = floor = program.footprint([of_graph.candidates[number].plan for of_graph, number in picked])
        # A single graph has a plan within the budget already, but for the code around it.
        if program.whole or captured <= program.limit:
            return None
        largest = max(range(len(calls)), key=lambda place: costs[place].backward_peak)
        plan = plans[calls[largest].runner].variant(lowest.plans[largest]).captured.plan
        what = f"this step of {len(calls)} calls of {len(plans)} graphs"
        return budget_error(plan, self.session.options.budget, program.limit, floor, tiers=tiers, what=what)


def _address(thing: Any) -> int:
    return thing.untyped_storage()._cdata if isinstance(thing, torch.Tensor) else 0


def _hash_of(numbers: Any) -> int:
    beginning = 0
    for number in numbers:
        beginning = hash((beginning, number))
    return beginning
