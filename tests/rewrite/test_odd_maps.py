"""Maps that passes over feature maps once got wrong: constants their type cannot hold, and layouts of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from encore.cost.density import planned_density
from encore.graph import Op
from encore.rewrite.additive_scores import find_additive_scores
from encore.schedule import Run
from support.captured_graphs import captured
from support.rounding import assert_gradients_as_accurate

A_LITTLE = 1e-6
"""An overhead that keeping everything does not use up: the passes run, and hardly anything is computed again."""


def train_on_squares(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    y.to(torch.promote_types(y.dtype, torch.float32)).square().sum().backward()


def check(model: nn.Module, x: torch.Tensor, *, lowering: str = "eager") -> None:
    """Gradients are eager's: every bit of them in the eager lowering."""
    eager = copy.deepcopy(model)
    encore.compile(model, lowering=lowering, overhead=A_LITTLE)
    for one in (eager, model):
        train_on_squares(one, x)
    if lowering == "eager":
        for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None
            assert ours.grad is not None
            assert torch.equal(theirs.grad, ours.grad)
    else:
        assert_gradients_as_accurate(model, eager, train_on_squares, x)


class Apply(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (nn.Hardtanh(-0.7, 0.7), torch.bfloat16),
        (nn.Hardtanh(-0.1, 0.1), torch.float16),
        (nn.Threshold(0.1, 0.1), torch.bfloat16),
        (nn.Hardtanh(-0.7, 0.7), torch.float32),
        (nn.ReLU6(), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("lowering", ["eager", "fused"])
def test_constants_that_the_type_of_a_map_cannot_hold(layer: nn.Module, dtype: torch.dtype, lowering: str) -> None:
    """The output of such a layer lies on another side of its constant, rounded, than its input does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 64)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    check(model, 20 * torch.randn(64, 64).to(dtype), lowering=lowering)


class PooledAcross(nn.Module):
    """What is pooled lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 512), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.max_pool2d(F.relu(self.into(x).view(-1, 4, 8, 16).transpose(2, 3)), 2))


class GatedAcross(nn.Module):
    """The gradient of a gate lies otherwise than the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 2048), nn.Linear(2048, 4)
        self.more = nn.Parameter(torch.zeros(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x).view(-1, 64, 32).transpose(1, 2).contiguous()
        return self.out((F.hardsigmoid(hidden).transpose(1, 2) + self.more).flatten(1))


class OneNumberPooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(self.into(x), (2,))  # type: ignore[arg-type]


@pytest.mark.parametrize("lowering", ["eager", "fused"])
@pytest.mark.parametrize(
    ("kind", "shape"), [(PooledAcross, (64, 8)), (GatedAcross, (256, 32)), (OneNumberPooled, (4, 3, 32, 32))]
)
def test_layouts_of_their_own(kind: type[nn.Module], shape: tuple[int, ...], lowering: str) -> None:
    torch.manual_seed(0)
    check(kind(), torch.randn(shape), lowering=lowering)


def test_hardsigmoid_in_float64_has_a_sixth_in_float32() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Hardsigmoid(), nn.Dropout(0.0), nn.AvgPool1d(2), nn.Linear(32, 4))
    check(model.double(), 3 * torch.randn(256, 64).double())


def test_a_comparison_larger_than_what_it_reads_stays_in_backward() -> None:
    model = nn.Sequential(
        nn.Linear(64, 64), Apply(lambda x: (h := x.tanh()) - h.amax(-1, keepdim=True)), nn.Linear(64, 4)
    )
    graph = captured(model, torch.randn(256, 64), lowering="eager", overhead=A_LITTLE)
    values = graph.plan.schedule.graph.values
    kept = [values[number] for number in graph.plan.schedule.saved]
    assert not [value for value in kept if value.dtype is torch.bool and value.bytes == 256 * 64]


def test_zeros_with_a_sign_are_counted_as_they_are_stored() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        seen = torch.zeros(100, dtype=dtype)
        seen[:50] = -0.0
        seen[:10] = 1.0
        assert planned_density(seen) == pytest.approx(0.55)
    assert planned_density(torch.tensor([0, 1, 0, 0])) == pytest.approx(0.275)


def test_what_is_inside_is_told_before_the_convolution_that_follows() -> None:
    """Else the map would stand beside the gradients, which the pass is there to prevent."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU6(), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1))
    graph = captured(model, torch.randn(8, 3, 64, 64), lowering="fused", overhead=A_LITTLE)
    ops = graph.plan.schedule.graph.ops
    order: list[Op] = [ops[action.op] for action in graph.plan.schedule.backward if isinstance(action, Run)]
    told = [place for place, op in enumerate(order) if op.target is torch.ops.encore.encode_inside.default]
    used = [place for place, op in enumerate(order) if op.target is torch.ops.encore.masked_by_bits.default]
    assert len(told) == len(used) == 1
    between = [op.target for op in order[told[0] : used[0]]]
    assert torch.ops.aten.convolution_backward.default in between


class Remembering(nn.Module):
    """Scores against keys that the step replaces."""

    memory: torch.Tensor

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.query, self.vector = nn.Linear(64, 64), nn.Linear(64, 1, bias=False)
        self.register_buffer("memory", torch.randn(8, 16, 64))
        self.replaces = replaces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.vector(torch.tanh(self.query(x).unsqueeze(2) + self.memory.unsqueeze(1))).squeeze(-1)
        if self.replaces:
            self.memory.mul_(0.9)
        return scores.softmax(-1)


@pytest.mark.parametrize("replaces", [False, True])
def test_scores_against_what_the_step_replaces_are_left_alone(replaces: bool) -> None:
    torch.manual_seed(0)
    graph = captured(Remembering(replaces=replaces), torch.randn(8, 12, 64), lowering="eager")
    assert len(list(find_additive_scores(graph.plan.schedule.graph))) == (not replaces)
    check(Remembering(replaces=replaces), torch.randn(8, 12, 64), lowering="fused")


class OneVectorForAll(nn.Module):
    """A frozen vector, expanded over the batch for a batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(64, 64), nn.Linear(64, 64)
        self.vector = nn.Parameter(torch.randn(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        middle = torch.tanh(self.query(x).unsqueeze(2) + self.keys(x).unsqueeze(1)).view(batch, steps * steps, width)
        spread = self.vector[None, :, None].expand(batch, width, 1)
        return torch.bmm(middle, spread).view(batch, steps, steps).softmax(-1)


def test_a_vector_that_is_expanded_for_a_product() -> None:
    torch.manual_seed(0)
    model, x = OneVectorForAll(), torch.randn(8, 32, 64)
    eager = copy.deepcopy(model)
    encore.compile(model)
    for one in (eager, model):
        train_on_squares(one, x)
    assert_gradients_as_accurate(model, eager, train_on_squares, x)
