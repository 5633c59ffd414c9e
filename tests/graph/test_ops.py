"""The tables of operators against the operators themselves: what class they are, and what really writes in place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import encore.rnn  # noqa: F401 - registers encore::*
from encore.cost.allocations import measure_cpu
from encore.graph import OpClass, classify
from encore.graph.ops import (
    CHEAP_PACKETS,
    HEAVY_PACKETS,
    OUT_ARGUMENT,
    OUT_VARIANT,
    VIEW_PACKETS,
    WRITES_FIRST,
    class_of_call,
)
from encore.lower.calls import callable_for

aten = torch.ops.aten
BOXED_SCALARS = 16


@torch.library.custom_op("encore_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (aten.mm.default, OpClass.HEAVY),
        (aten.addmm.default, OpClass.HEAVY),
        (aten.bmm.default, OpClass.HEAVY),
        (aten.convolution.default, OpClass.HEAVY),
        (aten.convolution_backward.default, OpClass.HEAVY),
        (aten.mkldnn_rnn_layer.default, OpClass.HEAVY),
        (torch.ops.encore.lstm_forward.default, OpClass.HEAVY),
        (torch.ops.encore.lstm_backward.default, OpClass.HEAVY),
        (torch.ops.encore.gru_forward.default, OpClass.HEAVY),
        (torch.ops.encore.gru_backward.default, OpClass.HEAVY),
        (torch.ops.encore.elman_forward.default, OpClass.HEAVY),
        (torch.ops.encore.elman_backward.default, OpClass.HEAVY),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, OpClass.HEAVY),
        (aten.add.Tensor, OpClass.CHEAP),
        (aten.relu.default, OpClass.CHEAP),
        (aten.gelu_backward.default, OpClass.CHEAP),
        (aten._softmax.default, OpClass.CHEAP),
        (aten.native_layer_norm.default, OpClass.CHEAP),
        (aten._native_batch_norm_legit_functional.default, OpClass.CHEAP),
        (aten.embedding.default, OpClass.CHEAP),
        (aten.cat.default, OpClass.CHEAP),
        (aten.sum.dim_IntList, OpClass.CHEAP),
        (aten.clone.default, OpClass.CHEAP),
        (aten.view.default, OpClass.VIEW),
        (aten.t.default, OpClass.VIEW),
        (aten._unsafe_view.default, OpClass.VIEW),
        (aten.transpose.int, OpClass.VIEW),
        (aten.expand.default, OpClass.VIEW),
        (aten.slice.Tensor, OpClass.VIEW),
        (aten.detach.default, OpClass.VIEW),
        (aten.split.Tensor, OpClass.VIEW),
        (operator.getitem, OpClass.VIEW),
        (aten.bernoulli.p, OpClass.RANDOM),
        (aten.rand_like.default, OpClass.RANDOM),
        (aten.native_dropout.default, OpClass.RANDOM),
        (torch.ops.encore.dropout_noise.default, OpClass.RANDOM),
        (aten.add_.Tensor, OpClass.MUTATING),
        (aten.copy_.default, OpClass.MUTATING),
        (torch.ops.encore.encode_bits.default, OpClass.CHEAP),
        (torch.ops.encore_tests.doubled.default, OpClass.OPAQUE),
        (torch.ops.higher_order.cond, OpClass.OPAQUE),
        (len, OpClass.OPAQUE),
        (torch.ops._c10d_functional.all_reduce.default, OpClass.COLLECTIVE),
        (torch.ops._c10d_functional.wait_tensor.default, OpClass.COLLECTIVE),
    ],
    ids=str,
)
def test_an_operator_is_of_its_class(target: Any, kind: OpClass) -> None:
    assert classify(target) is kind


def test_an_in_place_draw_counts_as_random() -> None:
    assert classify(aten.bernoulli_.float) is OpClass.RANDOM


def test_attention_draws_with_dropout_alone() -> None:
    efficient = aten._scaled_dot_product_efficient_attention.default
    q = torch.zeros(1, 1, 2, 2)
    assert class_of_call(efficient, (q, q, q, None, True), {}) is OpClass.HEAVY
    assert class_of_call(efficient, (q, q, q, None, True, 0.0, True), {}) is OpClass.HEAVY
    assert class_of_call(efficient, (q, q, q, None, True, 0.1), {}) is OpClass.RANDOM
    assert (
        class_of_call(aten._scaled_dot_product_flash_attention.default, (q, q, q), {"dropout_p": 0.1}) is OpClass.RANDOM
    )
    assert classify(aten._scaled_dot_product_efficient_attention_backward.default) is OpClass.HEAVY
    assert class_of_call(aten.bernoulli.default, (q,), {}) is OpClass.RANDOM


def test_no_operator_stands_in_two_tables() -> None:
    assert not HEAVY_PACKETS & CHEAP_PACKETS
    assert not VIEW_PACKETS & (HEAVY_PACKETS | CHEAP_PACKETS)


@pytest.mark.parametrize("packet", sorted(HEAVY_PACKETS | CHEAP_PACKETS | VIEW_PACKETS))
def test_every_listed_operator_exists(packet: str) -> None:
    assert hasattr(aten, packet) or hasattr(torch.ops.encore, packet)


# -- writing over an operand -------------------------------------------------------------------------------------------

SHAPE = (96, 700)
"""Large enough for several threads, and no multiple of a vector's width."""


def noise(seed: int = 0) -> torch.Tensor:
    return torch.empty(SHAPE).normal_(generator=torch.Generator().manual_seed(seed))


def positive(seed: int = 0) -> torch.Tensor:
    return noise(seed).abs() + 0.1


def transposed(seed: int = 0) -> torch.Tensor:
    return torch.empty(SHAPE[1], SHAPE[0]).normal_(generator=torch.Generator().manual_seed(seed)).t()


Arguments = Callable[[], tuple[Any, ...]]
TWO: Arguments = lambda: (noise(1), noise(2))  # noqa: E731
ONE: Arguments = lambda: (noise(1),)  # noqa: E731

OPERANDS: dict[str, list[Arguments]] = {
    "add.Tensor": [TWO, lambda: (noise(1), 2), lambda: (noise(1), torch.tensor(2.0)), lambda: (transposed(), noise(2))],
    "sub.Tensor": [TWO, lambda: (noise(1), 2.5)],
    "mul.Tensor": [TWO, lambda: (noise(1), 2.5), lambda: (transposed(1), transposed(2))],
    "div.Tensor": [TWO, lambda: (noise(1), 3)],
    "mul.Scalar": [lambda: (noise(1), 2.5)],
    "div.Scalar": [lambda: (noise(1), 3)],
    "add.Scalar": [lambda: (noise(1), 2)],
    "sub.Scalar": [lambda: (noise(1), 2)],
    "maximum.default": [TWO],
    "minimum.default": [TWO],
    "sigmoid.default": [ONE],
    "tanh.default": [ONE],
    "exp.default": [ONE],
    "neg.default": [ONE],
    "sqrt.default": [lambda: (positive(),)],
    "rsqrt.default": [lambda: (positive(),)],
    "log.default": [lambda: (positive(),)],
    "abs.default": [ONE],
    "reciprocal.default": [lambda: (positive(),)],
    "gelu.default": [ONE],
    "silu.default": [ONE],
    "hardtanh.default": [ONE, lambda: (noise(1), -0.5, 0.5)],
    "leaky_relu.default": [ONE, lambda: (noise(1), 0.2)],
    "elu.default": [ONE, lambda: (noise(1), 0.7)],
    "clamp.default": [lambda: (noise(1), -0.5, 0.5), lambda: (noise(1), None, 0.5)],
    "threshold_backward.default": [lambda: (noise(1), noise(2), 0)],
    "where.self": [lambda: (noise(1) > 0, noise(2), noise(3))],
    "sigmoid_backward.default": [lambda: (noise(1), noise(2).sigmoid())],
    "tanh_backward.default": [lambda: (noise(1), noise(2).tanh())],
    "gelu_backward.default": [TWO],
    "silu_backward.default": [TWO],
    "hardtanh_backward.default": [lambda: (noise(1), noise(2), -0.5, 0.5)],
    "leaky_relu_backward.default": [lambda: (noise(1), noise(2), 0.2, False)],
    "elu_backward.default": [lambda: (noise(1), 1.0, 1.0, 1.0, False, noise(2))],
    "clamp_min.default": [lambda: (noise(1), 0.1)],
    "clamp_max.default": [lambda: (noise(1), 0.1)],
    "threshold.default": [lambda: (noise(1), 0.1, 0.05)],
    "hardswish.default": [ONE],
    "hardsigmoid.default": [ONE],
    "mish.default": [ONE],
    "softplus.default": [ONE],
    "hardsigmoid_backward.default": [TWO],
    "softplus_backward.default": [lambda: (noise(1), noise(2), 1, 20)],
    "slice_scatter.default": [
        lambda: (noise(1), noise(2)[:, :100].clone(), 1, 50, 150),
        lambda: (noise(1), noise(2)[::2].clone(), 0, 0, 9223372036854775807, 2),
    ],
    "select_scatter.default": [lambda: (noise(1), noise(2)[3].clone(), 0, 5)],
    "bernoulli.p": [lambda: (noise(1), 0.25)],
    "encore.bernoulli_noise.default": [lambda: (noise(1), 0.25)],
    "masked_fill.Scalar": [lambda: (noise(1), noise(2) > 0, 3.5)],
    "masked_fill.Tensor": [lambda: (noise(1), noise(2) > 0, torch.tensor(3.5))],
    "relu.default": [ONE, lambda: (transposed(),)],
    "index_put.default": [
        lambda: (noise(1), [torch.tensor([5, 3])], noise(2)[:2].clone()),
        lambda: (noise(1), [torch.tensor([5, 5])], noise(2)[:2].clone(), True),
    ],
    "index_add.default": [lambda: (noise(1), 0, torch.tensor([5, 3, 5]), noise(2)[:3].clone())],
    "scatter.src": [lambda: (noise(1), 0, torch.zeros(SHAPE, dtype=torch.int64)[:1], noise(2))],
    "scatter.value": [lambda: (noise(1), 1, torch.tensor([[3], [5]]), 2.5)],
    "scatter_add.default": [lambda: (noise(1), 0, torch.zeros(SHAPE, dtype=torch.int64), noise(2))],
    "addmm.default": [lambda: (noise(1), noise(2)[:, :7], noise(3)[:7])],
    "baddbmm.default": [lambda: (noise(1)[None], noise(2)[None, :, :7], noise(3)[None, :7])],
    "encore.additive_scores_backward.default": [
        lambda: (
            noise(1)[None],
            noise(2)[None, :3, :96].contiguous(),
            noise(3)[None, :3].contiguous(),
            noise(4)[None],
            noise(5)[0],
            None,
            None,
            None,
            None,
            True,
            True,
            True,
        ),
    ],
    "fill.Scalar": [lambda: (noise(1), 2.5)],
    "fill.Tensor": [lambda: (noise(1), torch.tensor(2.5))],
}
"""Arguments for every operator that may write over one of them."""


def label(target: Any) -> str:
    return str(target).removeprefix("aten.")


def first_of(results: Any) -> torch.Tensor:
    """The result that goes over an operand."""
    first: torch.Tensor = results[0] if isinstance(results, tuple) else results
    return first


OUT_CASES = [
    pytest.param(target, arguments, position, id=f"{label(target)}-{number}-over-{position}")
    for target in OUT_VARIANT
    for number, arguments in enumerate(OPERANDS[label(target)])
    for position, argument in enumerate(arguments())
    if isinstance(argument, torch.Tensor) and argument.shape == SHAPE and argument.dtype is torch.float32
    if argument.stride() == target(*arguments()).stride()
]
FIRST_CASES = [
    pytest.param(target, arguments, id=f"{label(target)}-{number}")
    for target in WRITES_FIRST
    for number, arguments in enumerate(OPERANDS[label(target)])
]


def test_every_entry_has_operands_to_be_tried_on() -> None:
    assert {label(target) for target in (*OUT_VARIANT, *WRITES_FIRST)} == OPERANDS.keys()
    assert {case.values[0] for case in OUT_CASES} == OUT_VARIANT.keys()


@pytest.mark.parametrize(("target", "arguments", "position"), OUT_CASES)
def test_an_out_variant_writes_over_an_operand(target: Any, arguments: Arguments, position: int) -> None:
    expected = target(*arguments())
    args = arguments()
    others = [argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in args]
    out = OUT_VARIANT[target]
    operand = args[position]
    place = operand.data_ptr()

    measured = measure_cpu(lambda: callable_for(out)(*args, **{OUT_ARGUMENT[out]: operand}))

    assert measured.result.data_ptr() == place
    assert measured.result.stride() == expected.stride()
    assert torch.equal(measured.result, expected)
    assert measured.step_peak <= BOXED_SCALARS
    for index, (argument, before) in enumerate(zip(args, others, strict=True)):
        if isinstance(argument, torch.Tensor) and index != position:
            assert torch.equal(argument, before)


@pytest.mark.parametrize(("target", "arguments"), FIRST_CASES)
def test_a_functional_operator_writes_over_its_first_operand(target: Any, arguments: Arguments) -> None:
    torch.manual_seed(0)
    expected = first_of(callable_for(target)(*arguments()))
    args = arguments()
    place = args[0].data_ptr()
    torch.manual_seed(0)

    measured = measure_cpu(lambda: callable_for(WRITES_FIRST[target])(*args))

    found = first_of(measured.result)
    assert found.data_ptr() == place
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
    functional = measure_cpu(lambda: callable_for(target)(*arguments()))
    assert measured.step_peak <= max(BOXED_SCALARS, functional.step_peak - 4 * args[0].numel())


def test_a_keyword_reaches_the_out_variant() -> None:
    x, y = noise(1), noise(2)
    expected = aten.add.Tensor(x, y, alpha=3)
    assert torch.equal(OUT_VARIANT[aten.add.Tensor](x, y, alpha=3, out=y), expected)
    x, y = noise(1), noise(2)
    expected = aten.gelu_backward.default(x, y, approximate="tanh")
    assert torch.equal(OUT_VARIANT[aten.gelu_backward.default](x, y, approximate="tanh", grad_input=x), expected)
