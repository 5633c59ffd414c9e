"""Comparison of two runs of one step: outputs, gradients and buffers, by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from encore.errors import VerificationError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a comparison with eager."""

    compared: int
    """Tensors compared."""
    bit_equal: bool
    largest_difference: float
    """The largest absolute difference; 0.0 if all tensors are bit-equal."""

    def __str__(self) -> str:
        how = "bit for bit" if self.bit_equal else f"within {self.largest_difference:.3g}"
        return f"{self.compared} tensors equal eager's {how}"


ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""The distance of a tensor from eager's, relative to its norm, above which both are compared with float64."""
NO_WORSE = 1.5
"""The errors of a fused step, compared with float64, may be this many times eager's."""
NO_WORSE_ALONE = 10.0
"""The same for a single tensor, whose rounding errors vary more."""
ALONE, OF_ALL = 1e-3, 1e-6
"""An error that a single tensor may have in any case, as a share of its own norm and of the norm of all tensors."""


def compare(planned: Tensors, expected: Tensors, tolerance: tuple[float, float] | None) -> Verification:
    """Compare two runs; raise if a tensor exceeds the tolerance (relative, absolute), if there is one."""
    if planned.keys() != expected.keys():
        odd = sorted(planned.keys() ^ expected.keys())[0]
        raise VerificationError(f"only one of the two runs has {odd}; report this as a bug of Encore")
    largest = 0.0
    bit_equal = True
    for name, want in expected.items():
        have = planned[name]
        if have.is_sparse and want.is_sparse:
            have, want = have.to_dense(), want.to_dense()
        if have.shape != want.shape or have.dtype != want.dtype:
            raise VerificationError(f"{name} is {have.dtype}{list(have.shape)}, eager's {want.dtype}{list(want.shape)}")
        if same_bits(have, want):
            continue
        bit_equal = False
        difference = (have.double() - want.double()).abs()
        largest = max(largest, float(difference.nan_to_num(nan=float("inf")).max()))
        if tolerance is None:
            continue
        rtol, atol = tolerance
        if not torch.allclose(have, want, rtol=rtol, atol=atol, equal_nan=True):
            raise VerificationError(
                f"{name} differs from eager's by up to {float(difference.max()):.3g} "
                f"in {int((difference > 0).sum())} of {want.numel()} elements (rtol={rtol:g}, atol={atol:g})"
            )
    return Verification(compared=len(expected), bit_equal=bit_equal, largest_difference=largest)


def equal_up_to_rounding(planned: Tensors, expected: Tensors) -> bool:
    for name, want in expected.items():
        have = planned[name].to_dense() if planned[name].is_sparse else planned[name]
        want = want.to_dense() if want.is_sparse else want
        if not same_bits(have, want):
            apart = _norm(have.double() - want.double())
            if not apart <= ROUNDING.get(want.dtype, 0.0) * _norm(want.double()):
                return False
    return True


def unlike(planned: Tensors, expected: Tensors) -> str:
    """Return a message on the first tensor that is further from eager's than rounding explains, for steps that cannot
    run in float64; empty if there is none."""
    sizes = {name: _norm(want.double()) for name, want in expected.items()}
    for name, want in expected.items():
        apart = _norm(planned[name].double() - want.double())
        kind = name.split(" ", 1)[0]
        size = sum(norm**2 for other, norm in sizes.items() if other.startswith(kind)) ** 0.5
        rounding = ROUNDING.get(want.dtype, 0.0)
        if not apart <= 10 * rounding * sizes[name] + rounding * size / 10 and not same_bits(planned[name], want):
            return f"{name} is {apart:.3g} away from eager's, whose norm is {sizes[name]:.3g}"
    return ""


def compare_errors(planned: Tensors, expected: Tensors, exact: Tensors) -> None:
    """Raise if the gradients (outputs, buffers) are further from float64's than eager's are, all together or one of
    them by much."""
    for kind in ("output", "gradient", "buffer"):
        names = [name for name in exact if name.startswith(kind) and exact[name].dtype is torch.float64]
        error = sum(_norm(planned[name].double() - exact[name]) ** 2 for name in names) ** 0.5
        eagers = sum(_norm(expected[name].double() - exact[name]) ** 2 for name in names) ** 0.5
        size = sum(_norm(exact[name]) ** 2 for name in names) ** 0.5
        if not error <= NO_WORSE * eagers + ROUNDING[torch.float32] * size:
            raise VerificationError(
                f"the {kind}s are {error:.3g} away from those of a float64 copy of the model, eager's {eagers:.3g}"
            )
        for name in names:
            apart, eagers_apart = (_norm(found[name].double() - exact[name]) for found in (planned, expected))
            if not apart <= NO_WORSE_ALONE * eagers_apart + ALONE * _norm(exact[name]) + OF_ALL * size:
                raise VerificationError(
                    f"{name} is {apart:.3g} away from that of a float64 copy of the model, eager's {eagers_apart:.3g}"
                )


def cotangent(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A gradient for an output: one for a loss, noise for anything larger, since ones would hide errors that cancel."""
    if tensor.numel() == 1:
        return torch.ones_like(tensor)
    generator = torch.Generator(tensor.device).manual_seed(index)
    noise = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device).normal_(generator=generator)
    return torch.empty_like(tensor, requires_grad=False).copy_(noise)  # laid out like the output, as a loss would


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.norm())


def same_bits(have: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(torch.equal(have, want) or ((have == want) | (have.isnan() & want.isnan())).all())
