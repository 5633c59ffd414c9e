"""The first call of a graph compared with plain PyTorch: part of `ENCORE_CHECK=1`.

Dynamo's graph is a module that plain PyTorch can run. Before its first call, and once more after it has been planned
for other gradients, the compiled graph and that module each run forward and backward on copies of the
inputs, parameters and buffers among them, from the same generator states. Outputs, gradients and inputs that were
written to are compared: bit for bit in the eager lowering, up to rounding in the fused one and, beyond rounding, by
the distance of both from float64. The user's tensors, `.grad`, hooks and generators are unchanged. Operators with
effects (a custom operator that prints) run twice more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from encore.comparison import (
    Tensors,
    compare,
    compare_errors,
    cotangent,
    equal_up_to_rounding,
    same_bits,
    unlike,
)
from encore.compiler.lossy_check import has_lossy_codes
from encore.compiler.session import Session
from encore.compiler.sized_runner import SizedRunner
from encore.compiler.variants import GraphRunner
from encore.devices import default_generators
from encore.errors import CheckError, VerificationError
from encore.graph import OpClass
from encore.graph.torch_private import pytree

log = logging.getLogger("encore")


class CheckedCall:
    """A compiled graph whose first call is compared with Dynamo's module."""

    def __init__(
        self, session: Session, runner: GraphRunner | SizedRunner, module: fx.GraphModule, compiled: Callable[..., Any]
    ) -> None:
        self.session = session
        self.runner = runner
        self.module = module
        self.compiled = compiled
        self.names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        self.checked: set[tuple[tuple[int, ...], frozenset[int]]] = set()
        """The sizes, and the sets of gradients, that it has been checked for."""

    def __call__(self, *inputs: Any) -> Any:
        sizes = tuple(one for one in inputs if isinstance(one, int))
        if (sizes, self.runner.current.used) not in self.checked and torch.is_grad_enabled():
            reason = _cannot_copy(inputs)
            if reason:
                log.warning("ENCORE_CHECK: %s is not compared with eager: %s", self._name, reason)
            else:
                with self.session.check_running(), self._generators_kept():
                    self._check(inputs)
            self.checked.add((sizes, self.runner.current.used))
        return self.compiled(*inputs)

    @property
    def _name(self) -> str:
        return self.runner.current.captured.name

    def _check(self, inputs: Sequence[Any]) -> None:
        planned = self._outcome(self.compiled, inputs)
        expected = self._outcome(self.module, inputs)
        if has_lossy_codes(self.runner.current.captured.plan):
            planned, expected = (_without_gradients(found) for found in (planned, expected))
        try:
            if self.session.options.lowering == "eager":
                self._compare_bits(planned, expected, inputs)
            else:
                self._compare_up_to_rounding(planned, expected, inputs)
        except VerificationError as error:
            raise CheckError(
                f"ENCORE_CHECK: the first step of {self._name} differs from eager: {error}. This is a bug in Encore: "
                'please report it with the model; lowering="eager" or skip= may avoid it'
            ) from None

    def _compare_bits(self, planned: Tensors, expected: Tensors, inputs: Sequence[Any]) -> None:
        found = compare(planned, expected, None)
        if found.bit_equal:
            return
        again = self._outcome(self.module, inputs)
        settled = {name: tensor for name, tensor in expected.items() if same_bits(again[name], tensor)}
        compare({name: planned[name] for name in settled}, settled, (0.0, 0.0))
        if not equal_up_to_rounding(planned, expected):
            raise VerificationError(unlike(planned, expected))

    def _compare_up_to_rounding(self, planned: Tensors, expected: Tensors, inputs: Sequence[Any]) -> None:
        compare(planned, expected, None)
        if equal_up_to_rounding(planned, expected):
            return
        if any(op.kind is OpClass.RANDOM for op in self.runner.current.graph.ops):
            different = unlike(planned, expected)  # float64 draws other numbers
            if different:
                raise VerificationError(different)
            return
        wide = [_widened(given) for given in inputs]
        compare_errors(planned, expected, self._outcome(self.module, wide))

    def _outcome(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Tensors:
        """The outputs and gradients of a step, and the inputs that it writes to."""
        with self._generators_kept():
            leaves = _copies(inputs)
            given = [
                leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not one.is_leaf else leaf
                for leaf, one in zip(leaves, inputs, strict=True)
            ]
            returned = [out for out in pytree.tree_leaves(function(*given)) if isinstance(out, torch.Tensor)]
            found = {f"output {place}": out.detach().clone() for place, out in enumerate(returned)}
            outputs = self._with_gradients([out for out in returned if out.requires_grad])
            wanted = {
                name: leaf
                for name, leaf in zip(self.names, leaves, strict=True)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            }
            if outputs and wanted:
                cotangents = [cotangent(out, place) for place, out in enumerate(outputs)]
                made = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
                for name, gradient in zip(wanted, made, strict=True):
                    if gradient is not None:
                        found[f"gradient of {name}"] = gradient
            for name, tensor in zip(self.names, given, strict=True):
                if isinstance(tensor, torch.Tensor):
                    found[f"buffer {name}"] = tensor.detach()  # a kernel may write to it without telling autograd
        return found

    def _with_gradients(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs that the current plan expects gradients for."""
        tangents, used = self.runner.tangents, self.runner.current.used
        if used == tangents.everything:
            return outputs
        if len(outputs) == len(tangents.everything):
            return [out for place, out in enumerate(outputs) if place in used]
        return [out for out in outputs if not out.shape] or outputs

    @contextlib.contextmanager
    def _generators_kept(self) -> Iterator[None]:
        """Restore the state of every generator at the end."""
        modules = (getattr(self.module, str(node.target), None) for node in self.module.graph.find_nodes(op="get_attr"))
        named = [one for one in modules if isinstance(one, torch.Generator)]
        states = [(one, one.get_state()) for one in (*default_generators(), *named)]
        try:
            yield
        finally:
            for one, state in states:
                one.set_state(state)


def _cannot_copy(inputs: Sequence[Any]) -> str:
    """Return why these inputs cannot be copied; empty if they can."""
    seen: set[int] = set()
    for given in inputs:
        if isinstance(given, torch.Generator):
            return "it is given a generator"
        if not isinstance(given, torch.Tensor):
            continue
        if type(given) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return f"it is given a {type(given).__name__}"
        if given.layout is not torch.strided:
            return f"it is given a tensor of layout {given.layout}"
        if given.is_conj() or given.is_neg():
            return "it is given a tensor that is conjugated or negated lazily"
        address = given.untyped_storage().data_ptr()
        if address and address in seen:
            return "two of its inputs share memory"
        seen.add(address)
    return ""


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Copies of inputs with the same layouts; a tensor that overlaps itself cannot be written to, and is not copied."""
    made: list[Any] = []
    for given in inputs:
        if not isinstance(given, torch.Tensor):
            made.append(given)
            continue
        copy = given.detach()
        if 0 not in given.stride():
            place = (given.storage_offset(), given.size(), given.stride())
            copy = torch.empty(0, dtype=given.dtype, device=given.device).set_(given.untyped_storage().clone(), *place)
            copy = copy.detach()
        made.append(copy.requires_grad_(given.requires_grad))
    return made


def _widened(given: Any) -> Any:
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        return given
    wide = given.detach().double().requires_grad_(given.requires_grad)
    return wide if given.is_leaf else wide.clone()


def _without_gradients(found: Tensors) -> Tensors:
    """Lossy encodings change gradients alone."""
    return {name: tensor for name, tensor in found.items() if not name.startswith("gradient")}
