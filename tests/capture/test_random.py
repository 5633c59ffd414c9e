"""Random operators: the same seed draws what eager draws, and leaves the generator where eager leaves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_matches_eager, assert_same, run_step
from support.lowerings import in_both_lowerings

# Dynamo looks at `.grad` of what `random_` writes to.
pytestmark = [
    pytest.mark.mostly_eager,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

Draw = Callable[[Tensor], Tensor]

DRAWS: dict[str, Draw] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 0, 9),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(*x.shape),
    "randint": lambda x: torch.randint(0, 5, x.shape),
    "randperm": lambda x: torch.randperm(x.shape[0]).unsqueeze(-1).expand(x.shape[0], 1).float(),
    "bernoulli of probabilities": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda x: torch.bernoulli(x.detach(), 0.3),
    "normal of tensors": lambda x: torch.normal(x, x.exp()),
    "normal around a tensor": lambda x: torch.normal(x, 0.5),
    "normal of a size": lambda x: torch.normal(0.0, 2.0, size=x.shape),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ of probabilities": lambda x: torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: torch.empty_like(x).random_(0, 10),
    "poisson": lambda x: torch.poisson(x.exp()),
    "multinomial": lambda x: torch.multinomial(x.detach().exp(), 1).float(),
}

BREAKS = {"random_"}
"""Draws that Dynamo leaves to eager."""

MASKS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout in place": lambda x: F.dropout(x * 2, 0.4, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha_dropout in place": lambda x: F.alpha_dropout(x * 2, 0.4, training=True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    # AOTAutograd's functional rrelu keeps the strides of its input where eager's gives a contiguous result.
    "rrelu": lambda x: F.rrelu(x, training=True).contiguous(),
    "rrelu in place": lambda x: F.rrelu(x * 2, training=True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "gumbel_softmax, hard": lambda x: F.gumbel_softmax(x, hard=True, dim=-1),
}

LAYOUTS: dict[str, Draw] = {
    "contiguous": lambda x: x * 1.5,
    "transposed": lambda x: (x * 1.5).transpose(0, 1),
    "strided": lambda x: (x * 1.5)[:, ::2],
    "expanded": lambda x: (x * 1.5)[:, :1].expand(-1, 3),
}

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def matrix(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 6)), requires_grad=True)


@every_layout
@in_both_lowerings("draw", DRAWS, ["normal_"])
def test_a_draw_is_the_one_eager_makes(draw: str, layout: str, lowering: str) -> None:
    def function(x: Tensor) -> Tensor:
        x = LAYOUTS[layout](x)
        return x * DRAWS[draw](x)

    assert_matches_eager(function, matrix(), graphs=None if draw in BREAKS else 1, lowering=lowering)


@every_layout
@in_both_lowerings("mask", MASKS, ["dropout"])
def test_a_mask_is_the_one_eager_makes(mask: str, layout: str, lowering: str) -> None:
    def function(x: Tensor) -> Tensor:
        return MASKS[mask](LAYOUTS[layout](x)).sin()

    assert_matches_eager(function, matrix(), lowering=lowering)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.3), nn.Dropout2d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)]
)
def test_dropout_layers_behind_a_convolution(
    layer: nn.Module, memory_format: torch.memory_format, lowering: str
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), layer, nn.Conv2d(3, 1, 2))
    assert_matches_eager(model, torch.randn(2, 2, 6, 6).to(memory_format=memory_format), lowering=lowering)


def test_dropout3d(lowering: str) -> None:
    assert_matches_eager(
        nn.Sequential(nn.Conv3d(1, 2, 2), nn.Dropout3d(0.5)), torch.randn(2, 1, 3, 3, 3), lowering=lowering
    )


def test_dropout_written_into_an_input_that_lives_on(lowering: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = x * weight
        F.dropout(y, 0.5, inplace=True)
        return y + x

    assert_matches_eager(function, matrix(), matrix(), lowering=lowering)


def test_noise_that_nobody_reads_is_still_drawn(lowering: str) -> None:
    def function(x: Tensor) -> Tensor:
        torch.rand(3)
        return F.dropout(x, 0.5)

    assert_matches_eager(function, matrix(), lowering=lowering)


def test_several_draws_keep_their_order(lowering: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.bernoulli(x.sigmoid())
        noise = torch.randn_like(x)
        return F.dropout(x * noise, 0.5), x * mask + torch.rand(x.shape)

    assert_matches_eager(function, matrix(), lowering=lowering)


def test_dropout_inside_attention(lowering: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    assert_matches_eager(function, *(matrix(2, 2, 5, 4) for _ in range(3)), lowering=lowering)


def test_a_generator_of_the_users_own(lowering: str) -> None:
    generator = torch.Generator()

    def function(x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=generator) + torch.rand_like(x)

    planned = encore.compile(function, lowering=lowering)
    x = matrix()
    for _ in range(2):
        generator.manual_seed(3)
        have, state = run_step(planned, (x,)), generator.get_state()
        generator.manual_seed(3)
        assert_same(have, run_step(function, (x,)), lowering)
        assert torch.equal(state, generator.get_state())


def test_each_step_draws_a_new_mask(lowering: str) -> None:
    planned = encore.compile(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), lowering=lowering)
    x = torch.randn(4, 8)
    assert not torch.equal(planned(x) == 0, planned(x) == 0)


def test_compiling_leaves_the_generator_alone(lowering: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 4), nn.LSTM(4, 3))
    x = torch.randn(5, 2, 6, 6)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    encore.compile(model, lowering=lowering)(x)[0].sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
