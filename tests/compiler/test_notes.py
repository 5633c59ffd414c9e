"""The report of a model says for which of its graphs a promise may not hold, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import encore
from encore.cost import workspace
from support.captured_graphs import captured, train_step
from support.compare_with_eager import gradients, run_step, same_bits


def scan(gates: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """A linear recurrence, step by step in eager and in halves that are combined when compiled, as a model may do."""
    if torch.compiler.is_compiling():
        middle = gates.shape[0] // 2
        first, second = (step_by_step(gates[part], inputs[part]) for part in (slice(middle), slice(middle, None)))
        return second + gates[middle:].cumprod(0) * first[-1]
    return step_by_step(gates, inputs)[gates.shape[0] // 2 :]


def step_by_step(gates: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    state, states = torch.zeros_like(inputs[0]), []
    for gate, given in zip(gates, inputs, strict=True):
        state = gate * state + given
        states.append(state)
    return torch.stack(states)


class Scanned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.enter = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scan(torch.sigmoid(self.gate(x)), self.enter(x))


def test_code_that_asks_whether_it_is_compiled_is_reported_and_runs_as_dynamo_traces_it() -> None:
    """The bits are those of the branch that the model takes when compiled, whoever compiles it: not eager's."""
    model, x = Scanned(), torch.randn(12, 4, 8)
    eager = run_step(model, (x,))
    traced = run_step(torch.compile(model, backend="eager"), (x,))
    traced = {name.replace("_orig_mod.", ""): tensor for name, tensor in traced.items()}
    apart = {name for name in gradients(model) if not same_bits(traced[name], eager[name])}
    assert apart
    planned = encore.compile(model, lowering="eager")
    found = run_step(planned, (x,))
    for name, want in traced.items():
        assert same_bits(found[name], want), name
    (note,) = encore.report(planned).graphs[0].notes
    assert (
        note == "code that asks whether it is compiled (test_notes.py:scan) may compute in another order than in eager"
    )
    assert f"note on graph 0: {note}" in str(encore.report(planned))
    assert note in encore.report(planned).to_json()


def test_a_loop_over_time_steps_has_eagers_bits() -> None:
    """The order of additions in the joint graph is autograd's own."""

    class Loop(Scanned):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return step_by_step(torch.sigmoid(self.gate(x)), self.enter(x))

    model, x = Loop(), torch.randn(12, 4, 8)
    eager = run_step(model, (x,))
    found = run_step(encore.compile(model, lowering="eager"), (x,))
    for name, want in eager.items():
        assert same_bits(found[name], want), name
    assert encore.report(model).graphs[0].notes == ()


def test_outputs_that_are_views_of_inputs_are_reported() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.t(), (x * 2).exp()

    graph = captured(function, torch.randn(3, 4, requires_grad=True))
    (note,) = graph.notes
    assert note.startswith("1 of its outputs are views of inputs: part of their backward runs outside the graph")


def test_a_workspace_that_is_a_bound_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(workspace, "has_room", lambda footprint, device: False)
    model = encore.compile(nn.Conv2d(3, 4, 3), lowering="eager")
    train_step(model, torch.randn(2, 3, 8, 8))
    notes = encore.report(model).graphs[0].notes
    assert notes[0] == (
        "the workspace of aten.convolution.default is a bound (there is too little free memory for its operands): "
        "the measured peak may differ from the predicted one"
    )


def test_a_custom_operator_is_reported() -> None:
    """Its workspace is not known: it is never run on made-up operands."""

    @torch.library.custom_op("encore_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])[: len(x)] + x

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, gradient: gradient * 2)
    graph = captured(lambda x: doubled(x * 3).exp(), torch.randn(64, requires_grad=True))
    (note,) = graph.notes
    assert note.startswith(
        "the workspace of encore_tests.doubled.default is a bound (none is counted: custom operators"
    )


class Annotated(nn.Module):
    """A model with a budget for PyTorch's own partitioner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.region_activation_memory_budget(0.25):
            return torch.tanh(self.layer(x)).sum()


def test_a_budget_of_pytorchs_own_gets_a_warning_and_a_note() -> None:
    planned = encore.compile(Annotated(), lowering="eager")
    with pytest.warns(UserWarning, match=r"region_activation_memory_budget\(0\.25\) is not used.*budget="):
        planned(torch.randn(4, 8)).backward()
    (graph,) = encore.report(planned).graphs
    assert any("region_activation_memory_budget(0.25)" in note for note in graph.notes)
