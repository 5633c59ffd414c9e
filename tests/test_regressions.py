"""What random models and readers have found, pinned."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import encore
from support.compare_with_eager import assert_matches_eager, assert_same, assert_verified


def predicted_and_measured(model: nn.Module, x: torch.Tensor, lowering: str) -> tuple[int, int]:
    encore.compile(model, lowering=lowering)

    def step() -> None:
        output = model(x)
        gradient = torch.ones_like(output)
        output.backward(gradient)  # both are held while it runs, as the prediction assumes

    for _ in range(2):
        model.zero_grad()
        x.grad = None
        measured = encore.measure(step).step_peak
    return encore.report(model).planned.step_peak, measured


def test_the_copy_of_an_inputs_gradient_in_another_layout_is_predicted(lowering: str) -> None:
    """Autograd copies the gradient of any leaf whose strides differ from the leaf's, not only a parameter's."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.transpose(1, 2))

    predicted, measured = predicted_and_measured(Turned(), torch.randn(4, 64, 32, requires_grad=True), lowering)
    assert measured <= predicted <= 1.01 * measured


def test_batch_norm_of_a_transposed_value_between_two_linear_layers_runs(lowering: str) -> None:
    """The fake kernel of batch norm keeps its input's strides, the real one returns a contiguous result."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.linear = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))

    assert_verified(encore.compile(Normed(), lowering=lowering), torch.randn(3, 5, 8))


# -- what a review has found -----------------------------------------------------------------------------------------


class DrawsInBackward(torch.autograd.Function):
    """Draws twice in backward: once depending on the gradient, once on nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient) + torch.rand(4, 8)


def test_draws_in_backward_keep_their_order(lowering: str) -> None:
    @encore.compile(lowering=lowering)
    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(DrawsInBackward.apply(x), 0.5)

    assert_verified(function, torch.randn(4, 8, requires_grad=True))


class SavesAProduct(torch.autograd.Function):
    """Computes in forward what only its backward reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(buffer * 2)
        return x * buffer.mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (doubled,) = ctx.saved_tensors
        return gradient * doubled, None


def test_what_a_function_computes_for_its_backward_is_computed_before_a_buffer_changes(lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = SavesAProduct.apply(self.linear(x), self.scale)
            self.scale.add_(1)  # type: ignore[operator]
            return result

    assert_verified(encore.compile(Model(), lowering=lowering), torch.randn(2, 3))


SELF_SCATTERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_add": lambda h, order: h.index_add(0, order, h),
    "scatter": lambda h, order: h.scatter(0, order[:, None].expand(4, 4), h),
    "scatter_add": lambda h, order: h.scatter_add(0, order[:, None].expand(4, 4), h),
    "index_put": lambda h, order: h.index_put((order,), h, accumulate=True),
}


@pytest.mark.parametrize("scatter", SELF_SCATTERS)
def test_a_tensor_scattered_into_itself(scatter: str, lowering: str) -> None:
    order = torch.tensor([2, 0, 3, 1])

    @encore.compile(lowering=lowering)
    def function(x: torch.Tensor) -> torch.Tensor:
        return SELF_SCATTERS[scatter]((x * 2).add(1), order).sin()

    assert_verified(function, torch.randn(4, 4, requires_grad=True))


def test_a_compiled_model_can_be_collected(lowering: str) -> None:
    model = encore.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lowering=lowering)
    model(torch.randn(2, 4)).sum().backward()
    weight = weakref.ref(model[0].weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None


def test_a_users_profiler_is_left_running(lowering: str) -> None:
    model = encore.compile(nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh()), lowering=lowering)
    with torch.profiler.profile() as profile:
        model(torch.randn(2, 2, 9)).sum().backward()
    assert any(event.key == "aten::tanh" for event in profile.key_averages())
    with torch.profiler.profile(), pytest.raises(encore.EncoreError, match="outside"):
        encore.measure(lambda: None)


def test_calls_without_backward_do_not_add_up(lowering: str) -> None:
    model, x = encore.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lowering=lowering), torch.randn(8, 4)
    model(x).sum().backward()
    before = encore.report(model).planned.step_peak
    for _ in range(5):
        model(x)
    assert encore.report(model).planned.step_peak == before


def test_two_batch_sizes_through_torch_compile_are_two_steps(lowering: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(model, backend="encore", options={"lowering": lowering})
    peaks = []
    for size in (8, 4):
        compiled(torch.randn(size, 4)).sum().backward()
        peaks.append(encore.report(compiled).planned.step_peak)
    assert peaks[0] > peaks[1]
    assert len(encore.report(compiled).graphs) == 1


def test_checkpoints_in_a_model_are_obeyed(lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    model, x = encore.compile(Model(), lowering=lowering), torch.randn(64, 32)
    model(x).sum().backward()
    assert "recompute" in {row.action for row in encore.report(model).decisions}
    model.zero_grad()
    planned = encore.measure(lambda: model(x).sum().backward()).step_peak
    model.zero_grad()
    plain = encore.measure(lambda: model._call_impl(x).sum().backward()).step_peak
    assert planned <= plain


def test_a_method_can_be_compiled(lowering: str) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.scale = 3.0

        @encore.compile(lowering=lowering)
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).sin().sum()

    x = torch.randn(4, requires_grad=True)
    Trainer().loss(x).backward()
    assert x.grad is not None
    assert_same({"x": x.grad}, {"x": torch.autograd.grad((x * 3.0).sin().sum(), x)[0]}, lowering)


def test_an_estimate_copies_no_tensor_and_refuses_what_cannot_be_copied() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.tables = [torch.randn(1000, 100)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.tables[0][0, 0]

    measured = encore.measure(lambda: encore.estimate(Listing(), torch.randn(2, 4)).floor)
    assert measured.step_peak < 2 * 400_000

    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.lock = nn.Linear(4, 4), threading.Lock()

    with pytest.raises(encore.OptionError, match="cannot be copied"):
        encore.estimate(Locked(), torch.randn(2, 4))


def test_verify_takes_expanded_buffers_and_sparse_gradients(lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4, sparse=True)
            self.register_buffer("ones", torch.ones(1).expand(4))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.embedding(index) * self.ones

    assert_verified(encore.compile(Model(), lowering=lowering), torch.tensor([1, 3, 3]))


def test_sizes_among_the_outputs_of_torch_compile(lowering: str) -> None:
    """From the second shape on Dynamo makes sizes symbols, and they leave the graph as outputs."""

    @torch.compile(backend="encore", options={"lowering": lowering})
    def function(x: torch.Tensor, weight: torch.Tensor, count: int) -> tuple[torch.Tensor, int, int, torch.Tensor]:
        return (x * weight * count).sin(), x.shape[0] * 2, count + 1, x.new_zeros(x.shape[0] + 1)

    weight = torch.randn(4, requires_grad=True)
    for rows, count in ((3, 2), (5, 3), (7, 4)):
        result, doubled, successor, zeros = function(torch.randn(rows, 4), weight, count)
        result.sum().backward()
        assert (doubled, successor, len(zeros)) == (2 * rows, count + 1, rows + 1)


def test_a_checkpoint_policy_is_obeyed(lowering: str) -> None:
    """Products are kept, as the policy says, and everything else in the region is recomputed."""

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(32, 256), nn.Softplus(), nn.Tanh(), nn.Linear(256, 32)) for _ in range(3)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    planned = assert_matches_eager(Model(), torch.randn(64, 32), lowering=lowering)
    actions = {(row.module.rpartition(".")[2], row.action) for row in encore.report(planned).decisions}
    assert {("0", "keep"), ("2", "recompute")} <= actions
    assert ("0", "recompute") not in actions
