"""One training step with Encore compared with the same step in eager PyTorch.

Both sides start from equal parameters, inputs and random state. Compared are outputs (with their strides), gradients
of parameters and inputs, buffers, inputs afterwards (they may be written to) and the state of the generator. The eager
lowering must give the same bits. The fused lowering must be as close to the step in float64 as eager is, where that
step can be taken (the same numbers are drawn, nothing but parameters and arguments is read), and close to eager where
it cannot.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import encore
from encore.api import compiled_call
from encore.compiler import Session
from encore.schedule import replay
from support.captured_graphs import gradients_for_all_outputs
from support.rounding import assert_as_accurate, assert_close, largest

Tensors = dict[str, torch.Tensor]
SEED = 7


def assert_matches_eager(
    model: Any,
    *args: Any,
    lowering: str,
    steps: int = 2,
    graphs: int | None = 1,
    narrow: torch.dtype | None = None,
    **kwargs: Any,
) -> Any:
    """Compile a copy of the model (or the function) and compare `steps` steps; the compiled copy is returned.

    `graphs` is how many graphs the model must be captured in, all of them planned; None where any number will do.
    `narrow` is a type in which the model computes some of what it returns in a wider one.
    """
    truths = steps_in_double(model, args, kwargs, steps) if lowering == "fused" else [None] * steps
    planned = encore.compile(copy.deepcopy(model) if isinstance(model, nn.Module) else model, lowering=lowering)
    for truth in truths:
        assert_same(run_step(planned, args, kwargs), run_step(model, args, kwargs), lowering, truth, narrow)
    session = session_of(planned)
    if graphs is not None:
        assert not session.plain, f"runs as plain PyTorch: {session.plain[0].reason}"
        assert len(session.graphs) == graphs, f"captured in {len(session.graphs)} graphs"
        assert session.forwards_run == steps * graphs, f"{session.forwards_run} planned forwards in {steps} steps"
    assert_legal(session)
    return planned


def assert_legal(session: Session) -> None:
    """Every schedule that was made replays within its prediction, and fusing has not raised the peak."""
    for graph in session.graphs:
        predicted = graph.plan.timeline.step_peak
        assert predicted <= graph.unplanned.timeline.step_peak
        limit = predicted if graph.plan.timeline.outputs_outlive else None  # replay has the user hold them to the end
        replay(graph.plan.schedule, limit=limit, workspace=session.workspaces)


def steps_in_double(model: Any, args: Any, kwargs: Any, steps: int) -> list[Tensors | None]:
    """These steps in float64; nothing for models that hold numbers of their own, whose type stays what it is."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, in_double, (args, kwargs))
    twin = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
    try:
        found = [run_step(twin, args, kwargs) for _ in range(steps)]
    except RuntimeError:  # a matrix product of two types: some tensor of the model stayed what it was
        return [None] * steps
    return list(found)


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().to(torch.float64) if tensor.is_floating_point() else tensor.detach()
    return wide.requires_grad_(tensor.requires_grad)


def run_step(model: Callable[..., Any], args: Any = (), kwargs: Any = None, *, seed: int = SEED) -> Tensors:
    """What one step gives, by name. Gradients are zeroed first, arguments are copied."""
    args, kwargs = copy.deepcopy((args, kwargs or {}))
    owner = model if isinstance(model, nn.Module) else nn.Module()
    owner.zero_grad()
    torch.manual_seed(seed)
    outputs = dict(named_tensors("output", model(*args, **kwargs)))
    backward([output for output in outputs.values() if output.requires_grad])
    found = {name: output.detach() for name, output in outputs.items()}
    for name, tensor in named_tensors("input", (args, kwargs)):
        found[f"{name} afterwards"] = tensor.detach()
        if tensor.is_leaf and tensor.grad is not None:
            found[f"gradient of {name}"] = tensor.grad
    return (
        found
        | gradients(owner)
        | {f"buffer {name}": held.clone() for name, held in owner.named_buffers()}
        | {"generator": torch.get_rng_state()}
    )


def backward(outputs: list[torch.Tensor], **options: Any) -> None:
    """Backward with made-up gradients for the outputs, the same ones each time."""
    with gradients_for_all_outputs():
        torch.autograd.backward(outputs, [cotangent(output, index) for index, output in enumerate(outputs)], **options)


def cotangent(output: torch.Tensor, index: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def gradients(model: nn.Module) -> Tensors:
    """Gradients by parameter name, cloned; those that are None are missing."""
    held = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {f"gradient of {name}": gradient.clone() for name, gradient in held if gradient is not None}


def named_tensors(prefix: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a nest of containers, dataclasses included."""
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = f"{prefix}{pytree.keystr(path)}"
        if isinstance(leaf, torch.Tensor):
            yield name, leaf
        elif dataclasses.is_dataclass(leaf):
            yield from named_tensors(name, vars(leaf))


def assert_same(
    planned: Tensors,
    eager: Tensors,
    lowering: str,
    truth: Tensors | None = None,
    narrow: torch.dtype | None = None,
) -> None:
    """Every tensor is there on both sides with the same type, shape, (for outputs) strides, and the numbers that the
    lowering promises."""
    assert sorted(planned) == sorted(eager)
    # Coins fall alike in every type; normal numbers do not, and leave the generator in another state.
    drawn_alike = truth is not None and torch.equal(truth["generator"], eager["generator"])
    scale = max((largest(one) for name, one in (truth or {}).items() if name.startswith("gradient")), default=0.0)
    for name, want in eager.items():
        have = planned[name]
        assert (have.dtype, have.shape) == (want.dtype, want.shape), name
        if name.startswith("output"):
            assert have.stride() == want.stride(), name
        if lowering == "eager" or not have.is_floating_point():
            assert same_bits(have, want), name
        elif drawn_alike and truth is not None and truth[name].dtype == torch.float64:
            assert_as_accurate(have, want, truth[name], name, narrow=narrow, scale=scale)
        else:
            assert_close(have, want, name, narrow=narrow)


def assert_verified(model: Any, *args: Any) -> None:
    """`encore.verify` finds what the model's lowering promises."""
    exact = session_of(model).options.lowering == "eager"
    assert encore.verify(model, *args).bit_equal or not exact


def same_bits(have: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(torch.equal(have, want) or ((have == want) | (have.isnan() & want.isnan())).all())


def session_of(model: Any) -> Session:
    return compiled_call(model).session
