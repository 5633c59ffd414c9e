"""Operators that take any layout give the same numbers for operands with channels first and with channels last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from encore.graph.ops import ANY_LAYOUT, takes_any_layout
from support.rounding import assert_close

aten = torch.ops.aten
B, C, H = 2, 6, 8
SETTINGS = ([1, 1], [1, 1], [1, 1], False, [0, 0])


def maps(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, C, H, H)))


def channels() -> Tensor:
    return torch.rand(C) + 0.5


def places(*shape: int, below: int = C) -> Tensor:
    return torch.randint(below, shape or (B, C, H, H))


def pooled(x: Tensor) -> Tensor:
    return aten.max_pool2d_with_indices(x, [2, 2], [2, 2])[1]


def samples(x: Tensor, g: Tensor, s: Tensor, w: Tensor) -> dict[Any, tuple[Any, ...]]:
    """Arguments by operator, of a map, another map, a pooled one, and a weight."""
    running = (channels(), channels(), channels(), channels())
    statistics = torch.randn(B * C * H, 1).view(B, C, H, 1), torch.rand(B * C * H, 1).view(B, C, H, 1)
    one, probabilities, dims = torch.tensor(1.0), (x.sigmoid(), g.sigmoid()), (1, [1])
    return {
        aten.convolution: (x, w, channels(), *SETTINGS, 1),
        aten.convolution_backward: (g, x, w, [C], *SETTINGS, 1, [True] * 3),
        aten.bmm: (x[0], g[0]), aten.mm: (x[0, 0], g[0, 0]), aten.baddbmm: (x[0], g[0], x[0]),
        aten.addmm: (x[0, 0], g[0, 0], x[0, 1]), aten.mv: (x[0, 0], g[0, 0, 0]),
        aten.addmv: (x[0, 0, 0], x[0, 1], g[0, 0, 0]),
        aten.clone: (x,), aten._to_copy: (x,), aten.cat: ([x, g], 1), aten.stack: ([x, g], 1),
        aten.constant_pad_nd: (x, [1] * 4), aten.reflection_pad2d: (x, [1] * 4), aten.repeat: (x, [1, 2, 1, 1]),
        aten.flip: (x, [1]), aten.roll: (x, [1]),
        aten.embedding: (maps(7, 5), places(B, 3, 4, 4)),
        aten.embedding_dense_backward: (maps(2, 3, 4, 5), places(2, 3, 4), 7, -1, False),
        aten.index: (x, [None, places(5)]), aten.index_select: (x, 1, places(5)), aten.gather: (x, 1, places()),
        aten.index_put: (x, [places(5, below=B)], maps(5, C, H, H), True), aten.index_add: (x, 1, torch.arange(C), g),
        aten.scatter: (x, 1, places(below=1), g[:, :1].expand_as(g)), aten.scatter_add: (x, 1, places(), g),
        aten.scatter_reduce: (x, 1, places(), g, "sum"), aten.select_scatter: (x, g[:, 0], 1, 2),
        aten.slice_scatter: (x, g[:, :3], 1, 0, 3), aten.slice_backward: (g[:, :3], [B, C, H, H], 1, 0, 3, 1),
        aten.select_backward: (g[:, 0], [B, C, H, H], 1, 2),
        aten.upsample_nearest2d: (s, [H, H]), aten.upsample_nearest2d_backward: (g, [H, H], [B, C, 4, 4]),
        aten.upsample_bilinear2d: (s, [H, H], False),
        aten.upsample_bilinear2d_backward: (g, [H, H], [B, C, 4, 4], False),
        aten.im2col: (x, [3, 3], [1, 1], [1, 1], [1, 1]), aten.pixel_shuffle: (maps(B, 8, 4, 4), 2),
        aten.pixel_unshuffle: (x, 2), aten.topk: (x, 2, 1), aten.sort: (x, 1), aten.cumsum: (x, 1),
        aten.cumprod: (x, 1), aten.sum: (x, dims[1]), aten.mean: (x, dims[1]), aten.amax: (x, dims[1]),
        aten.amin: (x, dims[1]), aten.max: (x, 1), aten.min: (x, 1), aten.prod: (x, 1), aten.var: (x, dims[1]),
        aten.std: (x, dims[1]), aten.var_mean: (x, dims[1]), aten.std_mean: (x, dims[1]),
        aten.logsumexp: (x, dims[1]), aten.linalg_vector_norm: (x, 2, dims[1]), aten.any: (x, 1), aten.all: (x, 1),
        aten.argmax: (x,), aten.argmin: (x,),
        aten._softmax: (x, 1, False), aten._softmax_backward_data: (g, x, 3, torch.float32),
        aten._log_softmax: (x, 1, False), aten._log_softmax_backward_data: (g, x, 3, torch.float32),
        aten.native_batch_norm: (x, *running, True, 0.1, 1e-5),
        aten.native_batch_norm_backward: (g, x, channels(), *running, True, 1e-5, [True] * 3),
        aten._native_batch_norm_legit_functional: (x, *running, True, 0.1, 1e-5),
        aten._native_batch_norm_legit_no_training: (x, *running, 0.1, 1e-5),
        aten.native_layer_norm: (x, [H], torch.randn(H), torch.randn(H), 1e-5),
        aten.native_layer_norm_backward: (g, x, [H], *statistics, torch.randn(H), torch.randn(H), [True] * 3),
        aten.native_group_norm: (x, channels(), channels(), B, C, H * H, 2, 1e-5),
        aten.max_pool2d_with_indices: (x, [2, 2], [2, 2]),
        aten.max_pool2d_with_indices_backward: (s, x, [2, 2], [2, 2], [0, 0], [1, 1], False, pooled(x)),
        aten.avg_pool2d: (x, [2, 2]),
        aten.avg_pool2d_backward: (s, x, [2, 2], [2, 2], [0, 0], False, True, None),
        aten._adaptive_avg_pool2d: (x, [4, 4]), aten._adaptive_avg_pool2d_backward: (s, x),
        aten.adaptive_max_pool2d: (x, [4, 4]),
        aten.adaptive_max_pool2d_backward: (s, x, aten.adaptive_max_pool2d(x, [4, 4])[1]),
        aten.nll_loss2d_forward: (x, places(B, H, H), None, 1, -100),
        aten.mse_loss: (x, g), aten.mse_loss_backward: (one, x, g, 1), aten.smooth_l1_loss: (x, g),
        aten.smooth_l1_loss_backward: (one, x, g, 1, 1.0), aten.binary_cross_entropy: probabilities,
        aten.binary_cross_entropy_backward: (one, *probabilities, None, 1),
        aten.binary_cross_entropy_with_logits: (x, g.sigmoid()), aten.threshold_backward: (g, x, 0),
        aten.huber_loss: (x, g), aten.huber_loss_backward: (one, x, g, 1, 1.0),
        aten.elu_backward: (g, 1.0, 1.0, 1.0, False, x), aten.leaky_relu_backward: (g, x, 0.1, False),
        aten.softplus_backward: (g, x, 1.0, 20.0), aten.mish_backward: (g, x),
        aten.hardtanh_backward: (g, x, -0.5, 0.5), aten.hardsigmoid_backward: (g, x), aten.hardswish_backward: (g, x),
        aten.glu: (x, 1), aten.glu_backward: (g[:, :3], x, 1), aten.where: (x > 0, x, g),
        aten.masked_fill: (x, g > 0, 1.0), aten._prelu_kernel: (x, maps(1, C, 1, 1)),
        aten._prelu_kernel_backward: (g, x, maps(1, C, 1, 1)),
    }  # fmt: skip


def relaid(args: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The arguments with every choice of maps laid out with channels last."""

    def last(one: Any) -> Any:
        if isinstance(one, list):
            return [last(each) for each in one]
        if not isinstance(one, Tensor) or one.dim() < 3 or one.shape[-1] == 1:  # a vector, or statistics
            return one
        return one.movedim(1, -1).contiguous().movedim(-1, 1)

    for choice in itertools.product([False, True], repeat=len(args)):
        yield tuple(last(one) if chosen else one for one, chosen in zip(args, choice, strict=True))


def results(operator: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    found = operator(*args)
    return [one for one in (found if isinstance(found, tuple | list) else [found]) if one is not None]


SAMPLES = samples(maps(), maps(), maps(B, C, 4, 4), maps(C, C, 3, 3))


def test_every_operator_of_the_table_has_a_sample() -> None:
    assert {packet.__name__ for packet in SAMPLES} == set(ANY_LAYOUT)


@pytest.mark.parametrize("packet", SAMPLES, ids=lambda packet: packet.__name__)
def test_an_operator_that_takes_any_layout_gives_the_same_numbers(packet: Any) -> None:
    args = SAMPLES[packet]
    wanted = results(packet, args)
    for others in relaid(args):
        for have, want in zip(results(packet, others), wanted, strict=True):
            assert_close(have, want)


def test_operators_that_trust_the_layout_of_their_formula_do_not() -> None:
    for packet in ("_weight_norm_interface_backward", "native_group_norm_backward", "nll_loss2d_backward"):
        assert not takes_any_layout(getattr(aten, packet).default)
    assert not takes_any_layout(aten._scaled_dot_product_flash_attention_for_cpu.default)
