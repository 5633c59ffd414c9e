"""encore.nn against torch.nn: options, states, packed sequences, types, errors."""

from __future__ import annotations

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import encore
from encore.rnn import native, plain, tuning
from encore.rnn.tuning import LayerLayout
from support.recurrent_pairs import KINDS, assert_as_torch, both_kernels, everything, kernels, pair
from support.rounding import assert_all_as_accurate

pytestmark = pytest.mark.usefixtures("own_layers")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "layers": {"num_layers": 3, "dropout": 0.3},
    "batch first": {"batch_first": True, "num_layers": 2},
    "both directions": {"bidirectional": True, "num_layers": 2, "dropout": 0.2},
    "all": {"bidirectional": True, "num_layers": 2, "batch_first": True, "bias": False},
}


def states_of(module: nn.Module, batch: int, dtype: torch.dtype = torch.float32) -> Any:
    module_: Any = module
    count = module_.num_layers * (2 if module_.bidirectional else 1)
    h = torch.randn(count, batch, module_.proj_size or module_.hidden_size, dtype=dtype, requires_grad=True)
    if not isinstance(module, nn.LSTM):
        return h
    return h, torch.randn(count, batch, module_.hidden_size, dtype=dtype, requires_grad=True)


def leaves(states: Any) -> list[Tensor]:
    return list(states) if isinstance(states, tuple) else [states]


@both_kernels
@pytest.mark.parametrize("stash", ["fast", "lean", 1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_torch(kind: str, options: dict[str, Any], stash: str | int, steps: ModuleType) -> None:
    theirs, ours = pair(kind, 5, 19, stash=stash, **options)
    x = torch.randn(*((4, 11) if options.get("batch_first") else (11, 4)), 5, requires_grad=True)
    states = states_of(theirs, 4)
    with kernels(steps):
        found = everything(ours, x, states, wanted=[x, *leaves(states)])
    assert_as_torch(found, theirs, x, states, wanted=[x, *leaves(states)])


@both_kernels
@pytest.mark.parametrize("stash", ["fast", 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projection(bidirectional: bool, stash: str | int, steps: ModuleType) -> None:
    theirs, ours = pair("LSTM", 6, 21, 2, stash=stash, proj_size=7, bidirectional=bidirectional)
    x = torch.randn(9, 3, 6, requires_grad=True)
    states = states_of(theirs, 3)
    with kernels(steps):
        found = everything(ours, x, states, wanted=[x, *states])
    assert_as_torch(found, theirs, x, states, wanted=[x, *states])


@both_kernels
@pytest.mark.parametrize("stash", ["fast", 1, 2, 50])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind: str, bidirectional: bool, stash: str | int, steps: ModuleType) -> None:
    theirs, ours = pair(kind, 4, 18, 2, stash=stash, bidirectional=bidirectional)
    sequences = [torch.randn(length, 4, requires_grad=True) for length in (3, 9, 1, 9, 5)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    states = states_of(theirs, 5)
    with kernels(steps):
        found = everything(ours, packed, states, wanted=[*sequences, *leaves(states)])
    packed = pack_sequence(sequences, enforce_sorted=False)
    assert_as_torch(found, theirs, packed, states, wanted=[*sequences, *leaves(states)])
    assert ours(packed)[0].batch_sizes.tolist() == theirs(packed)[0].batch_sizes.tolist()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Shapes around the widths of vectors, tiles and chunks."""
    kind = data.draw(st.sampled_from(KINDS))
    steps, batch = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([1, 2, 5, 6, 7, 13, 200]))
    hidden, inputs = data.draw(st.sampled_from([1, 3, 15, 16, 17, 64, 65, 130])), data.draw(st.integers(1, 9))
    stash: str | int = data.draw(st.sampled_from(["fast", "lean", "1", "4"]))
    stash = int(stash) if str(stash).isdigit() else stash
    theirs, ours = pair(kind, inputs, hidden, stash=stash, bidirectional=data.draw(st.booleans()))
    lengths = data.draw(st.one_of(st.none(), st.lists(st.integers(1, steps), min_size=batch, max_size=batch)))
    x = torch.randn(steps, batch, inputs, requires_grad=True)
    given_input: Any = x
    if lengths is not None:
        given_input = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    found = everything(ours, given_input, wanted=[x])
    if lengths is not None:
        given_input = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    assert_as_torch(found, theirs, given_input, wanted=[x])


@pytest.mark.parametrize("kind", KINDS)
def test_no_farther_from_float64(kind: str) -> None:
    theirs, ours = pair(kind, 48, 96)
    x = torch.randn(60, 16, 48, requires_grad=True)
    exact = copy.deepcopy(theirs).double()
    exact_x = x.detach().double().requires_grad_()
    truth = everything(exact, exact_x, wanted=[exact_x])

    def error(module: nn.Module) -> float:
        found = everything(module, x, wanted=[x])
        pairs = zip(found, truth, strict=True)
        return sum(((mine - true).norm() / true.norm()).item() for mine, true in pairs)

    allowed = (1.0 if kind == "LSTM" else 1.2) * error(theirs)  # for others, torch.nn adds up step by step
    for stash in ("fast", "lean", 5):
        ours.stash = stash  # type: ignore[assignment]
        assert error(ours) <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("stash", "bias"), [("fast", True), ("fast", False), (4, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_types_are_computed_in_float32(kind: str, stash: str | int, bias: bool, dtype: torch.dtype) -> None:
    """As close to float64 as rounding once to the type allows, and closer than torch.nn."""
    theirs, ours = pair(kind, 32, 48, stash=stash, bias=bias)
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    x = torch.randn(20, 6, 32).to(dtype).requires_grad_()
    exact = copy.deepcopy(theirs).double()
    exact_x = x.detach().double().requires_grad_()
    truth = everything(exact, exact_x, wanted=[exact_x])

    def error(module: nn.Module, steps: ModuleType) -> float:
        with kernels(steps):
            found = everything(module, x, wanted=[x])
        assert all(tensor.dtype == dtype for tensor in found)
        return sum(((mine - true).norm() / true.norm()).item() for mine, true in zip(found, truth, strict=True))

    reference = error(theirs, native)
    for narrow in (False, True):  # where the processor multiplies bfloat16 as it is, gates' gradients are rounded to it
        with tuning.forced(LayerLayout("packed", 64, narrow=narrow)):
            assert error(ours, native) <= (1.05 if narrow else 1.0) * reference
    assert error(ours, plain) <= reference


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_and_default_states(kind: str) -> None:
    theirs, ours = pair(kind, 3, 8, 2, batch_first=True)
    x = torch.randn(7, 3, requires_grad=True)
    assert_as_torch(everything(ours, x, wanted=[x]), theirs, x, wanted=[x])
    state = torch.randn(2, 8)
    states = (state, state) if kind == "LSTM" else state
    assert_as_torch(everything(ours, x, states, wanted=[x]), theirs, x, states, wanted=[x])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (1, 4), (5, 1), (3, 0)])
def test_corners(kind: str, steps: int, batch: int) -> None:
    for stash in ("fast", "lean"):
        theirs, ours = pair(kind, 3, 8, stash=stash)
        x = torch.randn(steps, batch, 3, requires_grad=True)
        assert_as_torch(everything(ours, x, wanted=[x]), theirs, x, wanted=[x])


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
@pytest.mark.parametrize("stash", ["fast", "lean"])
def test_cells(kind: str, stash: str) -> None:
    theirs, ours = pair(kind, 4, 20, stash=stash)
    for shape in ((3,), ()):
        x = torch.randn(*shape, 4, requires_grad=True)
        state = torch.randn(*shape, 20, requires_grad=True)
        states = (state, state) if kind == "LSTMCell" else state
        for given_states in (states, None):
            wanted = [x] if given_states is None else [x, state]
            assert_as_torch(everything(ours, x, given_states, wanted=wanted), theirs, x, given_states, wanted=wanted)


def test_relu() -> None:
    theirs, ours = pair("RNN", 4, 20, nonlinearity="relu")
    x = torch.randn(6, 3, 4, requires_grad=True)
    assert_as_torch(everything(ours, x, wanted=[x]), theirs, x, wanted=[x])


def test_gradients_in_any_layout() -> None:
    """Of a sum (expanded), of the last step alone, of states alone; twice with the same graph."""
    theirs, ours = pair("LSTM", 4, 9, batch_first=True)
    x = torch.randn(3, 7, 4, requires_grad=True)
    exact = copy.deepcopy(theirs).double()
    for loss in (
        lambda module, x: module(x)[0].sum(),
        lambda module, x: module(x)[0][:, -1].square().sum(),
        lambda module, x: module(x)[1][1].sum(),
        lambda module, x: module(x)[0].transpose(0, 2).exp().mean(),
    ):
        found = loss(ours, x)
        first = torch.autograd.grad(found, list(ours.parameters()), retain_graph=True)
        again = torch.autograd.grad(found, list(ours.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        assert_all_as_accurate(
            first,
            torch.autograd.grad(loss(theirs, x), list(theirs.parameters())),
            torch.autograd.grad(loss(exact, x.double()), list(exact.parameters())),
        )


def test_states_may_lie_anywhere() -> None:
    theirs, ours = pair("LSTM", 4, 9)
    x, h, c = torch.randn(5, 3, 4), torch.randn(1, 9, 3).transpose(1, 2), torch.zeros(1, 1, 9).expand(1, 3, 9)
    for stash in ("fast", 2):
        ours.stash = stash  # type: ignore[assignment]
        assert_as_torch(everything(ours, x, (h, c), wanted=[]), theirs, x, (h, c), wanted=[])


def test_frozen_parts_get_no_gradient() -> None:
    _, ours = pair("LSTM", 4, 9)
    module: Any = ours
    x = torch.randn(5, 3, 4)
    module.requires_grad_(False)
    module.bias_hh_l0.requires_grad_()
    module(x)[0].sum().backward()
    assert module.weight_ih_l0.grad is None
    assert module.bias_hh_l0.grad is not None
    module.bias_hh_l0.requires_grad_(False)
    x.requires_grad_()
    module(x)[0].sum().backward()
    assert x.grad is not None


def test_biases_do_not_share_gradients() -> None:
    for kind in KINDS:
        _, ours = pair(kind, 4, 9)
        module: Any = ours
        module(torch.randn(5, 3, 4))[0].sum().backward()
        assert module.bias_ih_l0.grad.data_ptr() != module.bias_hh_l0.grad.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_of_torch(kind: str) -> None:
    """isinstance, keys, repr, copies, pickles and functional calls."""
    theirs, ours = pair(kind, 4, 9, 2, stash="lean")
    assert isinstance(ours, getattr(nn, kind))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert repr(ours) == repr(theirs)[:-1] + ", stash='lean')"
    x = torch.randn(5, 3, 4)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x)[0], ours(x)[0])
    zeros = {name: torch.zeros_like(parameter) for name, parameter in ours.named_parameters()}
    assert not torch.func.functional_call(ours, zeros, (x,))[0].any()


def test_autocast() -> None:
    for kind in KINDS:
        _, ours = pair(kind, 4, 9)
        with torch.autocast("cpu", torch.bfloat16):
            output = ours(torch.randn(5, 3, 4))[0]
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())  # type: ignore[union-attr]


def test_errors_say_what_is_wrong() -> None:
    for stash in ("slow", 0, True, 2.5):
        with pytest.raises(encore.OptionError, match='"fast", "lean"'):
            encore.nn.LSTM(3, 4, stash=stash)  # type: ignore[arg-type]
    module = encore.nn.LSTM(3, 4)
    with pytest.raises(encore.OptionError, match="at least one step"):
        module(torch.randn(0, 2, 3))
    with pytest.raises(RuntimeError, match="input_size"):
        module(torch.randn(5, 2, 4))
    with pytest.raises(RuntimeError, match="hidden"):
        module(torch.randn(5, 2, 3), (torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)))
    with pytest.raises(RuntimeError, match="3-D"):
        module(torch.randn(5, 2, 3), (torch.zeros(2, 4), torch.zeros(2, 4)))
    with pytest.raises(ValueError, match="dtype"):
        module(torch.randn(5, 2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="2D or 3D"):
        module(torch.randn(3))
    with pytest.raises(encore.OptionError, match="w_ih"):
        encore.nn.GRUCell(3, 4)(torch.randn(2, 5))
