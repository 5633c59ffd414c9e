"""Values that operators accept: the domain of every operand that may not be any number.

Operators are probed on random operands. On some numbers they raise, read out of bounds or, on CUDA, end the process's
context with a device assertion. So each operand that an operator checks, indexes by or iterates over is drawn from its
domain: `DOMAINS`, by operator and argument name. Operands that are not in the table get noise (floating point)
or zeros (integers, booleans), which are within the bounds of every dimension that is not empty.

Sources: `TORCH_CHECK`, `CUDA_KERNEL_ASSERT` and index arithmetic in ATen's kernels (aten/src/ATen/native) of PyTorch
2.13; tests/sweeps probe what PyTorch's own samples lead to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from encore.graph import Graph, Op
from encore.graph.torch_private import OpOverload, packet_name
from encore.graph.values import Ref

DRAWN = 1 << 16
"""Numbers that are drawn for one tensor; a larger one repeats them, since drawing takes longer than most operators."""


class ProbedCall:
    """An operator's call, with its arguments by name."""

    def __init__(self, graph: Graph, op: Op) -> None:
        self.graph = graph
        declared = getattr(getattr(op.target, "_schema", None), "arguments", ())
        self.arguments: dict[str, Any] = {one.name: one.default_value for one in declared if one.has_default_value()}
        self.arguments |= {one.name: argument for one, argument in zip(declared, op.args, strict=False)}
        self.arguments |= op.kwargs
        self.name = _aten_name(op)

    def shape(self, argument: str) -> tuple[int, ...]:
        given = self.arguments[argument]
        return self.graph.values[given.value].shape if isinstance(given, Ref) else ()

    def number(self, argument: str, default: int) -> int:
        given = self.arguments.get(argument, default)
        return given if isinstance(given, int) else default


class Domain(Protocol):
    """A set of values. `fill` writes some of them to a tensor whose elements do not overlap."""

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None: ...


@dataclass(frozen=True, slots=True)
class Between:
    """Floating-point numbers from an interval; ones if the operand has another type."""

    low: float
    high: float

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        if tensor.is_floating_point():
            _repeat(tensor, lambda part: part.uniform_(self.low, self.high, generator=generator))
        else:
            tensor.fill_(1)


@dataclass(frozen=True, slots=True)
class Constant:
    """One number."""

    number: int

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        tensor.fill_(self.number)


@dataclass(frozen=True, slots=True)
class Indices:
    """Integers from `first` to the size of something: of dimension `dim` of argument `of` (a number, the name of an
    argument, or None for all elements), of its last `last` dimensions together, or the number that is the argument."""

    of: str
    dim: int | str | None = None
    last: int = 0
    first: int = 0

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        high = self.bound(call)
        if tensor.dtype is torch.bool or tensor.is_floating_point() or high <= self.first:
            tensor.zero_()
        else:
            high = min(high, torch.iinfo(tensor.dtype).max)
            _repeat(tensor, lambda part: part.random_(self.first, high, generator=generator))

    def bound(self, call: ProbedCall) -> int:
        given = call.arguments[self.of]
        if isinstance(given, int):
            return given
        sizes = call.shape(self.of) if isinstance(given, Ref) else tuple(given)
        if self.last or self.dim is None:
            return math.prod(sizes[-self.last :])
        dim = call.number(self.dim, 0) if isinstance(self.dim, str) else min(self.dim, len(sizes) - 1)
        return sizes[dim] if sizes else 1


@dataclass(frozen=True, slots=True)
class EachDimension:
    """A list of indices, the first into the first dimension of argument `of`, and so on."""

    of: str

    def at(self, position: int) -> Domain:
        return Indices(self.of, position)

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        Indices(self.of, 0).fill(tensor, call, generator)


@dataclass(frozen=True, slots=True)
class Parts:
    """Lengths of parts that make up the size of argument `of` along `axis`, or the number that it is, as equal as
    possible; ones if the argument is not given."""

    of: str
    axis: str | None = None

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        number = tensor.shape[-1] if tensor.dim() else 1
        given = call.arguments.get(self.of)
        total = number if given is None else Indices(self.of, self.axis or 0).bound(call)
        tensor.copy_(_evenly(total, number).diff())


@dataclass(frozen=True, slots=True)
class Offsets:
    """Where parts of argument `of` along `axis` begin; their end as well if `ends` (the name of a flag, or a
    constant) is true."""

    of: str
    axis: str | None = None
    ends: str | bool = False

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        number = tensor.shape[-1] if tensor.dim() else 1
        ends = call.arguments.get(self.ends, False) if isinstance(self.ends, str) else self.ends
        total = Indices(self.of, self.axis or 0).bound(call)
        tensor.copy_(_evenly(total, number - 1) if ends and number > 1 else _evenly(total, number)[:-1])


@dataclass(frozen=True, slots=True)
class Ends:
    """Where parts of argument `of` end along dimension `dim`, in ascending order."""

    of: str
    dim: int

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        tensor.copy_(_evenly(Indices(self.of, self.dim).bound(call), tensor.shape[-1])[1:])


@dataclass(frozen=True, slots=True)
class WholeSize:
    """The whole size of dimension `dim` of argument `of`, for every element."""

    of: str
    dim: int | str

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        tensor.fill_(Indices(self.of, self.dim).bound(call))


@dataclass(frozen=True, slots=True)
class TargetLengths:
    """Lengths of the targets of a CTC loss: the width of padded targets, or parts of concatenated ones."""

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        lengths: Domain = WholeSize("targets", 1) if len(call.shape("targets")) > 1 else Parts("targets")
        lengths.fill(tensor, call, generator)


@dataclass(frozen=True, slots=True)
class Ascending:
    """0, 1, 2... along the last dimension (a permutation, or sorted numbers), counted from `first`."""

    first: int = 0

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        size = tensor.shape[-1] if tensor.dim() else 1
        tensor.copy_(torch.arange(self.first, self.first + size, device=tensor.device))


@dataclass(frozen=True, slots=True)
class PositiveDefinite:
    """Diagonal matrices with distinct positive numbers: symmetric, positive definite, triangular and invertible."""

    def fill(self, tensor: torch.Tensor, call: ProbedCall, generator: torch.Generator) -> None:
        tensor.zero_()
        if tensor.dim() >= 2:
            diagonal = tensor.diagonal(dim1=-2, dim2=-1)
            diagonal.copy_(torch.linspace(1, 2, max(1, diagonal.shape[-1]), device=tensor.device)[: diagonal.shape[-1]])


def _repeat(flat: torch.Tensor, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Draw few numbers and repeat them."""
    drawn = draw(flat[:DRAWN])
    whole = len(flat) // DRAWN * DRAWN
    if whole:
        flat[:whole].view(-1, DRAWN)[1:] = drawn
        flat[whole:] = drawn[: len(flat) - whole]


def _evenly(total: int, parts: int) -> torch.Tensor:
    """Where each of so many parts begins, and the end of the last."""
    return torch.arange(parts + 1) * total // max(1, parts)


ZEROS, ONES = Constant(0), Constant(1)
UNIT = Between(0.05, 0.95)
"""Probabilities, and numbers within (0, 1)."""
POSITIVE = Between(0.5, 2.0)
ABOVE_ONE = Between(1.1, 2.0)
MATRIX = PositiveDefinite()
ALONG = Indices("self", "dim")
CLASS = Indices("self", 1)
BAGS = Indices("grad", 0)

DOMAINS: Mapping[str, Mapping[str, Domain]] = {
    # Probabilities: binary cross entropy and the draws check them.
    "binary_cross_entropy": {"self": UNIT, "target": UNIT},
    "binary_cross_entropy_backward": {"self": UNIT, "target": UNIT},
    "bernoulli": {"self": UNIT, "p": UNIT},
    "binomial": {"count": Constant(4), "prob": UNIT},
    "multinomial": {"self": UNIT},
    "fractional_max_pool2d": {"random_samples": UNIT},
    "fractional_max_pool3d": {"random_samples": UNIT},
    "logit": {"self": UNIT},
    "logit_backward": {"self": UNIT},
    "special_ndtri": {"self": UNIT},
    "erfinv": {"self": UNIT},
    "acos": {"self": UNIT},
    "asin": {"self": UNIT},
    "atanh": {"self": UNIT},
    # Positive numbers: rates and standard deviations are checked, logarithms and roots lead to NaN.
    "poisson": {"self": POSITIVE},
    "normal": {"std": POSITIVE},
    "_standard_gamma": {"self": POSITIVE},
    "_standard_gamma_grad": {"self": POSITIVE, "output": POSITIVE},
    "_sample_dirichlet": {"self": POSITIVE},
    "_dirichlet_grad": {"x": UNIT, "alpha": POSITIVE, "total": POSITIVE},
    "acosh": {"self": ABOVE_ONE},
    "digamma": {"self": POSITIVE},
    "lgamma": {"self": POSITIVE},
    "polygamma": {"self": POSITIVE},
    "special_zeta": {"self": ABOVE_ONE, "other": POSITIVE},
    "mvlgamma": {"self": Between(16.0, 17.0)},
    "igamma": {"self": POSITIVE, "other": POSITIVE},
    "igammac": {"self": POSITIVE, "other": POSITIVE},
    "log": {"self": POSITIVE},
    "log2": {"self": POSITIVE},
    "log10": {"self": POSITIVE},
    "log1p": {"self": POSITIVE},
    "sqrt": {"self": POSITIVE},
    "rsqrt": {"self": POSITIVE},
    "xlogy": {"other": POSITIVE},
    "special_xlog1py": {"other": POSITIVE},
    "special_entr": {"self": POSITIVE},
    "pow": {"self": POSITIVE},
    "float_power": {"self": POSITIVE},
    "native_batch_norm": {"running_var": POSITIVE},
    "_native_batch_norm_legit_no_training": {"running_var": POSITIVE},
    "native_batch_norm_backward": {"running_var": POSITIVE, "save_invstd": POSITIVE},
    "native_layer_norm_backward": {"rstd": POSITIVE},
    "native_group_norm_backward": {"rstd": POSITIVE},
    "fake_quantize_per_tensor_affine_cachemask": {"scale": POSITIVE},
    "fake_quantize_per_channel_affine_cachemask": {"scale": POSITIVE},
    # Divisors: integers by zero raise.
    "div": {"other": POSITIVE},
    "floor_divide": {"other": POSITIVE},
    "remainder": {"self": POSITIVE, "other": POSITIVE},
    "fmod": {"other": POSITIVE},
    "reciprocal": {"self": POSITIVE},
    # Indices along a dimension.
    "gather": {"index": ALONG},
    "scatter": {"index": ALONG},
    "scatter_add": {"index": ALONG},
    "scatter_reduce": {"index": ALONG},
    "index_select": {"index": ALONG},
    "index_add": {"index": ALONG},
    "index_copy": {"index": ALONG},
    "index_fill": {"index": ALONG},
    "index_reduce": {"index": ALONG},
    "take": {"index": Indices("self")},
    "put": {"index": Indices("self")},
    "index": {"indices": EachDimension("self")},
    "index_put": {"indices": EachDimension("self")},
    "_unsafe_index": {"indices": EachDimension("self")},
    "_unsafe_index_put": {"indices": EachDimension("self")},
    "_unsafe_masked_index": {"indices": EachDimension("self"), "mask": ONES},
    "_unsafe_masked_index_put_accumulate": {"indices": EachDimension("self"), "mask": ONES},
    "embedding": {"indices": Indices("weight", 0)},
    "embedding_renorm": {"indices": Indices("self", 0)},
    "embedding_backward": {"indices": Indices("num_weights")},
    "embedding_dense_backward": {"indices": Indices("num_weights")},
    # Bags of embeddings: offsets ascend from zero, and every index has its bag.
    "_embedding_bag": {"indices": Indices("weight", 0), "offsets": Offsets("indices", ends="include_last_offset")},
    "_embedding_bag_forward_only": {
        "indices": Indices("weight", 0),
        "offsets": Offsets("indices", ends="include_last_offset"),
    },
    "_embedding_bag_backward": {
        "indices": Indices("num_weights"),
        "offsets": Offsets("indices"),
        "offset2bag": BAGS,
        "bag_size": ONES,
        "maximum_indices": Indices("num_weights"),
    },
    "_embedding_bag_dense_backward": {
        "indices": Indices("num_weights"),
        "offset2bag": BAGS,
        "bag_size": ONES,
        "maximum_indices": Indices("num_weights"),
    },
    "_embedding_bag_per_sample_weights_backward": {
        "indices": Indices("weight", 0),
        "offsets": Offsets("indices"),
        "offset2bag": BAGS,
    },
    # Classes.
    "nll_loss_forward": {"target": CLASS},
    "nll_loss_backward": {"target": CLASS, "total_weight": POSITIVE},
    "nll_loss2d_forward": {"target": CLASS},
    "nll_loss2d_backward": {"target": CLASS, "total_weight": POSITIVE},
    "multi_margin_loss": {"target": CLASS},
    "multi_margin_loss_backward": {"target": CLASS},
    "multilabel_margin_loss_forward": {"target": CLASS},
    "multilabel_margin_loss_backward": {"target": CLASS, "is_target": UNIT},
    "_ctc_loss": {
        "targets": Indices("log_probs", 2, first=1),
        "input_lengths": WholeSize("log_probs", 0),
        "target_lengths": TargetLengths(),
    },
    "_ctc_loss_backward": {
        "targets": Indices("log_probs", 2, first=1),
        "input_lengths": WholeSize("log_probs", 0),
        "target_lengths": TargetLengths(),
    },
    # Positions of a pooled maximum within its plane or volume.
    "max_pool2d_with_indices_backward": {"indices": Indices("self", last=2)},
    "max_pool3d_with_indices_backward": {"indices": Indices("self", last=3)},
    "adaptive_max_pool2d_backward": {"indices": Indices("self", last=2)},
    "adaptive_max_pool3d_backward": {"indices": Indices("self", last=3)},
    "fractional_max_pool2d_backward": {"indices": Indices("self", last=2)},
    "fractional_max_pool3d_backward": {"indices": Indices("self", last=3)},
    "max_unpool2d": {"indices": Indices("output_size")},
    "max_unpool3d": {"indices": Indices("output_size")},
    # Lengths, counts and offsets.
    "_pack_padded_sequence": {"lengths": WholeSize("input", 0)},
    "segment_reduce": {"lengths": Parts("data", "axis"), "offsets": Offsets("data", "axis", ends=True)},
    "_segment_reduce_backward": {"lengths": Parts("data", "axis"), "offsets": Offsets("data", "axis", ends=True)},
    "repeat_interleave": {"repeats": Parts("output_size")},
    "_grouped_mm": {"offs": Ends("self", 0)},
    "masked_scatter": {"mask": ZEROS},
    # Permutations and sorted numbers.
    "lu_unpack": {"LU_pivots": Ascending(1)},
    "lu_solve": {"LU_pivots": Ascending(1)},
    "linalg_lu_solve": {"LU": MATRIX, "pivots": Ascending(1)},
    "linalg_ldl_solve": {"LD": MATRIX, "pivots": Ascending(1)},
    "searchsorted": {"sorted_sequence": Ascending(), "sorter": Ascending()},
    "bucketize": {"boundaries": Ascending()},
    # Matrices that can be factorized and inverted.
    "cholesky": {"self": MATRIX},
    "linalg_cholesky_ex": {"self": MATRIX},
    "cholesky_inverse": {"self": MATRIX},
    "_cholesky_solve_helper": {"A": MATRIX},
    "linalg_inv_ex": {"A": MATRIX},
    "_linalg_solve_ex": {"A": MATRIX},
    "linalg_solve_triangular": {"self": MATRIX},
    "triangular_solve": {"A": MATRIX},
    "_linalg_det": {"A": MATRIX},
    "_linalg_slogdet": {"A": MATRIX},
    "linalg_lu": {"A": MATRIX},
    "linalg_lu_factor_ex": {"A": MATRIX},
    "linalg_ldl_factor_ex": {"self": MATRIX},
    "_linalg_eigh": {"A": MATRIX},
    "linalg_eig": {"self": MATRIX},
    "_linalg_eigvals": {"self": MATRIX},
    "_linalg_svd": {"A": MATRIX},
    "linalg_lstsq": {"self": MATRIX},
    "_linalg_check_errors": {"info": ZEROS},
    "_assert_async": {"self": ONES},
    "_functional_assert_async": {"self": ONES},
}


def domain_key(op: Op) -> str:
    """The part of a measurement's key about the values of operands, on which workspaces may depend."""
    return " in domain" if _aten_name(op) in DOMAINS else ""


def _aten_name(op: Op) -> str:
    """The name of an operator of `aten` without its overload; empty for any other."""
    aten = isinstance(op.target, OpOverload) and op.target.namespace == "aten"
    return packet_name(op.target) if aten else ""


ELEMENT_BY_ELEMENT = (Between, Constant, Indices, EachDimension, WholeSize)
"""Domains that do not depend on the position of an element: they fill memory of any layout."""

Fill = Callable[[torch.Tensor, torch.Tensor, torch.Generator], None]
"""Writes to the memory of a tensor: called with the memory, flat, the tensor in it, and a generator."""


def operand_domains(graph: Graph, op: Op) -> dict[int, Fill]:
    """Return a function that fills it for every operand with a domain."""
    call = ProbedCall(graph, op)
    found: dict[int, Fill] = {}
    for name, domain in DOMAINS.get(call.name, {}).items():
        argument = call.arguments.get(name)
        for position, item in enumerate(argument if isinstance(argument, tuple | list) else [argument]):
            if isinstance(item, Ref):
                at = domain.at(position) if isinstance(domain, EachDimension) else domain
                found.setdefault(item.value, functools.partial(_fill_from, at, call))
    return found


def fill_by_default(memory: torch.Tensor, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill with noise if it is floating point, else with zeros."""
    if memory.is_floating_point() or memory.is_complex():
        _repeat(memory, lambda part: part.normal_(generator=generator))
    else:
        memory.zero_()


def _fill_from(
    domain: Domain, call: ProbedCall, memory: torch.Tensor, tensor: torch.Tensor, generator: torch.Generator
) -> None:
    if isinstance(domain, ELEMENT_BY_ELEMENT):
        domain.fill(memory, call, generator)
        return
    memory.zero_()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    apart = tuple(slice(0, 1) if step == 0 and size > 1 else slice(None) for size, step in steps)
    domain.fill(tensor[apart], call, generator)  # an expanded dimension has one element in memory
