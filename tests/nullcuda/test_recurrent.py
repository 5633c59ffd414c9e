"""`torch.nn`'s recurrent layers on CUDA run on cuDNN, with its reserve and its flat weights predicted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.rnn import cudnn
from nullcuda.steps import as_loss, compiled_step

LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"num_layers": 2}),
    "both ways": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "projected": (nn.LSTM, {"proj_size": 16}),
    "without biases": (nn.LSTM, {"bias": False}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "dropout": (nn.GRU, {"num_layers": 2, "dropout": 0.5}),
}


def layer(name: str) -> nn.Module:
    kind, options = LAYERS[name]
    made: nn.Module = kind(32, 64, **options).cuda()
    return made


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("options", [{"overhead": 0}, {"budget": "min"}], ids=str)
def test_layers_run_on_cudnn_within_their_prediction(name: str, options: dict[str, Any], lowering: str) -> None:
    step = compiled_step(layer(name), [torch.randn(20, 8, 32, device="cuda")], lowering=lowering, **options)
    assert step.measured <= step.predicted <= 1.01 * step.measured
    assert step.counts.syncs == 0


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_lie_as_the_weights_do(name: str) -> None:
    model = layer(name)
    encore.compile(model)
    as_loss(model(torch.randn(20, 8, 32, device="cuda"))).backward()
    for weight in model.parameters():
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        assert weight.grad.storage_offset() == weight.storage_offset()
    assert (
        len({weight.grad.untyped_storage().data_ptr() for weight in model.parameters() if weight.grad is not None}) == 1
    )


def test_weights_in_memory_of_their_own_are_copied_to_their_places_in_one_buffer() -> None:
    together = list(layer("lstm").parameters())
    apart = [torch.arange(float(weight.numel())).view(weight.shape).cuda() for weight in together]
    h0 = torch.zeros(2, 8, 64, device="cuda")
    buffer, views = cudnn._flat(h0, apart, (4, 2, 2, False))
    assert all(torch.equal(view.cpu(), weight.cpu()) for view, weight in zip(views, apart, strict=True))
    assert [view.storage_offset() for view in views] == [weight.storage_offset() for weight in together]
    taken, same = cudnn._flat(h0, together, (4, 2, 2, False))
    assert taken.data_ptr() == together[0].untyped_storage().data_ptr()
    assert same[0] is together[0]
    assert taken.numel() == buffer.numel()


def test_the_reserve_is_the_one_that_cudnn_asks_for() -> None:
    model = layer("lstm")
    x = torch.randn(20, 8, 32, device="cuda")
    output, _ = model(x)
    reserve = output.grad_fn._saved_result3
    shapes = tuple(tuple(weight.shape) for weight in model.parameters())
    state = (2, 8, 64)
    options = (4, 2, 2, False, 0.0, True, True)
    assert cudnn._reserve_bytes((20, 8, 32), state, state, shapes, options, x.dtype, x.device) == reserve.nbytes > 0


def test_a_second_backward_is_an_error_and_not_a_wrong_gradient() -> None:
    model = layer("lstm")
    encore.compile(model)
    loss = as_loss(model(torch.randn(20, 8, 32, device="cuda")))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_runs_in_half_precision() -> None:
    model = layer("lstm")
    encore.compile(model)
    with torch.autocast("cuda", torch.float16):
        output, _ = model(torch.randn(20, 8, 32, device="cuda"))
    assert output.dtype is torch.float16
    output.sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype is torch.float32 for weight in model.parameters())


@pytest.mark.parametrize("name", ["lstm", "both ways"])
def test_a_copy_of_a_layer_is_within_its_prediction(name: str) -> None:
    """Its weights are not in one buffer."""
    step = compiled_step(copy.deepcopy(layer(name)), [torch.randn(20, 8, 32, device="cuda")], overhead=0)
    assert step.measured <= step.predicted <= 1.01 * step.measured


@pytest.mark.parametrize("options", [{"overhead": 0}, {"budget": "min"}], ids=str)
def test_autocast_is_within_its_prediction(options: dict[str, Any]) -> None:
    """Weights are cast, and the casts copied to one buffer."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer("lstm")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.float16):
                return as_loss(self.layer(x)).float()

    step = compiled_step(Cast(), [torch.randn(20, 8, 32, device="cuda")], **options)
    assert step.measured <= step.predicted <= 1.01 * step.measured


def test_a_layer_inside_a_model() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.layers = nn.LSTM(32, 64, num_layers=2, batch_first=True)
            self.out = nn.Linear(64, 50)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.layers(self.embed(words))
            return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), words.flatten())

    words = torch.zeros(8, 20, dtype=torch.int64, device="cuda")
    step = compiled_step(Tagger().cuda(), [words], budget="min")
    assert step.measured <= step.predicted <= 1.01 * step.measured
