"""`encore.verify`: a planned step against plain eager PyTorch, number by number.

Both run on the same parameters, buffers and random state, with the same made-up gradients for the outputs (for all of
them, and for scalars alone if there are others too: a loss is often all that receives a gradient); outputs, gradients
of parameters and inputs, and buffers afterwards are compared. The model, its gradients and the generators
are left as they were found.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from encore.api import compiled_call
from encore.capture.compiled import CompiledCall
from encore.errors import OptionError, VerificationError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, and how close it is."""

    compared: int
    """Tensors compared."""
    bit_equal: bool
    largest_difference: float
    """Largest absolute difference found, 0.0 where everything is bit-equal."""

    def __str__(self) -> str:
        how = "bit for bit" if self.bit_equal else f"within {self.largest_difference:.3g}"
        return f"{self.compared} tensors equal eager's {how}"


ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a tensor may be from eager's, relative to its size, before float64 is asked who is right."""
NO_WORSE = 1.5
"""Errors of a fused step against float64 may be this many times eager's own."""


def verify(
    model: Callable[..., Any], *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> Verification:
    """Run one step through Encore and one through eager; raise `VerificationError` at the first difference.

    Without a tolerance, the eager lowering must give eager's very bits, since it runs the same operators in the same
    order. The fused lowering rounds elsewhere: its numbers must be eager's up to rounding or, where a model magnifies
    rounding, as close to those of a float64 copy of the model as eager's are.
    """
    call = compiled_call(model)
    owner = model if isinstance(model, nn.Module) else None
    exact_bits = rtol is None and atol is None and call.session.options.lowering == "eager"
    up_to_rounding = rtol is None and atol is None and not exact_bits
    with _left_as_found(owner) as restore:
        with call.session.learning_nothing():
            planned = _outcome(call, call, owner, args, kwargs)
        restore()
        expected = _outcome(call.plain, call, owner, args, kwargs)
        found = _compare(planned, expected, None if up_to_rounding else (rtol or 0.0, atol or 0.0))
        if up_to_rounding and not _equal_up_to_rounding(planned, expected):
            restore()
            _compare_errors(planned, expected, _outcome_in_float64(owner, args, kwargs))
    return found


def _equal_up_to_rounding(planned: Tensors, expected: Tensors) -> bool:
    for name, want in expected.items():
        have = planned[name].to_dense() if planned[name].is_sparse else planned[name]
        want = want.to_dense() if want.is_sparse else want
        if not _same_bits(have, want):
            apart = _norm(have.double() - want.double())
            if not apart <= ROUNDING.get(want.dtype, 0.0) * _norm(want.double()):
                return False
    return True


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.norm())


def _outcome_in_float64(owner: nn.Module | None, args: Any, kwargs: Any) -> Tensors:
    """The same step of a float64 copy of the model."""
    if owner is None:
        raise VerificationError(
            "the numbers differ from eager's by more than rounding; rtol= and atol= set a tolerance"
        )
    exact = copy.deepcopy(owner).double()

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.double() if tensor.is_floating_point() else tensor
        return wide.detach().requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (args, kwargs))
    return _outcome(exact._call_impl, compiled_call(owner), exact, args, kwargs)


def _compare_errors(planned: Tensors, expected: Tensors, exact: Tensors) -> None:
    """All gradients together (and all outputs) must be no further from the truth than eager's are."""
    for kind in ("output", "gradient", "buffer"):
        names = [name for name in exact if name.startswith(kind) and exact[name].dtype is torch.float64]
        mine = sum(_norm(planned[name].double() - exact[name]) ** 2 for name in names) ** 0.5
        its = sum(_norm(expected[name].double() - exact[name]) ** 2 for name in names) ** 0.5
        size = sum(_norm(exact[name]) ** 2 for name in names) ** 0.5
        if not mine <= NO_WORSE * its + ROUNDING[torch.float32] * size:
            raise VerificationError(
                f"the {kind}s are {mine:.3g} away from those of a float64 copy of the model, eager's {its:.3g}"
            )


def _outcome(
    function: Callable[..., Any], call: CompiledCall, owner: nn.Module | None, args: Any, kwargs: Any
) -> Tensors:
    """Outputs, gradients and buffers after one step, by name. Nobody's `.grad` is touched."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _leaf, (args, kwargs))
    with torch.enable_grad():
        outputs = _named_tensors("output", function(*args, **kwargs))
    differentiable = [tensor for tensor in outputs.values() if tensor.requires_grad]
    if not differentiable:
        raise OptionError("no output of this call depends on anything that needs a gradient; there is no step")
    leaves = _named_parameters(call, owner) | _named_tensors("input", (args, kwargs))
    wanted = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    found = {name: tensor.detach().clone() for name, tensor in outputs.items()}
    losses = [tensor for tensor in differentiable if not tensor.shape]
    if losses and len(losses) < len(differentiable):
        found |= _gradients(losses, wanted, " by the losses alone", retain_graph=True)
    found |= _gradients(differentiable, wanted, "")
    if owner is not None:
        found |= {f"buffer {name}": buffer.clone() for name, buffer in owner.named_buffers()}
    return found


def _gradients(outputs: list[torch.Tensor], wanted: Tensors, how: str, *, retain_graph: bool = False) -> Tensors:
    cotangents = [_cotangent(tensor, index) for index, tensor in enumerate(outputs)]
    leaves = list(wanted.values())
    gradients = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=retain_graph, allow_unused=True)
    found = zip(wanted, gradients, strict=True)
    return {f"gradient of {name}{how}": gradient for name, gradient in found if gradient is not None}


def _named_parameters(call: CompiledCall, owner: nn.Module | None) -> Tensors:
    """A module's parameters; for a function, those its capture came across."""
    if owner is not None:
        return dict(owner.named_parameters())
    captured = (reference() for reference in call.session.tensors)
    distinct = {id(tensor): tensor for tensor in captured if tensor is not None}
    return {f"parameter {index}": tensor for index, tensor in enumerate(distinct.values())}


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, since the model may write to its inputs; expanded ones cannot be written to and stay as they are."""
    fresh = tensor.detach() if 0 in tensor.stride() else tensor.detach().clone()
    return fresh.requires_grad_(tensor.requires_grad)


def _cotangent(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Ones for a loss, noise for anything larger: a gradient of ones hides errors that cancel."""
    if tensor.numel() == 1:
        return torch.ones_like(tensor)
    generator = torch.Generator(tensor.device).manual_seed(index)
    noise = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device).normal_(generator=generator)
    return torch.empty_like(tensor, requires_grad=False).copy_(noise)  # laid out like the output, as a loss would


def _named_tensors(prefix: str, tree: Any) -> Tensors:
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {f"{prefix}{pytree.keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


@contextlib.contextmanager
def _left_as_found(owner: nn.Module | None) -> Iterator[Callable[[], None]]:
    """Gives a function that puts buffers and generators back; calls it in the end as well."""
    buffers = {name: buffer.clone() for name, buffer in owner.named_buffers()} if owner is not None else {}
    state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore() -> None:
        torch.set_rng_state(state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        if owner is not None:
            with torch.no_grad():
                for name, buffer in owner.named_buffers():
                    if 0 not in buffer.stride():  # expanded: nobody can have written to it
                        buffer.copy_(buffers[name])

    try:
        yield restore
    finally:
        restore()


def _compare(planned: Tensors, expected: Tensors, tolerance: tuple[float, float] | None) -> Verification:
    """How far the two are apart; raises where that is beyond the tolerance (relative, absolute), if there is one."""
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
        if _same_bits(have, want):
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


def _same_bits(have: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(torch.equal(have, want) or ((have == want) | (have.isnan() & want.isnan())).all())
