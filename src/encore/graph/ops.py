"""The class of every operator, by tables, and by operator tags for those that the tables do not have.

A class says what a planner may do with an operator: a VIEW costs nothing, a CHEAP one can be run again, a HEAVY one
should not be, RANDOM and MUTATING ones only with their state restored, COLLECTIVE and OPAQUE ones never.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

import encore.graph.random_ops  # noqa: F401 - registers encore::*
from encore.codecs import WORKSPACES as CODEC_OPERATORS
from encore.graph.sized_ops import SIZED
from encore.graph.torch_private import OpOverload
from encore.rnn.scores import additive_scores_backward_

aten = torch.ops.aten


class OpClass(enum.Enum):
    VIEW = "view"
    """Returns an alias of an operand: no bytes, no arithmetic."""
    CHEAP = "cheap"
    """Memory-bound: pointwise, reductions, normalisations, copies, gathers."""
    HEAVY = "heavy"
    """Compute-bound: matrix products, convolutions, whole recurrent layers, fused attention."""
    RANDOM = "random"
    """Draws from a generator."""
    MUTATING = "mutating"
    """Writes to an operand."""
    COLLECTIVE = "collective"
    """Talks to other processes."""
    OPAQUE = "opaque"
    """Unknown: custom operators, higher-order operators."""


SIDE_EFFECTS = frozenset({OpClass.RANDOM, OpClass.MUTATING, OpClass.COLLECTIVE, OpClass.OPAQUE})
"""Operators that run even if their results are not read, and in the order of the program."""

HEAVY_PACKETS = frozenset({
    "mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "mv", "dot", "matmul", "linear", "linear_backward", "einsum",
    "_scaled_mm", "_grouped_mm", "_int_mm",
    "convolution", "_convolution", "convolution_backward", "convolution_overrideable", "mkldnn_convolution",
    "cudnn_convolution", "miopen_convolution", "_slow_conv2d_forward", "_slow_conv2d_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_flash_attention_forward", "_flash_attention_backward",
    "_efficient_attention_forward", "_efficient_attention_backward",
    "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn",
    "lstm_forward", "lstm_backward", "gru_forward", "gru_backward", "elman_forward", "elman_backward",
    "packed_aten_forward", "packed_aten_backward", "cudnn_layers", "cudnn_layers_backward",
    "additive_scores", "additive_scores_backward", "dot_attention", "dot_attention_backward",
    "_thnn_fused_lstm_cell", "_cdist_forward", "_cdist_backward", "_fft_r2c", "_fft_c2r", "_fft_c2c",
    "linalg_solve_ex", "linalg_inv_ex", "_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_lu_factor_ex",
})  # fmt: skip

CHEAP_PACKETS = frozenset({
    # copies and constructors
    "clone", "copy", "_to_copy", "contiguous", "cat", "stack", "pad", "constant_pad_nd", "reflection_pad2d", "repeat",
    "flip", "roll", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "new_zeros", "new_full",
    "new_ones", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "arange", "eye",
    "scalar_tensor", "tril", "triu", "lift_fresh_copy", "one_hot", "fill", "linspace",
    # gathers and scatters
    "pack_rows", "pad_rows", "rows_in_block", "packed_batch_sizes", "packed_lengths",
    "embedding", "embedding_dense_backward", "index", "index_select", "gather", "take", "index_put", "index_add",
    "scatter", "scatter_add", "scatter_reduce", "select_scatter", "slice_scatter", "as_strided_scatter",
    "diagonal_scatter", "slice_backward", "select_backward", "diagonal_backward", "index_select_backward",
    "unfold_backward", "masked_select", "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "im2col", "col2im", "pixel_shuffle", "topk", "sort", "argmax", "argmin",
    # reductions and normalisations
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "std_mean", "norm", "logsumexp",
    "linalg_vector_norm", "any", "all", "cumsum", "cumprod", "sum_to_size",
    "_softmax", "_softmax_backward_data", "_safe_softmax", "_log_softmax", "_log_softmax_backward_data",
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    # pooling
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
    "avg_pool1d", "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool3d", "avg_pool3d_backward",
    "adaptive_max_pool3d", "adaptive_max_pool3d_backward",
    # losses, dropout's backward, and pointwise operators that carry no tag
    "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "mse_loss",
    "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward",
    "binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
    "_ctc_loss", "_ctc_loss_backward",
    "native_dropout_backward", "gelu_backward", "silu_backward", "threshold_backward", "tanh_backward",
    "sigmoid_backward", "elu_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward",
    "leaky_relu_backward", "softplus_backward", "mish_backward", "log_sigmoid_forward", "log_sigmoid_backward",
    "glu", "glu_backward", "relu", "where", "masked_fill", "_prelu_kernel", "_prelu_kernel_backward",
    "_weight_norm_interface", "_weight_norm_interface_backward", "detach", "alias", "isnan", "bucketize",
    "searchsorted",
})  # fmt: skip

VIEW_PACKETS = frozenset({
    "_unsafe_view", "_reshape_alias", "lift_fresh", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk",
})  # fmt: skip
"""Aliases that their schema does not declare."""

ANY_LAYOUT = frozenset({
    "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "convolution", "convolution_backward",
    "clone", "_to_copy", "cat", "stack", "constant_pad_nd", "reflection_pad2d", "repeat", "flip", "roll",
    "embedding", "embedding_dense_backward", "index", "index_select", "gather", "index_put", "index_add", "scatter",
    "scatter_add", "scatter_reduce", "select_scatter", "slice_scatter", "slice_backward", "select_backward",
    "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward",
    "im2col", "pixel_shuffle", "pixel_unshuffle", "topk", "sort", "cumsum", "cumprod",
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "std_mean", "logsumexp",
    "linalg_vector_norm", "any", "all", "argmax", "argmin",
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
    "nll_loss2d_forward", "mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward",
    "binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
    "huber_loss", "huber_loss_backward", "elu_backward", "leaky_relu_backward", "softplus_backward", "mish_backward",
    "hardtanh_backward", "hardsigmoid_backward", "hardswish_backward",
    "threshold_backward", "glu", "glu_backward", "where", "masked_fill", "_prelu_kernel", "_prelu_kernel_backward",
})  # fmt: skip
"""Operators whose results are the same however the memory of feature maps is laid out. Others may read it as their
derivative's formula would have laid it out, without a check: group normalisation's backward wants both of its operands
alike, weight normalisation and attention want theirs dense."""

DRAWS_NOTHING = frozenset({
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
})  # fmt: skip
"""Tagged as random for a dropout that their kernel does not support, or that it repeats from forward's state."""

DRAWS_BY_SHAPE = frozenset({
    "dropout_mask", "dropout_noise", "bernoulli_noise", "native_dropout", "rand", "rand_like", "randn", "randn_like",
    "randint", "randint_like", "randperm",
})  # fmt: skip
"""Draws whose numbers depend on the generator and a shape alone. Others (a Poisson draw with rates from a tensor) would
differ if an operand differed in its last bit, so they are not recomputed."""

COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor", "symm_mem"})


def is_codec(target: Any) -> bool:
    """Return whether an operator is one of Encore's own that make codes or read them: as cheap as a copy, and never
    part of a kernel."""
    return target in CODEC_OPERATORS


@cache
def classify(target: Any) -> OpClass:
    """Return the class of an operator of a captured graph."""
    if target is operator.getitem:
        return OpClass.VIEW
    if not isinstance(target, OpOverload):
        return OpClass.OPAQUE
    if target.namespace in COLLECTIVE_NAMESPACES:
        return OpClass.COLLECTIVE
    if target in SIZED.values():
        return OpClass.CHEAP
    if target.overloadpacket.__name__ in DRAWS_NOTHING:
        return OpClass.HEAVY
    if torch.Tag.nondeterministic_seeded in target.tags:
        return OpClass.RANDOM
    if target._schema.is_mutable:
        return OpClass.MUTATING
    packet = target.overloadpacket.__name__
    if is_codec(target):
        return OpClass.CHEAP
    if target.namespace not in ("aten", "prims", "encore"):
        return OpClass.OPAQUE
    if packet in VIEW_PACKETS or target.is_view:
        return OpClass.VIEW
    if packet in HEAVY_PACKETS:
        return OpClass.HEAVY
    if packet in CHEAP_PACKETS or torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags:
        return OpClass.CHEAP
    return OpClass.OPAQUE


def class_of_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpClass:
    """Return the class of an operator's call: attention is tagged as random for a dropout that may be zero."""
    kind = classify(target)
    if kind is not OpClass.RANDOM or not isinstance(target, OpOverload):
        return kind
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return kind
    position = names.index("dropout_p")
    dropout = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return OpClass.HEAVY if dropout == 0.0 else kind


NOT_FUSED = frozenset({
    # sums of several writers into one place: kernels would add with atomics, in no fixed order
    "embedding_dense_backward", "index_put", "index_add", "scatter", "scatter_add", "scatter_reduce",
    "index_select_backward", "unfold_backward", "col2im", "as_strided_scatter",
    # eager's scalar keeps the memory of all its terms and is counted so; a kernel's would not
    "mse_loss", "smooth_l1_loss",
    # nothing to fuse with: sorts, scans, whole-tensor losses
    "sort", "topk", "cumsum", "cumprod", "_ctc_loss", "_ctc_loss_backward", "masked_select", "searchsorted",
    "_weight_norm_interface_backward",
    "bucketize", "logcumsumexp", "norm", "prod", "argmax", "argmin", "im2col",
    # windows: PyTorch's own kernels are as fast
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward", "avg_pool1d",
    "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool3d", "avg_pool3d_backward",
    "adaptive_max_pool3d", "adaptive_max_pool3d_backward",
    "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward",
    # memory that is not written
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
})  # fmt: skip
"""Cheap operators that stay separate."""


@cache
def is_fusible(target: Any) -> bool:
    """Return whether an operator may become part of a kernel."""
    if classify(target) is not OpClass.CHEAP:
        return False
    return target.namespace != "encore" and target.overloadpacket.__name__ not in NOT_FUSED


@cache
def is_pointwise(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


@cache
def takes_any_layout(target: Any) -> bool:
    """Return whether operands may be laid out in another way than they were captured."""
    if classify(target) is OpClass.VIEW or target in SIZED.values() or is_codec(target):
        return True
    known = target.overloadpacket.__name__ in ANY_LAYOUT or target.namespace == "encore"
    return known or torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags


def without_unread(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without tensors that the kernel does not read, which they would keep alive."""
    if target is aten.native_batch_norm_backward.default and args[BATCH_NORM_TRAIN]:
        return (*args[:3], None, None, *args[5:])  # running statistics: training uses those of the batch
    return args


BATCH_NORM_TRAIN = 7


def _out_variants() -> dict[Any, Any]:
    """Pointwise operators that may write over a dying operand, and the overload that does so."""
    pairs = {
        "add.Tensor": "add.out", "sub.Tensor": "sub.out", "mul.Tensor": "mul.out", "div.Tensor": "div.out",
        "maximum.default": "maximum.out", "minimum.default": "minimum.out",
        "sigmoid.default": "sigmoid.out", "tanh.default": "tanh.out",
        "exp.default": "exp.out", "neg.default": "neg.out", "sqrt.default": "sqrt.out", "rsqrt.default": "rsqrt.out",
        "log.default": "log.out", "abs.default": "abs.out", "reciprocal.default": "reciprocal.out",
        "gelu.default": "gelu.out", "silu.default": "silu.out", "hardtanh.default": "hardtanh.out",
        "leaky_relu.default": "leaky_relu.out", "elu.default": "elu.out", "clamp.default": "clamp.out",
        "threshold_backward.default": "threshold_backward.grad_input", "where.self": "where.self_out",
        "sigmoid_backward.default": "sigmoid_backward.grad_input",
        "tanh_backward.default": "tanh_backward.grad_input",
        "gelu_backward.default": "gelu_backward.grad_input", "silu_backward.default": "silu_backward.grad_input",
        "hardtanh_backward.default": "hardtanh_backward.grad_input",
        "leaky_relu_backward.default": "leaky_relu_backward.grad_input",
        "elu_backward.default": "elu_backward.grad_input",
        "clamp_min.default": "clamp_min.out", "clamp_max.default": "clamp_max.out",
        "threshold.default": "threshold.out", "hardswish.default": "hardswish.out",
        "hardsigmoid.default": "hardsigmoid.out", "mish.default": "mish.out", "softplus.default": "softplus.out",
        "hardsigmoid_backward.default": "hardsigmoid_backward.grad_input",
        "softplus_backward.default": "softplus_backward.grad_input",
    }  # fmt: skip
    return {_overload(functional): _overload(out) for functional, out in pairs.items()}


def _overload(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


OUT_VARIANT: dict[Any, Any] = _out_variants()
"""Operator -> overload with an out= argument; safe with out= being one of its operands (same shape, strides, dtype)."""

OUT_ARGUMENT: dict[Any, str] = {target: target._schema.arguments[-1].name for target in OUT_VARIANT.values()}
"""The name of that argument: usually `out`, `grad_input` for backward formulas."""


def _slice_scatter_(base: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    aten.slice.Tensor(base, dim, start, end, step).copy_(src)
    return base


def _select_scatter_(base: Any, src: Any, dim: int, index: int) -> Any:
    aten.select.int(base, dim, index).copy_(src)
    return base


def _bernoulli_(noise: Any, p: float = 0.5, *, generator: Any = None) -> Any:
    return noise.bernoulli_(p, generator=generator)


def _masked_fill_(base: Any, mask: Any, value: Any) -> Any:
    return base.masked_fill_(mask, value)


WRITES_FIRST: dict[Any, Callable[..., Any]] = {
    aten.slice_scatter.default: _slice_scatter_,
    aten.select_scatter.default: _select_scatter_,
    torch.ops.encore.bernoulli_noise.default: _bernoulli_,
    aten.bernoulli.p: _bernoulli_,
    aten.masked_fill.Scalar: _masked_fill_,
    aten.masked_fill.Tensor: _masked_fill_,
    aten.relu.default: aten.relu_.default,  # relu.out and the Scalar_out overloads compute into a temporary and copy
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Scalar: aten.sub_.Scalar,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Scalar: aten.div_.Scalar,
    aten.addmm.default: aten.addmm_.default,
    aten.baddbmm.default: aten.baddbmm_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.fill.Scalar: aten.fill_.Scalar,
    aten.fill.Tensor: aten.fill_.Tensor,
    torch.ops.encore.additive_scores_backward.default: additive_scores_backward_,
}
"""Functional forms of in-place operators -> the operator that writes into the first operand, used when that is its last
read. Of several results, the first one is in that memory."""
