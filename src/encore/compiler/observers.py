"""Measurements on running steps: the gradient error of lossy codecs, the speed of tiers."""

from __future__ import annotations

import torch

from encore.capture import torch_private
from encore.compiler.captured import Captured
from encore.compiler.fuse import FusedPlan
from encore.compiler.lossy_check import LossyCheck, has_lossy_codes
from encore.cost import LinkLessons
from encore.cost.gradient_error import GradientError
from encore.plan import Plan, step_seconds
from encore.plan.saved import fingerprint


def lossy_check(captured: Captured, fused: FusedPlan, planned: GradientError | None) -> LossyCheck | None:
    """Return the check of the gradient error of a plan with lossy codecs; `planned` is the error that was measured
    while the plan was chosen."""
    session, options, plan = captured.session, captured.options, fused.plan
    if not captured.runs or not has_lossy_codes(plan):
        return None
    name = fingerprint(captured.graph)

    def plan_again(tangents: list[torch.Tensor]) -> bool:
        if session.one_graph or options.plan is not None or torch_private.has_ranks():
            return False
        session.excesses[name] += 1
        session.sent_tangents[name] = [tangent.detach().clone() for tangent in tangents]
        session.plan_again = True
        return True

    return LossyCheck(
        captured.name,
        plan,
        fused.kernels,
        bound=None if options.lossy.bound is None else captured.share_of(options.lossy.bound),
        every=options.lossy_check,
        planned=planned,
        plan_again=plan_again,
    )


def link_lessons(captured: Captured, plan: Plan) -> LinkLessons | None:
    """Return what measures the speed of a tier on the steps of a plan, if the step has one graph, on a CPU and without
    checks, and uses one tier."""
    session = captured.session
    alone = captured.runs and not session.checks and not captured.break_reason and not captured.number
    used = plan.tiers
    if not alone or len(used) != 1 or any(storage.device != "cpu" for storage in plan.schedule.graph.storages):
        return None
    (name,) = used
    computing = step_seconds(plan.schedule, session.seconds)
    return LinkLessons(session.transports[name].tier, session.links[name], computing)
