"""A plan made of operators -> the same plan made of kernels that exist and never hold more than the operators did.

Fusing takes memory away almost everywhere, but a kernel allocates all its results at once and keeps all its operands
until it ends. A kernel at fault for a higher peak is taken apart again; where several of one structure are, all are.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from encore.cost import Workspaces
from encore.lower.kernels import CompiledKernel, KernelStore
from encore.plan import Plan
from encore.schedule import Fused, Fusion, Schedule, Timeline, simulate
from encore.schedule.kernel import Kernel

log = logging.getLogger("encore")

MOST_TAKEN_APART = 40
"""Kernels taken apart for the sake of the peak before fusing is given up for the graph."""
FEW = 3
"""Kernels of one structure that are taken apart by themselves before the structure is."""


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """A plan of kernels, and the kernels by key."""

    plan: Plan
    kernels: Mapping[str, CompiledKernel]
    compiled: int
    """How many of them had to be compiled for it."""


def fuse_plan(plan: Plan, workspaces: Workspaces, store: KernelStore, *, compile_kernels: bool) -> FusedPlan:
    """Fuse what can be fused. Without compiling (an estimate), every kernel is taken to work."""
    refused: dict[str, str] = {}
    apart: dict[str, set[tuple[int, ...]]] = {}
    fresh = 0
    fusion = Fusion(plan.schedule)

    def separate(action: Fused) -> bool:
        taken = apart.get(action.kernel.key, ())
        return action.kernel.key in refused or len(taken) > FEW or action.ops in taken

    for _ in range(MOST_TAKEN_APART):
        schedule = fusion.without(separate)
        kernels = kernels_of(schedule)
        compiled: Mapping[str, CompiledKernel] = {}
        if compile_kernels:
            made = store.compile(kernels.values())
            compiled = made.compiled
            fresh += made.fresh
            refused.update(made.failed)
            if made.failed:
                continue
        for key, kernel in kernels.items():
            known = store.workspace(kernel)
            if known is not None:
                workspaces.learn(key, known)
        timeline = simulate(schedule, workspaces, outputs_outlive=plan.timeline.outputs_outlive)
        if timeline.step_peak <= plan.timeline.step_peak:
            _tell(refused)
            return FusedPlan(dataclasses.replace(plan, schedule=schedule, timeline=timeline), compiled, fresh)
        fault = _at_fault(timeline)
        if fault is None:
            break
        apart.setdefault(fault.kernel.key, set()).add(fault.ops)
    log.info("operators stay separate: every way of fusing them that was tried raises the peak")
    _tell(refused)
    return FusedPlan(plan, {}, fresh)


def kernels_of(schedule: Schedule) -> dict[str, Kernel]:
    """The distinct kernels of a schedule, by key."""
    actions = (*schedule.forward, *schedule.backward)
    return {action.kernel.key: action.kernel for action in actions if isinstance(action, Fused)}


def _at_fault(timeline: Timeline) -> Fused | None:
    """The kernel that runs at the worst moment, else the last one before it."""
    before = reversed(timeline.moments[: timeline.worst + 1])
    return next((moment.action for moment in before if isinstance(moment.action, Fused)), None)


def _tell(refused: Mapping[str, str]) -> None:
    if refused:
        reasons = sorted(set(refused.values()))
        warnings.warn(
            f"encore: the operators of {len(refused)} kernels run one by one: {'; '.join(reasons[:3])}", stacklevel=2
        )
