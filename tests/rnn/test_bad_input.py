"""Input that is wrong, odd or empty: what torch.nn raises or returns, for every kind, stash and set of kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import encore
from encore.rnn import modules
from support.recurrent_pairs import KINDS, assert_as_torch, both_kernels, kernels, pair, run

pytestmark = pytest.mark.usefixtures("own_layers")

CELLS = ("LSTMCell", "GRUCell", "RNNCell")
both_stashes = pytest.mark.parametrize("stash", ["fast", "lean"])
Wrong = Callable[[Any, str], Any]


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers are `torch.nn`'s own otherwise."""
    monkeypatch.setattr(modules, "left_to_torch", lambda *facts: False)


def states(kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    state = torch.zeros(*shape, dtype=dtype)
    return (state, state) if kind.startswith("LSTM") else state


def other_states(kind: str, *shape: int) -> Any:
    """Those of another kind: one where there should be two, two where there should be one."""
    return states("GRU" if kind.startswith("LSTM") else "LSTM", *shape)


def packed(width: int = 3, dtype: torch.dtype = torch.float32, lengths: tuple[int, ...] = (5, 2)) -> PackedSequence:
    return pack_padded_sequence(torch.randn(5, 2, width, dtype=dtype), torch.tensor(lengths))


def by_hand(rows: int, *sizes: int) -> PackedSequence:
    return PackedSequence(torch.randn(rows, 3), torch.tensor(sizes, dtype=torch.int64))


LAYERS: dict[str, Wrong] = {
    "input of another width": lambda layer, kind: layer(torch.randn(5, 2, 4)),
    "input without a width": lambda layer, kind: layer(torch.randn(5, 2, 0)),
    "input of one dimension": lambda layer, kind: layer(torch.randn(3)),
    "input of four dimensions": lambda layer, kind: layer(torch.randn(5, 2, 3, 1)),
    "no steps": lambda layer, kind: layer(torch.randn(0, 2, 3)),
    "neither steps nor batch": lambda layer, kind: layer(torch.randn(0, 0, 3)),
    "states of another batch": lambda layer, kind: layer(torch.randn(5, 2, 3), states(kind, 1, 3, 4)),
    "states of more layers": lambda layer, kind: layer(torch.randn(5, 2, 3), states(kind, 2, 2, 4)),
    "states of another width": lambda layer, kind: layer(torch.randn(5, 2, 3), states(kind, 1, 2, 5)),
    "states of two dimensions": lambda layer, kind: layer(torch.randn(5, 2, 3), states(kind, 2, 4)),
    "states of four dimensions": lambda layer, kind: layer(torch.randn(5, 2, 3), states(kind, 1, 1, 2, 4)),
    "states of a batch, input of none": lambda layer, kind: layer(torch.randn(5, 3), states(kind, 1, 2, 4)),
    "states of another kind": lambda layer, kind: layer(torch.randn(5, 2, 3), other_states(kind, 1, 2, 4)),
    "states in float64": lambda layer, kind: layer(torch.randn(5, 2, 3), states(kind, 1, 2, 4, dtype=torch.float64)),
    "input in float64": lambda layer, kind: layer(torch.randn(5, 2, 3).double()),
    "input of integers": lambda layer, kind: layer(torch.zeros(5, 2, 3, dtype=torch.int64)),
    "nothing": lambda layer, kind: layer(None),
    "unsorted lengths": lambda layer, kind: layer(packed(lengths=(2, 5))),
    "a length of zero": lambda layer, kind: layer(packed(lengths=(5, 0))),
    "packed input of another width": lambda layer, kind: layer(packed(4)),
    "packed input in float64": lambda layer, kind: layer(packed(dtype=torch.float64)),
    "packed input, states of another batch": lambda layer, kind: layer(packed(), states(kind, 1, 3, 4)),
    "sizes that rise": lambda layer, kind: layer(by_hand(3, 1, 2)),
    "too few rows": lambda layer, kind: layer(by_hand(3, 2, 2)),
    "no sizes": lambda layer, kind: layer(by_hand(0)),
}
STEPS: dict[str, Wrong] = {
    "input of another width": lambda cell, kind: cell(torch.randn(2, 4)),
    "input of no dimension": lambda cell, kind: cell(torch.randn(())),
    "input of three dimensions": lambda cell, kind: cell(torch.randn(2, 3, 3)),
    "states of another batch": lambda cell, kind: cell(torch.randn(2, 3), states(kind, 3, 4)),
    "states of another width": lambda cell, kind: cell(torch.randn(2, 3), states(kind, 2, 5)),
    "states of one dimension": lambda cell, kind: cell(torch.randn(2, 3), states(kind, 4)),
    "states of another kind": lambda cell, kind: cell(torch.randn(2, 3), other_states(kind, 2, 4)),
    "states in float64": lambda cell, kind: cell(torch.randn(2, 3), states(kind, 2, 4, dtype=torch.float64)),
    "input in float64": lambda cell, kind: cell(torch.randn(2, 3).double()),
    "input of integers": lambda cell, kind: cell(torch.zeros(2, 3, dtype=torch.int64)),
}
TABLE = [
    *((kind, name, call) for kind in KINDS for name, call in LAYERS.items()),
    *((kind, name, call) for kind in CELLS for name, call in STEPS.items()),
]


def raised(call: Wrong, module: nn.Module, kind: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the class is what is looked at)
        call(module, kind)
    return caught.value


@both_kernels
@both_stashes
@pytest.mark.parametrize(("kind", "name", "call"), TABLE, ids=[f"{kind}, {name}" for kind, name, _ in TABLE])
def test_raises_what_torch_nn_raises(kind: str, name: str, call: Wrong, stash: str, steps: ModuleType) -> None:
    theirs, ours = pair(kind, 3, 4, stash=stash)
    with kernels(steps):
        mine = raised(call, ours, kind)
    assert isinstance(mine, type(raised(call, theirs, kind)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("no steps", "neither steps nor batch")])
def test_raises_it_from_a_compiled_model(kind: str, name: str) -> None:
    layer = getattr(nn, kind)(3, 4)
    theirs = raised(LAYERS[name], layer, kind)
    torch._dynamo.reset()
    assert isinstance(raised(LAYERS[name], encore.compile(layer, skip="fuse"), kind), type(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_names_what_is_wrong(kind: str) -> None:
    layer = getattr(encore.nn, kind)(3, 4, stash="lean")
    with pytest.raises(encore.OptionError, match="at least one step"):
        layer(torch.randn(0, 2, 3))
    with pytest.raises(encore.OptionError, match="input dtype"):
        layer(packed(dtype=torch.float64))
    with pytest.raises(encore.OptionError, match="w_ih"):
        getattr(encore.nn, f"{kind}Cell")(3, 4)(torch.randn(2, 5))


def with_nan() -> Tensor:
    x = torch.randn(6, 3, 4)
    x[2, 1, 0] = torch.nan
    return x.requires_grad_()


ODD: dict[str, Callable[[], Tensor]] = {
    "NaN": with_nan,
    "infinity": lambda: torch.where(torch.arange(4) == 2, torch.inf, torch.randn(6, 3, 4)).requires_grad_(),
    "not contiguous": lambda: torch.randn(4, 6, 6).transpose(0, 2)[:, ::2].requires_grad_(),
    "expanded": lambda: torch.randn(1, 3, 4).expand(6, 3, 4).requires_grad_(),
    "empty batch": lambda: torch.randn(6, 0, 4).requires_grad_(),
}


EVERY: list[Any] = [*((kind, {}) for kind in KINDS), ("RNN", {"nonlinearity": "relu"})]


@both_kernels
@both_stashes
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("kind", "options"), EVERY)
def test_returns_what_torch_nn_returns(
    kind: str, options: dict[str, Any], odd: str, stash: str, steps: ModuleType
) -> None:
    """Outputs and gradients, infinities and NaN at the same places."""
    theirs, ours = pair(kind, 4, 5, stash=stash, bidirectional=True, **options)
    x = ODD[odd]()
    with kernels(steps):
        outputs, grads = run(ours, x, wanted=[x])
    assert_as_torch([*outputs, *grads], theirs, x, wanted=[x])
    assert any(tensor.isnan().any() for tensor in grads) == (odd in ("NaN", "infinity"))
