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
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from encore.capture import torch_private
from encore.capture.call_trace import NotRepeatableError
from encore.capture.recurrent import lifting, told_of_packing
from encore.capture.repeats import Repeats, trace_repeats
from encore.capture.session import CapturedGraph, PlainGraph, Session
from encore.capture.watch import watches
from encore.codecs import CODECS, Densities, Share
from encore.cost import LinkLessons, densities, may_be_narrow, may_be_sparse, time_kernels
from encore.errors import PlanError
from encore.graph import Graph, UnsupportedGraphError, build_graph, verify_graph
from encore.lower import FusedPlan, Lowered, fuse_plan, kernel_store, kernels_of, lower
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
    step_seconds,
    will_do,
    worth_having,
)
from encore.rewrite import Judge, find_heads, rewrite, split_head
from encore.schedule import Choice, Schedule
from encore.schedule.recompute import made_by, recomputable
from encore.units import bytes_text

SLICES = (1, 4, 16)
"""How many parts large heads are taken in, for the planner to choose from."""
LARGE_HEAD = 0.03
"""Share of the peak that the scores of a large head take."""

UNKNOWN_MAPS = 0.05
"""Share of the peak that feature maps must take whose codes depend on the data, for the first batch to be looked at."""

log = logging.getLogger("encore")
if os.environ.get("ENCORE_LOG"):
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


def encore_backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **unknown: Any
) -> Callable[..., Any]:
    """`torch.compile(model, backend="encore", options={"budget": "2GiB"})`."""
    session = Session("torch.compile", make_options({**(options or {}), **unknown}), one_graph=True)
    return GraphCompiler(session)(module, inputs)


def _tell_of_recurrent_layers() -> None:
    warnings.warn(
        "encore: torch.compile passes over models with nn.LSTM, nn.GRU or nn.RNN, which then run as plain PyTorch; set "
        "torch._dynamo.config.allow_rnn = True before the first step, or use encore.compile(model)",
        stacklevel=2,
    )


torch_private.tell_of_recurrent_layers(encore_backend, _tell_of_recurrent_layers)


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
        return self.compilation(self.session, module, inputs).compile()


class GraphCompilation:
    """One graph on its way from Dynamo to callables."""

    def __init__(self, session: Session, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.session = session
        self.module = module
        self.inputs = inputs
        self.name = f"graph {len(session.graphs) + len(session.plain)}"
        self.captured: CapturedGraph | None = None
        self.lowered: Lowered | None = None
        self.repeats: Repeats | None = None
        self.lifted: list[Any] = []
        self.rewrites: tuple[str, ...] = ()
        self.primals: list[Any] = []
        """The tensors that the step was called with, while it is planned."""
        self.started = time.perf_counter()
        since = session.waiting_since
        self.seconds: dict[str, float] = {} if since is None else {"dynamo": self.started - since}

    def compile(self) -> Callable[..., Any]:
        try:
            with lifting(self.session.options) as self.lifted:
                return self._traced()
        finally:  # PyTorch keeps the callbacks, and they this object; it must not keep the user's parameters
            self.inputs = ()
            self.primals = []
            self.repeats = None
            self.module = fx.GraphModule({}, fx.Graph())

    def _traced(self) -> Callable[..., Any]:
        self.repeats = trace_repeats(self.module)
        if self.repeats is not None:
            with contextlib.suppress(NotRepeatableError):
                compiled = self._through_aot_autograd(self.repeats.edges)
                if self.captured is not None:
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
        )

    def partition(self, joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan the joint graph, which AOTAutograd has traced or only the edges of."""
        if self.repeats is not None:
            joint = self.repeats.joint(joint)
        self._lap("capture" if self.repeats is None else "capture of repeats")
        return self.split(joint, num_outputs)

    def split(self, joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan the whole joint graph; AOTAutograd gets a shell with the right inputs and outputs."""
        try:
            with _collector_paused():
                graph = build_graph(
                    joint,
                    primals=torch_private.primals(joint, self.module, self.inputs),
                    returned=torch_private.returned_outputs(joint, num_outputs),
                )
        except UnsupportedGraphError as unsupported:
            self.session.plain.append(PlainGraph(self.name, str(unsupported)))
            warnings.warn(f"encore: {self.name} runs as plain PyTorch: {unsupported}", stacklevel=2)
            return torch_private.plain_partition(joint, num_outputs)
        self.primals = torch_private.given(joint, self.inputs)
        self._lap("facts")
        verify_graph(graph)
        self._lap("verify")
        packing = functools.partial(told_of_packing, self.session.between)
        reason, line = torch_private.break_reason(self.module, packing) or ("", "")
        with torch_private.real_tensors():
            with _collector_paused():
                unplanned = keep_everything(graph, self.session.workspaces, outputs_outlive=not reason)
                kept = self._rewritten(unplanned)
                planner = self._planner(kept)
                offers = self._offers(unplanned, planner, torch_private.checkpointed(joint))
            fused = self._pick(unplanned, planner, offers)
            self.session.workspaces.save()
            self.session.seconds.save()
        plan = dataclasses.replace(fused.plan, schedule=self._in_saving_order(joint, fused.plan.schedule))
        self._lap("compile")
        # An estimate compiles no kernels: what runs there, on tensors without memory, are the operators.
        runs = plan.schedule if self.session.workspaces.run else self._in_saving_order(joint, kept.schedule)
        watching = watches(plan) if self.session.workspaces.run else {}
        transports = self.session.transports if plan.choice.offload and self.session.workspaces.run else {}
        self.lowered = lower(runs, self.name.replace(" ", "_"), fused.kernels, watching, transports)
        self._lap("lower")
        self.captured = CapturedGraph(
            name=self.name,
            unplanned=unplanned,
            plan=plan,
            break_reason=reason,
            break_line=line,
            seconds=self.seconds,
            sources=(self.lowered.forward_source, self.lowered.backward_source),
            rewrites=self.rewrites,
            kernels_compiled=fused.compiled,
            watches=tuple(watching.values()),
            offers=() if self.session.workspaces.run else tuple(offers),
            choices=tuple(offer.told for offer in worth_having(offers)),
            lessons=self._lessons(plan) if transports and not reason and not self.session.graphs else None,
        )
        self.session.graphs.append(self.captured)
        self._tell()
        return torch_private.shell(joint, num_outputs, plan.schedule)

    def _rewritten(self, unplanned: Plan) -> Plan:
        """Everything kept, with less to keep, and with the matrix products as the fused lowering wants them. The eager
        lowering has the passes that change no bit, and only where the step as it is will not do."""
        options, workspaces = self.session.options, self.session.workspaces
        exact = options.lowering == "eager"
        earlier = self.session.plans_of_step_so_far()
        if (
            exact
            and options.plan is None
            and will_do(Offer.of(unplanned), options, unplanned=unplanned, earlier=earlier)
        ):
            return unplanned
        outlive = unplanned.timeline.outputs_outlive

        @functools.cache
        def keep(graph: Graph) -> Plan:
            return keep_everything(graph, workspaces, outputs_outlive=outlive)

        rewritten = rewrite(
            unplanned.schedule.graph,
            Judge(run=workspaces.run, exact=exact),
            peak=lambda graph: keep(graph).timeline.step_peak,
            limit=unplanned.timeline.step_peak,
            skip=options.skip,
        )
        self.rewrites = (*(["recurrent"] if self.lifted else []), *rewritten.applied)
        if not rewritten.applied:
            return unplanned
        verify_graph(rewritten.graph)
        return keep(rewritten.graph)

    def _planner(self, kept: Plan, reference: Planner | None = None) -> Planner:
        session = self.session
        separate = session.options.lowering == "eager" or "fuse" in session.options.skip
        return Planner(
            kept,
            session.workspaces,
            session.seconds,
            fuse=None if separate else self._as_kernels,
            exact=session.options.lowering == "eager",
            keep=session.options.keep,
            methods=allowed_methods(session.options),
            links=None if reference is None else reference.links,
            densities=None if reference is None else reference.densities,
            reference=reference,
        )

    def _in_slices(self, planner: Planner, slices: int) -> Planner | None:
        """The planner of the same graph with its large heads in slices, where it has some. Sums come out in another
        order, so the eager lowering does without."""
        options = self.session.options
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
        return self._planner(dataclasses.replace(kept, slices=slices), reference=planner)

    def _offers(self, unplanned: Plan, planner: Planner, by_hand: Collection[str]) -> list[Offer]:
        """The plans to pick from: the one that was given; what checkpoints in the model ask for, where nothing else
        is asked; only the kept one, where that will do."""
        options, earlier = self.session.options, self.session.plans_of_step_so_far()
        as_it_is = planner.as_it_is()
        if options.plan is not None:
            given = options.plan.of_graph(len(self.session.graphs))
            return [self._given(unplanned.schedule.graph, planner, given)]
        if by_hand and options.budget is None and options.overhead is None:
            obeyed = planner.given(Choice(made_by(planner.graph, by_hand) & recomputable(planner.graph)))
            return [min(obeyed, as_it_is, key=lambda offer: offer.plan.timeline.step_peak)]
        if self.session.workspaces.run and will_do(as_it_is, options, unplanned=unplanned, earlier=earlier):
            return [as_it_is]
        self.session.seconds.settle(planner.runs.schedule)
        planner.links = self.session.links
        planner.densities = self._densities(planner)
        forms = [self._in_slices(planner, slices) for slices in SLICES]
        return menu([form for form in forms if form is not None])

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

    def _given(self, captured: Graph, planner: Planner, plan: GraphPlan) -> Offer:
        """A plan that was made before, or by another rank."""
        planner.links = self.session.links
        form = self._in_slices(planner, plan.slices)
        if form is None:
            raise PlanError(f"the plan takes heads in {plan.slices} slices, and this graph has none; plan anew")
        lossy, tiers = self.session.options.lossy, planner.links
        return form.given(plan.choice(captured, form.graph, lossy=lossy, tiers=tiers))

    def _pick(self, unplanned: Plan, planner: Planner, offers: list[Offer]) -> FusedPlan:
        """The plan that is asked for, with its kernels. One that needs more than was predicted once its kernels are
        there makes room for the next."""
        options, earlier = self.session.options, self.session.plans_of_step_so_far()
        while True:
            with _collector_paused():
                mine = offers[0]
                if options.plan is None:
                    mine = choose(offers, options, unplanned=unplanned, earlier=earlier)
            offer = self._as_other_ranks(unplanned.schedule.graph, planner, mine)
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

    def _as_other_ranks(self, captured: Graph, planner: Planner, offer: Offer) -> Offer:
        """Ranks time their operators each by itself and would plan differently: the first to plan a graph decides."""
        if not torch_private.has_ranks():
            return offer
        mine = GraphPlan.of(captured, offer.separate)
        question = f"encore plan {mine.fingerprint} {dataclasses.replace(self.session.options, plan=None)}"
        told = torch_private.told_first(question, mine.to_json())
        agreed = GraphPlan.from_json(told)
        return offer if agreed == mine else self._given(captured, planner, agreed)

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
        if self.lowered is None or self.captured is None:
            return torch_private.plain_callable(module)
        run, session, captured = self.lowered.forward, self.session, self.captured
        starts_a_step = session.one_graph

        def forward(args: list[Any]) -> Any:
            if starts_a_step:
                session.begin_call()
            session.note_forward(captured)
            before, lessons = session.waited, captured.lessons
            if lessons is not None:
                lessons.begin_step()
            began = time.perf_counter()
            result = captured.seconds_of_first("first forward", run, args)
            if lessons is not None:
                lessons.ran(began)
            captured.stalled["forward"] = session.waited - before
            session.waiting_since = time.perf_counter()
            return result

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def backward_callable(self, module: fx.GraphModule) -> Callable[..., Any]:
        if self.lowered is None or self.captured is None:
            return torch_private.plain_callable(module)
        run, session, captured = self.lowered.backward, self.session, self.captured

        def backward(args: list[Any]) -> Any:
            session.note_backward()
            before, lessons = session.waited, captured.lessons
            began = time.perf_counter()
            result = captured.seconds_of_first("first backward", run, args)
            if lessons is not None:
                lessons.ran(began)
                lessons.end_step()
                captured.lessons = None if lessons.over else lessons
            captured.stalled["backward"] = session.waited - before
            return result

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward

    def _lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.started
        self.started = now

    def _tell(self) -> None:
        assert self.captured is not None
        graph, timeline = self.captured.plan.schedule.graph, self.captured.plan.timeline
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
        log.info(
            "%s: %d operators, peak %s (saved %s), plan %r; seconds: %s",
            self.name, len(graph.ops), bytes_text(timeline.step_peak), bytes_text(timeline.saved),
            self.captured.plan.name, stages,
        )  # fmt: skip
