"""The forms of a graph: rewritten for speed or for memory, with its large heads whole or in slices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from encore.compiler.captured import Captured
from encore.compiler.fuse import FusedPlan, fuse_plan
from encore.errors import PlanError
from encore.graph import Graph, verify_graph
from encore.lower import kernel_store
from encore.plan import (
    Candidate,
    GraphPlan,
    Plan,
    Planner,
    allowed_methods,
    keep_everything,
    will_do,
    without_saved_weights,
)
from encore.plan.saved import describe
from encore.plan.seconds import ActionSeconds
from encore.rewrite import ComparedJudge, Judge, LeanJudge, find_heads, rewrite, split_head

SLICES = (1, 4, 16)
"""The numbers of slices of large heads that the planner chooses from."""
LARGE_HEAD = 0.03
"""A head is large if its scores take this share of the peak."""


@dataclass(frozen=True, slots=True)
class RewrittenGraph:
    """A graph after its passes, with the plan that keeps everything."""

    kept: Plan
    passes: tuple[str, ...]
    """Those that changed it."""
    lean: bool = False
    """Whether it is the graph that `rewrite_for_memory` returns, too."""


def rewrite_for_speed(captured: Captured, unplanned: Plan) -> RewrittenGraph:
    """Run the passes that make the step faster. The eager lowering has those that change no bit, and runs them only if
    the step exceeds the budget without them."""
    options = captured.options
    if captured.exact and options.plan is None:
        as_it_is = Candidate.of(unplanned)
        if will_do(as_it_is, options, unplanned=unplanned, earlier=captured.earlier):
            return RewrittenGraph(unplanned, _while_tracing(captured), lean=True)
    known = captured.session.structures.of(captured.graph).ratios if captured.runs else None
    judge = ComparedJudge(Judge(run=captured.runs, exact=captured.exact, known=known), LeanJudge())
    found = _rewrite(captured, unplanned, judge)
    return dataclasses.replace(found, lean=judge.alike)


def rewrite_for_memory(captured: Captured, unplanned: Plan) -> RewrittenGraph:
    """Run the passes that save less for backward, whatever they cost. Which rewrites are faster differs from process to
    process; the lowest reachable peak must not."""
    found = _rewrite(captured, unplanned, LeanJudge())
    return dataclasses.replace(found, kept=dataclasses.replace(found.kept, lean=True))


def _rewrite(captured: Captured, unplanned: Plan, judge: Judge) -> RewrittenGraph:
    workspaces, outlive = captured.session.workspaces, unplanned.timeline.outputs_outlive

    @functools.cache
    def keep(graph: Graph) -> Plan:
        return keep_everything(graph, workspaces, outputs_outlive=outlive)

    rewritten = rewrite(
        unplanned.schedule.graph,
        judge,
        peak=lambda graph: keep(graph).timeline.step_peak,
        limit=unplanned.timeline.step_peak,
        skip=captured.options.skip,
    )
    if not rewritten.applied:
        return RewrittenGraph(unplanned, _while_tracing(captured))
    graph = rewritten.graph
    if captured.session.gathers:
        graph = without_saved_weights(graph, exact=captured.exact)
    kept = keep(graph)
    return RewrittenGraph(kept, (*_while_tracing(captured), *rewritten.applied))


def _while_tracing(captured: Captured) -> tuple[str, ...]:
    return ("recurrent",) if captured.lifted else ()


@dataclass(frozen=True, slots=True)
class Forms:
    """The planners of one graph: of the form that is rewritten for speed, and of its other forms."""

    captured: Captured
    unplanned: Plan
    first: Planner
    passes: Mapping[bool, tuple[str, ...]]
    """The passes that changed the graph; by `Plan.lean`."""
    is_lean: bool
    """Whether a graph that is rewritten for memory is the same."""

    @classmethod
    def of(cls, captured: Captured, unplanned: Plan, rewritten: RewrittenGraph) -> Forms:
        """The forms of a graph that was rewritten."""
        planner = _planner(captured, rewritten.kept)
        return cls(captured, unplanned, planner, {False: rewritten.passes, True: ()}, rewritten.lean)

    def priced_by(self, seconds: ActionSeconds) -> Forms:
        """The same forms, with other seconds."""
        return dataclasses.replace(self, first=self.first.informed(seconds=seconds))

    def with_lean(self) -> tuple[Forms, Planner | None]:
        """The planner of the form that is rewritten for memory, unless it is the same graph."""
        if self.captured.exact or self.is_lean:
            return self, None
        rewritten = rewrite_for_memory(self.captured, self.unplanned)
        if describe(rewritten.kept.schedule.graph) == describe(self.first.graph):
            return self, None
        lean = _planner(self.captured, rewritten.kept, reference=self.first)
        return dataclasses.replace(self, passes={**self.passes, True: rewritten.passes}), lean

    def in_slices(self, planner: Planner, slices: int) -> Planner | None:
        """The planner of the same graph with its large heads in slices, if it has some. Slices change the order of
        sums, so the eager lowering has none."""
        if slices == 1 or self.captured.exact or "split_head" in self.captured.options.skip:
            return planner if slices == 1 else None
        heads = find_heads(planner.graph)
        scores = max((planner.graph.bytes_of(head.product.result) for head in heads), default=0)
        if scores < LARGE_HEAD * planner.kept.timeline.step_peak:
            return None
        graph = split_head(planner.graph, slices)
        verify_graph(graph)
        outlive = planner.kept.timeline.outputs_outlive
        kept = keep_everything(graph, self.captured.session.workspaces, outputs_outlive=outlive)
        kept = dataclasses.replace(kept, slices=slices, lean=planner.kept.lean)
        return _planner(self.captured, kept, reference=planner)

    def all_slices(self, planner: Planner) -> Iterator[Planner]:
        """The planner, and those of its graph with large heads in slices."""
        found = (self.in_slices(planner, slices) for slices in SLICES)
        return (form for form in found if form is not None)

    def given(self, plan: GraphPlan, *, made_here: bool = False) -> tuple[Forms, Candidate]:
        """A plan that was made before, or by another rank (`made_here`)."""
        forms, lean = self.with_lean() if plan.lean else (self, None)
        form = forms.in_slices(lean or self.first, plan.slices)
        if form is None:
            raise PlanError(f"the plan takes heads in {plan.slices} slices, and this graph has none; plan anew")
        captured, options = self.unplanned.schedule.graph, self.captured.options
        fates = plan.fates_in(
            captured, form.graph, lossy=options.lossy.codecs, links=self.first.links, made_here=made_here
        )
        return forms, form.given(fates)


def _planner(captured: Captured, kept: Plan, reference: Planner | None = None) -> Planner:
    session, options = captured.session, captured.options
    separate = captured.exact or "fuse" in options.skip
    return Planner(
        kept,
        session.workspaces,
        session.seconds if reference is None else reference.seconds,
        fuse=None if separate else functools.partial(_as_kernels, captured),
        exact=captured.exact,
        keep=options.keep,
        methods=allowed_methods(options.methods, options.lossy.codecs),
        links=None if reference is None else reference.links,
        densities=None if reference is None else reference.densities,
        admitted=None if reference is None else reference.admitted,
        gathered=session.gathers,
        reference=reference,
    )


def _as_kernels(captured: Captured, plan: Plan) -> Plan:
    """The plan with kernels, which are not compiled yet."""
    return fused(captured, plan, compile_kernels=False).plan


def fused(captured: Captured, plan: Plan, *, compile_kernels: bool) -> FusedPlan:
    """The plan with kernels."""
    return fuse_plan(
        plan,
        captured.session.workspaces,
        kernel_store(),
        compile_kernels=compile_kernels,
        fusions=captured.fusions,
    )
