"""Sizes of results that fake kernels do not know, against the real operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from encore.graph.sizes import LSTM_MODE, onednn_lstm_workspace, true_bytes, true_types
from encore.graph.torch_private import FakeTensorMode
from encore.graph.values import Ref, Value


@pytest.mark.parametrize("hidden", [1, 16, 33, 64, 128, 256])
@pytest.mark.parametrize(
    ("steps", "batch", "features"), [(1, 1, 1), (7, 3, 20), (24, 4, 64), (5, 8, 256), (30, 2, 300)]
)
def test_the_workspace_is_what_the_real_operator_returns(steps: int, batch: int, features: int, hidden: int) -> None:
    state = torch.zeros(1, batch, hidden)
    weights = (torch.zeros(4 * hidden, features), torch.zeros(4 * hidden, hidden), *[torch.zeros(4 * hidden)] * 2)
    with torch.enable_grad():
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
            torch.zeros(steps, batch, features), *weights, state, state,
            False, [], LSTM_MODE, hidden, 1, True, False, False, True,
        )  # fmt: skip
    assert workspace.numel() * workspace.element_size() == onednn_lstm_workspace(steps, batch, features, hidden)


@pytest.mark.parametrize("hidden", [1, 33, 64, 256])
@pytest.mark.parametrize(("steps", "batch", "features"), [(1, 1, 1), (24, 4, 64), (30, 2, 300)])
def test_the_workspace_in_bfloat16(steps: int, batch: int, features: int, hidden: int) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    state = torch.zeros(1, batch, hidden, dtype=torch.bfloat16)
    shapes = ((4 * hidden, features), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    weights = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    with torch.enable_grad():
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
            torch.zeros(steps, batch, features, dtype=torch.bfloat16), *weights, state, state,
            False, [], LSTM_MODE, hidden, 1, True, False, False, True,
        )  # fmt: skip
    assert workspace.untyped_storage().nbytes() == onednn_lstm_workspace(steps, batch, features, hidden, 2)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("padding_idx", [-1, 3])
def test_the_results_of_embedding_bag(mode: int, include_last_offset: bool, padding_idx: int) -> None:
    weight, indices = torch.randn(50, 8), torch.randint(0, 50, (40,))
    args = (weight, indices, torch.arange(0, 41, 4), False, mode, False, None, include_last_offset, padding_idx)
    results = torch.ops.aten._embedding_bag(*args)
    known = true_bytes(torch.ops.aten._embedding_bag.default, args, [], results)
    for position, result in enumerate(results):
        dense = result.numel() * result.element_size()
        assert result.untyped_storage().nbytes() == known.get(position, dense), position


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    "name",
    ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
     "binary_cross_entropy_with_logits"],
)  # fmt: skip
def test_the_memory_of_a_reduced_loss(name: str, reduction: int) -> None:
    target = getattr(torch.ops.aten, name).default
    x, wanted = torch.rand(10, 20), torch.rand(10, 20)
    result = target(x, wanted, reduction=reduction)
    value = Value(0, "x", 0, (10, 20), (20, 1), torch.float32, x.untyped_storage().nbytes(), None)
    known = true_bytes(target, (Ref(0), Ref(0)), [value], [result])
    assert result.untyped_storage().nbytes() == known.get(0, result.numel() * 4)


def normalisation(name: str, x: torch.Tensor, kind: torch.dtype | None) -> tuple[str, tuple[Any, ...]]:
    """An operator and its arguments, its weights of this type or left out."""
    weight, bias, mean, variance = (None if kind is None else torch.ones(8, dtype=kind) for _ in range(4))
    return {
        "layer norm": ("native_layer_norm.default", (x, [8], weight, bias, 1e-5)),
        "group norm": ("native_group_norm.default", (x, weight, bias, 4, 8, 8, 2, 1e-5)),
        "batch norm": (
            "_native_batch_norm_legit_functional.default", (x, weight, bias, mean, variance, True, 0.1, 1e-5),
        ),
        "batch statistics": ("_native_batch_norm_legit.no_stats", (x, weight, bias, True, 0.1, 1e-5)),
    }[name]  # fmt: skip


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("narrow", [True, False, None])
@pytest.mark.parametrize("name", ["layer norm", "group norm", "batch norm", "batch statistics"])
def test_the_types_of_statistics(name: str, narrow: bool | None, source: torch.dtype) -> None:
    if narrow is None and name == "batch norm":
        pytest.skip("its functional form has running statistics")
    kind = None if narrow is None else source if narrow else torch.float32
    packet, args = normalisation(name, torch.randn(4, 8, 8).to(source), kind)
    target = getattr(getattr(torch.ops.aten, packet.partition(".")[0]), packet.partition(".")[2])
    with FakeTensorMode() as mode:
        fake = target(*(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args))
    values = [Value(0, "x", 0, (8,), (1,), arg.dtype, 0, None) for arg in args if isinstance(arg, torch.Tensor)]
    numbers = iter(range(len(values)))
    references = [Ref(next(numbers)) if isinstance(arg, torch.Tensor) else arg for arg in args]
    known = true_types(target, references, values, fake)
    found = [known.get(place, fake[place].dtype) for place in (1, 2)]
    assert found == [result.dtype for result in target(*args)[1:3]]
