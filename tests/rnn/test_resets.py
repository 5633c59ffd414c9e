"""States zeroed inside a sequence: every segment is a sequence of its own, as torch.nn runs it in float64."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import encore
from encore.errors import OperandError
from encore.rnn import tuning
from encore.rnn.tuning import LayerLayout
from support.recurrent_pairs import KINDS, Workspace, both_kernels, everything, kernels, pair
from support.rounding import assert_close, assert_gradients_as_accurate
from support.segments import expected, found_by, some_resets, some_states

pytestmark = pytest.mark.usefixtures("own_layers")


def check(module: nn.Module, theirs: nn.Module, x: Tensor, states: list[Tensor], resets: Tensor) -> None:
    for one, other in zip(found_by(module, x, states, resets), expected(theirs, x, states, resets), strict=True):
        assert_close(one, other.to(one.dtype))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both directions": {"bidirectional": True},
    "layers": {"num_layers": 2, "bidirectional": True, "bias": False},
}


@both_kernels
@pytest.mark.parametrize("stash", ["fast", pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_sequences(kind: str, options: dict[str, Any], stash: str | int, steps: ModuleType) -> None:
    theirs, ours = pair(kind, 3, 6, stash=stash, **options)
    x = torch.randn(8, 3, 3, requires_grad=True)
    resets = some_resets(8, 3)
    resets[0] = torch.tensor([True, False, False])
    resets[:, 2] = False
    with kernels(steps):
        check(ours, theirs, x, some_states(theirs, 3, x.dtype), resets)


@both_kernels
@pytest.mark.parametrize("stash", ["fast", 2])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projections(stash: str | int, steps: ModuleType) -> None:
    theirs, ours = pair("LSTM", 3, 6, 2, stash=stash, proj_size=4, bidirectional=True)
    x = torch.randn(7, 3, 3, requires_grad=True)
    with kernels(steps):
        check(ours, theirs, x, some_states(theirs, 3, x.dtype), some_resets(7, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", ["stored", "transposed"])
def test_layouts(kind: str, weight: str) -> None:
    """A product a step by PyTorch, in chunks of a few rows."""
    theirs, ours = pair(kind, 3, 6, bidirectional=True)
    x = torch.randn(7, 3, 3, requires_grad=True)
    for steps in (7, 1):
        with tuning.forced(LayerLayout(weight, 6)):
            check(ours, theirs, x[:steps], some_states(theirs, 3, x.dtype), some_resets(steps, 3, 0.5))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_resets(data: st.DataObject) -> None:
    kind, steps, batch = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    rows = st.lists(st.booleans(), min_size=batch, max_size=batch)
    resets = torch.tensor(data.draw(st.lists(rows, min_size=steps, max_size=steps)))
    stash: Any = data.draw(st.sampled_from(["fast", "lean", 1, 2, 4]))
    hidden = data.draw(st.sampled_from([1, 5, 16, 17]))
    theirs, ours = pair(
        kind, 2, hidden, data.draw(st.integers(1, 2)), stash=stash, bidirectional=data.draw(st.booleans())
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    x = torch.randn(steps, batch, 2, dtype=dtype, requires_grad=True)
    check(ours, theirs, x, some_states(theirs, batch, dtype), resets)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", [False, True])
def test_narrow_types(kind: str, dtype: torch.dtype, narrow: bool) -> None:
    theirs, ours = pair(kind, 3, 6, stash=2)
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    x = torch.randn(7, 3, 3).to(dtype).requires_grad_()
    with tuning.forced(LayerLayout("packed", 64, narrow=narrow)):
        check(ours, theirs, x, some_states(theirs, 3, dtype), some_resets(7, 3))


@both_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_crosses_a_reset(kind: str, steps: ModuleType) -> None:
    """Neither numbers, NaN included, nor gradients."""
    _, ours = pair(kind, 3, 6, 2, stash=2)
    resets = torch.zeros(8, 2, dtype=torch.bool)
    resets[5] = True
    x = torch.randn(8, 2, 3)
    x[4] = torch.nan
    x.requires_grad_()
    with kernels(steps):
        output = ours(x, None, resets)[0]
        assert not output[5:].isnan().any()
        assert output[4].isnan().all()
        finite = x.detach().nan_to_num(0.5).requires_grad_()
        (grad,) = torch.autograd.grad(ours(finite, None, resets)[0][5:].sum(), finite)
    assert grad[:5].eq(0).all()
    assert grad[5:].ne(0).all()


@both_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_no_resets_are_none(kind: str, steps: ModuleType) -> None:
    """All false gives the bits of a call without."""
    _, ours = pair(kind, 3, 6, 2, stash=3, bidirectional=True)
    x = torch.randn(8, 2, 3, requires_grad=True)
    with kernels(steps):
        plain = everything(ours, x, wanted=[x])
        found = everything(ours, x, None, torch.zeros(8, 2, dtype=torch.bool), wanted=[x])
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_first_and_unbatched(kind: str) -> None:
    _, ours = pair(kind, 3, 6, bidirectional=True)
    x, resets = torch.randn(7, 2, 3), some_resets(7, 2)
    expected_output = ours(x, None, resets)[0]
    for row in range(2):
        assert_close(ours(x[:, row], None, resets[:, row])[0], expected_output[:, row])
    ours.batch_first = True  # type: ignore[assignment]
    assert_close(ours(x.transpose(0, 1), None, resets.t())[0], expected_output.transpose(0, 1))


def test_dropout_between_layers_draws_as_without() -> None:
    _, ours = pair("GRU", 3, 6, 2, dropout=0.5)
    x = torch.randn(7, 2, 3)
    found = []
    for resets in (None, torch.zeros(7, 2, dtype=torch.bool)):
        torch.manual_seed(3)
        found.append(ours(x, None, resets)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("stash", ["fast", 4])
@pytest.mark.parametrize("kind", KINDS)
def test_workspace_to_the_byte(kind: str, stash: str | int) -> None:
    """Contiguous resets take none, others a byte for each step of each row."""
    module = getattr(encore.nn, kind)(20, 40, stash=stash, batch_first=True)
    x, resets = torch.randn(7, 30, 20, requires_grad=True), some_resets(7, 30)
    for given_resets in (resets, resets.t().contiguous().t()):
        with Workspace() as workspace:
            output = module(x, None, given_resets)[0]
            output.backward(torch.randn_like(output))
        assert len(workspace.seen) == 2
        assert all(told == measured for _, told, measured in workspace.seen)


@pytest.mark.parametrize("kind", ["lstm", "gru", "elman"])
@pytest.mark.parametrize("reverse", [False, True])
def test_operators(kind: str, reverse: bool) -> None:
    gates = {"lstm": 4, "gru": 3, "elman": 1}[kind]

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).div_(2).requires_grad_()

    states = [some(2, 5) for _ in range(2 if kind == "lstm" else 1)]
    weights = [some(gates * 5, 3), some(gates * 5, 5), some(gates * 5), some(gates * 5)]
    tensors: Any = [some(6, 2, 3), *states, *weights, *([None] if kind == "lstm" else []), None]
    resets = torch.tensor([[0, 1], [0, 0], [1, 1], [0, 0], [0, 1], [0, 0]]).bool()
    operator: Any = getattr(torch.ops.encore, f"{kind}_forward").default
    for option in (0, 2) if kind != "elman" else (False,):
        args = (reverse, option, resets)
        torch.library.opcheck(operator, (*tensors, *args))

        def outputs(*given: Any, args: tuple[Any, ...] = args) -> Any:
            return operator(*given, *args)[: len(states) + 1]

        assert torch.autograd.gradcheck(outputs, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(outputs, tensors, fast_mode=True, check_undefined_grad=False)


class Agent(nn.Module):
    def __init__(self, kind: str, stash: str) -> None:
        super().__init__()
        options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
        self.layers = getattr(encore.nn, kind)(12, 24, stash=stash, **options)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor, resets: Tensor) -> Tensor:
        return self.head(self.layers(x, None, resets)[0]).square().mean()


def assert_same_gradients(model: nn.Module, eager: nn.Module, x: Tensor, resets: Tensor) -> None:
    for one in (model, eager):
        one.zero_grad(set_to_none=True)
        one(x, resets).backward()
    assert_gradients_as_accurate(model, eager, lambda one, *args: one(*args).backward(), x, resets)


@pytest.mark.parametrize("stash", ["fast", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_have_resets(kind: str, stash: str) -> None:
    """The gradients of a compiled step are those of the module, its peak is predicted, and other resets run as well."""
    eager = Agent(kind, stash)
    model = copy.deepcopy(eager)
    encore.compile(model, budget="1GiB", lowering="eager")
    x = torch.randn(6, 20, 12)
    for share in (0.3, 0.0, 0.6):
        assert_same_gradients(model, eager, x, some_resets(6, 20, share))
    resets = some_resets(6, 20)
    model(x, resets).backward()
    model.zero_grad(set_to_none=True)
    measured = encore.measure(lambda: model(x, resets).backward())
    assert encore.report(model).planned.step_peak == measured.step_peak
    estimate = encore.estimate(copy.deepcopy(eager), x, resets)
    assert estimate.unplanned.step_peak == encore.report(model).unplanned.step_peak


def test_stashed_layers_keep_resets() -> None:
    """A plan that keeps less changes the operators' `keep` and nothing else."""
    eager = Agent("LSTM", "fast")
    model = copy.deepcopy(eager)
    encore.compile(model, budget="min", methods="stash")
    x, resets = torch.randn(6, 40, 12), some_resets(6, 40)
    assert_same_gradients(model, eager, x, resets)
    assert any(row.action == "stash" for row in encore.report(model).decisions)


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_are_named(kind: str) -> None:
    _, ours = pair(kind, 3, 6)
    x = torch.randn(7, 2, 3)
    with pytest.raises(OperandError, match="booleans"):
        ours(x, None, torch.zeros(7, 2))
    with pytest.raises(OperandError, match=r"shape \(7, 2\)"):
        ours(x, None, torch.zeros(2, 7, dtype=torch.bool))
    with pytest.raises(OperandError, match="booleans"):
        ours(x, None, [[True]])
    with pytest.raises(OperandError, match="PackedSequence"):
        ours(pack_padded_sequence(x, torch.tensor([7, 3])), None, torch.zeros(7, 2, dtype=torch.bool))
