"""The Python that runs: boxed, freeing as it goes, and readable in a traceback."""

from __future__ import annotations

import linecache
import re
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.graph.values import Ref
from encore.lower import lower
from encore.lower.calls import callable_for
from encore.schedule import Free, Run
from support.captured_graphs import Perceptron, captured

aten = torch.ops.aten


def inputs_of_perceptron(model: Perceptron) -> list[torch.Tensor]:
    """In the order of the graph's primals."""
    enter, leave = model.enter, model.leave
    return [enter.weight, enter.bias, torch.ones(3, 4), leave.weight, leave.bias]


def test_boxed_callables_empty_their_list_and_compute_the_step() -> None:
    model = Perceptron()
    schedule = captured(model, torch.ones(3, 4)).plan.schedule
    gradients = [model.enter.weight.grad, model.enter.bias.grad, None, model.leave.weight.grad, model.leave.bias.grad]
    lowered = lower(schedule)
    assert lowered.forward._boxed_call  # type: ignore[attr-defined]
    assert lowered.backward._boxed_call  # type: ignore[attr-defined]
    with torch.no_grad():
        primals: list[Any] = inputs_of_perceptron(model)
        loss, *saved = lowered.forward(primals)
        assert primals == []
        assert len(saved) == len(schedule.saved)
        assert torch.equal(loss, encore.api.compiled_call(model).plain(torch.ones(3, 4)))
        rest = [*saved, torch.ones(())]
        found = lowered.backward(rest)
    assert rest == []
    for have, want in zip(found, gradients, strict=True):
        assert (have is None) == (want is None)
        assert want is None or torch.equal(have, want)


def test_what_is_freed_dies_at_once() -> None:
    """The saved tensor is gone before backward returns, since the boxed list held its last name."""
    model = Perceptron()
    schedule = captured(model, torch.ones(3, 4)).plan.schedule
    lowered = lower(schedule)
    with torch.no_grad():
        _, *saved = lowered.forward(inputs_of_perceptron(model))
        (hidden,) = [tensor for tensor in saved if tensor.shape == (3, 8)]
        alive = weakref.ref(hidden)
        rest = [*saved, torch.ones(())]
        del saved, hidden
        results = lowered.backward(rest)
    assert alive() is None
    assert results[0] is not None


def test_every_free_is_a_del_and_every_run_a_line() -> None:
    graph = captured(Perceptron(), torch.randn(3, 4))
    schedule = graph.plan.schedule
    for source, actions in zip(graph.sources, (schedule.forward, schedule.backward), strict=True):
        deleted = [name for names in re.findall(r"^    del (.+)$", source, re.MULTILINE) for name in names.split(", ")]
        assert deleted == [f"v{action.value}" for action in actions if isinstance(action, Free)]
        calls = re.findall(r"^    \S.* = \w+\(", source, re.MULTILINE)
        assert len(calls) == sum(isinstance(action, Run) for action in actions)


def test_the_source_of_a_perceptron() -> None:
    forward, _ = captured(Perceptron(), torch.randn(3, 4)).sources
    assert forward == (
        "def graph_0_forward(args):\n"
        "    v0, v1, v2, v3, v4, = args\n"
        "    args.clear()\n"
        "    v6 = aten_t_default_0(v0)\n"
        "    del v0\n"
        "    v7 = aten_addmm_default_1(v1, v2, v6)\n"
        "    del v1, v6\n"
        "    v8 = aten_relu__default_2(v7)\n"
        "    del v7\n"
        "    v9 = aten_t_default_0(v3)\n"
        "    v10 = aten_addmm_default_1(v4, v8, v9)\n"
        "    del v4, v9\n"
        "    v11 = aten_sum_default_3(v10)\n"
        "    del v10\n"
        "    return (v11, v3, v8, v2,)\n"
    )


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).sum()


def test_an_exception_shows_the_generated_line() -> None:
    model = encore.compile(Lookup(), lowering="eager")
    model(torch.tensor([0, 3])).backward()
    with pytest.raises(IndexError, match="index out of range") as raised:
        model(torch.tensor([0, 4]))
    frames = traceback.extract_tb(raised.value.__traceback__)
    (generated,) = [frame for frame in frames if frame.filename.startswith("<encore ")]
    assert generated.name == "graph_0_forward"
    assert generated.line is not None
    assert re.fullmatch(r"v\d+ = aten_embedding_default_\d+\(v0, v1\)", generated.line)
    assert linecache.getline(generated.filename, generated.lineno or 0).strip() == generated.line
    assert model(torch.tensor([0, 3])).isfinite(), "the next step runs as if nothing had happened"


class Literals(nn.Module):
    """Arguments without a literal in Python's grammar: infinities, types, lists of tensors, slices of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x * self.weight).masked_fill(x > 1, float("-inf")).softmax(-1)
        wide = scores.to(torch.float64, memory_format=torch.contiguous_format)
        picked = wide[torch.tensor([0, 2]), torch.tensor([1, 3])]
        return torch.cat([picked, wide.flatten()[2:9:3], wide.new_full((2,), float("nan")).nan_to_num()]).sum()


def test_every_kind_of_argument_survives() -> None:
    model = encore.compile(Literals(), lowering="eager")
    assert encore.verify(model, torch.linspace(0, 2, 12).view(3, 4)).bit_equal


def test_a_write_over_names_the_operand_as_out() -> None:
    graph = captured(Perceptron(), torch.randn(3, 4))
    schedule = graph.plan.schedule
    (over,) = [action for action in schedule.backward if isinstance(action, Run) and action.over is not None]
    op = schedule.graph.ops[over.op]
    assert op.target is aten.threshold_backward.default
    assert isinstance(op.args[0], Ref)
    assert over.over == op.args[0].value
    assert f"grad_input=v{over.over})" in graph.sources[1]


def test_operators_are_called_through_the_dispatcher() -> None:
    assert callable_for(aten.mm.default) is aten.mm.default._op


def test_a_functional_draw_fills_memory_in_eagers_order() -> None:
    like = torch.empty(5, 7).t()
    torch.manual_seed(3)
    expected = torch.empty_like(like).bernoulli_(0.3)
    torch.manual_seed(3)
    drawn = callable_for(torch.ops.encore.bernoulli_noise.default)(like, 0.3)
    assert torch.equal(drawn, expected)
    assert drawn.is_contiguous()
