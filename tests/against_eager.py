"""One training step through Encore beside the same step in plain eager PyTorch, compared bit for bit.

Both sides start from equal parameters, inputs and random state. Compared are outputs (with their strides), gradients
of parameters and inputs, buffers, inputs afterwards (they may be written to) and the state of the generator.
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
from encore.capture import Session

Tensors = dict[str, torch.Tensor]
SEED = 7


def assert_matches_eager(model: Any, *args: Any, steps: int = 2, graphs: int | None = 1, **kwargs: Any) -> Any:
    """Compile a copy of the model (or the function) and compare `steps` steps; the compiled copy is returned.

    `graphs` is how many graphs the model must be captured in, all of them planned; None where any number will do.
    """
    planned = encore.compile(copy.deepcopy(model) if isinstance(model, nn.Module) else model)
    for _ in range(steps):
        assert_same(run_step(planned, args, kwargs), run_step(model, args, kwargs))
    session = session_of(planned)
    if graphs is not None:
        assert not session.plain, f"runs as plain PyTorch: {session.plain[0].reason}"
        assert len(session.graphs) == graphs, f"captured in {len(session.graphs)} graphs"
        assert session.forwards_run == steps * graphs, f"{session.forwards_run} planned forwards in {steps} steps"
    return planned


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


def assert_same(planned: Tensors, eager: Tensors) -> None:
    """Every tensor is there on both sides with the same type, shape, (for outputs) strides, and bits."""
    assert sorted(planned) == sorted(eager)
    for name, want in eager.items():
        have = planned[name]
        assert (have.dtype, have.shape) == (want.dtype, want.shape), name
        if name.startswith("output"):
            assert have.stride() == want.stride(), name
        assert same_bits(have, want), name


def same_bits(have: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(torch.equal(have, want) or ((have == want) | (have.isnan() & want.isnan())).all())


def session_of(model: Any) -> Session:
    return compiled_call(model).session
