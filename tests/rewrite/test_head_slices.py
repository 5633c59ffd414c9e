"""Heads in slices: the numbers of every form, the bytes of one, and that all of it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from benchmarks.workloads import tiny
from encore.api import compiled_call
from encore.compiler import backend
from encore.graph import Graph, build_graph, verify_graph
from encore.lower import lower
from encore.rewrite import fold_additions
from encore.rewrite.head_slices import split_head
from encore.schedule import Run, replay, schedule_step, simulate
from support.captured_graphs import captured_graph, drop_gradients, operators
from support.compare_with_eager import SEED, Tensors, cotangent, in_double, run_step
from support.head_models import BATCH, FORMS, RETURNED, STEPS, WIDTH, WORDS, Net, Tied, batch, entropy
from support.rounding import assert_as_accurate, assert_close, assert_named_as_accurate

aten = torch.ops.aten


def run(graph: Graph, model: nn.Module, args: Iterable[Any]) -> Tensors:
    """What a graph computes when it is scheduled, checked, lowered and run: its output, and gradients by name."""
    verify_graph(graph)
    schedule = schedule_step(graph)
    replay(schedule, limit=simulate(schedule).step_peak)
    lowered = lower(schedule)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names |= {id(arg): f"input[0][{position}]" for position, arg in enumerate(args)}
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *args)}
    primals = [held[identity or 0] for identity in graph.identities]
    torch.manual_seed(SEED)
    with torch.no_grad():
        loss, *saved = lowered.forward(list(primals))
        gradients = lowered.backward([*saved, cotangent(loss)])
    return {"output": loss} | {
        f"gradient of {names[id(primal)]}": gradient
        for primal, gradient in zip(primals, gradients, strict=True)
        if gradient is not None
    }


def check(model: nn.Module, *args: torch.Tensor, slices: Iterable[int] = (2, 3, 7, 1000)) -> Graph:
    """Split the head of a model's step in several ways, and compare each with eager; the last graph is returned."""
    plain = copy.deepcopy(model)
    graph = captured_graph(model, *args)
    drop_gradients(model, args)
    expected = run_step(plain, args)
    truth = run_step(copy.deepcopy(plain).double(), [in_double(arg) for arg in args])
    split = graph
    for number in slices:
        split = split_head(graph, number)
        assert split is not graph
        found = run(split, model, args)
        assert set(found) == {name for name in expected if name.startswith(("output", "gradient"))}
        for name, have in found.items():
            assert_as_accurate(have, expected[name], truth[name], name)
    return split


@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_slices(form: str) -> None:
    check(Net(FORMS[form]), *batch())


@pytest.mark.parametrize("form", RETURNED)
def test_scores_that_are_returned_are_read_in_slices(form: str) -> None:
    model, args = Net(RETURNED[form]), batch()
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = encore.compile(model, lowering="eager", overhead=0.0)
    compiled(*args)[0].backward()
    (captured,) = compiled_call(compiled).session.last_step
    graph = captured.plan.schedule.graph
    drop_gradients(model, args)
    mine = [args[0], *model.parameters()]
    its = torch.autograd.grad((outputs := plain(*args))[0], [args[0], *plain.parameters()], allow_unused=True)
    wide = in_double(args[0])
    truth = torch.autograd.grad(exact(wide, args[1])[0], [wide, *exact.parameters()], allow_unused=True)
    for slices in (2, 3, 1000):
        split = split_head(graph, slices)
        assert split is not graph
        verify_graph(split)
        schedule = schedule_step(split)
        peak = simulate(schedule).step_peak
        replay(schedule, limit=peak)
        assert slices == 1000 or peak < simulate(schedule_step(graph)).step_peak
        held = {id(tensor): tensor for tensor in (*mine, *model.buffers(), *args)}
        primals = [held[identity or 0] for identity in split.identities]
        lowered = lower(schedule)
        with torch.no_grad():
            results = lowered.forward(list(primals))
            found, saved = results[: len(outputs)], results[len(outputs) :]
            gradients = lowered.backward([*saved, torch.ones_like(found[0])])
        for have, want in zip(found, outputs, strict=True):
            assert_close(have, want)
        of = {id(primal): gradient for primal, gradient in zip(primals, gradients, strict=True)}
        for tensor, want, exactly in zip(mine, its, truth, strict=True):
            have = of.get(id(tensor))
            assert (have is None) == (want is None)
            if have is not None and want is not None and exactly is not None:
                assert_as_accurate(have, want, exactly, str(tensor.shape))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_loss_in_slices(reduction: str, ignored: int, weighted: bool) -> None:
    def end(net: Net, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = net.rarity if weighted else None
        return entropy(net.leave(hidden), target, reduction=reduction, ignore_index=ignored, weight=weight)

    x, target = batch()
    target[1:3] = ignored  # whole slices of nothing else
    target[0, 0] = 5
    check(Net(end), x, target)


def test_nothing_but_ignored_words_is_no_number_as_in_eager() -> None:
    x, target = batch()
    check(Net(FORMS["bias"]), x, torch.full_like(target, -100))


def test_a_tied_weight_gets_both_of_its_gradients() -> None:
    words, target = torch.randint(WORDS, (2, BATCH, STEPS))
    split = check(Tied(), words, target)
    assert len(operators(split, aten.embedding_dense_backward)) == 1


def test_slices_of_a_narrow_type_add_up_in_a_wider_one() -> None:
    """Rounded to bfloat16 once a slice, sums over 32 of them would be off by 2.5 times eager's error."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leave = nn.Linear(32, 100)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(self.leave(x), target)

    model, x, target = Narrow(), torch.randn(256, 32), torch.randint(100, (256,))
    ours, eager = errors(model, x, target, slices=32)
    assert ours <= 1.5 * eager


def test_as_close_to_float64_as_eager() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leave = nn.Linear(64, 500)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.leave(x), target)

    x, target = torch.randn(512, 64, requires_grad=True), torch.randint(500, (512,))
    ours, eager = errors(Wide(), x, target, slices=16)
    assert ours <= 1.5 * eager


def errors(model: nn.Module, *args: torch.Tensor, slices: int) -> tuple[float, float]:
    """How far all gradients together are from those of float64: in slices, and in eager."""
    plain = copy.deepcopy(model)
    graph = captured_graph(model, *args)
    drop_gradients(model, args)
    truth = run_step(copy.deepcopy(plain).double(), [in_double(arg) for arg in args])
    names = [name for name in truth if name.startswith("gradient")]
    steps = (run(split_head(graph, slices), model, args), run_step(plain, args))
    ours, eager = (torch.cat([(step[name] - truth[name]).flatten() for name in names]).norm() for step in steps)
    return float(ours), float(eager)


class Alone(nn.Module):
    """A head and nothing else: hidden rows come from outside and want a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(8, 1000)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.leave(hidden), target)


def test_every_byte_of_a_head_in_slices() -> None:
    """64 rows of 1,000 scores are 256,000 bytes, an eighth of them 32,000."""
    graph = captured_graph(Alone(), torch.randn(64, 8, requires_grad=True), torch.randint(1000, (64,)))
    scores, hidden, weight, bias, number = 256_000, 64 * 8 * 4, 1000 * 8 * 4, 1000 * 4, 4
    assert simulate(schedule_step(graph)).step_peak == 2 * number + 3 * scores == 768_008  # the loss, its gradient
    schedule = schedule_step(split_head(graph, 8))
    timeline = simulate(schedule)
    assert timeline.saved == 2 * number
    peaks = {phase: max(m.peak for m in timeline.moments if m.phase == phase) for phase in ("forward", "backward")}
    piece = scores // 8
    assert peaks["forward"] == 2 * piece + 7 * 2 * number == 64_056  # the parts of the loss, each with its weight
    assert peaks["backward"] == 3 * piece + hidden + weight + bias + 3 * number == 134_060  # and the total weight
    assert timeline.step_peak == replay(schedule) == 134_060


def test_more_slices_hold_less() -> None:
    graph = captured_graph(Alone(), torch.randn(64, 8, requires_grad=True), torch.randint(1000, (64,)))
    peaks = [simulate(schedule_step(split_head(graph, number))).step_peak for number in (1, 2, 4, 8, 16, 32, 64)]
    assert peaks == [768_008, 422_056, 230_060, 134_060, 86_060, 62_060, 50_060]


def test_backward_has_slices_of_its_own() -> None:
    graph = captured_graph(Net(FORMS["bias"]), *batch())
    split = split_head(graph, 5)
    softmaxes = operators(split, aten._log_softmax)
    assert [op.forward for op in softmaxes] == 5 * [True] + 5 * [False]
    assert {split.values[op.writes[0] or 0].shape for op in softmaxes} == {(4, WORDS)}
    crossing = {split.values[value].shape for value in schedule_step(split).saved}
    assert crossing == {(), (WORDS,), (WORDS, WIDTH), (WIDTH, WIDTH), (BATCH, STEPS), (BATCH, STEPS, WIDTH)}


def test_sums_are_written_over() -> None:
    """Gradients of weight, bias and hidden rows take the memory of what they have come to so far."""
    graph = split_head(captured_graph(Net(FORMS["bias"]), *batch()), 5)
    schedule = schedule_step(graph)
    over = [
        graph.ops[action.op].target
        for action in schedule.backward
        if isinstance(action, Run) and action.over is not None
    ]
    assert over.count(aten.addmm.default) == 4
    assert over.count(aten.slice_scatter.default) == 5
    assert over.count(aten.add.Tensor) >= 4


def test_the_whole_pipeline_runs_it(monkeypatch: pytest.MonkeyPatch, lowering: str) -> None:
    """As the backend would: through autograd, with kernels, and a peak that is the measured one."""
    monkeypatch.setattr(backend, "build_graph", lambda *args, **how: split_head(build_graph(*args, **how), 4))
    model, args = Alone(), (torch.randn(64, 8, requires_grad=True), torch.randint(1000, (64,)))
    plain = copy.deepcopy(model)
    compiled = encore.compile(model, lowering=lowering)
    truth = run_step(copy.deepcopy(plain).double(), [in_double(arg) for arg in args])
    for name, want in run_step(plain, args).items():
        if name.startswith(("output", "gradient")):
            assert_as_accurate(run_step(compiled, args)[name], want, truth[name], name)
    for _ in range(2):
        drop_gradients(model, args)
        measured = encore.measure(lambda: compiled(*args).backward()).step_peak
    predicted = encore.report(compiled).planned.step_peak
    assert measured <= predicted <= 1.01 * measured
    assert predicted < 300_000


@pytest.mark.parametrize("name", ["lm", "nmt", "transformer"])
def test_workloads_end_in_heads(name: str) -> None:
    workload = tiny(name)
    check(workload.model, *workload.batch(0), slices=(4,))


def test_a_weight_gradient_may_have_been_folded_into_another() -> None:
    """The embedding's share waits for the hidden rows' gradient, so that it is added when all slices are done."""
    model, words, target = Tied(), *torch.randint(WORDS, (2, BATCH, STEPS))
    graph = captured_graph(model, words, target)
    folded = fold_additions.apply(graph)
    assert folded is not graph
    split = split_head(folded, 4)
    found, expected = run(split, model, (words, target)), run(graph, model, (words, target))
    truth = run_step(copy.deepcopy(model).double(), [in_double(arg) for arg in (words, target)])
    assert_named_as_accurate(found, expected, {name: truth[name] for name in expected})
    assert simulate(schedule_step(split)).step_peak < simulate(schedule_step(graph)).step_peak
