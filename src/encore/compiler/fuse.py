"""Fusion of a plan: runs of operators become compiled kernels, as long as the peak does not rise.

Fusing saves memory almost everywhere, but a kernel allocates all its results at once and keeps all its operands until
it ends. A kernel that causes a higher peak is split into its operators again; if several of one structure do, all are.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from encore.compiler.stage_clock import collector_paused
from encore.cost import Workspaces
from encore.lower.kernels import CompiledKernel, KernelStore
from encore.plan import Plan
from encore.schedule import Fused, Fusion, Schedule, Timeline, simulate
from encore.schedule.kernel import Kernel

log = logging.getLogger("encore")

MOST_SPLIT = 40
"""Kernels that are split because of the peak before the whole graph stays without fusion."""
MOST_FUSIONS = 4
FEW = 3
"""Kernels of one structure that are split one by one before all of them are."""


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """A plan with kernels, and the compiled kernels by key."""

    plan: Plan
    kernels: Mapping[str, CompiledKernel]
    compiled: int
    """How many of them were compiled for it."""


class Fusions:
    """The fusions of a few plans of one graph: a plan is fused before it is chosen, and again when it is compiled."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Schedule, Fusion]] = {}

    def of(self, schedule: Schedule) -> Fusion:
        """The fusion of a schedule."""
        if id(schedule) not in self._made:
            if len(self._made) >= MOST_FUSIONS:
                del self._made[next(iter(self._made))]
            with collector_paused():
                self._made[id(schedule)] = schedule, Fusion(schedule)
        return self._made[id(schedule)][1]


def fuse_plan(
    plan: Plan,
    workspaces: Workspaces,
    store: KernelStore,
    *,
    compile_kernels: bool,
    fusions: Fusions | None = None,
) -> FusedPlan:
    """Fuse a plan. Without compiling (in an estimate), every kernel is assumed to compile."""
    failed: dict[str, str] = {}
    split: dict[str, set[tuple[int, ...]]] = {}
    fresh = 0
    fusion = (fusions or Fusions()).of(plan.schedule)

    def separate(action: Fused) -> bool:
        taken = split.get(action.kernel.key, ())
        return action.kernel.key in failed or len(taken) > FEW or action.ops in taken

    for _ in range(MOST_SPLIT):
        with collector_paused():
            schedule = fusion.without(separate)
            kernels = kernels_of(schedule)
        compiled: Mapping[str, CompiledKernel] = {}
        if compile_kernels:
            made = store.compile(kernels.values())
            compiled = made.compiled
            fresh += made.fresh
            failed.update(made.failed)
            if made.failed:
                continue
        for key, kernel in kernels.items():
            known = store.workspace(kernel)
            if known is not None:
                workspaces.learn(key, known)
        with collector_paused():
            timeline = simulate(schedule, workspaces, outputs_outlive=plan.timeline.outputs_outlive)
        if timeline.step_peak <= plan.timeline.step_peak:
            _warn_of_failures(failed)
            return FusedPlan(dataclasses.replace(plan, schedule=schedule, timeline=timeline), compiled, fresh)
        cause = _cause_of_peak(timeline)
        if cause is None:
            break
        split.setdefault(cause.kernel.key, set()).add(cause.ops)
    log.info("operators are not fused: every fusion that was tried raises the peak")
    _warn_of_failures(failed)
    return FusedPlan(plan, {}, fresh)


def kernels_of(schedule: Schedule) -> dict[str, Kernel]:
    """The distinct kernels of a schedule, by key."""
    actions = (*schedule.forward, *schedule.backward)
    return {action.kernel.key: action.kernel for action in actions if isinstance(action, Fused)}


def _cause_of_peak(timeline: Timeline) -> Fused | None:
    """The kernel that runs at the peak, else the last one before it."""
    before = reversed(timeline.moments[: timeline.worst + 1])
    return next((moment.action for moment in before if isinstance(moment.action, Fused)), None)


def _warn_of_failures(failed: Mapping[str, str]) -> None:
    if failed:
        reasons = sorted(set(failed.values()))
        warnings.warn(
            f"encore: the operators of {len(failed)} kernels run one by one: {'; '.join(reasons[:3])}", stacklevel=2
        )
