"""What a model carries from step to step: running statistics, tied weights, pickles, and numbers as arguments."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_matches_eager, assert_same, run_step, session_of
from support.lowerings import in_both_lowerings

pytestmark = pytest.mark.mostly_eager


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(4)
        self.output = nn.Linear(4, 9, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.output(self.norm(self.embedding(tokens)).tanh()), tokens)


TOKENS = torch.tensor([1, 2, 2, 6, 0, 8])

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (5, 3)),
    "1d over time": (lambda: nn.BatchNorm1d(3), (5, 3, 4)),
    "2d": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "3d": (lambda: nn.BatchNorm3d(3), (2, 3, 3, 3, 3)),
    "cumulative average": (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 5, 5)),
    "not affine": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False)), (4, 3, 5, 5)),
    "nothing tracked": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 5, 5)),
    "twice in one step": (
        lambda: (lambda norm: nn.Sequential(norm, nn.Conv2d(3, 3, 1), nn.ReLU(), norm))(nn.BatchNorm2d(3)),
        (4, 3, 5, 5),
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@in_both_lowerings("norm", NORMS, ["twice in one step"])
@pytest.mark.filterwarnings("ignore:encore. BatchNorm2d ran as plain eager PyTorch:UserWarning")
def test_batch_norm(norm: str, training: bool, lowering: str) -> None:
    make, shape = NORMS[norm]
    model = make().train(training)
    graphs = None if norm == "cumulative average" and training else 1  # asks a tensor for its value: left to eager
    assert_matches_eager(model, torch.randn(shape, requires_grad=True), steps=3, graphs=graphs, lowering=lowering)


def test_batches_are_counted_once(lowering: str) -> None:
    model = assert_matches_eager(nn.BatchNorm1d(3), torch.randn(5, 3), steps=4, lowering=lowering)
    assert model.num_batches_tracked.item() == 4


def test_batch_norm_in_double_and_with_a_frozen_scale(lowering: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    model[1].weight.requires_grad_(False)
    assert_matches_eager(model, torch.randn(5, 4).double(), lowering=lowering)


def test_tied_weights_get_one_gradient_and_stay_tied(lowering: str) -> None:
    model = assert_matches_eager(Tied(), TOKENS, steps=3, lowering=lowering)
    assert model.output.weight is model.embedding.weight
    assert "output.weight" in model.state_dict()
    assert len(list(model.parameters())) == 3


def test_a_layer_used_twice(lowering: str) -> None:
    layer = nn.Linear(4, 4)
    assert_matches_eager(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), torch.randn(3, 4), lowering=lowering)


def test_a_parameter_that_is_unfrozen_and_frozen(lowering: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    planned = encore.compile(copy.deepcopy(eager), lowering=lowering)
    x = torch.randn(3, 4)
    for trainable in (True, False, True):
        for model in (eager, planned):
            model[0].weight.requires_grad_(trainable)
        have = run_step(planned, (x,))
        assert ("gradient of 0.weight" in have) == trainable
        assert_same(have, run_step(eager, (x,)), lowering)


def test_a_parameter_that_is_replaced(lowering: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    planned = encore.compile(copy.deepcopy(eager), lowering=lowering)
    run_step(planned, (torch.randn(3, 4),))
    weight = torch.randn(4, 4)
    for model in (eager, planned):
        model[0].weight = nn.Parameter(weight.clone())
    x = torch.randn(3, 4)
    assert_same(run_step(planned, (x,)), run_step(eager, (x,)), lowering)


@pytest.mark.parametrize("ran", [False, True], ids=["never run", "after a step"])
def test_a_pickle_is_a_plain_model_with_the_same_numbers(ran: bool, lowering: str) -> None:
    planned = encore.compile(Tied(), lowering=lowering)
    if ran:
        run_step(planned, (TOKENS,))
    with pytest.warns(UserWarning, match="has the plain module, without its plans"):
        loaded = pickle.loads(pickle.dumps(planned))
    assert_same(run_step(planned, (TOKENS,)), run_step(loaded, (TOKENS,)), lowering)
    with pytest.raises(encore.NeverRunError):
        encore.report(loaded)
    assert encore.compile(loaded, lowering=lowering) is loaded
    assert_same(run_step(planned, (TOKENS,)), run_step(loaded, (TOKENS,)), lowering)
    assert session_of(loaded).forwards_run == 1


def test_a_whole_model_through_torch_save(lowering: str) -> None:
    planned = encore.compile(Tied(), lowering=lowering)
    run_step(planned, (TOKENS,))
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="has the plain module, without its plans"):
        torch.save(planned, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_same(run_step(planned, (TOKENS,)), run_step(loaded, (TOKENS,)), lowering)


def test_a_state_dict_through_torch_save_into_a_fresh_model(lowering: str) -> None:
    plain_keys = list(Tied().state_dict())
    planned = encore.compile(Tied(), lowering=lowering)
    run_step(planned, (TOKENS,))
    assert list(planned.state_dict()) == plain_keys
    file = io.BytesIO()
    torch.save(planned.state_dict(), file)
    file.seek(0)
    fresh = Tied()
    fresh.load_state_dict(torch.load(file))
    assert_same(run_step(planned, (TOKENS,)), run_step(fresh, (TOKENS,)), lowering)


def test_moving_to_another_type_is_another_variant(lowering: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    planned = encore.compile(copy.deepcopy(eager), lowering=lowering)
    x = torch.randn(3, 4)
    assert_same(run_step(planned, (x,)), run_step(eager, (x,)), lowering)
    assert_same(run_step(planned.double(), (x.double(),)), run_step(eager.double(), (x.double(),)), lowering)
    assert len(session_of(planned).graphs) == 2


@in_both_lowerings("number", [0, 1, 3, -2, 0.5, float("inf"), True, False, None, "relu"], [None])
def test_an_argument_that_is_no_tensor(number: object, lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, extra: object, *rest: object, option: object = None) -> Tensor:
            y = self.linear(x)
            if isinstance(extra, str):
                return getattr(F, extra)(y)
            if extra is None:
                return y
            return y * extra if option is None else y + extra  # type: ignore[operator]

    eager = Model()
    planned = assert_matches_eager(eager, torch.randn(3, 4), number, lowering=lowering)
    x = torch.randn(3, 4)
    assert_same(
        run_step(planned, (x, number, "rest", 3), {"option": number}),
        run_step(eager, (x, number, "rest", 3), {"option": number}),
        lowering,
    )


def test_numbers_that_change_from_call_to_call(lowering: str) -> None:
    def function(x: Tensor, scale: float, times: int) -> Tensor:
        for _ in range(times):
            x = (x * scale).tanh()
        return x

    planned = encore.compile(function, lowering=lowering)
    x = torch.randn(3, 4, requires_grad=True)
    for scale, times in ((0.5, 1), (1.5, 1), (1.5, 3), (0.5, 1), (2, 2)):
        assert_same(run_step(planned, (x, scale, times)), run_step(function, (x, scale, times)), lowering)
    assert session_of(planned).forwards_run == 5


def test_an_input_that_needs_a_gradient_in_one_call_and_none_in_the_next(lowering: str) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    planned = encore.compile(copy.deepcopy(eager), lowering=lowering)
    for needs in (False, True, False):
        x = torch.randn(3, 4, requires_grad=needs)
        assert_same(run_step(planned, (x,)), run_step(eager, (x,)), lowering)
    assert len(session_of(planned).graphs) == 2


def test_arguments_of_torch_compile_may_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning replaces `torch.compile` by a function that keeps a deep copy of its arguments."""
    original, kept = torch.compile, []

    def keeping(*args: Any, **kwargs: Any) -> Any:
        kept.append(copy.deepcopy(kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", keeping)
    planned = encore.compile(nn.Linear(4, 4), lowering="eager")
    planned(torch.ones(2, 4)).sum().backward()
    assert [one["backend"].session for one in kept] == [session_of(planned)]
