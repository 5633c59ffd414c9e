"""Training steps made of the samples that PyTorch tests its own operators and modules with (OpInfo and ModuleInfo).

A sample becomes a step: its differentiable inputs are multiplied by one, so that there is an activation to recompute;
the operator or module is called; what it returns is weighted and summed. The step runs in eager PyTorch and through
Encore at the lowest budget, twice, and every output and gradient is compared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils import _pytree as pytree

import encore
from encore.api import compiled_call
from support.compare_with_eager import same_bits
from support.rounding import FACTOR, SMALLEST, ULPS, largest

SEED = 11
STEPS = 2
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """A call to try: arguments, and the module they go to where there is one."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None = None


@dataclass
class Outcome:
    """How the steps of one sample compare with eager's."""

    tried: bool = True
    planned: bool = True
    reason: str = ""
    """Why there is no step to try, or why Encore leaves it to plain PyTorch."""
    wrong: list[str] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    """Operators that raised when they were probed."""
    predicted: int = 0
    measured: int = 0
    noted: bool = False
    """Does the report say that the prediction may not hold?"""

    @property
    def kind(self) -> str:
        if not self.tried:
            return "no step"
        return "wrong" if self.wrong else "equal" if self.planned else "plain"


def try_sample(sample: Sample, lowering: str, *, measure: bool = False) -> Outcome:
    """Run the sample in eager and through Encore at the lowest budget."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            weights = weights_of(sample)
            eager = [run(step_of(sample), sample, weights) for _ in range(STEPS)]
            repeatable = all(same_bits(eager[0][name], eager[1][name]) for name in eager[0])
        except Exception as error:  # some samples are calls that PyTorch itself rejects
            return Outcome(tried=False, reason=f"eager raises {type(error).__name__}: {first_line(error)}")
    if not any(name.startswith("gradient") for name in eager[0]):
        return Outcome(tried=False, reason="nothing to differentiate")
    if not repeatable:
        return Outcome(tried=False, reason="eager itself gives other numbers each time")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _through_encore(sample, lowering, weights, eager[0], measure)


def _through_encore(sample: Sample, lowering: str, weights: Any, eager: Tensors, measure: bool) -> Outcome:
    compiled = encore.compile(step_of(sample), budget="min", lowering=lowering)
    outcome = Outcome()
    counters.clear()
    with failed_probes() as outcome.probes:
        try:
            found = [run(compiled, sample, weights) for _ in range(STEPS)]
        except encore.EncoreError as error:
            return Outcome(tried=True, planned=False, reason=f"{type(error).__name__}: {first_line(error)}")
        except Exception as error:
            outcome.wrong.append(f"raises {type(error).__name__}: {first_line(error)}")
            return outcome
    session = compiled_call(compiled).session
    broken = [first_line(reason) for kind in ("graph_break", "unimplemented") for reason in counters[kind]]
    outcome.planned = bool(session.graphs) and not session.plain and not broken
    if session.plain:
        outcome.reason = first_line(session.plain[0].reason)
    elif not outcome.planned:
        outcome.reason = f"graph break: {broken[0]}" if broken else "no graph reached Encore"
    exact = in_double(sample, weights) if lowering == "fused" else None
    for step in found:
        outcome.wrong += differences(step, eager, exact)
    if measure and outcome.planned and not outcome.wrong:
        report = encore.report(compiled)
        outcome.predicted = report.planned.step_peak
        outcome.noted = any(graph.notes for graph in report.graphs)
        outcome.measured = measured_peak(compiled, sample, weights)
    return outcome


# -- a step of a sample ----------------------------------------------------------------------------------------------


def step_of(sample: Sample) -> Callable[..., Any]:
    call = sample.call

    def step(args: Any, kwargs: Any, weights: Any) -> Any:
        returned = call(*scaled(args), **scaled(kwargs))
        outputs = tensors_of(returned)
        loss = sum((real(output) * weight).sum() for output, weight in zip(differentiable(outputs), weights))  # noqa: B905
        return loss, [output.detach() for output in outputs]

    return step


def scaled(tree: Any) -> Any:
    """The tree with every tensor that requires a gradient multiplied by one."""
    if isinstance(tree, torch.Tensor):
        return tree * 1 if tree.requires_grad else tree
    if type(tree) in (tuple, list):
        return type(tree)([scaled(item) for item in tree])
    if type(tree) is dict:
        return {key: scaled(item) for key, item in tree.items()}
    return tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, tuple | list):
        return [tensor for item in tree for tensor in tensors_of(item)]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in tensors_of(item)]
    return []


def differentiable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def weights_of(sample: Sample) -> list[torch.Tensor]:
    """Weights for the outputs: noise, since a gradient of ones hides errors that cancel."""
    args, kwargs = fresh((sample.args, sample.kwargs))
    torch.manual_seed(SEED)
    outputs = differentiable(tensors_of(copy_of(sample).call(*scaled(args), **scaled(kwargs))))
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(real(output).shape, generator=generator).to(real(output).dtype) for output in outputs]


def copy_of(sample: Sample) -> Sample:
    """The sample on a copy of its module, whose buffers may change."""
    if sample.module is None:
        return sample
    module = copy.deepcopy(sample.module)
    return Sample(module, sample.args, sample.kwargs, module)


def fresh(tree: Any) -> Any:
    """Copies of all tensors, as leaves."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        copied = tensor.detach().clone() if 0 not in tensor.stride() else tensor.detach()
        return copied.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, leaf, tree)


def measured_peak(step: Callable[..., Any], sample: Sample, weights: Any) -> int:
    """What the allocator says of one step. Copies of the arguments are made before it."""
    args, kwargs = fresh((sample.args, sample.kwargs))
    leaves = [leaf for leaf in tensors_of((args, kwargs)) if leaf.requires_grad]
    if sample.module is not None:
        leaves += [parameter for parameter in sample.module.parameters() if parameter.requires_grad]

    for leaf in leaves:
        leaf.grad = None

    def once() -> None:
        loss, outputs = step(args, kwargs, weights)
        loss.backward()
        del outputs  # held while backward runs, as the prediction assumes

    peak = encore.measure(once).step_peak
    for leaf in leaves:
        leaf.grad = None
    return peak


def run(step: Callable[..., Any], sample: Sample, weights: Any) -> Tensors:
    """Outputs, gradients and buffers after one step, by name."""
    args, kwargs = fresh((sample.args, sample.kwargs))
    buffers = {} if sample.module is None else {name: held.clone() for name, held in sample.module.named_buffers()}
    torch.manual_seed(SEED)
    loss, outputs = step(args, kwargs, weights)
    leaves = {f"argument {number}": leaf for number, leaf in enumerate(tensors_of((args, kwargs)))}
    if sample.module is not None:
        leaves |= dict(sample.module.named_parameters())
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if leaves else ()
    found = {"loss": loss.detach()}
    found |= {f"output {number}": output for number, output in enumerate(outputs)}
    for name, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            found[f"gradient of {name}"] = gradient
    if sample.module is not None:
        found |= {f"buffer {name}": held.clone() for name, held in sample.module.named_buffers()}
        with torch.no_grad():
            for name, held in sample.module.named_buffers():
                held.copy_(buffers[name])
    found["generator"] = torch.get_rng_state()
    return {name: tensor.to_dense() if tensor.layout is not torch.strided else tensor for name, tensor in found.items()}


# -- comparing -------------------------------------------------------------------------------------------------------


def differences(found: Tensors, eager: Tensors, exact: Tensors | None) -> list[str]:
    """What differs from eager by more than the lowering may: nothing in the eager lowering (`exact` is None)."""
    if sorted(found) != sorted(eager):
        return [f"only one side has {', '.join(sorted(found.keys() ^ eager.keys()))}"]
    wrong = []
    for name, want in eager.items():
        have = found[name]
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            wrong.append(f"{name} is {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}")
        elif not same_bits(have, want) and not (exact is not None and _as_close(have, want, exact.get(name))):
            apart = largest(real(have).double() - real(want).double())
            wrong.append(f"{name} differs by {apart:.3g} of {largest(real(want).double()):.3g}")
    return wrong


def _as_close(have: torch.Tensor, want: torch.Tensor, exact: torch.Tensor | None) -> bool:
    """No further from float64 than half as much again as eager, or than a few roundings."""
    if not (have.is_floating_point() or have.is_complex()):
        return False
    have, want = real(have).double(), real(want).double()
    truth = want if exact is None else real(exact).double()
    if not torch.equal(have.isnan(), want.isnan()):
        return False
    rounding = ULPS[torch.float32] * torch.finfo(torch.float32).eps * (5 if exact is None else 1)
    return largest(have - truth) <= FACTOR * largest(want - truth) + rounding * (largest(truth) + SMALLEST)


def in_double(sample: Sample, weights: Any) -> Tensors:
    """The step in float64; nothing where that cannot be run."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(tensor.dtype, tensor.dtype)
        return tensor.detach().to(wide).requires_grad_(tensor.requires_grad)

    args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (sample.args, sample.kwargs))
    module = None if sample.module is None else copy.deepcopy(sample.module).double()
    wide = Sample(module or sample.call, args, kwargs, module)
    with contextlib.suppress(Exception):
        return run(step_of(wide), wide, [weight.double() for weight in weights])
    return {}


@contextlib.contextmanager
def failed_probes() -> Iterator[list[str]]:
    """Collects what Encore logs about operators that could not be probed."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage()) if "cannot be run" in record.msg else None  # type: ignore[method-assign]
    logger = logging.getLogger("encore")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def name_of(info: Any) -> str:
    """The name of a database entry, with its variant."""
    variant = getattr(info, "variant_test_name", "")
    return f"{info.name}.{variant}" if variant else str(info.name)


def first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]


# -- PyTorch's databases ---------------------------------------------------------------------------------------------


@functools.cache
def databases() -> tuple[dict[str, Any], dict[str, Any]]:
    """Operators with a gradient in float32 on CPU, and modules, by name."""
    flags = "__allow_nonbracketed_mutation_flag"  # importing forbids every later test to set backends' flags
    before = getattr(torch.backends, flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations
        from torch.testing._internal.common_modules import module_db
    setattr(torch.backends, flags, before)
    # Samples that draw set a seed first, with context managers that Dynamo does not trace. Steps are seeded here.
    setattr(invocations, "wrapper_set_seed", lambda operator, *args, **kwargs: operator(*args, **kwargs))  # noqa: B010
    operators = [info for info in invocations.op_db if info.supports_autograd]
    operators = [info for info in operators if torch.float32 in info.supported_dtypes("cpu")]
    return {name_of(info): info for info in operators}, {name_of(info): info for info in module_db}


def operator_samples(info: Any, most: int) -> list[Sample]:
    """The first samples of an operator's database entry, spread over those there are."""
    torch.manual_seed(SEED)
    given = list(itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=True), 64))
    return [Sample(info.op, (one.input, *one.args), dict(one.kwargs)) for one in spread(given, most)]


def module_samples(info: Any, most: int) -> list[Sample]:
    torch.manual_seed(SEED)
    given = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True)
    samples = []
    for one in spread(list(given), most):
        if one.forward_input is None:
            continue
        given_to = (one.constructor_input.args, one.constructor_input.kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, _single, given_to)
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            module = info.module_cls(*args, **kwargs).train()
        sample = Sample(module, tuple(one.forward_input.args), dict(one.forward_input.kwargs), module)
        if isinstance(module, LazyModuleMixin):  # takes its shapes from the first call
            sample.call(*fresh(sample.args), **fresh(sample.kwargs))
        samples.append(sample)
    return samples


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """Samples of constructors are float64 where PyTorch's tests make that the default."""
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def spread(given: list[Any], most: int) -> list[Any]:
    if len(given) <= most:
        return given
    return [given[number * (len(given) - 1) // (most - 1)] for number in range(most)] if most > 1 else given[:1]
