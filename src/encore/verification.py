"""`encore.verify`: a planned step compared with plain eager PyTorch, number by number.

Both run on the same parameters, buffers and random state, with the same random gradients for the outputs (for all of
them, and also for scalars alone if there are others: often only a loss receives a gradient). Outputs, gradients of
parameters and inputs, and buffers are compared. The model, its gradients and the generators stay unchanged.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from encore.api import compiled_call
from encore.comparison import Tensors, Verification, compare, compare_errors, cotangent, equal_up_to_rounding
from encore.compiler.compiled import CompiledCall
from encore.devices import default_generators
from encore.errors import OptionError, VerificationError
from encore.graph.torch_private import pytree


def verify(
    model: Callable[..., Any], *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> Verification:
    """Run one step through Encore and one through eager; raise `VerificationError` at the first difference.

    Without a tolerance, the eager lowering must equal eager bit for bit, since it runs the same operators in the same
    order. The fused lowering rounds differently: its numbers must be eager's up to rounding or, where a model magnifies
    rounding, as close to those of a float64 copy of the model as eager's are.
    """
    call = compiled_call(model)
    owner = model if isinstance(model, nn.Module) else None
    exact_bits = rtol is None and atol is None and call.session.options.lowering == "eager"
    up_to_rounding = rtol is None and atol is None and not exact_bits
    with unchanged(owner) as restore:
        with call.session.learning_nothing():
            planned = _outcome(call, call, owner, args, kwargs)
        restore()
        expected = _outcome(call.plain, call, owner, args, kwargs)
        found = compare(planned, expected, None if up_to_rounding else (rtol or 0.0, atol or 0.0))
        if up_to_rounding and not equal_up_to_rounding(planned, expected):
            restore()
            compare_errors(planned, expected, _outcome_in_float64(owner, args, kwargs))
    return found


def _outcome_in_float64(owner: nn.Module | None, args: Any, kwargs: Any) -> Tensors:
    """The same step of a float64 copy of the model."""
    if owner is None:
        raise VerificationError(
            "the numbers differ from eager's by more than rounding, and there is no module to run in float64; set a "
            "tolerance by rtol= and atol="
        )
    exact = copy.deepcopy(owner).double()

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.double() if tensor.is_floating_point() else tensor
        return wide.detach().requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (args, kwargs))
    return _outcome(exact._call_impl, compiled_call(owner), exact, args, kwargs)


def _outcome(
    function: Callable[..., Any], call: CompiledCall, owner: nn.Module | None, args: Any, kwargs: Any
) -> Tensors:
    """Outputs, gradients and buffers after one step, by name. No `.grad` is changed."""
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
    cotangents = [cotangent(tensor, index) for index, tensor in enumerate(outputs)]
    leaves = list(wanted.values())
    gradients = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=retain_graph, allow_unused=True)
    found = zip(wanted, gradients, strict=True)
    return {f"gradient of {name}{how}": gradient for name, gradient in found if gradient is not None}


def _named_parameters(call: CompiledCall, owner: nn.Module | None) -> Tensors:
    """The parameters of a module; those that a function's graphs take."""
    if owner is not None:
        return dict(owner.named_parameters())
    captured = (reference() for reference in call.session.tensors.values())
    distinct = {id(tensor): tensor for tensor in captured if tensor is not None}
    return {f"parameter {index}": tensor for index, tensor in enumerate(distinct.values())}


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, since the model may write to its inputs; expanded ones cannot be written to and are not copied."""
    fresh = tensor.detach() if 0 in tensor.stride() else tensor.detach().clone()
    return fresh.requires_grad_(tensor.requires_grad)


def _named_tensors(prefix: str, tree: Any) -> Tensors:
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {f"{prefix}{pytree.keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


@contextlib.contextmanager
def unchanged(owner: nn.Module | None) -> Iterator[Callable[[], None]]:
    """Yield a function that restores buffers and generators, and call it at the end."""
    buffers = {name: buffer.clone() for name, buffer in owner.named_buffers()} if owner is not None else {}
    states = [(generator, generator.get_state()) for generator in default_generators()]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)
        if owner is not None:
            with torch.no_grad():
                for name, buffer in owner.named_buffers():
                    if 0 not in buffer.stride():  # an expanded one cannot be written to
                        buffer.copy_(buffers[name])

    try:
        yield restore
    finally:
        restore()
