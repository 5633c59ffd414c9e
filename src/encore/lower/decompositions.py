"""Decompositions of operators inside kernels: Inductor's, except that long sums are taken in stages.

A kernel that adds two thousand rows one after the other in float32 has an error ten times that of PyTorch's own sums,
which are pairwise. Summing short pieces first and then their sums is as accurate as those, and more parallel. Variances
are computed around the mean in a second pass, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
LONG = 256
"""Sums of fewer elements are not split."""
PIECE = 32
IN_STAGES = (torch.float32,)


def sum_in_stages(
    source: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """`aten.sum.dim_IntList`: one dimension after the other, long ones in pieces."""
    dims = sorted({position % max(source.dim(), 1) for position in (dim or range(source.dim()))}, reverse=True)
    if source.dtype not in IN_STAGES or dtype not in (None, source.dtype) or source.dim() == 0:
        return NotImplemented
    if math.prod(source.shape[position] for position in dims) < LONG:
        return NotImplemented
    total = source
    for position in dims:
        total = _sum_over(total, position)
    if not keepdim:
        return total.reshape([size for position, size in enumerate(source.shape) if position not in dims])
    return total


def _sum_over(source: torch.Tensor, position: int) -> torch.Tensor:
    """Sum over one dimension, which stays with size 1."""
    size = source.shape[position]
    if size < LONG:
        return aten.sum.dim_IntList(source, [position], True)
    if isinstance(size, torch.SymInt):
        return _sum_over_symbol(source, position)
    left = size % PIECE
    whole = source.narrow(position, 0, size - left)
    pieces = [*source.shape[:position], size // PIECE, PIECE, *source.shape[position + 1 :]]
    partial = aten.sum.dim_IntList(whole.reshape(pieces), [position + 1])
    total: torch.Tensor = aten.sum.dim_IntList(partial, [position], True)
    return total + aten.sum.dim_IntList(source.narrow(position, size - left, left), [position], True) if left else total


def _sum_over_symbol(source: torch.Tensor, position: int) -> torch.Tensor:
    """The same for a size that is a symbol: what is left has at least one piece, so that no size differs in kind."""
    size = source.shape[position]
    count = size // PIECE - 1
    whole = source.narrow(position, 0, count * PIECE)
    pieces = [*source.shape[:position], count, PIECE, *source.shape[position + 1 :]]
    partial = aten.sum.dim_IntList(whole.reshape(pieces), [position + 1])
    total: torch.Tensor = aten.sum.dim_IntList(partial, [position], True)
    left = source.narrow(position, count * PIECE, size - count * PIECE)
    return total + aten.sum.dim_IntList(left, [position], True)


def sum_of_all(source: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """`aten.sum.default`."""
    return sum_in_stages(source, None, dtype=dtype)


def mean_in_stages(
    source: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """`aten.mean.dim`."""
    if source.dtype not in IN_STAGES or dtype not in (None, source.dtype):
        return NotImplemented
    count = math.prod(source.shape[position] for position in (dim or range(source.dim())))
    return aten.sum.dim_IntList(source, list(dim or range(source.dim())), keepdim) / count


def var_mean_in_stages(
    source: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """`aten.var_mean.correction`."""
    dims = list(dim or range(source.dim()))
    count = math.prod(source.shape[position] for position in dims)
    lost = 1 if correction is None else correction
    if source.dtype not in IN_STAGES or count < LONG or count <= lost:
        return NotImplemented
    mean = aten.sum.dim_IntList(source, dims, True) / count
    around = source - mean
    variance = aten.sum.dim_IntList(around * around, dims, keepdim) / (count - lost)
    if not keepdim:
        kept = [size for position, size in enumerate(source.shape) if position not in {d % source.dim() for d in dims}]
        mean = mean.reshape(kept)
    return variance, mean


def with_sums_in_stages(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a table of decompositions with these in place of its own."""
    return {
        **table,
        aten.sum.dim_IntList: sum_in_stages,
        aten.sum.default: sum_of_all,
        aten.mean.dim: mean_in_stages,
        aten.var_mean.correction: var_mean_in_stages,
    }
