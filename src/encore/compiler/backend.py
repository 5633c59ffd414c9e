"""What Dynamo calls with each graph it finds: trace the joint graph, plan it, hand back callables that run the plan.

Passes, in order, each named and timed: capture (AOTAutograd's trace) or capture of repeats, facts, verify, plan (with
the rewrites of the fused lowering), compile (its kernels), lower. One INFO line a graph on the logger `encore`;
`ENCORE_LOG=1` shows it on stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from encore.capture import torch_private
from encore.capture.call_trace import NotRepeatableError
from encore.capture.recurrent import lifting
from encore.capture.repeats import Repeats, trace_repeats
from encore.capture.unused_outputs import NotOptionalError, Tangents, can_run_again
from encore.codecs import CODECS, Densities, Share
from encore.compiler.bounded_codecs import BoundedCodecs
from encore.compiler.first_call import CheckedCall
from encore.compiler.fuse import FusedPlan, fuse_plan, kernels_of
from encore.compiler.lossy_check import LossyCheck, has_lossy_codes
from encore.compiler.notes import capture_notes, workspace_notes
from encore.compiler.session import CapturedGraph, PlainGraph, Session
from encore.compiler.variants import GraphRunner, Used, Variant
from encore.compiler.watch import watches
from encore.cost import LinkLessons, densities, may_be_narrow, may_be_sparse, time_kernels
from encore.cost.gradient_error import GradientError
from encore.errors import BudgetError, CheckError, EncoreError, IllegalGraphError, PlanError
from encore.graph import Graph, Primal, UnsupportedGraphError, build_graph, verify_graph
from encore.lower import kernel_store, lower
from encore.options import make_options
from encore.plan import (
    GraphPlan,
    Offer,
    Plan,
    Planner,
    allowed_methods,
    choose,
    feature_maps,
    keep_everything,
    keeps_budget,
    menu,
    stack_plans,
    step_seconds,
    will_do,
    worth_having,
)
from encore.plan.saved import describe, fingerprint
from encore.rewrite import Judge, LeanJudge, find_heads, rewrite, split_head
from encore.schedule import Choice, Schedule, replay
from encore.schedule.recompute import made_by, recomputable
from encore.units import bytes_text

SLICES = (1, 4, 16)
"""How many parts large heads are taken in, for the planner to choose from."""
LARGE_HEAD = 0.03
"""Share of the peak that the scores of a large head take."""

ONCE = ("dynamo", "capture", "capture of repeats")
"""Stages of the first step that another plan for the same graph does not take again."""

UNKNOWN_MAPS = 0.05
"""Share of the peak that feature maps must take whose codes depend on the data, for the first batch to be looked at."""

log = logging.getLogger("encore")
if os.environ.get("ENCORE_LOG"):
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **unknown: Any
) -> Callable[..., Any]:
    """`torch.compile(model, backend="encore", options={"budget": "2GiB"})`."""
    with _errors_as_themselves():
        session = Session("torch.compile", make_options({**(options or {}), **unknown}), one_graph=True)
    return GraphCompiler(session)(module, inputs)


@contextlib.contextmanager
def _errors_as_themselves() -> Iterator[None]:
    """What Encore raises on purpose reaches the caller of the compiled function unwrapped."""
    try:
        yield
    except EncoreError as error:
        raise torch_private.BackendRefusal(error, keep_frames=isinstance(error, IllegalGraphError)) from None


def _tell_of_recurrent_layers() -> None:
    warnings.warn(
        "encore: torch.compile passes over models with nn.LSTM, nn.GRU or nn.RNN, which then run as plain PyTorch; set "
        "torch._dynamo.config.allow_rnn = True before the first step, or use encore.compile(model)",
        stacklevel=2,
    )


def __getattr__(name: str) -> Any:
    """`encore_backend`, which the entry point of `torch.compile(backend="encore")` names. Only a process that asks for
    it has a callback in Dynamo."""
    if name != "encore_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    torch_private.tell_of_recurrent_layers(compile_graph, _tell_of_recurrent_layers)
    globals()[name] = compile_graph
    return compile_graph


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes a million small objects that stay, and no cycles: Python's collector would look through them, and
    through the traced graph, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphCompiler:
    """A Dynamo backend that files what it compiles under one session."""

    def __init__(self, session: Session, compilation: Callable[..., GraphCompilation] | None = None) -> None:
        self.session = session
        self.compilation = compilation or GraphCompilation
        self.__name__ = "encore"

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.session.remember_tensors(inputs)
        torch_private.pin_sizes(module)
        torch_private.guard_hooks()
        with _errors_as_themselves():
            compilation = self.compilation(self.session, module, inputs)
            compiled = compilation.compile()
        if self.session.checks and compilation.runner is not None:
            return CheckedCall(self.session, compilation.runner, module, compiled)
        return compiled


class GraphCompilation:
    """One graph on its way from Dynamo to callables."""

    def __init__(self, session: Session, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.session = session
        self.options = session.options
        self.module = module
        self.inputs = inputs
        self.notes = capture_notes(module, torch_private.traced_code())
        self.name = f"graph {len(session.graphs) + len(session.plain)}"
        self.runner: GraphRunner | None = None
        self.repeats: Repeats | None = None
        self.lifted: list[Any] = []
        self.rewrites: dict[bool, tuple[str, ...]] = {}
        """Passes that changed the graph, for both of its forms: False, and True for the lean one."""
        self.primals: Sequence[Any] = []
        """The tensors that the step was called with, while it is planned."""
        self.number = 0
        """Its place among the graphs of the session."""
        self.roles: list[Primal] = []
        self.returned: list[bool] = []
        self.ended = ("", "")
        """Why the graph ended before the model did, and where."""
        self.before: list[CapturedGraph] = []
        """The graphs of the step up to this one."""
        self.bounded: BoundedCodecs | None = None
        self.lossy_error: GradientError | None = None
        """The error of the plan's lossy codecs, measured while it was chosen."""
        self.started = time.perf_counter()
        since = session.waiting_since
        self.seconds: dict[str, float] = {} if since is None else {"dynamo": self.started - since}

    def compile(self) -> Callable[..., Any]:
        try:
            with lifting(self.session.options.lowering, self.session.options.skip) as self.lifted:
                return self._traced()
        finally:  # PyTorch keeps the callbacks, and they this object; it must not keep the user's parameters
            self.inputs = ()
            self.primals = []
            self.bounded = None
            self.repeats = None
            self.module = fx.GraphModule({}, fx.Graph())

    def _traced(self) -> Callable[..., Any]:
        self.repeats = trace_repeats(self.module)
        if self.repeats is not None:
            with contextlib.suppress(NotRepeatableError):
                compiled = self._through_aot_autograd(self.repeats.edges)
                if self.runner is not None:
                    return compiled
            self.repeats = None
        return self._through_aot_autograd(self.module)

    def _through_aot_autograd(self, module: fx.GraphModule) -> Callable[..., Any]:
        return torch_private.trace_joint(
            module,
            self.inputs,
            partition=self.partition,
            forward=self.forward_callable,
            backward=self.backward_callable,
            takes_missing_gradients=lambda: self.runner is not None and self.runner.tangents.may_be_missing,
        )

    def partition(self, joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan the joint graph, which AOTAutograd has traced or only the edges of."""
        if self.repeats is not None:
            joint = self.repeats.joint(joint)
        self._lap("capture" if self.repeats is None else "capture of repeats")
        return self.split(joint, num_outputs)

    def split(self, joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan the whole joint graph; AOTAutograd gets a shell with the right inputs and outputs."""
        self.roles = torch_private.primals(joint, self.module, self.inputs)
        self.returned = torch_private.returned_outputs(joint, num_outputs)
        try:
            with _collector_paused():
                graph = self._facts(joint)
        except UnsupportedGraphError as unsupported:
            self.session.plain.append(PlainGraph(self.name, str(unsupported)))
            warnings.warn(f"encore: {self.name} runs as plain PyTorch: {unsupported}", stacklevel=2)
            return torch_private.plain_partition(joint, num_outputs)
        self.primals = torch_private.given(joint, self.inputs)
        self.number = len(self.session.graphs)
        self.before = self.session.graphs_of_step_so_far()
        self.ended = torch_private.break_reason(self.module) or ("", "")
        tangents = Tangents(joint, num_outputs)
        used = self._first_used(tangents, graph)
        expected = joint if used == tangents.everything else tangents.only(used)
        graph = graph if expected is joint else self._facts(expected)
        self._lap("facts")
        first = self._plan(expected, graph, used)
        self.session.graphs.append(first.captured)
        self.runner = GraphRunner(self.session, tangents, first, functools.partial(self._plan_later, tangents))
        schedule = first.captured.plan.schedule
        return torch_private.shell(joint, num_outputs, [schedule.graph.values[value] for value in schedule.saved])

    def _facts(self, joint: fx.GraphModule) -> Graph:
        return build_graph(joint, primals=self.roles, returned=self.returned)

    def _first_used(self, tangents: Tangents, graph: Graph) -> Used:
        """The gradients to expect before any backward: those that the plan which was given or graphs like this one
        had; else those of losses, unless the outputs go on to another graph."""
        if not tangents.optional:
            return tangents.everything
        if not can_run_again(graph):
            tangents.require_all()
            return tangents.everything
        if self.options.plan is not None:
            planned = self.options.plan.of_graph(self.number).gradients_of
            expected = tangents.everything if planned is None else tangents.numbers(planned)
        else:
            reason, _ = self.ended
            seen = self.session.gradients_seen.get((len(self.before), tangents.kinds))
            expected = seen or (tangents.everything if reason else tangents.losses())
        try:
            tangents.only(expected)
        except NotOptionalError as reason:
            log.info("%s takes a gradient for every output: %s", self.name, reason)
            tangents.require_all()
            return tangents.everything
        return expected

    def _plan_later(self, tangents: Tangents, used: Used, primals: Sequence[Any], in_backward: bool) -> Variant:
        """Plan the graph for another set of gradients, while the step runs; for all, where that set cannot be."""
        assert self.runner is not None
        session = self.session
        self.started = time.perf_counter()
        self.seconds = {stage: seconds for stage, seconds in self.seconds.items() if stage in ONCE}
        self.options = dataclasses.replace(session.options, plan=None)  # a plan that was given is for the first set
        self.primals = primals
        mine = self.runner.current.captured
        self.before = session.graphs_before(mine) if in_backward else session.graphs_of_step_so_far()
        try:
            with torch_private.compile_settings(), _collector_paused():
                try:
                    joint = tangents.only(used)
                except NotOptionalError as reason:
                    log.info("%s takes a gradient for every output: %s", self.name, reason)
                    used = tangents.everything
                    joint = tangents.only(used)
                graph = self._facts(joint)
                self._lap("facts")
                variant = self._plan(joint, graph, used)
        finally:
            self.primals, self.before, self.bounded = [], [], None
        session.graphs[self.number] = variant.captured
        return variant

    def _plan(self, joint: fx.GraphModule, graph: Graph, used: Used) -> Variant:
        verify_graph(graph)
        self._lap("verify")
        reason, line = self.ended
        self.bounded, self.lossy_error = None, None
        with torch_private.real_tensors():
            with _collector_paused():
                unplanned = keep_everything(graph, self.session.workspaces, outputs_outlive=not reason)
            kept, offers, fused = self._within_budget(unplanned, torch_private.checkpointed(joint))
            self.session.workspaces.save()
            self.session.seconds.save()
        plan = dataclasses.replace(fused.plan, schedule=self._in_saving_order(joint, fused.plan.schedule))
        verify_graph(plan.schedule.graph)
        self._lap("compile")
        # An estimate compiles no kernels: what runs there, on tensors without memory, are the operators.
        runs = plan.schedule if self.session.workspaces.run else self._in_saving_order(joint, kept.schedule)
        watching = watches(plan) if self.session.workspaces.run else {}
        transports = self.session.transports if plan.choice.offload and self.session.workspaces.run else {}
        if self.session.checks:
            self._replay(plan)
        name = self.name.replace(" ", "_")
        lowered = lower(runs, name, fused.kernels, watching, transports, checked=self.session.checks)
        self._lap("lower")
        captured = CapturedGraph(
            name=self.name,
            unplanned=unplanned,
            plan=plan,
            limit=self.options.budget.bytes if self.options.budget is not None else None,
            break_reason=reason,
            break_line=line,
            seconds=self.seconds,
            sources=(lowered.forward_source, lowered.backward_source),
            rewrites=self.rewrites[plan.lean],
            kernels_compiled=fused.compiled,
            watches=tuple(watching.values()),
            offers=() if self.session.workspaces.run else tuple(offers),
            choices=tuple(offer.told for offer in worth_having(offers)),
            notes=(*workspace_notes(plan.schedule.graph, self.session.workspaces), *self.notes),
            lossy_check=self._lossy_check(graph, plan, fused) if self.session.workspaces.run else None,
            lessons=self._lessons(plan) if self._learns_links(plan) else None,
        )
        self._tell(captured)
        return Variant(used, captured, lowered)

    def _within_budget(self, unplanned: Plan, by_hand: Collection[str]) -> tuple[Plan, list[Offer], FusedPlan]:
        """Everything kept, the plans to pick from, and the one that was picked.

        A budget in percent is one of the largest unplanned step so far, in bytes. If other graphs follow in the step,
        this one is first planned within the share of the step at hand, to leave them what they had in larger steps.
        """
        options, (reason, _), place = self.options, self.ended, 1 + len(self.before)
        own = stack_plans([*(graph.unplanned for graph in self.before), unplanned]).total + options.resident
        largest = max(own, self.session.largest_step(place))
        for base in sorted({own, largest}) if reason else [largest]:
            if options.budget is not None:
                self.options = dataclasses.replace(options, budget=options.budget.of_step(base))
            try:
                found = self._planned(unplanned, by_hand)
                break
            except BudgetError:
                if base == largest:
                    raise
        self.session.note_step(place, own)
        return found

    def _planned(self, unplanned: Plan, by_hand: Collection[str]) -> tuple[Plan, list[Offer], FusedPlan]:
        with _collector_paused():
            kept = self._rewritten(unplanned)
            planner = self._planner(kept)
            offers = self._offers(unplanned, planner, by_hand)
        return kept, offers, self._pick(unplanned, planner, offers)

    @property
    def earlier(self) -> list[Plan]:
        """The plans of the step up to this graph."""
        return [graph.plan for graph in self.before]

    def _rewritten(self, unplanned: Plan) -> Plan:
        """Everything kept, with less to keep, and with the matrix products as the fused lowering wants them. The eager
        lowering has the passes that change no bit, and only where the step as it is will not do."""
        options, workspaces = self.options, self.session.workspaces
        exact = options.lowering == "eager"
        earlier = self.earlier
        self.rewrites = {False: ("recurrent",) if self.lifted else ()}
        if (
            exact
            and options.plan is None
            and will_do(Offer.of(unplanned), options, unplanned=unplanned, earlier=earlier)
        ):
            return unplanned
        return self._rewritten_by(Judge(run=workspaces.run, exact=exact), unplanned)

    def _rewritten_by(self, judge: Judge, unplanned: Plan) -> Plan:
        """Everything kept, after the passes that a judge lets through."""
        workspaces, outlive = self.session.workspaces, unplanned.timeline.outputs_outlive
        lean = isinstance(judge, LeanJudge)

        @functools.cache
        def keep(graph: Graph) -> Plan:
            return keep_everything(graph, workspaces, outputs_outlive=outlive)

        rewritten = rewrite(
            unplanned.schedule.graph,
            judge,
            peak=lambda graph: keep(graph).timeline.step_peak,
            limit=unplanned.timeline.step_peak,
            skip=self.options.skip,
        )
        self.rewrites[lean] = (*self.rewrites[False][: bool(self.lifted)], *rewritten.applied)
        return dataclasses.replace(keep(rewritten.graph) if rewritten.applied else unplanned, lean=lean)

    def _lean(self, unplanned: Plan, planner: Planner) -> Planner | None:
        """The planner of the graph rewritten for memory alone, unless that is the same graph. Which rewrites pay by
        their time differs from process to process; the lowest reachable peak must not."""
        if self.options.lowering == "eager":
            return None
        kept = self._rewritten_by(LeanJudge(), unplanned)
        if describe(kept.schedule.graph) == describe(planner.graph):
            return None
        return self._planner(kept, reference=planner)

    def _planner(self, kept: Plan, reference: Planner | None = None) -> Planner:
        session = self.session
        separate = self.options.lowering == "eager" or "fuse" in self.options.skip
        return Planner(
            kept,
            session.workspaces,
            session.seconds,
            fuse=None if separate else self._as_kernels,
            exact=self.options.lowering == "eager",
            keep=self.options.keep,
            methods=allowed_methods(self.options.methods, self.options.lossy.codecs),
            links=None if reference is None else reference.links,
            densities=None if reference is None else reference.densities,
            admitted=None if reference is None else reference.admitted,
            reference=reference,
        )

    def _in_slices(self, planner: Planner, slices: int) -> Planner | None:
        """The planner of the same graph with its large heads in slices, where it has some. Sums come out in another
        order, so the eager lowering does without."""
        options = self.options
        if slices == 1 or options.lowering == "eager" or "split_head" in options.skip:
            return planner if slices == 1 else None
        heads = find_heads(planner.graph)
        scores = max((planner.graph.bytes_of(head.product.result) for head in heads), default=0)
        if scores < LARGE_HEAD * planner.kept.timeline.step_peak:
            return None
        graph = split_head(planner.graph, slices)
        verify_graph(graph)
        outlive = planner.kept.timeline.outputs_outlive
        kept = keep_everything(graph, self.session.workspaces, outputs_outlive=outlive)
        return self._planner(dataclasses.replace(kept, slices=slices, lean=planner.kept.lean), reference=planner)

    def _offers(self, unplanned: Plan, planner: Planner, by_hand: Collection[str]) -> list[Offer]:
        """The plans to pick from: the one that was given; what checkpoints in the model ask for, where nothing else
        is asked; only the kept one, where that will do."""
        options, earlier = self.options, self.earlier
        as_it_is = planner.as_it_is()
        if options.plan is not None:
            given = options.plan.of_graph(self.number)
            return [self._given(unplanned, planner, given)]
        if by_hand and options.budget is None and options.overhead is None:
            obeyed = planner.given(Choice(made_by(planner.graph, by_hand) & recomputable(planner.graph)))
            return [min(obeyed, as_it_is, key=lambda offer: offer.plan.timeline.step_peak)]
        if self.session.workspaces.run and will_do(as_it_is, options, unplanned=unplanned, earlier=earlier):
            return [as_it_is]
        self.session.seconds.settle(planner.runs.schedule)
        planner.links = self.session.links
        planner.densities = self._densities(planner)
        if self.session.workspaces.run and options.lossy.bound is not None and "encode" in options.methods:
            self._admit_lossy(unplanned, planner, options.lossy.bound)
        return self._menu(unplanned, planner)

    def _menu(self, unplanned: Plan, planner: Planner) -> list[Offer]:
        rewritten = (planner, self._lean(unplanned, planner))
        forms = [self._in_slices(one, slices) for one in rewritten if one is not None for slices in SLICES]
        return menu([form for form in forms if form is not None])

    def _admit_lossy(self, unplanned: Plan, planner: Planner, bound: float) -> None:
        """Restrict the planner to lossy codecs whose measured effect on the gradients stays within the bound."""
        options = self.options
        limit = math.inf
        if options.budget is not None and not options.budget.is_floor:
            whole = unplanned.timeline.resident + unplanned.timeline.step_peak + options.resident
            limit = options.budget.resolve(whole) - unplanned.timeline.resident - options.resident
        name, sent = fingerprint(unplanned.schedule.graph), list[torch.Tensor]()
        if name in self.session.sent_tangents:
            sent, self.session.sent_tangents[name] = self.session.sent_tangents[name], []
        self.bounded = BoundedCodecs(planner, self.primals, self._share_of(bound), limit, sent)
        planner.admitted = self.bounded.admitted()
        if self.bounded.why_none:
            warnings.warn(
                f"encore: {self.name} uses no lossy codecs: their effect on the gradients cannot be measured, since "
                f"{self.bounded.why_none}; lossy= with names of codecs allows them without a bound",
                stacklevel=2,
            )

    def _lossy_check(self, captured: Graph, plan: Plan, fused: FusedPlan) -> LossyCheck | None:
        """What measures the gradient error of a plan with lossy codecs when it runs."""
        options = self.options
        if not has_lossy_codes(plan):
            return None
        bound = None if options.lossy.bound is None else self._share_of(options.lossy.bound)
        session, name = self.session, fingerprint(captured)

        def plan_again(tangents: list[torch.Tensor]) -> bool:
            fixed = session.one_graph or options.plan is not None or torch_private.has_ranks()
            if fixed or name in session.sent_tangents:
                return False
            session.sent_tangents[name] = [tangent.detach().clone() for tangent in tangents]
            session.plan_again = True
            return True

        return LossyCheck(
            self.name,
            plan,
            fused.kernels,
            bound=bound,
            every=options.lossy_check,
            planned=self.lossy_error,
            plan_again=plan_again,
        )

    def _share_of(self, bound: float) -> float:
        """What one graph may use of the bound. Errors of a later graph's input gradients pass on to earlier graphs, so
        shares add up: a half for the first graph of a step that breaks, a quarter for the second, and so on; the last
        takes what is left."""
        return bound * 0.5 ** (len(self.before) + bool(self.ended[0]))

    def _within_bound(self, unplanned: Plan, planner: Planner, offer: Offer, offers: list[Offer]) -> bool:
        """Does the plan keep the bound on the gradient error? Otherwise the offers are made anew, with fewer and better
        codecs."""
        bounded, plan = self.bounded, offer.separate
        if bounded is None or all(CODECS[one.codec].lossless for one in plan.choice.encode):
            return True
        found = bounded.error_of(plan)
        if found is not None and found.relative <= bounded.bound:
            self.lossy_error = found
            return True
        log.info("%s: a plan with a gradient error of %s is dropped", self.name, found)
        planner.admitted = bounded.tightened(math.inf if found is None else found.relative)
        with _collector_paused():
            offers[:] = self._menu(unplanned, planner)
        return False

    def _replay(self, plan: Plan) -> None:
        """Have the replayer follow what is lowered, within the peak that was predicted."""
        try:
            replay(plan.schedule, limit=plan.timeline.step_peak, workspace=self.session.workspaces)
        except IllegalGraphError as error:
            raise CheckError(f"ENCORE_CHECK: {self.name}: {error}. This is a bug in Encore: please report it") from None

    def _learns_links(self, plan: Plan) -> bool:
        """Steps teach how fast tiers are, if one graph is all there is to them, and nothing slows it down."""
        reason, _ = self.ended
        running = self.session.workspaces.run and not self.session.checks
        return bool(running and plan.choice.offload and not reason and not self.number)

    def _lessons(self, plan: Plan) -> LinkLessons | None:
        """Whoever learns from the steps of this plan how fast its tier is: one tier, and seconds that a processor
        spends, not a device that nobody waits for."""
        graph, session = plan.schedule.graph, self.session
        used = {one.tier for one in plan.choice.offload}
        if len(used) != 1 or any(storage.device != "cpu" for storage in graph.storages):
            return None
        (name,) = used
        computing = step_seconds(plan.schedule, session.seconds)
        return LinkLessons(session.transports[name].tier, session.links[name], computing)

    def _densities(self, planner: Planner) -> Densities:
        """How dense feature maps are on this batch, and how far integers reach, if there is a codec to which that
        matters."""
        asking = {codec.share for codec in map(CODECS.__getitem__, planner.methods.codecs) if not codec.exact_size}
        if not self.session.workspaces.run or not asking:
            return {}
        graph, peak = planner.graph, planner.kept.timeline.step_peak
        large = [value for value in feature_maps(planner.kept.schedule) if planner.is_large(value)]
        unknown = {Share.NON_ZEROS: may_be_sparse, Share.NUMBER_BYTES: may_be_narrow}
        maps = {share: unknown[share](graph).intersection(large) for share in asking}
        if sum(map(graph.bytes_of, set().union(*maps.values()))) < UNKNOWN_MAPS * peak:
            return {}
        with torch_private.real_tensors():
            return densities(graph, self.primals, maps)

    def _given(self, unplanned: Plan, planner: Planner, plan: GraphPlan, *, made_here: bool = False) -> Offer:
        """A plan that was made before, or by another rank (`made_here`)."""
        planner.links = self.session.links
        lean = self._lean(unplanned, planner) if plan.lean else None
        form, captured = self._in_slices(lean or planner, plan.slices), unplanned.schedule.graph
        if form is None:
            raise PlanError(f"the plan takes heads in {plan.slices} slices, and this graph has none; plan anew")
        lossy, tiers = self.options.lossy.codecs, planner.links
        choice = plan.choice(captured, form.graph, lossy=lossy, tiers=tiers, made_here=made_here)
        return form.given(choice)

    def _pick(self, unplanned: Plan, planner: Planner, offers: list[Offer]) -> FusedPlan:
        """The plan that is asked for, with its kernels. One that needs more than was predicted once its kernels are
        there makes room for the next."""
        options, earlier = self.options, self.earlier
        while True:
            with _collector_paused():
                mine = offers[0]
                if options.plan is None:
                    mine = choose(offers, options, unplanned=unplanned, earlier=earlier)
            if options.plan is None and not self._within_bound(unplanned, planner, mine, offers):
                continue
            offer = self._as_other_ranks(unplanned, planner, mine)
            self._lap("plan")
            if planner.fuse is None:
                return FusedPlan(offer.plan, {}, 0)
            fused = self._fused(offer.separate, compile_kernels=self.session.workspaces.run)
            plan = dataclasses.replace(fused.plan, overhead=offer.plan.overhead)
            if len(offers) > 1:
                time_kernels(self.session.seconds, kernels_of(plan.schedule), fused.kernels)
            if len(offers) > 1 or plan.choice.offload:
                plan = planner.timed(plan)
            as_predicted = plan.timeline.step_peak <= offer.plan.timeline.step_peak
            within = keeps_budget(plan, options, unplanned=unplanned, earlier=earlier)
            if as_predicted or offer is not mine or within:
                return dataclasses.replace(fused, plan=plan)
            offer.plan = plan

    def _as_other_ranks(self, unplanned: Plan, planner: Planner, offer: Offer) -> Offer:
        """Ranks time their operators each by itself and would plan differently: the first to plan a graph decides."""
        if not torch_private.has_ranks():
            return offer
        mine = GraphPlan.of(unplanned.schedule.graph, offer.separate)
        question = f"encore plan {mine.fingerprint} {dataclasses.replace(self.session.options, plan=None)}"
        told = torch_private.told_first(question, mine.to_json())
        agreed = GraphPlan.from_json(told)
        return offer if agreed == mine else self._given(unplanned, planner, agreed, made_here=True)

    def _as_kernels(self, plan: Plan) -> Plan:
        """The plan as it would run, its kernels not compiled yet."""
        return self._fused(plan, compile_kernels=False).plan

    def _fused(self, plan: Plan, *, compile_kernels: bool) -> FusedPlan:
        return fuse_plan(plan, self.session.workspaces, kernel_store(), compile_kernels=compile_kernels)

    def _in_saving_order(self, joint: fx.GraphModule, schedule: Schedule) -> Schedule:
        names = {schedule.graph.values[value].name: value for value in schedule.saved}
        ordered = torch_private.unchecked_last(joint, tuple(names))
        return dataclasses.replace(schedule, saved=tuple(names[name] for name in ordered))

    def forward_callable(self, module: fx.GraphModule) -> Callable[..., Any]:
        if self.runner is None:
            return torch_private.plain_callable(module)
        return torch_private.boxed(self.runner.forward)

    def backward_callable(self, module: fx.GraphModule) -> Callable[..., Any]:
        if self.runner is None:
            return torch_private.plain_callable(module)
        return torch_private.boxed(self.runner.backward)

    def _lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.started
        self.started = now

    def _tell(self, captured: CapturedGraph) -> None:
        graph, timeline = captured.plan.schedule.graph, captured.plan.timeline
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
        log.info(
            "%s: %d operators, peak %s (saved %s), plan %r; seconds: %s",
            self.name, len(graph.ops), bytes_text(timeline.step_peak), bytes_text(timeline.saved),
            captured.plan.name, stages,
        )  # fmt: skip
