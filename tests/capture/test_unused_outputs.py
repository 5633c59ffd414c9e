"""Outputs that receive no gradient: backward without them, for the first step and for those that change their mind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from encore.api import compiled_call
from encore.errors import ReplayError
from encore.options import LOWERINGS
from support.rounding import assert_close

lowerings = pytest.mark.parametrize("lowering", LOWERINGS)
Outputs = dict[str, torch.Tensor]
Uses = Callable[[Outputs], torch.Tensor]


class Heads(nn.Module):
    """A loss, and two more outputs that depend on a layer each that nothing else does."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scores = nn.Linear(8, 5)
        self.aside = nn.Linear(8, 3)
        self.further = nn.Linear(5, 4)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Outputs:
        hidden = torch.tanh(self.norm(self.body(x)))
        hidden = F.dropout(hidden, self.dropout, self.training)
        scores = self.scores(hidden)
        return {
            "loss": F.cross_entropy(scores, target),
            "scores": scores,
            "aside": self.aside(hidden).sin(),
            "further": self.further(scores.exp()),
        }


class Encoder(Heads):
    """The same with no loss among its outputs."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Outputs:
        found = super().forward(x, target)
        del found["loss"]
        return found


def loss(found: Outputs) -> torch.Tensor:
    return found["loss"]


def loss_and_aside(found: Outputs) -> torch.Tensor:
    return found["loss"] + found["aside"].pow(2).sum()


def only_further(found: Outputs) -> torch.Tensor:
    return found["further"].pow(3).mean()


def everything(found: Outputs) -> torch.Tensor:
    return torch.stack([output.pow(2).sum() for output in found.values()]).sum()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(7, 6, generator=generator), torch.randint(0, 5, (7,), generator=generator)


def step(model: nn.Module, uses: Uses, seed: int = 0) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    uses(model(*batch())).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_like_eager(mine: dict[str, Any], its: dict[str, Any], lowering: str) -> None:
    for name, expected in its.items():
        if expected is None:
            assert mine[name] is None, f"{name} has a gradient, in eager it has none"
        elif lowering == "eager":
            assert torch.equal(mine[name], expected), name
        else:
            assert_close(mine[name], expected, name)


def planned_gradients(model: nn.Module) -> int:
    (graph,) = compiled_call(model).session.last_step
    return len(graph.plan.schedule.graph.tangents)


def session_graphs(model: nn.Module) -> int:
    return len(compiled_call(model).session.graphs)


@lowerings
def test_parameters_of_unused_outputs_have_no_gradient_from_the_first_step_on(lowering: str) -> None:
    model = Heads(dropout=0.5)
    planned = encore.compile(copy.deepcopy(model), lowering=lowering)
    for seed in range(2):
        mine, its = step(planned, loss, seed), step(model, loss, seed)
        assert its["aside.weight"] is None
        assert its["further.weight"] is None
        assert_like_eager(mine, its, lowering)
    for (name, buffer), expected in zip(planned.named_buffers(), model.buffers(), strict=True):
        assert_close(buffer.float(), expected.float(), name)
    assert planned_gradients(planned) == 1
    assert session_graphs(planned) == 1


@lowerings
def test_outputs_are_used_in_some_steps_and_not_in_others(lowering: str) -> None:
    model = Heads(dropout=0.5)
    planned = encore.compile(copy.deepcopy(model), lowering=lowering)
    uses = [loss, loss_and_aside, loss, only_further, loss, everything, loss_and_aside, only_further]
    forewarned = []
    for seed, use in enumerate(uses):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine = step(planned, use, seed)
        assert_like_eager(mine, step(model, use, seed), lowering)
        forewarned.append(any("Forward runs a second time" in str(warning.message) for warning in caught))
    assert forewarned == [False, True, False, True, False, True, False, False]
    assert planned_gradients(planned) == 4
    assert session_graphs(planned) == 1
    for (name, buffer), expected in zip(planned.named_buffers(), model.buffers(), strict=True):
        assert_close(buffer.float(), expected.float(), name)


def test_without_a_loss_among_the_outputs_the_first_backward_tells() -> None:
    model = Encoder()
    planned = encore.compile(copy.deepcopy(model), lowering="eager")
    for expected in (3, 1, 1):
        assert_like_eager(step(planned, only_further), step(model, only_further), "eager")
        assert planned_gradients(planned) == expected
    peak = encore.report(planned).planned.step_peak
    model.zero_grad()
    planned.zero_grad()
    assert encore.measure(lambda: step(planned, only_further)).step_peak <= peak


def test_other_sizes_are_planned_with_what_is_known() -> None:
    model = encore.compile(Encoder(), lowering="eager")
    step(model, only_further)
    x, target = batch()
    found = model(x[:4], target[:4])
    assert planned_gradients(model) == 1
    only_further(found).backward()


@lowerings
def test_backward_through_one_output_and_then_another(lowering: str) -> None:
    model = Heads(dropout=0.5)
    planned = encore.compile(copy.deepcopy(model), lowering=lowering)
    found = []
    for which in (planned, model):
        torch.manual_seed(5)
        outputs = which(*batch())
        names, wanted = zip(*which.named_parameters(), strict=True)
        for name in ("loss", "aside", "scores", "loss"):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*Forward runs a second time")
                gradients = torch.autograd.grad(outputs[name].sum(), wanted, retain_graph=True, allow_unused=True)
            found.append(dict(zip(names, gradients, strict=True)))
        assert torch.rand(1).item() == pytest.approx(_first_after(which), abs=0)
    for mine, its in zip(found[:4], found[4:], strict=True):
        assert_like_eager(mine, its, lowering)


def _first_after(model: nn.Module) -> float:
    """The number that the generator gives after one forward."""
    torch.manual_seed(5)
    with torch.no_grad():
        copy.deepcopy(model)._call_impl(*batch())
    return torch.rand(1).item()


def test_an_input_that_has_changed_is_an_error_and_the_next_step_is_right() -> None:
    class TwoSides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.left(x).pow(2).sum(), self.right(y)

    model = TwoSides()
    planned = encore.compile(copy.deepcopy(model), lowering="eager")
    x, y = torch.ones(2, 3), torch.ones(2, 4)
    loss, scores = planned(x, y)
    y.add_(1.0)
    with (
        pytest.warns(UserWarning, match="Forward runs a second time"),
        pytest.raises(ReplayError, match=r"input of shape \[2, 4\] has been modified by an inplace operation"),
    ):
        (loss + scores.sum()).backward()
    for which in (planned, model):
        loss, scores = which(x, y)
        (loss + scores.sum()).backward()
    mine, its = ({name: p.grad for name, p in which.named_parameters()} for which in (planned, model))
    assert_like_eager(mine, its, "eager")


def test_a_graph_that_was_freed_is_an_error_as_in_eager() -> None:
    found = encore.compile(Heads(), lowering="eager")(*batch())
    found["loss"].backward()
    with pytest.raises(RuntimeError, match="second time"):
        found["aside"].sum().backward()


def test_no_gradient_at_all_is_no_gradient() -> None:
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return None

    model = encore.compile(nn.Linear(3, 2), lowering="eager")
    Cut.apply(model(torch.ones(1, 3))).sum().backward()
    assert model.weight.grad is None


def test_partly_used_pieces_of_one_tensor() -> None:
    """`split` has one backward for all pieces: those without a gradient are zeros there, in eager too."""

    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            left, right = self.body(x).split(3, dim=1)
            return self.left(left).sum(), self.right(right)

    model = Pieces()
    planned = encore.compile(copy.deepcopy(model), lowering="eager")
    for which in (model, planned):
        which(torch.arange(8.0).reshape(2, 4))[0].backward()
    mine, its = ({name: p.grad for name, p in which.named_parameters()} for which in (planned, model))
    assert its["right.weight"] is None
    assert its["body.weight"] is not None
    assert_like_eager(mine, its, "eager")


def test_an_input_that_is_written_to_and_read_keeps_all_gradients() -> None:
    """Forward cannot run a second time once what it reads has been written to, so that it saves for every output."""

    class Counts(nn.Module):
        state: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body, self.aside = nn.Linear(3, 3), nn.Linear(3, 2)
            self.register_buffer("state", torch.ones(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x) * self.state.exp()
            self.state.mul_(2.0)
            return hidden.pow(2).sum(), self.aside(hidden.tanh())

    model = Counts()
    planned = encore.compile(copy.deepcopy(model), lowering="eager")
    for uses_aside in (False, True, False):
        for which in (model, planned):
            which.zero_grad()
            total, aside = which(torch.ones(2, 3))
            (total + aside.sum() if uses_aside else total).backward()
        mine, its = ({name: p.grad for name, p in which.named_parameters()} for which in (planned, model))
        assert_like_eager(mine, its, "eager")
        assert planned_gradients(planned) == 2


def test_outputs_that_share_memory_and_inputs_that_are_written_to() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.aside = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, log: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = self.body(x).sin()
            log.copy_(self.aside(hidden).detach())
            return hidden[:, :2], hidden.t(), hidden.sum(), self.aside(hidden.cos()), x

    model = Odd()
    planned = encore.compile(copy.deepcopy(model), lowering="eager")
    uses: list[Callable[..., torch.Tensor]] = [
        lambda *found: found[2],
        lambda *found: found[0].pow(2).sum(),
        lambda *found: found[1].pow(2).sum() + found[3].sum(),
        lambda *found: found[2],
    ]
    for use in uses:
        for which in (model, planned):
            which.zero_grad()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*Forward runs a second time")
                use(*which(torch.arange(8.0).reshape(2, 4), torch.zeros(2, 2))).backward()
        mine, its = ({name: p.grad for name, p in which.named_parameters()} for which in (planned, model))
        assert_like_eager(mine, its, "eager")


def test_a_plan_that_was_saved_begins_with_its_gradients() -> None:
    model = encore.compile(Encoder(), lowering="eager", budget="min")
    for _ in range(2):
        step(model, only_further)
    plan = encore.report(model).plan
    again = encore.compile(Encoder(), lowering="eager", plan=plan)
    step(again, only_further)
    assert planned_gradients(again) == 1


def test_verify_looks_at_every_output_and_teaches_nothing() -> None:
    model = encore.compile(Heads(), lowering="eager")
    for _ in range(2):
        step(model, loss)
        encore.verify(model, *batch())
    assert planned_gradients(model) == 1


def test_a_model_that_is_gone_leaves_its_parameters() -> None:
    import gc
    import weakref

    model = encore.compile(Heads(), lowering="eager")
    step(model, loss)
    weight = weakref.ref(model.body.weight)
    found = model(*batch())
    found["loss"].backward()
    del model, found
    torch.compiler.reset()
    gc.collect()
    assert weight() is None


def test_a_gradient_that_depends_on_no_other_is_made_as_in_eager(lowering: str) -> None:
    """`torch.normal` passes zeros on to its mean and deviation, whatever gradient it is given."""

    def function(mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
        return torch.normal(mean * 1, deviation.exp()).sum()

    leaves = [torch.randn(5, requires_grad=True) for _ in range(2)]
    encore.compile(function, lowering=lowering)(*leaves).backward()
    assert [leaf.grad.tolist() for leaf in leaves if leaf.grad is not None] == [[0.0] * 5] * 2
