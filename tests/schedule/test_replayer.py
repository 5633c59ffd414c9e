"""The replayer accepts what the scheduler makes and rejects every way of spoiling it; both agree on the bytes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import encore
from encore.api import compiled_call
from encore.errors import IllegalGraphError
from encore.graph import Graph, Op, OpClass, Role, Storage, Value, verify_graph
from encore.graph.values import Ref
from encore.schedule import Action, Free, Run, Schedule, replay, schedule_step, simulate
from support.observed_steps import tiny_step
from support.workload_cases import workloads_lowered

in_each_lowering = workloads_lowered(eager=("lm", "speech", "transformer"), fused=("speech",))

aten = torch.ops.aten


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * 2).exp().sum()


@functools.cache
def mlp() -> Schedule:
    torch._dynamo.reset()
    model = encore.compile(Mlp(), lowering="eager")
    model(torch.ones(3, 4)).backward()
    (captured,) = compiled_call(model).session.graphs
    return captured.plan.schedule


def rejected(schedule: Schedule, why: str) -> None:
    with pytest.raises(IllegalGraphError, match=why):
        replay(schedule)


def changed(
    *,
    forward: Callable[[list[Action]], list[Action]] | None = None,
    backward: Callable[[list[Action]], list[Action]] | None = None,
) -> Schedule:
    schedule = mlp()
    return dataclasses.replace(
        schedule,
        forward=tuple(forward(list(schedule.forward)) if forward else schedule.forward),
        backward=tuple(backward(list(schedule.backward)) if backward else schedule.backward),
    )


def first(actions: list[Action] | tuple[Action, ...], kind: type[Action]) -> int:
    return next(position for position, action in enumerate(actions) if isinstance(action, kind))


# -- what is rejected ------------------------------------------------------------------------------------------------


def test_a_use_before_definition() -> None:
    rejected(changed(forward=lambda actions: actions[::-1]), "which is not there|ends without")
    runs = [position for position, action in enumerate(mlp().forward) if isinstance(action, Run)]

    def swapped(actions: list[Action]) -> list[Action]:
        actions[runs[0]], actions[runs[1]] = actions[runs[1]], actions[runs[0]]
        return actions

    rejected(changed(forward=swapped), "never made, or freed")


def test_a_use_after_free() -> None:
    run = next(action for action in mlp().backward if isinstance(action, Run))
    operand = mlp().graph.ops[run.op].reads[0]
    rejected(changed(backward=lambda actions: [Free(operand), *actions]), "never made, or freed")


def test_a_double_free() -> None:
    freed = next(action for action in mlp().backward if isinstance(action, Free))

    def twice(actions: list[Action]) -> list[Action]:
        position = actions.index(freed)
        return [*actions[: position + 1], freed, *actions[position + 1 :]]

    rejected(changed(backward=twice), "free of .* which is not there")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_leak(phase: str) -> None:
    """Every single free that is left out is noticed."""
    actions = getattr(mlp(), phase)
    frees = [position for position, action in enumerate(actions) if isinstance(action, Free)]
    assert frees
    for position in frees:
        spoilt = dataclasses.replace(mlp(), **{phase: (*actions[:position], *actions[position + 1 :])})  # type: ignore[arg-type]
        rejected(spoilt, f"{phase} leaks")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_missing_result(phase: str) -> None:
    graph = mlp().graph
    results = graph.outputs if phase == "forward" else graph.gradients
    result = next(value for value in results if value is not None and graph.values[value].producer is not None)
    actions = (*getattr(mlp(), phase), Free(result))
    rejected(dataclasses.replace(mlp(), **{phase: actions}), f"{phase} ends without")  # type: ignore[arg-type]


def test_a_missing_saved_value() -> None:
    saved = next(value for value in mlp().saved if mlp().graph.values[value].producer is not None)
    rejected(changed(forward=lambda actions: [*actions, Free(saved)]), "forward ends without")


def test_an_operator_that_runs_twice() -> None:
    def twice(actions: list[Action]) -> list[Action]:
        position = first(actions, Run)
        return [*actions[: position + 1], actions[position], *actions[position + 1 :]]

    rejected(changed(backward=twice), "made while it is still there|never made, or freed")


def test_a_byte_over_the_limit() -> None:
    highest = replay(mlp())
    assert replay(mlp(), limit=highest) == highest
    with pytest.raises(IllegalGraphError, match=f"over the limit of {highest - 1}"):
        replay(mlp(), limit=highest - 1)


def test_workspace_counts_towards_the_limit() -> None:
    highest = replay(mlp())
    with_workspace = replay(mlp(), workspace=lambda graph, op: 1000)
    assert highest < with_workspace <= highest + 1000
    with pytest.raises(IllegalGraphError, match="over the limit"):
        replay(mlp(), limit=highest, workspace=lambda graph, op: 1000)


# -- memory that is written over: a graph made by hand ---------------------------------------------------------------


def chain(length: int, *, bytes_each: int = 64) -> Graph:
    """x -> tanh -> neg -> tanh -> ... -> output, and back: each gradient reads one forward value."""
    values: list[Value] = []
    storages: list[Storage] = []
    ops: list[Op] = []

    def value(name: str, producer: int | None, role: Role | None = None) -> int:
        index = len(values)
        storages.append(Storage(index, bytes_each, "cpu", [index]))
        shape = (bytes_each // 4,)
        values.append(Value(index, name, index, shape, (1,), torch.float32, bytes_each, producer, role))
        return index

    def op(target: object, *reads: int, forward: bool) -> int:
        index = len(ops)
        result = value(f"v{len(values)}", index)
        args = tuple(Ref(read) for read in reads)
        ops.append(
            Op(
                index,
                f"op{index}",
                target,
                args,
                {},
                tuple(dict.fromkeys(reads)),
                (result,),
                False,
                OpClass.CHEAP,
                "",
                "",
            )
        )
        ops[-1].forward = forward
        for read in dict.fromkeys(reads):
            values[read].readers.append(index)
        return result

    x = value("x", None, Role.INPUT)
    made = [x]
    for position in range(length):
        made.append(op(aten.neg.default if position % 2 else aten.tanh.default, made[-1], forward=True))
    tangent = value("tangent", None, Role.TANGENT)
    gradient = tangent
    for kept in reversed(made[1:]):
        gradient = op(aten.mul.Tensor, gradient, kept, forward=False)
    output = made[-1]
    return Graph(values, storages, ops, [x], [tangent], [output], [gradient], returned=[output])


def with_over(schedule: Schedule, phase: str, position: int, operand: int) -> Schedule:
    """The schedule whose n-th operator of a phase writes over that operand."""
    actions = list(getattr(schedule, phase))
    runs = [index for index, action in enumerate(actions) if isinstance(action, Run)]
    actions[runs[position]] = Run(actions[runs[position]].op, operand)
    return dataclasses.replace(schedule, **{phase: tuple(actions)})  # type: ignore[arg-type]


def test_the_chain_is_legal_and_reuses_dying_gradients() -> None:
    graph = chain(4)
    verify_graph(graph)
    schedule = schedule_step(graph)
    replay(schedule)
    overs = [action.over for action in schedule.backward if isinstance(action, Run)]
    assert overs[0] is None, "the tangent is not ours to write over"
    assert all(over is not None for over in overs[1:])
    assert all(action.over is None for action in schedule.forward if isinstance(action, Run))


def test_a_write_over_an_input() -> None:
    graph = chain(3)
    rejected(with_over(schedule_step(graph), "forward", 0, graph.primals[0]), "which the schedule does not own")


def test_a_write_over_a_saved_value() -> None:
    schedule = schedule_step(chain(3))
    last = schedule.graph.ops[2]
    assert last.forward
    kept = last.reads[0]
    assert kept in schedule.saved
    rejected(with_over(schedule, "forward", 2, kept), "whose memory was written over")
    operand = next(value for value in schedule.graph.ops[3].reads if value in schedule.saved)
    rejected(with_over(schedule, "backward", 0, operand), "which the schedule does not own")


def test_a_write_over_a_tangent() -> None:
    schedule = schedule_step(chain(3))
    rejected(with_over(schedule, "backward", 0, schedule.graph.tangents[0]), "which the schedule does not own")


def test_a_write_over_an_output() -> None:
    """The last gradient operator reads nothing of the caller's; the first reads the output, which the caller holds."""
    schedule = schedule_step(chain(1))
    output = schedule.graph.outputs[0]
    assert output is not None
    assert output in schedule.saved
    rejected(with_over(schedule, "backward", 0, output), "which the schedule does not own")


def test_a_stale_read_after_a_write_over() -> None:
    """x -> a -> b over a, then a is read again."""
    graph = chain(2)
    x, a, b = 0, 1, 2
    forward = (Run(0), Run(1, over=a), Run(1))
    spoilt = Schedule(graph, forward, (), saved=())
    assert graph.ops[1].reads == (a,)
    assert graph.ops[1].writes == (b,)
    assert graph.primals == [x]
    rejected(spoilt, "reads v1, whose memory was written over")


def test_a_write_over_what_the_operator_does_not_read() -> None:
    schedule = schedule_step(chain(4))
    gradient = schedule.graph.ops[4].writes[0]
    assert gradient is not None
    rejected(with_over(schedule, "backward", 3, gradient), "cannot write over")


def test_a_write_over_a_block_of_another_size() -> None:
    graph = chain(4)
    schedule = schedule_step(graph)
    result = graph.ops[5].writes[0]
    assert result is not None
    storage = graph.values[result].storage
    assert storage is not None
    graph.storages[storage].bytes += 4
    rejected(schedule, "writes 68 bytes over a block of 64")


# -- what is accepted ------------------------------------------------------------------------------------------------


@in_each_lowering
def test_captured_schedules_are_legal_and_both_walks_agree(name: str, lowering: str) -> None:
    schedule = tiny_step(name, lowering).plan.schedule
    timeline = simulate(schedule)
    in_phases = max(moment.peak for moment in timeline.moments if moment.phase != "end")
    assert replay(schedule) == in_phases
    for moment in timeline.moments:
        assert sum(moment.by_kind) == moment.live + timeline.resident


def test_ten_thousand_operators() -> None:
    graph = chain(5_000)
    assert len(graph.ops) == 10_000
    verify_graph(graph)
    schedule = schedule_step(graph)
    timeline = simulate(schedule)
    # Everything is kept, beside it the tangent, and one gradient that the later ones write over.
    assert timeline.saved == 5_000 * 64
    assert timeline.step_peak == replay(schedule) == (5_000 + 2) * 64
    assert len(schedule.saved) == 5_000


def test_the_schedule_of_an_mlp_reads_like_this() -> None:
    assert mlp().describe() == MLP_ALOUD


MLP_ALOUD = """\
forward:
  run t(primals_1)
  free primals_1
  run addmm(primals_2, primals_3, t)
  free primals_2
  free t
  run tanh(addmm) over addmm
  free addmm
  run mul(tanh)
  run t_1(primals_4)
  run addmm_1(primals_5, mul, t_1)
  free primals_5
  free t_1
  run exp(addmm_1) over addmm_1
  free addmm_1
  run sum_1(exp)
backward:
  run expand(tangents_1)
  free tangents_1
  run mul_1(expand, exp)
  free expand
  free exp
  run mm(mul_1, primals_4)
  free primals_4
  run t_3(mul_1)
  run mm_1(t_3, mul)
  free t_3
  free mul
  run t_4(mm_1)
  free mm_1
  run sum_2(mul_1)
  free mul_1
  run view(sum_2)
  free sum_2
  run t_5(t_4)
  free t_4
  run mul_2(mm) over mm
  free mm
  run tanh_backward(mul_2, tanh) over mul_2
  free mul_2
  free tanh
  run t_6(tanh_backward)
  run mm_2(t_6, primals_3)
  free t_6
  free primals_3
  run t_7(mm_2)
  free mm_2
  run sum_3(tanh_backward)
  free tanh_backward
  run view_1(sum_3)
  free sum_3
  run t_8(t_7)
  free t_7
saved: exp, primals_4, mul, tanh, primals_3"""
