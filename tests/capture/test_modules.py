"""Layers of torch.nn and their functions, each captured in one graph and equal to eager bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.compare_with_eager import assert_matches_eager
from support.lowerings import in_both_lowerings

pytestmark = pytest.mark.mostly_eager


def image(*shape: Any) -> Tensor:
    return torch.randn(*(shape or (2, 3, 8, 8)), requires_grad=True)


SINGLE_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "linear, no bias, 3d": (lambda: nn.Linear(6, 4, bias=False), (2, 3, 6)),
    "bilinear sequential": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (2, 3, 8)),
    "conv1d, dilated": (lambda: nn.Conv1d(3, 4, 3, dilation=2), (2, 3, 8)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2), (2, 3, 8, 8)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 8, 8)),
    "conv2d, reflected": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 8, 8)),
    "conv2d, same": (lambda: nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), (2, 3, 8)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (2, 3, 5, 5)),
    "max_pool1d": (lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.MaxPool1d(2)), (2, 3, 8)),
    "max_pool2d": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(3, 2, 1)), (2, 3, 8, 8)),
    "avg_pool2d": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.AvgPool2d(2)), (2, 3, 8, 8)),
    "adaptive_avg_pool2d": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(3)), (2, 3, 8, 8)),
    "adaptive_max_pool2d": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveMaxPool2d(3)), (2, 3, 8, 8)),
    "upsample, nearest": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Upsample(scale_factor=2)), (2, 3, 4, 4)),
    "upsample, bilinear": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Upsample(size=(7, 9), mode="bilinear")),
        (2, 3, 4, 4),
    ),
    "upsample, bicubic": (
        lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Upsample(scale_factor=1.5, mode="bicubic", align_corners=True)),
        (2, 3, 4, 4),
    ),
    "upsample, linear": (
        lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.Upsample(scale_factor=2, mode="linear")),
        (2, 3, 5),
    ),
    "pixel_shuffle": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2)), (2, 3, 4, 4)),
    "layer_norm": (lambda: nn.LayerNorm(6), (3, 6)),
    "layer_norm, plain": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False)), (3, 6)),
    "rms_norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5, 5)),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 5, 5)),
    "instance_norm, tracked": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 5, 5)),
    "local_response_norm": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.LocalResponseNorm(2)), (2, 4, 5, 5)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), (3, 6)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), (3, 6)),
    "prelu": (lambda: nn.PReLU(3), (2, 3, 4)),
    "transformer_encoder_layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1), (5, 2, 8)),
    "transformer_encoder_layer, norm first": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=True),
        (2, 5, 8),
    ),
    "unfold": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Unfold(3)), (2, 3, 5, 5)),
    "zero_pad": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.ZeroPad2d(1), nn.ReflectionPad2d(1)), (2, 3, 5, 5)),
}


FUSED_LAYERS = ("layer_norm", "instance_norm, tracked", "transformer_encoder_layer")


@in_both_lowerings("layer", SINGLE_LAYERS, FUSED_LAYERS)
def test_a_layer_with_one_input(layer: str, lowering: str) -> None:
    make, shape = SINGLE_LAYERS[layer]
    assert_matches_eager(make(), torch.randn(shape, requires_grad=True), lowering=lowering)


@in_both_lowerings(
    "layer", ["conv2d", "conv2d, groups", "conv_transpose2d", "max_pool2d", "group_norm"], ["group_norm"]
)
def test_a_layer_in_channels_last(layer: str, lowering: str) -> None:
    make, shape = SINGLE_LAYERS[layer]
    model: Any = make()
    model.to(memory_format=torch.channels_last)
    assert_matches_eager(
        model, torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_(), lowering=lowering
    )


@in_both_lowerings(
    "activation",
    [
        F.relu, F.relu6, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.leaky_relu, F.softplus, F.hardtanh,
        F.hardswish, F.hardsigmoid, F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, F.logsigmoid, F.glu,
        torch.sigmoid, torch.tanh, torch.abs, torch.sin, torch.exp, torch.sqrt, torch.sinc,
    ],
    [F.gelu],
)  # fmt: skip
def test_an_activation(activation: Callable[[Tensor], Tensor], lowering: str) -> None:
    def function(x: Tensor) -> Tensor:
        return activation(x * 3.0)

    assert_matches_eager(function, image(4, 6), lowering=lowering)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding(options: dict[str, Any], lowering: str) -> None:
    model = nn.Sequential(nn.Embedding(7, 5, **options), nn.Linear(5, 2))
    assert_matches_eager(model, torch.tensor([[1, 2, 2], [6, 0, 1]]), lowering=lowering)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str, lowering: str) -> None:
    assert_matches_eager(
        nn.EmbeddingBag(7, 5, mode=mode), torch.tensor([1, 2, 2, 6, 0]), torch.tensor([0, 2]), lowering=lowering
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_scaled_dot_product_attention(causal: bool, masked: bool, lowering: str) -> None:
    mask = torch.rand(5, 5) > 0.2 if masked and not causal else None

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

    assert_matches_eager(function, *(torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3)), lowering=lowering)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights: bool, lowering: str) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True, kdim=6, vdim=6)

        def forward(self, query: Tensor, memory: Tensor, padding: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.attention(query, memory, memory, key_padding_mask=padding, need_weights=need_weights)

    padding = torch.tensor([[False, False, False, True]] * 2)
    assert_matches_eager(Attends(), image(2, 3, 8), image(2, 4, 6), padding, lowering=lowering)


def test_transformer_with_decoder(lowering: str) -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    assert_matches_eager(model, image(2, 5, 8), image(2, 4, 8), tgt_mask=mask, tgt_is_causal=True, lowering=lowering)


@pytest.mark.filterwarnings("ignore:encore. Transformer ran as plain eager PyTorch:UserWarning")
def test_transformer_that_looks_into_its_mask(lowering: str) -> None:
    """Without `tgt_is_causal`, torch.nn asks the mask for its values, and Dynamo gives up on the whole module."""
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    assert_matches_eager(model, image(2, 5, 8), image(2, 4, 8), tgt_mask=mask, graphs=None, lowering=lowering)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 2}, {"label_smoothing": 0.1}, {"reduction": "none"}], ids=str)
def test_cross_entropy(options: dict[str, Any], lowering: str) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.linear(x), labels, **options)

    assert_matches_eager(Classifier(), image(5, 6), torch.tensor([0, 1, 2, 3, 2]), lowering=lowering)


@in_both_lowerings(
    "loss",
    [
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.kl_div,
        F.soft_margin_loss, F.poisson_nll_loss, F.cosine_embedding_loss,
    ],
    [F.kl_div],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:reduction:UserWarning")  # kl_div's advice on "mean"
def test_a_loss(loss: Callable[..., Tensor], lowering: str) -> None:
    extra = (torch.tensor([1.0, -1.0, 1.0]),) if loss is F.cosine_embedding_loss else ()

    def function(x: Tensor, target: Tensor) -> Tensor:
        return loss(x, target, *extra)

    assert_matches_eager(function, image(3, 4), torch.rand(3, 4), lowering=lowering)


def test_ctc_loss(lowering: str) -> None:
    def function(x: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), targets, lengths, target_lengths)

    assert_matches_eager(
        function, image(9, 2, 5), torch.tensor([[1, 2, 3], [2, 4, 1]]), torch.tensor([9, 7]), torch.tensor([3, 2]),
        graphs=None, lowering=lowering,
    )  # fmt: skip


def test_complex_broadcasting(lowering: str) -> None:
    def function(x: Tensor, row: Tensor, column: Tensor, scalar: Tensor) -> Tensor:
        y = (x * row + column) / (scalar.exp() + 1) - row.unsqueeze(0) * column
        return torch.where(y > 0, y, scalar) * y.mean((0, 2), keepdim=True)

    assert_matches_eager(function, image(2, 3, 4), image(4), image(3, 1), image(()), lowering=lowering)


def test_complex_numbers(lowering: str) -> None:
    def function(x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        return torch.fft.irfft(spectrum * spectrum.conj(), n=x.shape[-1]) + spectrum.abs().sum()

    assert_matches_eager(function, image(3, 8), lowering=lowering)


def test_einsum_gather_sort_and_cumulative_sums(lowering: str) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.einsum("bik,bjk->bij", x, y)
        values, order = z.sort(-1)
        return values.cumsum(-1), z.gather(-1, order.flip(-1)), z.topk(2).values, torch.logsumexp(z, 1), z.std(0)

    assert_matches_eager(function, image(2, 3, 4), image(2, 5, 4), lowering=lowering)


def test_indexing_with_tensors_and_masks(lowering: str) -> None:
    def function(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return x[index], x[:, index, 1:3], x[..., -1].exp(), x.index_select(1, index), x.masked_fill(x > 0, 2.0)

    assert_matches_eager(function, image(3, 3, 4), torch.tensor([0, 2, 2]), lowering=lowering)
