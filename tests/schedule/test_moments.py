"""The simulator against the allocator, moment by moment: after every operator and kernel of every tiny workload, to the
byte, in both lowerings."""

from __future__ import annotations

import pytest

from encore.schedule import Fused, Run
from encore.schedule.simulator import Moment
from support.observed_steps import TinyStep, tiny_step
from support.workload_cases import workloads_lowered

in_each_lowering = workloads_lowered(eager=("lm", "speech", "transformer"), fused=("speech",))


def simulated(step: TinyStep) -> list[tuple[Moment, Moment | None]]:
    """The moment of every operator and kernel, with the one before it."""
    moments = step.plan.timeline.moments
    previous = (None, *moments)
    return [
        (now, before) for now, before in zip(moments, previous, strict=False) if isinstance(now.action, Run | Fused)
    ]


def named(step: TinyStep, moment: Moment) -> str:
    assert isinstance(moment.action, Run | Fused)
    ops = moment.action.ops if isinstance(moment.action, Fused) else (moment.action.op,)
    return f"{moment.phase} {', '.join(step.plan.schedule.graph.ops[op].name for op in ops)}"


@in_each_lowering
def test_live_bytes_equal_the_allocators_before_and_after_every_operator(name: str, lowering: str) -> None:
    step = tiny_step(name, lowering)
    assert step.graphs == 1
    moments = simulated(step)
    assert len(moments) == len(step.operators) > 50
    wrong = [
        f"{named(step, now)}: simulated {now.live}, allocated {seen.after}"
        for (now, _), seen in zip(moments, step.operators, strict=True)
        if now.live != seen.after
    ]
    assert not wrong, "\n".join(wrong[:20])
    in_forward = [
        f"before {named(step, now)}: simulated {before.live}, allocated {seen.before}"
        for (now, before), seen in zip(moments, step.operators, strict=True)
        if before is not None and before.phase == now.phase and before.live != seen.before
    ]
    assert not in_forward, "\n".join(in_forward[:20])


@in_each_lowering
def test_the_simulated_peak_of_an_operator_is_never_below_the_real_one(name: str, lowering: str) -> None:
    step = tiny_step(name, lowering)
    too_low = [
        f"{named(step, now)}: simulated {now.peak}, allocated {seen.peak}"
        for (now, _), seen in zip(simulated(step), step.operators, strict=True)
        if now.peak < seen.peak
    ]
    assert not too_low, "\n".join(too_low[:20])


@in_each_lowering
def test_the_worst_operator_is_the_one_the_allocator_names(name: str, lowering: str) -> None:
    """The predicted and the real worst moment may tie elsewhere, but are equally high."""
    step = tiny_step(name, lowering)
    assert max(now.peak for now, _ in simulated(step)) == pytest.approx(
        max(seen.peak for seen in step.operators), rel=0.01
    )
