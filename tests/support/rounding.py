"""Comparisons that do not depend on how a CPU rounds.

Vector units, libraries and compilers add up in different orders, so two correct results in float32 differ by an amount
that nobody can name in advance. What is compared is therefore the distance from the same computation in float64: a
result is right if it is not much further away than eager PyTorch's on the same machine (`assert_as_accurate`). Where
there is no float64 result, half of the digits must agree (`assert_close`): a wrong gradient never comes that close.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

FACTOR = 3.0
"""Errors may be this many times eager's own: at small sizes, eager is lucky now and then."""
ULPS = {torch.float32: 16, torch.float16: 4, torch.bfloat16: 4}
"""What a handful of operators rounds off, in units of the last place of a tensor's largest number."""
SMALLEST = 0.1
"""Numbers below it count as this large: sums cancel."""
SHARE = 0.1
"""Nor do they count as smaller than this share of the largest number of all tensors that are compared together: the
gradient of a bias below a BatchNorm is rounding and nothing else."""


def assert_as_accurate(
    found: Tensor,
    eager: Tensor,
    exact: Tensor,
    name: str = "",
    *,
    narrow: torch.dtype | None = None,
    scale: float = 0.0,
) -> None:
    """Not much further from `exact`, which was computed in float64, than eager's result is.

    `scale` is the largest number of everything that is compared together. `narrow` is a type in which some of the
    operators compute although the result has a wider one.
    """
    assert (found.shape, found.dtype) == (eager.shape, eager.dtype), name
    if eager.dtype == torch.float64:  # as precise as the reference itself
        assert_close(found, eager, name)
        return
    assert_not_numbers_alike(found, eager, name)
    ours, theirs = (largest(one.detach().double() - exact.detach().double()) for one in (found, eager))
    rounded = narrow or eager.dtype
    floor = ULPS[rounded] * torch.finfo(rounded).eps * (max(largest(exact), SHARE * scale) + SMALLEST)
    assert ours <= FACTOR * theirs + floor, f"{name}: off by {ours:.3g}, eager by {theirs:.3g}, floor {floor:.3g}"


def assert_all_as_accurate(
    found: Iterable[Tensor | None], eager: Iterable[Tensor | None], exact: Iterable[Tensor | None]
) -> None:
    """One by one; what eager leaves out (`None`) is left out in `found`, too."""
    exact = list(exact)
    scale = max((largest(right) for right in exact if right is not None), default=0.0)
    for place, (ours, theirs, right) in enumerate(zip(found, eager, exact, strict=True)):
        if ours is None or theirs is None or right is None:
            assert ours is theirs is right is None, f"tensor {place} is missing"
        else:
            assert_as_accurate(ours, theirs, right, f"tensor {place}", scale=scale)


def assert_close(found: Tensor, expected: Tensor, name: str = "", *, narrow: torch.dtype | None = None) -> None:
    """Half of the digits agree, counted from the largest number. Integers and booleans agree exactly."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    if not expected.is_floating_point() and not expected.is_complex():
        assert torch.equal(found, expected), name
        return
    assert_not_numbers_alike(found, expected, name)
    apart = largest(found.detach().double() - expected.detach().double())
    allowed = torch.finfo(narrow or expected.dtype).eps ** 0.5 * (largest(expected) + SMALLEST)
    assert apart <= allowed, f"{name}: {apart:.3g} apart, where {allowed:.3g} is half of the digits"


def assert_not_numbers_alike(found: Tensor, expected: Tensor, name: str = "") -> None:
    """NaN and infinities are at the same places."""
    assert torch.equal(found.isnan(), expected.isnan()), name
    assert torch.equal(found[found.isinf()], expected[expected.isinf()]), name


def largest(tensor: Tensor) -> float:
    finite = tensor.detach()[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def doubled(tree: Any) -> Any:
    """All floating-point tensors of a nest in float64: copies, through which gradients flow to the originals."""
    return pytree.tree_map_only(Tensor, lambda one: one.double() if one.is_floating_point() else one, tree)


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    """Of all parameters, in their order."""
    return [parameter.grad for parameter in model.parameters()]


def assert_gradients_as_accurate(
    planned: nn.Module, eager: nn.Module, step: Callable[..., object], *args: Any, seed: int | None = None
) -> None:
    """The gradients that both models have are right: `step(model, *args)` is taken once more, in float64."""
    exact = copy.deepcopy(eager).double()
    exact.zero_grad(set_to_none=True)
    if seed is not None:
        torch.manual_seed(seed)
    step(exact, *doubled(args))
    assert_all_as_accurate(gradients_of(planned), gradients_of(eager), gradients_of(exact))


def assert_named_as_accurate(
    found: Mapping[str, Tensor], eager: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> None:
    """By name."""
    assert sorted(found) == sorted(eager) == sorted(exact)
    scale = max(map(largest, exact.values()), default=0.0)
    for name, theirs in eager.items():
        assert_as_accurate(found[name], theirs, exact[name], name, scale=scale)
