"""`ENCORE_CHECK=1`: silent on what is right, in no step's way, and loud about each kind of fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import encore
from encore.api import compiled_call
from encore.errors import CheckError
from encore.graph.editor import Editor
from encore.lower.calls import callable_for
from encore.options import LOWERINGS
from encore.rewrite import Judge
from encore.schedule.reuse import write_over_dying
from support.captured_graphs import Perceptron, drop_gradients, train_step
from support.lowerings import in_both_lowerings

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _checking(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("ENCORE_CHECK", "1")
    monkeypatch.setattr(Judge, "channels_last_pays", lambda *_: True)


class Images(nn.Module):
    """Convolutions with statistics and a pool, two readers of one view, and a random mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.left, self.right = nn.Linear(16 * 16, 8), nn.Linear(16 * 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        maps = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        flat = self.second(maps).flatten(1)
        return self.left(flat).pow(2).mean() + self.right(F.dropout(torch.sigmoid(flat), 0.3)).pow(2).mean()


class Sequences(nn.Module):
    """A tied embedding around a recurrent layer and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        steps, _ = self.lstm(self.embed(tokens))
        mixed, _ = self.attend(steps, steps, steps, need_weights=False)
        logits = (steps + mixed) @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


class Written(nn.Module):
    """Writes to a buffer and to intermediates, and returns a view."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.linear(x)
        h[:, ::2].mul_(2)
        one, other = F.gelu(h).chunk(2, 1)
        return (one.t() @ other.softmax(1)).permute(1, 0)[1:]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "images": (Images, lambda: torch.randn(4, 4, 8, 8).to(memory_format=torch.channels_last)),
    "sequences": (Sequences, lambda: torch.randint(19, (3, 7))),
    "written": (Written, lambda: torch.randn(5, 12)),
}


def step(model: nn.Module, x: Tensor) -> None:
    """One step of training: the loss alone receives a gradient."""
    if isinstance(model, Sequences):
        model(x)[0].backward()
    else:
        train_step(model, x)


def state_after(model: nn.Module, x: Tensor, steps: int = 2) -> dict[str, Any]:
    torch.manual_seed(3)
    for _ in range(steps):
        step(model, x)
    found: dict[str, Any] = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return found | dict(model.named_buffers()) | {"generator": torch.get_rng_state()}


@in_both_lowerings("case", CASES, fused=("images", "written"))
def test_a_checked_step_is_the_step_that_is_not_checked(
    case: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same gradients, buffers and draws, and the same peak."""
    make, example = CASES[case]
    torch.manual_seed(0)
    plain, x = make(), example()
    options: dict[str, Any] = {"lowering": lowering, "budget": "min"}
    found, peaks = [], []
    for checked in ("1", "0"):
        monkeypatch.setenv("ENCORE_CHECK", checked)
        torch._dynamo.reset()
        model = encore.compile(copy.deepcopy(plain), **options)
        assert compiled_call(model).session.checks is (checked == "1")
        found.append(state_after(model, x))
        drop_gradients(model)
        peaks.append(encore.measure(lambda model=model: step(model, x)).step_peak)  # type: ignore[misc]
        assert peaks[-1] <= encore.report(model).planned.step_peak
        assert len(compiled_call(model).session.last_step) == 1
    assert found[0].keys() == found[1].keys()
    for name, one in found[0].items():
        assert torch.equal(one, found[1][name]), name
    assert peaks[0] == peaks[1]


def test_hooks_and_gradients_see_the_users_steps_alone() -> None:
    model, x = Perceptron(), torch.randn(3, 4)
    calls: list[str] = []
    model.enter.weight.register_hook(lambda gradient: calls.append("gradient"))
    model.enter.weight.register_post_accumulate_grad_hook(lambda tensor: calls.append("accumulated"))
    compiled = encore.compile(model, lowering="eager")
    loss = compiled(x)
    assert not calls
    assert model.enter.weight.grad is None
    loss.backward()
    assert calls == ["gradient", "accumulated"]


def test_through_torch_compile() -> None:
    model = Perceptron()
    compiled = torch.compile(model, backend="encore", options={"lowering": "eager"})
    compiled(torch.randn(3, 4)).backward()
    assert model.enter.weight.grad is not None


def faulty(monkeypatch: pytest.MonkeyPatch, target: Any, replacement: Callable[..., Any]) -> None:
    """Have one operator do something else at run time."""
    monkeypatch.setattr(
        "encore.lower.codegen.callable_for", lambda one: replacement if one is target else callable_for(one)
    )


def test_an_operator_that_writes_to_its_operand_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, aten.pow.Tensor_Scalar, lambda x, power: x.pow_(power).clone())

    def squares(x: Tensor) -> Tensor:
        h = x.sin()
        return (h.pow(2) * h).sum()

    with pytest.raises(CheckError, match=r"the operator pow_1 = aten.pow.Tensor_Scalar .* changed sin "):
        encore.compile(squares, lowering="eager")(torch.randn(4, requires_grad=True))


def test_a_result_in_the_memory_of_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, aten.sin.default, lambda x: x)
    with pytest.raises(CheckError, match=r"the operator sin = .* returned sin .* in the memory of a live value"):
        encore.compile(lambda x: x.sin().sum(), lowering="eager")(torch.randn(4, requires_grad=True))


def test_another_layout_than_the_graphs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, aten.sin.default, lambda x: torch.sin(x).t().contiguous().t())
    with pytest.raises(CheckError, match=r"returned sin as torch.float32\[4, 3\] with strides \[1, 4\], and the graph"):
        encore.compile(lambda x: x.sin().sum(), lowering="eager")(torch.randn(4, 3, requires_grad=True))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_numbers_that_are_not_eagers_are_named(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, aten.mm.default, lambda x, y: torch.mm(x, y) * 1.01)
    model = Perceptron()
    x = torch.randn(3, 4)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(CheckError, match=r"the first step of graph 0 differs from eager: .*gradient"):
        encore.compile(model, lowering=lowering)(x)
    assert all(torch.equal(one, before[0][name]) for name, one in model.state_dict().items())
    assert torch.equal(before[1], torch.get_rng_state())


def test_the_replayer_follows_what_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_what_is_read_later(graph: Any, items: Any, *others: Any) -> Any:
        found = write_over_dying(graph, items, *others)
        for position, item in enumerate(items):
            if getattr(item, "target", None) is aten.sigmoid.default:
                found[position] = [(item.writes[0], item.args[0].value)]
        return found

    monkeypatch.setattr("encore.schedule.order.write_over_dying", over_what_is_read_later)

    def forward(x: Tensor) -> Tensor:
        h = x.sin()
        return (h.sigmoid() * h.cos()).sum()

    with pytest.raises(CheckError, match=r"ENCORE_CHECK: graph 0: illegal schedule: .*"):
        encore.compile(forward, lowering="eager")(torch.randn(4, requires_grad=True))


@pytest.fixture
def _views_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that reads a copy stays in the storage of the original, and no verifier looks."""
    monkeypatch.setattr(Editor, "file_under", lambda *_: None)
    monkeypatch.setattr(Editor, "_move_views", lambda *_: None)
    monkeypatch.setattr("encore.rewrite.passes.verify_graph", lambda graph: None)
    monkeypatch.setattr("encore.compiler.pipeline.verify_graph", lambda graph: None)
    monkeypatch.setattr("encore.compiler.lowered_plan.verify_graph", lambda graph: None)


@pytest.mark.usefixtures("_views_left_behind")
def test_memory_that_is_shared_unknown_to_the_graph_is_found() -> None:
    class TwoReaders(Images):
        def forward(self, x: Tensor) -> Tensor:
            flat = self.second(torch.relu(self.first(x))).flatten(1)
            return self.left(flat).pow(2).mean() + self.right(torch.sigmoid(flat)).pow(2).mean()

    model = TwoReaders()
    model.left, model.right = nn.Linear(16 * 64, 8), nn.Linear(16 * 64, 8)
    with pytest.raises(CheckError):
        train_step(encore.compile(model), torch.randn(8, 4, 8, 8))
