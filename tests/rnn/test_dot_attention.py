"""Attention in blocks: results and gradients beside the formula, bytes beside the allocator, and what it refuses."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import encore
from encore.errors import OptionError
from encore.rnn import WORKSPACES, dot, reference
from support.rounding import assert_all_as_accurate, doubled

pytestmark = pytest.mark.usefixtures("own_layers")

OP, BACKWARD = torch.ops.encore.dot_attention, torch.ops.encore.dot_attention_backward


def given(
    *, batch: int = 2, heads: int = 3, queries: int = 5, keys: int = 7, inner: int = 4, outer: int = 6,
    masks: bool = True, dtype: Any = torch.float64, transposed: bool = False, dropped: bool = False,
) -> list[Any]:  # fmt: skip
    """Everything that the operator takes. Heads as projections leave them, if they are to be transposed."""

    def some(length: int, width: int) -> Tensor:
        if transposed:
            return torch.randn(batch, length, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()
        return torch.randn(batch, heads, length, width, dtype=dtype).requires_grad_()

    added = [torch.randn(heads, 1, keys, dtype=dtype)] if masks else []
    hidden = [torch.rand(batch, 1, queries, keys) < 0.3, torch.rand(queries, keys) < 0.2] if masks else []
    return [
        some(queries, inner),
        some(keys, inner).mT,
        some(keys, outer),
        added,
        hidden,
        [-1e9, -5.0][: len(hidden)],
        0.4,
        torch.rand(batch, heads, queries, keys) < 0.7 if dropped else None,
        1 / 0.7 if dropped else 1.0,
    ]


def by_formula(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    operands: list[Any] = [*rest, query, keys, values]
    return reference.dot_attention(*operands)[0]


def results(call: Any, args: list[Any], grad: Tensor) -> list[Tensor]:
    found = call(*args)
    return [found.detach(), *torch.autograd.grad(found, args[:3], grad)]


@pytest.fixture(params=[1 << 20, 512, 60], ids=["at once", "some heads", "some queries"])
def workspace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(dot, "WORKSPACE", request.param)
    return int(request.param)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("masks", [False, True])
def test_the_formula(workspace: int, masks: bool, transposed: bool, dropped: bool) -> None:
    args = given(masks=masks, transposed=transposed, dropped=dropped)
    grad = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    for mine, right in zip(results(OP, args, grad), results(by_formula, args, grad), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("need", [(True, True, True), (False, False, True), (True, False, False)])
def test_bytes_aside(workspace: int, transposed: bool, dropped: bool, need: tuple[bool, bool, bool]) -> None:
    args = given(dtype=torch.float32, transposed=transposed, dropped=dropped)
    args[:3] = [one.detach() for one in args[:3]]
    grad = torch.randn(2, 3, 5, 6)
    found = OP(*args)
    assert encore.measure(lambda: OP(*args)).step_peak == found.nbytes + WORKSPACES[OP.default](*args)
    made = sum(one.nbytes for one in BACKWARD(grad, *args, *need))
    assert encore.measure(lambda: BACKWARD(grad, *args, *need)).step_peak == made + WORKSPACES[BACKWARD.default](
        grad, *args, *need
    )


def test_the_workspace_is_bounded() -> None:
    args = given(batch=4, heads=4, queries=600, keys=500, dtype=torch.float32, masks=False)
    assert WORKSPACES[OP.default](*args) <= dot.WORKSPACE < 4 * 16 * 600 * 500


def test_a_layout_that_no_product_reads() -> None:
    args = given(dtype=torch.float32)
    args[0] = torch.randn(2, 3, 5, 8)[..., ::2].requires_grad_()
    grad = torch.randn(2, 3, 5, 12)[..., ::2]
    exact = results(by_formula, doubled(args), grad.double())
    assert_all_as_accurate(results(OP, args, grad), results(by_formula, args, grad), exact)
    plain = [one.detach() if isinstance(one, Tensor) else one for one in args]
    peak = encore.measure(lambda: OP(*plain)).step_peak
    assert peak == OP(*plain).nbytes + WORKSPACES[OP.default](*plain)
    peak = encore.measure(lambda: BACKWARD(grad, *plain, True, True, True)).step_peak
    made = sum(one.nbytes for one in plain[:3])
    assert peak == made + WORKSPACES[BACKWARD.default](grad, *plain, True, True, True)


@pytest.mark.parametrize("dropped", [False, True])
def test_derivatives(dropped: bool) -> None:
    args = given(batch=1, heads=2, queries=2, keys=3, inner=2, outer=2, dropped=dropped)
    tensors, rest = args[:3], args[3:]
    call = functools.partial(lambda *three: OP(*three, *rest))
    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("dropped", [False, True])
def test_opcheck(dropped: bool) -> None:
    args = given(dropped=dropped)
    torch.library.opcheck(OP.default, tuple(args))
    plain = [one.detach() if isinstance(one, Tensor) else one for one in args]
    torch.library.opcheck(BACKWARD.default, (torch.randn(2, 3, 5, 6, dtype=torch.float64), *plain, True, True, True))


def test_what_is_empty() -> None:
    args = given(queries=0, masks=False)
    assert OP(*args).shape == (2, 3, 0, 6)
    args = given(keys=0, masks=False)
    found = results(OP, args, torch.ones(2, 3, 5, 6, dtype=torch.float64))
    assert [bool(one.count_nonzero()) for one in found] == [False] * 4


@pytest.mark.parametrize("dropped", [False, True])
def test_rows_that_are_hidden_altogether(dropped: bool) -> None:
    args = given(masks=False, dropped=dropped)
    args[4:6] = [[torch.ones(5, 7, dtype=torch.bool)], [-math.inf]]
    assert OP(*args).isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.randn(2, 3, 4)}, r"takes \[B, H, Tq, D\]"),
        ({0: torch.randn(2, 2, 5, 4)}, "agree in batch and heads"),
        ({2: torch.randn(2, 3, 6, 6)}, "agree as matrices"),
        ({2: torch.randn(2, 3, 7, 6)}, "of one type"),
        ({5: []}, "must be boolean"),
        ({8: 2.0}, "got 2.0 and no mask"),
        ({7: torch.ones(2, 3, 5, 7)}, "what dropout keeps must be boolean"),
        ({7: torch.ones(5, 7, dtype=torch.bool)}, r"boolean, \(2, 3, 5, 7\)"),
        ({3: [torch.randn(5, 7, dtype=torch.float64, requires_grad=True)]}, "gets no gradient"),
    ],
)
def test_refusals(change: dict[int, Any], message: str) -> None:
    args = given()
    for place, other in change.items():
        args[place] = other
    with pytest.raises(OptionError, match=message):
        OP(*args)
