"""encore.nn.AdditiveAttention: against the formula written out, masks, compilers, mistakes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from support.captured_graphs import train_step
from support.recurrent_pairs import assert_as_torch, everything
from support.rounding import assert_as_accurate, assert_close, assert_gradients_as_accurate

pytestmark = pytest.mark.usefixtures("own_layers")


def written_out(
    module: encore.nn.AdditiveAttention, query: Tensor, keys: Tensor, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Context and weights of queries `[B, Tq, size]`, in plain operators; `hidden` is true where nobody may look."""
    middle = module.query(query).unsqueeze(2) + module.keys(keys).unsqueeze(1)
    if module.norm is not None:
        middle = module.norm(middle)
    scores = middle.tanh() @ module.weight
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1)
    return weights @ keys, weights


class WrittenOut(nn.Module):
    def __init__(self, module: encore.nn.AdditiveAttention) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *args: Any) -> Any:
        return written_out(self.inner, *args)


@pytest.mark.parametrize("options", [{}, {"layer_norm": True}, {"bias": False}], ids=str)
def test_same_as_written_out(options: dict[str, Any]) -> None:
    module = encore.nn.AdditiveAttention(5, 7, 19, **options)
    query, keys = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 6, 7, requires_grad=True)
    found = everything(module, query, keys, wanted=[query, keys])
    assert_as_torch(found, WrittenOut(module), query, keys, wanted=[query, keys])


def test_a_step_of_a_decoder() -> None:
    module = encore.nn.AdditiveAttention(5, 7, 16, layer_norm=True)
    query, keys, values = torch.randn(3, 5), torch.randn(3, 6, 7), torch.randn(3, 6, 2)
    context, weights = module(query, keys, values, projected=module.project(keys))
    assert context.shape == (3, 2)
    assert weights.shape == (3, 6)
    whole, all_weights = module(query.unsqueeze(1), keys, values)
    assert_close(context, whole[:, 0])
    assert_close(weights, all_weights[:, 0])


def test_padding() -> None:
    module = encore.nn.AdditiveAttention(5, 7, 16)
    query, keys = torch.randn(3, 4, 5), torch.randn(3, 6, 7)
    lengths = torch.tensor([6, 1, 4])
    mask = torch.arange(6) >= lengths.unsqueeze(1)
    _, expected = written_out(module, query, keys, mask.unsqueeze(1))
    for given in (
        {"lengths": lengths},
        {"key_padding_mask": mask},
        {"key_padding_mask": mask.unsqueeze(1).expand(3, 4, 6)},
    ):
        context, weights = module(query, keys, **given)
        assert_close(weights, expected)
        assert_close(context, expected @ keys)
        assert (weights[1, :, 1:] == 0).all()
    both = module(query, keys, lengths=lengths, key_padding_mask=~mask & (torch.arange(6) == 0))[1]
    assert (both[:, :, 0] == 0).all()
    assert (both[2, :, 4:] == 0).all()


def test_nothing_to_look_at() -> None:
    """A sequence of padding only gets zeros, and spoils no gradient."""
    module = encore.nn.AdditiveAttention(5, 7, 16)
    query, keys = torch.randn(2, 4, 5, requires_grad=True), torch.randn(2, 6, 7)
    context, weights = module(query, keys, lengths=torch.tensor([0, 6]))
    assert (context[0] == 0).all()
    assert (weights[0] == 0).all()
    context.square().sum().backward()
    assert query.grad is not None
    assert (query.grad[0] == 0).all()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in module.parameters())


def test_state_and_autocast() -> None:
    module = encore.nn.AdditiveAttention(5, 7, 16, layer_norm=True)
    assert set(module.state_dict()) == {
        "query.weight",
        "query.bias",
        "keys.weight",
        "weight",
        "norm.weight",
        "norm.bias",
    }
    assert "layer_norm=True" in repr(module)
    again = encore.nn.AdditiveAttention(5, 7, 16, True, dtype=torch.float64)
    again.load_state_dict(module.state_dict())
    query, keys = torch.randn(2, 4, 5), torch.randn(2, 6, 7)
    expected = again(query.double(), keys.double())[0]
    assert_as_accurate(module(query, keys)[0], written_out(module, query, keys)[0], expected)
    with torch.autocast("cpu", torch.bfloat16):
        context, _ = module(query, keys)
    assert context.dtype == torch.bfloat16
    assert_close(context, expected.bfloat16())


class Reader(nn.Module):
    def __init__(self, layer_norm: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 24)
        self.attention = encore.nn.AdditiveAttention(24, 24, 32, layer_norm)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.embed(x).relu()
        context, _ = self.attention(hidden, hidden, lengths=lengths)
        return self.head(context).square().mean()


@pytest.mark.parametrize("layer_norm", [False, True])
def test_predicted_to_the_byte(layer_norm: bool, lowering: str) -> None:
    eager = Reader(layer_norm)
    model = copy.deepcopy(eager)
    args = torch.randn(5, 20, 6), torch.tensor([20, 3, 9, 1, 17])
    encore.compile(model, lowering=lowering, budget="1GiB")
    train_step(model, *args)
    train_step(eager, *args)
    assert_gradients_as_accurate(model, eager, train_step, *args)
    model.zero_grad(set_to_none=True)
    measured = encore.measure(lambda: model(*args).backward())
    assert encore.report(model).planned.step_peak == measured.step_peak


def test_compiles_as_one_graph() -> None:
    module = encore.nn.AdditiveAttention(5, 7, 19, layer_norm=True)
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    query, keys = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 6, 7, requires_grad=True)
    found = everything(compiled, query, keys, wanted=[query, keys])
    assert_as_torch(found, module, query, keys, wanted=[query, keys])


def test_mistakes_are_named() -> None:
    module = encore.nn.AdditiveAttention(5, 7, 16)
    query, keys = torch.randn(3, 4, 5), torch.randn(3, 6, 7)

    def fails(text: str, *args: Any, **given: Any) -> None:
        with pytest.raises(encore.OptionError, match=text):
            module(*args, **given)

    fails(r"takes a query \[B, 5\] or \[B, Tq, 5\]; got \(3, 4, 6\)", torch.randn(3, 4, 6), keys)
    fails(r"takes keys \[B, Tk, 7\]", query, keys[0])
    fails("the query has a batch of 3, the keys one of 2", query, keys[:2])
    fails("as many as keys", query, keys, keys[:, :2])
    fails(r"projected must be project\(keys\)", query, keys, projected=keys)
    fails("lengths must be 3 integers", query, keys, lengths=torch.tensor([1, 2]))
    fails("lengths must be 3 integers", query, keys, lengths=torch.tensor([1.0, 2.0, 3.0]))
    fails("key_padding_mask must be boolean", query, keys, key_padding_mask=torch.zeros(3, 6))
    fails("key_padding_mask must be boolean", query, keys, key_padding_mask=torch.zeros(3, 5, dtype=torch.bool))
    with pytest.raises(encore.OptionError, match="hidden_size must be an integer, 1 or more; got 0"):
        encore.nn.AdditiveAttention(5, 7, 0)
