"""Additive scores as an operator: against float64, PyTorch's own checks, bytes kept and taken aside, mistakes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import encore
from encore.cost.allocations import measure_cpu
from encore.rnn import WORKSPACES, scores, scores_native, scores_plain
from support.attention_inputs import by_formula, gradients, operands
from support.rounding import FACTOR, assert_all_as_accurate, assert_as_accurate

pytestmark = pytest.mark.usefixtures("own_layers")

SCORES: Any = torch.ops.encore.additive_scores
BACKWARD: Any = torch.ops.encore.additive_scores_backward
both = pytest.mark.parametrize("kernels", [scores_native, scores_plain], ids=["native", "plain"])


@contextmanager
def computed_by(kernels: ModuleType) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "_cpu_kernels", lambda: kernels)
        yield


def in_float64(given: list[Any]) -> list[Any]:
    return [one.detach().double().requires_grad_() if isinstance(one, Tensor) else one for one in given]


def error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one.double() - other).norm() / (1 + other.norm())) for one, other in zip(found, exact, strict=True)]


MODES: list[dict[str, Any]] = [
    {"bias": bias, "norm": norm} for bias in (False, True) for norm in ("", "plain", "affine")
]  # fmt: skip
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 5e-3, torch.float16: 1e-3}


@both
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(kernels: ModuleType, data: st.DataObject) -> None:
    """Sizes around the widths of vectors, tiles of queries and blocks of keys; none at all; any layout."""
    batch, queries = data.draw(st.sampled_from([0, 1, 2, 3])), data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 9]))
    keys, hidden = (
        data.draw(st.sampled_from([0, 1, 2, 31, 33, 65])),
        data.draw(st.sampled_from([0, 1, 2, 15, 16, 17, 48])),
    )
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    given = operands(batch, queries, keys, hidden, dtype=dtype, **data.draw(st.sampled_from(MODES)))
    if data.draw(st.booleans()):  # time first, as recurrent layers leave it
        given[:2] = [one.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for one in given[:2]]
    if data.draw(st.booleans()):  # every other number
        given[0], given[2] = (
            torch.stack([one, one], -1).detach()[..., 0].requires_grad_() for one in (given[0], given[2])
        )
    grad = torch.randn(batch, queries, keys, dtype=torch.float64).to(dtype)
    if data.draw(st.booleans()):
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    with computed_by(kernels):
        found = gradients(SCORES, given, grad)
    exact, eager = gradients(by_formula, in_float64(given), grad.double()), gradients(by_formula, given, grad)
    assert [one.dtype for one in found] == [dtype] * len(found)
    allowed = FACTOR * max(error(eager, exact)) + TOLERANCE[dtype] * (10 if hidden < 3 and given[-1] is not None else 1)
    assert max(error(found, exact)) < allowed


@pytest.mark.parametrize("mode", MODES)
def test_no_farther_from_float64_than_eager(mode: dict[str, Any]) -> None:
    given = operands(8, 20, 40, 200, dtype=torch.float32, **mode)
    grad = torch.randn(8, 20, 40)
    exact = gradients(by_formula, in_float64(given), grad.double())
    ours, eager = (error(gradients(call, given, grad), exact) for call in (SCORES, by_formula))
    assert all(mine <= FACTOR * other + 1e-7 for mine, other in zip(ours, eager, strict=True)), (ours, eager)


@both
def test_saturation_and_nan(kernels: ModuleType) -> None:
    """tanh where it is flat, at infinity, and NaN only where there was one."""
    query = torch.tensor([[[0.0, 0.0]], [[float("inf"), 1.0]], [[float("nan"), 1.0]]], requires_grad=True)
    keys = torch.tensor([-1e30, -50.0, -9.0, -1e-30, 0.0, 8.7, 1e30]).view(1, 7, 1).expand(3, 7, 2)
    weight = torch.ones(2)
    with computed_by(kernels):
        found = SCORES(query, keys, weight, None, None, None, None)
        (grad,) = torch.autograd.grad(found.sum(), query)
    exact = by_formula(query.double(), keys.double(), weight.double(), None, None, None, None)
    plain = by_formula(query, keys, weight, None, None, None, None)
    assert_as_accurate(found, plain, exact)
    assert found[0, 0, 3] == torch.tensor(-2e-30)
    assert not found[:2].isnan().any()
    assert found[2].isnan().all()
    assert grad.isnan().flatten().tolist() == [False] * 4 + [True, False]
    assert (grad[:2] >= 0).all()


def test_threads_agree() -> None:
    given = operands(3, 9, 50, 40, bias=True, norm="affine", dtype=torch.float32)
    grad, before, found = torch.randn(3, 9, 50), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):  # runs that end inside sequences, one inside another's
            torch.set_num_threads(threads)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scores_native, "WORK_PER_THREAD", 1)
                found.append(gradients(SCORES, given, grad))
    finally:
        torch.set_num_threads(before)
    eager, exact = gradients(by_formula, given, grad), gradients(by_formula, in_float64(given), grad.double())
    for one in found:
        assert_all_as_accurate(one, eager, exact)


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode: dict[str, Any]) -> None:
    given = operands(2, 3, 5, 6, **mode)
    torch.library.opcheck(SCORES.default, tuple(given))
    tensors = [one.detach() if isinstance(one, Tensor) else one for one in given]
    for onto in (None, torch.randn(2, 5, 6, dtype=torch.float64)):
        call = (onto, torch.randn(2, 3, 5, dtype=torch.float64), *tensors, True, True, True)
        torch.library.opcheck(BACKWARD.default, call)


@pytest.mark.parametrize("mode", MODES)
def test_derivatives(mode: dict[str, Any]) -> None:
    *given, eps = operands(2, 3, 4, 3, **mode)
    given[4:] = [None if one is None else (one * 0.3).detach().requires_grad_() for one in given[4:]]
    assert torch.autograd.gradcheck(lambda *some: SCORES(*some, eps), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(
        lambda *some: SCORES(*some, eps), given, fast_mode=True, check_undefined_grad=False
    )  # fmt: skip


@both
def test_added_to_what_was_there(kernels: ModuleType) -> None:
    tensors = [one.detach() if isinstance(one, Tensor) else one for one in operands(2, 3, 5, 7, norm="plain")]
    grad, onto = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 5, 7, dtype=torch.float64)
    before = onto.clone()
    with computed_by(kernels):
        alone = BACKWARD(None, grad, *tensors, True, True, True)
        added = BACKWARD(onto, grad, *tensors, True, True, True)
        assert torch.equal(onto, before)
        in_place = scores.additive_scores_backward_(onto, grad, *tensors, True, True, True)
    torch.testing.assert_close(added[0], alone[0] + before)
    assert in_place[0] is onto
    for one, other in zip(added, in_place, strict=True):
        assert torch.equal(one, other)


def test_what_is_not_needed_is_empty() -> None:
    tensors = [one.detach() if isinstance(one, Tensor) else one for one in operands(2, 3, 5, 7, bias=True)]
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    everything = BACKWARD(None, grad, *tensors, True, True, True)
    sizes = [[35 * 2, 21 * 2, 7, 7, 0, 0], [0, 42, 0, 0, 0, 0], [70, 0, 0, 0, 0, 0], [0, 0, 7, 7, 0, 0]]
    asked = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
    for needs, expected in zip(asked, sizes, strict=True):
        found = BACKWARD(None, grad, *tensors, *needs)
        assert [one.numel() for one in found] == expected
        assert all(torch.equal(one, other) for one, other in zip(found, everything, strict=True) if one.numel())


# ---- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["", "affine"])
def test_nothing_is_kept(norm: str) -> None:
    """Beside the operands themselves."""
    given = operands(4, 6, 7, 32, norm=norm, dtype=torch.float32)
    theirs = {one.untyped_storage().data_ptr() for one in given if isinstance(one, Tensor)}
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        SCORES(*given)
    assert {one.untyped_storage().data_ptr() for one in kept} == theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_workspace_to_the_byte(mode: dict[str, Any], dtype: torch.dtype) -> None:
    for shape in ((3, 5, 40, 33), (4, 1, 200, 64)):
        tensors = [
            one.detach() if isinstance(one, Tensor) else one for one in operands(*shape, dtype=dtype, **mode)
        ]  # fmt: skip
        grad = torch.randn(shape[:3]).to(dtype)
        for op, args in ((SCORES, tensors), (BACKWARD, [None, grad, *tensors, True, True, True])):
            measured = measure_cpu(functools.partial(op, *args))
            told = WORKSPACES[op.default](*args)
            assert measured.step_peak - measured.left == told > 0
            with FakeTensorMode(allow_non_fake_inputs=False) as mode_:
                fakes = [mode_.from_tensor(one) if isinstance(one, Tensor) else one for one in args]
                assert WORKSPACES[op.default](*fakes) == told


def test_plain_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_plain, "BLOCK", 4096)
    with computed_by(scores_plain):
        for shape in ((3, 5, 40, 33), (4, 1, 200, 64), (1, 9, 9, 5000)):
            for mode in MODES:
                for dtype in (torch.float32, torch.bfloat16):
                    given = operands(*shape, dtype=dtype, **mode)
                    tensors = [one.detach() if isinstance(one, Tensor) else one for one in given]
                    grad = torch.randn(shape[:3]).to(dtype)
                    for op, args in ((SCORES, tensors), (BACKWARD, [None, grad, *tensors, True, True, True])):
                        measured = measure_cpu(functools.partial(op, *args))
                        assert measured.step_peak - measured.left <= WORKSPACES[op.default](*args), (shape, mode, op)


def test_workspace_grows_with_neither_keys_nor_batch() -> None:
    def told(batch: int, queries: int, keys: int) -> int:
        shape = torch.empty(batch, queries, 64), torch.empty(batch, keys, 64)
        return WORKSPACES[SCORES.default](*shape, torch.empty(64), None, None, None, None)

    assert told(64, 20, 5000) == told(64, 20, 100) == told(9, 20, 500)


# ---- no compiler, mistakes -----------------------------------------------------------------------------------------


def test_without_a_compiler_it_warns_once_and_runs(tmp_path: Path) -> None:
    program = (
        "import warnings, torch, encore\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        encore.nn.AdditiveAttention(3, 4, 5)(torch.randn(2, 3), torch.randn(2, 6, 4))[0].sum().backward()\n"
        "ours = [str(warning.message) for warning in seen if 'encore' in str(warning.message)]\n"
        "assert len(ours) == 1 and 'C++ compiler' in ours[0] and 'attention' in ours[0], ours\n"
    )
    environment = {**os.environ, "CXX": "no-such-compiler", "ENCORE_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_mistakes_are_named() -> None:
    query, keys, weight = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4), torch.zeros(4)

    def fails(text: str, *args: Any) -> None:
        with pytest.raises(encore.OptionError, match=text):
            SCORES(*args)

    fails(r"a query \[B, Tq, H\]", query[0], keys, weight, None, None, None, None)
    fails("agree in batch and hidden", query, keys[:1], weight, None, None, None, None)
    fails("agree in batch and hidden", query, keys[..., :3], weight, None, None, None, None)
    fails("are computed in", query.int(), keys.int(), weight.int(), None, None, None, None)
    fails("keys is torch.float64", query, keys.double(), weight, None, None, None, None)
    fails(r"weight must have the shape \(4,\)", query, keys, weight[:3], None, None, None, None)
    fails("bias must have the shape", query, keys, weight, torch.zeros(1, 4), None, None, None)
    fails("give its eps", query, keys, weight, None, weight, None, None)
    with pytest.raises(encore.OptionError, match=r"the gradient of these scores is \(2, 3, 5\)"):
        BACKWARD(None, torch.zeros(2, 5, 3), query, keys, weight, None, None, None, None, True, True, True)
    with pytest.raises(encore.OptionError, match="onto must be like the keys"):
        BACKWARD(query, torch.zeros(2, 3, 5), query, keys, weight, None, None, None, None, True, True, True)
