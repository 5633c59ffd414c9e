"""Lossy codecs within a bound on the gradient error: the bound holds against plain PyTorch, and the report says so.

The eager lowering gives PyTorch's very bits unless a codec loses some, so what is off against plain PyTorch is what the
codecs did.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.api import compiled_call
from encore.compiler import bounded_codecs
from encore.compiler.lossy_check import LossyCheck
from encore.plan.admission import LossyCandidate
from encore.reports.report import Report

Batch = tuple[torch.Tensor, ...]


class Residual(nn.Module):
    """Convolutions with BatchNorm around a shortcut, as in ResNet, and the loss."""

    def __init__(self, width: int = 8, blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.leave = nn.Linear(width, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.leave(nn.functional.dropout(x.mean((2, 3)), 0.2, self.training))

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.features(x), classes)


class Classifier(Residual):
    """The same with the loss outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.features(x)


class Words(nn.Module):
    """A language model of LSTM cells, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 32)
        self.cell = nn.LSTMCell(32, 32)
        self.leave = nn.Linear(32, 12)

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        state = tokens.new_zeros(2, tokens.shape[1], 32, dtype=torch.float32).unbind(0)
        outputs = []
        for word in self.words(tokens):
            state = self.cell(word, state)
            outputs.append(state[0])
        return nn.functional.cross_entropy(self.leave(torch.stack(outputs)).flatten(0, 1), wanted.flatten())


class Attending(nn.Module):
    """One Transformer layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def pictures() -> Batch:
    return torch.randn(4, 3, 16, 16), torch.randint(10, (4,))


def sentences() -> Batch:
    return torch.randint(12, (8, 64)), torch.randint(12, (8, 64))


def vectors() -> Batch:
    return (torch.randn(8, 24, 32),)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "residual": (Residual, pictures),
    "words": (Words, sentences),
    "attending": (Attending, vectors),
}


def run(model: nn.Module, batch: Batch, loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum) -> torch.Tensor:
    """The gradients of one step, as one vector; its draws are always the same."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss(model(*batch)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def apart(have: torch.Tensor, want: torch.Tensor) -> float:
    return float((have - want).norm() / want.norm())


def compiled(model: nn.Module, lossy: Any, **options: Any) -> nn.Module:
    chosen = {"budget": "min", "methods": "encode", "lowering": "eager", **options}
    return encore.compile(copy.deepcopy(model), lossy=lossy, **chosen)


def lossy_codes(report: Report) -> set[str]:
    return {row.code for row in report.decisions if not row.lossless}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_bound_holds_against_plain_pytorch(name: str) -> None:
    make, draw = NETWORKS[name]
    saved = {}
    for seed, bound in ((1, 0.01), (2, 0.1), (3, 0.01)):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        plain, batch = make(), draw()
        model = compiled(plain, bound)
        error = apart(run(model, batch), run(plain, batch))
        report = encore.report(model)
        assert lossy_codes(report)
        assert report.lossy is not None
        assert report.lossy.bound == bound
        assert report.lossy.error == pytest.approx(error, rel=1e-3)
        assert 0 < error <= bound
        assert report.lossy.holds
        saved[bound] = report.planned.saved / report.unplanned.saved
        for (key, mine), its in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, its), key  # BatchNorm counts once, whatever was measured
    assert saved[0.1] < 1


def test_a_bound_is_kept_checked_reported_and_saved(tmp_path: Any) -> None:
    plain, batch = Residual(), pictures()
    model = compiled(plain, True, lossy_check=2)
    want = run(plain, batch)
    error = apart(run(model, batch), want)
    assert 0 < error <= 0.01
    for _ in range(4):
        run(model, batch)
    report = encore.report(model)
    assert lossy_codes(report)
    assert report.lossy is not None
    assert report.lossy.bound == 0.01
    assert report.lossy.error == pytest.approx(error, rel=1e-3)
    assert report.lossy.holds
    assert [step for step, _ in report.lossy.checks] == [0, 2, 4]
    assert f"gradient error    {error:.3g} measured in 3 steps, bound 0.01" in str(report)
    assert json.loads(report.to_json())["lossy"]["error"] == report.lossy.error
    assert f"{error:.3g} measured in 3 steps, bound 0.01" in report.to_html(tmp_path / "page.html").read_text()
    (graph,) = compiled_call(model).session.last_step
    check = graph.lossy_check
    assert check is not None
    check.bound = 1e-6
    run(model, batch)
    with pytest.warns(UserWarning, match="gradient error of 0.00.* at step 6, over the bound of 1e-06"):
        assert torch.equal(run(model, batch), want)  # a step that is checked and found to be off takes these
    assert apart(run(model, batch), want) <= 0.01
    assert compiled_call(model).session.captured_so_far == 2

    torch._dynamo.reset()
    again = encore.compile(copy.deepcopy(plain), plan=report.plan, lossy=True)
    assert apart(run(again, batch), want) == pytest.approx(error, rel=1e-3)
    of_plan = encore.report(again)
    assert of_plan.plan == report.plan
    assert of_plan.lossy is not None
    assert of_plan.lossy.holds
    torch._dynamo.reset()
    strict = encore.compile(copy.deepcopy(plain), plan=report.plan, lossy=1e-6)
    with pytest.warns(UserWarning, match="over the bound of 1e-06"):
        run(strict, batch)


class Sharpening(nn.Module):
    """Sums of sines: the larger the weights, the more a rounded activation turns the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.square().mean()

    def sharpen(self, times: float) -> None:
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(times)  # type: ignore[operator]


def test_a_bound_that_training_exceeds_is_kept_again_from_the_next_step_on() -> None:
    """Codecs are chosen on the first batch; what they do to later ones is measured at steps 10, 100, ..."""
    plain, batch = Sharpening(), (torch.randn(256, 64),)
    model = compiled(plain, True)
    before = apart(run(model, batch), run(plain, batch))
    assert 0 < before <= 0.01
    for _ in range(7):
        run(model, batch)
    for one in (plain, model):
        one.get_submodule("").sharpen(8.0)  # type: ignore[operator]
    want = run(plain, batch)
    assert apart(run(model, batch), want) > 0.01
    with pytest.warns(UserWarning, match="at step 9, over the bound of 0.01.*next step is planned with other codecs"):
        assert torch.equal(run(model, batch), want)
    assert apart(run(model, batch), want) <= 0.01


def test_codecs_that_exceed_their_bound_again_and_again_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    shrinking = LossyCheck._exact_gradients
    monkeypatch.setattr(
        LossyCheck, "_exact_gradients", lambda self, *args: [_more(one) for one in shrinking(self, *args) or ()]
    )
    plain, batch = Sharpening(), (torch.randn(256, 64),)
    model = compiled(plain, True)
    for _ in range(5):
        run(model, batch)
    assert torch.equal(run(model, batch), run(plain, batch))
    assert not lossy_codes(encore.report(model))
    session = compiled_call(model).session
    assert session.captured_so_far == 5
    assert not session.plan_again


def test_named_codecs_have_no_bound_and_are_measured_all_the_same() -> None:
    plain, batch = Residual(), pictures()
    model = compiled(plain, ("int4", "sparse_int4"))
    error = apart(run(model, batch), run(plain, batch))
    report = encore.report(model)
    assert lossy_codes(report) <= {"int4", "sparse_int4"}
    assert report.lossy is not None
    assert report.lossy.bound is None
    assert report.lossy.holds is None
    assert report.lossy.error == pytest.approx(error, rel=1e-3)
    assert error > 0.01  # which the default bound would not have let through
    assert f"{error:.3g} measured" in str(report)
    assert "no bound" in str(report)


def test_a_tiny_bound_admits_no_lossy_codec(tmp_path: Any) -> None:
    plain, batch = Residual(), pictures()
    model = compiled(plain, 1e-9)
    assert torch.equal(run(model, batch), run(plain, batch))
    report = encore.report(model)
    assert not lossy_codes(report)
    assert report.lossy is not None
    assert (report.lossy.bound, report.lossy.error) == (1e-9, 0.0)
    assert "gradient error    0, no lossy codec is used; bound 1e-09" in str(report)
    assert json.loads(report.to_json())["lossy"]["bound"] == 1e-9
    assert "no lossy codec is used; bound 1e-09" in report.to_html(tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_plan_that_recomputes_from_lossy_codes_keeps_the_bound() -> None:
    """What is recomputed from a code is off, too; the error is that of the whole plan."""
    plain, batch = Residual(), pictures()
    model = compiled(plain, 0.02, methods=("recompute", "encode"))
    error = apart(run(model, batch), run(plain, batch))
    assert error <= 0.02


@pytest.mark.slow
def test_a_plan_over_the_bound_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were admission wrong by a lot, the measured plan would tell, and another one be made."""
    priced = bounded_codecs.BoundedCodecs._price_group

    def too_low(self: bounded_codecs.BoundedCodecs, *args: Any) -> None:
        priced(self, *args)
        self.candidates = [LossyCandidate(one.value, one.codec, one.saved, one.error / 30) for one in self.candidates]

    monkeypatch.setattr(bounded_codecs.BoundedCodecs, "_price_group", too_low)
    monkeypatch.setattr(bounded_codecs.BoundedCodecs, "_together", lambda self, base, admitted: 0.009)
    plain, batch = Residual(), pictures()
    model = compiled(plain, 0.01)
    assert apart(run(model, batch), run(plain, batch)) <= 0.01
    report = encore.report(model)
    assert report.lossy is not None
    assert report.lossy.error is not None
    assert report.lossy.error <= 0.01


@pytest.mark.slow
def test_a_loss_outside_is_measured_with_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise stands for the gradients of outputs until a loss has sent some; the first step then plans again."""

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :1].square().sum()  # one class alone: nothing like noise

    torch.manual_seed(3)
    plain, (x, _) = Classifier(), pictures()
    model = compiled(plain, 0.01)
    first = apart(run(model, (x,), loss), run(plain, (x,), loss))
    second = apart(run(model, (x,), loss), run(plain, (x,), loss))
    assert max(first, second) <= 0.01
    torch._dynamo.reset()
    shrinking = LossyCheck._exact_gradients
    monkeypatch.setattr(
        LossyCheck, "_exact_gradients", lambda self, *args: [_more(one) for one in shrinking(self, *args) or ()]
    )
    model = compiled(plain, 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, (x,), loss)
    session = compiled_call(model).session
    assert session.plan_again
    assert len(session.sent_tangents) == 1
    monkeypatch.undo()
    assert apart(run(model, (x,), loss), run(plain, (x,), loss)) <= 0.01
    assert len(session.graphs) == 2
    assert not session.plan_again


def _more(gradient: Any) -> Any:
    return None if gradient is None else 1.1 * gradient


@pytest.mark.slow
def test_a_forward_without_backward_is_not_what_is_checked() -> None:
    plain, batch = Residual(), pictures()
    model = compiled(plain, 0.01)
    model(*batch)
    run(model, batch)
    report = encore.report(model)
    assert report.lossy is not None
    assert [step for step, _ in report.lossy.checks] == [1]


def test_an_estimate_says_that_nothing_was_measured() -> None:
    from encore.api import estimate_with
    from encore.options import make_options

    options = make_options({"lossy": True, "budget": "min", "methods": "encode"})
    report = estimate_with(options, Residual(), pictures(), {}).report
    assert lossy_codes(report)
    assert report.lossy is not None
    assert report.lossy.error is None
    assert "not measured (an estimate runs nothing" in str(report)


def test_where_nothing_can_be_measured_no_lossy_codec_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_codecs, "step_has_room", lambda need, device: False)
    plain, batch = Residual(), pictures()
    model = compiled(plain, 0.01)
    with pytest.warns(UserWarning, match="uses no lossy codecs.*too little free memory"):
        have = run(model, batch)
    assert torch.equal(have, run(plain, batch))


@pytest.mark.slow
def test_measuring_within_a_budget_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs that measure do not keep everything where the budget would not hold that."""
    seen = []
    base = bounded_codecs.BoundedCodecs._base

    def note(self: bounded_codecs.BoundedCodecs) -> frozenset[int]:
        seen.append(base(self))
        return seen[-1]

    monkeypatch.setattr(bounded_codecs.BoundedCodecs, "_base", note)
    plain, batch = Residual(blocks=2), pictures()
    kept = encore.estimate(plain, *batch)
    budget = int(0.75 * (kept.resident + kept.unplanned.step_peak))
    model = compiled(plain, 0.01, budget=budget, methods=("recompute", "encode"))
    assert apart(run(model, batch), run(plain, batch)) <= 0.01
    assert seen[0]


@pytest.mark.slow
def test_a_step_of_several_graphs_shares_the_bound() -> None:
    class Broken(Residual):
        def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = torch.relu(x + block(x))
            torch._dynamo.graph_break()
            return nn.functional.cross_entropy(self.leave(torch.tanh(x).mean((2, 3))), classes)

    plain, batch = Broken(), pictures()
    model = compiled(plain, 0.01)
    error = apart(run(model, batch), run(plain, batch))
    assert error <= 0.01
    checks = [graph.lossy_check for graph in compiled_call(model).session.last_step if graph.lossy_check]
    assert [check.bound for check in checks] == [0.005] * len(checks)
    report = encore.report(model)
    assert report.lossy is not None
    assert report.lossy.error is not None
    assert error <= report.lossy.error <= 0.01
