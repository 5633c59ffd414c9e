"""Which operators become one kernel, what that saves, and what a kernel may not do. Nothing is compiled here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encore.errors import IllegalGraphError
from encore.schedule import Action, Free, Fused, Fusion, Run, Schedule, fuse, replay, simulate
from encore.schedule.fusion import MOST_OPERANDS, _Grouping
from support.captured_graphs import captured, named


def schedule_of(function: Callable[..., Any], *args: Any) -> Schedule:
    """The step operator by operator, as the eager lowering runs it."""
    torch._dynamo.reset()
    return captured(function, *args).plan.schedule


def fused(function: Callable[..., Any], *args: Any) -> Schedule:
    """The step in kernels, which replays to what is simulated. That may be more than before fusing."""
    together = fuse(schedule_of(function, *args))
    assert replay(together) == max(moment.peak for moment in simulate(together).moments if moment.phase != "end")
    return together


def matrix(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 3)), requires_grad=True)


def kernels(actions: Sequence[Action]) -> list[Fused]:
    return [action for action in actions if isinstance(action, Fused)]


def spoken(schedule: Schedule, phase: str = "forward") -> list[str]:
    """What a phase runs, read aloud, without its frees."""
    forward, backward = schedule.describe().split("backward:\n")
    lines = (forward.removeprefix("forward:\n") if phase == "forward" else backward).splitlines()
    return [line.strip() for line in lines if line.startswith(("  run", "  fuse"))]


# -- runs ------------------------------------------------------------------------------------------------------------


def test_a_small_graph_read_aloud() -> None:
    def between_products(x: Tensor, weight: Tensor) -> Tensor:
        return (((x * 2).sin() @ weight).exp() + 1).tanh()

    assert fused(between_products, matrix(), matrix()).describe() == (
        "forward:\n"
        "  fuse [mul sin] -> mul, sin\n"
        "  free primals_1\n"
        "  run mm(sin, primals_2)\n"
        "  fuse [exp add tanh] -> exp, tanh, exp over mm\n"
        "  free mm\n"
        "backward:\n"
        "  run t(sin)\n"
        "  free sin\n"
        "  fuse [tanh_backward mul_1] -> mul_1\n"
        "  free tangents_1\n"
        "  free tanh\n"
        "  free exp\n"
        "  run mm_1(t, mul_1)\n"
        "  free t\n"
        "  run t_1(primals_2)\n"
        "  free primals_2\n"
        "  run mm_2(mul_1, t_1)\n"
        "  free mul_1\n"
        "  free t_1\n"
        "  fuse [cos mul_2 mul_3] -> mul_3, mul_3 over mm_2\n"
        "  free mul\n"
        "  free mm_2\n"
        "saved: tanh, exp, sin, primals_2, mul"
    )


def test_what_passes_nothing_to_each_other_stays_apart() -> None:
    assert spoken(fused(lambda x, y: ((x * 2).sin(), (y * 3).cos()), matrix(3), matrix(4))) == [
        "fuse [mul sin] -> mul, sin",
        "fuse [mul_1 cos] -> mul_1, cos",
    ]


def test_an_operator_by_itself_is_no_kernel() -> None:
    schedule = fused(lambda x, weight: (x @ weight).tanh() @ weight, matrix(), matrix())
    assert kernels(schedule.forward) == []
    assert spoken(schedule) == spoken(schedule_of(lambda x, weight: (x @ weight).tanh() @ weight, matrix(), matrix()))


def test_what_lives_only_inside_gets_no_memory() -> None:
    def function(x: Tensor) -> Tensor:
        return (((x + 1) * 2 + 3) * 4).sum(0)

    apart, together = schedule_of(function, matrix(5, 7)), fused(function, matrix(5, 7))
    assert spoken(together) == ["fuse [add mul add_1 mul_1 sum_1] -> sum_1"]
    assert simulate(together).moments[0].live == 4 * 7
    assert simulate(apart).moments[0].live == 4 * 5 * 7


def test_a_draw_that_reads_nothing_of_the_run_steps_in_front_of_it() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin() * 2
        return y * torch.rand_like(x) + torch.randn_like(x)

    assert spoken(fused(function, matrix())) == [
        "run rand_like(primals_1)",
        "run randn_like(primals_1)",
        "fuse [sin mul mul_1 add] -> add, add over randn_like",
    ]


def test_a_draw_that_reads_the_run_ends_it() -> None:
    assert spoken(fused(lambda x: F.dropout(x.sin() * 2, 0.5).exp() + 1, matrix())) == [
        "fuse [sin mul] -> mul",
        "run dropout_noise(mul)",
        "fuse [mul_1 exp add] -> exp, add, exp over mul",
    ]


def test_operators_with_too_many_operands_and_sorts_stay_outside() -> None:
    def function(x: Tensor, *others: Tensor) -> Tensor:
        return torch.cat([other.sin() for other in others]).exp().sort(0).values * x.exp()

    count = MOST_OPERANDS + 1
    lines = spoken(fused(function, matrix(count, 2), *(matrix(1, 2) for _ in range(count))))
    assert sum(line.startswith("run cat(") for line in lines) == 1
    assert sum(line.startswith("run sort(") for line in lines) == 1


# -- forms that Inductor would not take -------------------------------------------------------------------------------


def test_a_stack_of_one_tensor_stays_outside() -> None:
    """Inductor gives the tensor itself for it: a kernel that returns both would return one buffer twice."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = (x * 2).tanh()
        return state, torch.stack([y, state]), torch.stack([state])

    lines = spoken(fused(function, matrix(), matrix()))
    assert "run stack_1(tanh)" in lines
    assert any(line.startswith("fuse [mul tanh stack]") for line in lines)


def test_complex_numbers_stay_outside() -> None:
    def function(x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        return torch.view_as_real(spectrum * spectrum + spectrum).sum()

    for action in kernels(fused(function, matrix(3, 8)).forward):
        assert all(not operand.dtype.is_complex for operand in action.kernel.operands)


def test_an_embedding_with_sparse_gradients_stays_outside() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Tanh(), nn.Hardtanh())
    assert spoken(fused(model, torch.tensor([1, 3])))[0].startswith("run embedding(")


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8)], ids=lambda norm: norm._get_name()
)
def test_a_norm_of_narrow_numbers_with_wide_weights_stays_outside(norm: nn.Module) -> None:
    """PyTorch keeps its statistics in the wide type, and its backward asks for that."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 8), norm

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return self.norm(self.linear(x)).exp() + 1

    schedule = fused(Model(), torch.randn(5, 6))
    for action in kernels((*schedule.forward, *schedule.backward)):
        assert not any("norm" in str(call.target) for call in action.kernel.calls)


# -- views -----------------------------------------------------------------------------------------------------------


def test_a_view_that_begins_with_its_base_moves_into_the_kernel() -> None:
    assert spoken(fused(lambda x: x[:2].sin() * 2, matrix(4, 3))) == ["fuse [slice_1 sin mul] -> mul"]


def test_a_view_that_begins_elsewhere_is_taken_outside() -> None:
    schedule = fused(lambda x: x[2:].sin() * 2, matrix(4, 3))
    assert spoken(schedule) == ["run slice_1(primals_1)", "fuse [sin mul] -> mul"]


def test_windows_at_other_places_have_equal_kernels() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [(x[start : start + 2].sin() * 2).exp() for start in (2, 4, 6)]

    actions = kernels(fused(function, matrix(8, 3)).forward)
    assert len(actions) == 3
    assert len({action.kernel.key for action in actions}) == 1
    assert actions[0].kernel == actions[1].kernel == actions[2].kernel


def test_a_view_of_a_result_that_others_read_is_taken_again_outside() -> None:
    schedule = fused(lambda x, weight: (x.sin() * 2).t() @ weight, matrix(), matrix())
    assert spoken(schedule) == ["fuse [sin mul] -> mul", "run t(mul)", "run mm(t, primals_2)"]


def test_a_view_of_a_result_that_only_the_kernel_reads_stays_inside() -> None:
    schedule = fused(lambda x: (x.sin() * 2).t().exp().sum(), matrix())
    (line,) = spoken(schedule)
    assert line.startswith("fuse [sin mul t exp sum_1] -> ")


# -- equal kernels ---------------------------------------------------------------------------------------------------


class Unrolled(nn.Module):
    """An LSTM, a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(4 + 3, 4 * 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = x.new_zeros(x.shape[1], 3), x.new_zeros(x.shape[1], 3)
        seen = []
        for step in x.unbind(0):
            i, f, g, o = self.gates(torch.cat([step, hidden], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            seen.append(hidden)
        return torch.stack(seen).sum()


def test_longer_sequences_have_no_more_kernels() -> None:
    counts = {}
    for time in (5, 9):
        schedule = fused(Unrolled(), torch.randn(time, 2, 4))
        actions = kernels((*schedule.forward, *schedule.backward))
        assert len(actions) >= 2 * time
        # The last step ends in a stack of all steps, which is another one for each length.
        counts[time] = len({action.kernel.key for action in actions})
    assert counts[5] == counts[9]


def test_kernels_differ_in_constants_types_shapes_and_strides() -> None:
    functions: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: (x * 2).relu(), matrix()),
        (lambda x: (x * 3).relu(), matrix()),
        (lambda x: (x * 2.0).relu(), matrix()),
        (lambda x: (x * 2).relu(), matrix(3, 4)),
        (lambda x: (x * 2).relu(), matrix(4, 3).detach().t().requires_grad_()),
        (lambda x: (x * 2).relu(), matrix().detach().double().requires_grad_()),
        (lambda x: (x * 2).relu() * 1, matrix()),
    ]
    keys = [kernels(fused(function, x).forward)[0].kernel.key for function, x in functions]
    assert len(set(keys)) == len(keys)
    again = kernels(fused(lambda y: (y * 2).relu(), matrix()).forward)[0].kernel
    assert again.key == keys[0]


# -- kernels that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["all", "first", "last"])
def test_a_refused_kernel_is_taken_apart_and_the_schedule_stays_legal(which: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = (x[:3].sin() * 2).t()
        return ((y @ weight).exp() + y).tanh() * x[3:].sin()

    apart = schedule_of(function, matrix(6, 3), matrix())
    actions = kernels(fuse(apart).forward + fuse(apart).backward)
    refused = {"all": actions, "first": actions[:1], "last": actions[-1:]}[which]
    keys = {action.kernel.key for action in refused}
    schedule = fuse(apart, lambda action: action.kernel.key in keys)
    replay(schedule)
    left = kernels(schedule.forward + schedule.backward)
    assert keys.isdisjoint(action.kernel.key for action in left)
    run = {action.op for action in schedule.forward + schedule.backward if isinstance(action, Run)}
    assert run >= {op for action in refused for op in action.ops}
    if which == "all":
        assert left == []
        assert sorted(spoken(schedule)) == sorted(spoken(apart))
        assert replay(schedule) == replay(apart)


def test_a_step_is_grouped_once_whatever_is_refused_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return ((x.sin() * 2) @ weight).exp().tanh()

    apart = schedule_of(function, matrix(), matrix())
    grouped: list[_Grouping] = []
    items = _Grouping.items

    def counted(grouping: _Grouping) -> Any:
        grouped.append(grouping)
        return items(grouping)

    monkeypatch.setattr(_Grouping, "items", counted)
    fusion = Fusion(apart)
    together = fusion.without(lambda action: False)
    separate = fusion.without(lambda action: True)
    again = fusion.without(lambda action: False)
    assert len(grouped) == 2  # forward and backward
    assert kernels(separate.forward + separate.backward) == []
    assert together.describe() == again.describe() == fuse(apart).describe()


# -- writing over ----------------------------------------------------------------------------------------------------


def test_results_are_written_over_dying_operands() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return ((x @ weight) + (weight @ x)).exp() + (x @ x)

    (*_, last) = kernels(fused(function, matrix(), matrix()).forward)
    graph = fused(function, matrix(), matrix()).graph
    taken = {graph.values[old].name for _, old in last.over}
    assert taken <= {"mm", "mm_1", "mm_2"}
    assert len(last.over) == len({old for _, old in last.over}) >= 1
    assert [position for position, _ in last.kernel.over] == sorted(position for position, _ in last.kernel.over)


def test_what_was_given_is_not_written_over() -> None:
    for action in kernels(fused(lambda x: (x.exp() * 2).sin() + x, matrix()).forward):
        assert action.over == ()


def test_an_operand_that_is_read_across_is_not_written_over() -> None:
    """A softmax reads a whole row for every element it writes."""
    schedule = fused(lambda x, weight: (x @ weight).softmax(-1) * 2, matrix(), matrix())
    (action,) = kernels(schedule.forward)
    assert action.over == ()


# -- what the replayer rejects ---------------------------------------------------------------------------------------


def product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, z = x @ weight, weight @ x
    return ((y * 2).exp() + z.sum(0)).tanh(), z


@pytest.fixture
def good() -> Schedule:
    """Its forward ends in one kernel that writes over a matrix product."""
    schedule = fused(product, matrix(), matrix())
    assert kernels(schedule.forward)[-1].over
    return schedule


def spoilt(schedule: Schedule, **change: Any) -> Schedule:
    """The schedule with its last forward kernel changed."""
    last = kernels(schedule.forward)[-1]
    forward = tuple(dataclasses.replace(action, **change) if action is last else action for action in schedule.forward)
    return dataclasses.replace(schedule, forward=forward)


def rejected(schedule: Schedule, why: str, **options: Any) -> None:
    with pytest.raises(IllegalGraphError, match=why):
        replay(schedule, **options)


def test_a_kernel_whose_operand_is_gone(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    position = good.forward.index(last)
    freed = (*good.forward[:position], Free(last.over[0][1]), *good.forward[position:])
    rejected(dataclasses.replace(good, forward=freed), "the kernel of tanh reads mm, which is not there")


def test_a_kernel_whose_operand_was_written_over(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    position = good.forward.index(last)
    (written, operand), *_ = last.over
    twin = dataclasses.replace(last, writes=last.writes)
    again = (
        *good.forward[: position + 1],
        *(Free(value) for value in last.writes),
        twin,
        *good.forward[position + 1 :],
    )
    rejected(dataclasses.replace(good, forward=again), "the kernel of tanh reads mm, whose memory was written over")
    assert written != operand


def test_a_kernel_that_lacks_an_operand(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    without = tuple(value for value in last.reads if value != last.over[0][1])
    rejected(spoilt(good, reads=without), "mul inside the kernel of tanh reads mm, which the kernel does not have")


def test_a_kernel_whose_operators_are_out_of_order(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    rejected(spoilt(good, ops=last.ops[::-1]), "inside the kernel of .* which the kernel does not have")


def test_a_kernel_that_writes_twice_over_one_operand(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    ((written, operand), *_) = last.over
    (other, *_) = [value for value in last.writes if value != written]
    rejected(spoilt(good, over=((written, operand), (other, operand))), "writes twice over one operand")
    inside = next(value for op in last.ops for value in good.graph.ops[op].writes if value not in last.writes)
    rejected(spoilt(good, over=((inside, operand),)), "or over one for nothing")


def test_a_kernel_that_does_not_make_what_it_leaves(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    primal = good.graph.primals[0]
    rejected(spoilt(good, writes=(*last.writes, good.graph.tangents[0])), "does not make tangents_1")
    rejected(spoilt(good, reads=(*last.reads, primal), writes=(*last.writes, primal)), "does not make primals_1")


def test_a_kernel_that_writes_over_what_it_does_not_read(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    ((written, _), *_) = last.over
    rejected(spoilt(good, over=((written, good.graph.primals[0]),)), "cannot write over primals_1")


def test_a_kernel_that_writes_over_what_somebody_else_holds(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    ((written, _), *_) = last.over
    primal = good.graph.primals[0]
    change = spoilt(good, reads=(*last.reads, primal), over=((written, primal),))
    rejected(change, "writes over primals_1, which the schedule does not own")


def test_a_kernel_that_writes_over_a_smaller_block() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return ((x @ weight) + (x[:1] @ weight)).exp() + 1

    schedule = fused(function, matrix(), matrix())
    last = kernels(schedule.forward)[-1]
    ((written, _), *_) = last.over
    small = named(schedule.graph, "mm_1").id
    assert small in last.reads
    rejected(spoilt(schedule, over=((written, small),)), "writes 36 bytes over a block of 12")


def test_a_kernel_that_runs_twice(good: Schedule) -> None:
    last = kernels(good.forward)[-1]
    position = good.forward.index(last)
    twice = (*good.forward[:position], dataclasses.replace(last, over=()), *good.forward[position:])
    rejected(dataclasses.replace(good, forward=twice), "is made while it is still there")


def test_a_kernel_over_the_limit(good: Schedule) -> None:
    def workspace(graph: Any, op: Any) -> int:
        return 10_000 if isinstance(op, Fused) else 0

    rejected(good, "bytes alive while the kernel of .* runs, over the limit of 9999", workspace=workspace, limit=9999)


def test_a_part_that_a_kernel_reads_does_not_make_it_differ_by_the_number_of_parts() -> None:
    def structures(length: int) -> set[str]:
        def step(x: Tensor, weight: Tensor) -> Tensor:
            parts = x.sigmoid().unbind(0)
            return torch.stack([part.tanh() * part @ weight for part in parts]).sum()

        schedule = fused(step, torch.randn(length, 4, 4), matrix(4, 4))
        first = kernels(schedule.forward)[0]
        assert [call.target for call in first.kernel.calls].count(torch.ops.aten.select.int) == 1
        return {one.kernel.structure for one in kernels(schedule.forward)}

    assert structures(9) == structures(12)
