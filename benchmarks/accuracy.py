"""The suite `accuracy`: training with activations that are saved in fewer bits, compared with eager training.

One CNN and one LSTM, each trained several times from the same weights on the same batches: by eager PyTorch; by eager
once more with a single weight changed by its last bit, which shows how far rounding alone drives two runs apart; by
Encore with encodings alone, lossless and with one lossy type at a time, as few bytes as there can be; and by eager with
every module's output, a recurrent cell's state among them, reduced to that type at once, so that forward computes with
it. The last is what Gist argues against (Jain et al., ISCA 2018): the same bits are lost, but the error travels through
every layer above.

Eager, lossless Encore and Encore with lossy codecs at the default bound on the gradient error train from three seeds
each. What eager's end losses and scores differ by over seeds is the noise that the others are compared with
(`within_seed_noise`).
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import encore
from benchmarks.schema import Layout, Written
from benchmarks.workloads import TINY_SIZES, Workload, build
from encore.codecs import CODECS, Codec
from encore.machine import Machine, this_machine
from encore.terminal import progress

SIZES: dict[str, dict[str, int]] = {
    "vgg16": {"batch_size": 32, "width": 16, "resolution": 32, "classes": 10},
    "lm": {"batch_size": 16, "hidden": 128, "steps": 35},
}
STEPS, QUICK_STEPS = 200, 4
CHECKED = 60
"""Steps after which the gradient error of lossy codecs is measured again. No divisor of `STEPS`: the step after these
is the one whose peak is measured."""
LOSSY = ("fp16", "fp10", "fp8_e4m3")
"""Types that activations are saved in, from the widest to the narrowest."""
EAGER, ONE_ROUNDING_APART, LOSSLESS = "eager", "eager, one rounding apart", "Encore, lossless"
BOUNDED = "Encore, lossy within 0.01"
SEEDED = (EAGER, LOSSLESS, BOUNDED)
"""Variants that train from every seed; the others from the first."""
SEEDS = (0, 1, 2)
LAST = 20
"""Steps at the end, whose mean loss is reported."""


@dataclass(frozen=True, slots=True)
class Training:
    """One run of one variant."""

    variant: str
    losses: tuple[float, ...]
    """Of every step; it ends where the loss was no number any more."""
    score: dict[str, float]
    """On data that no batch contained; empty where training failed."""
    peak: int
    """Measured, of one step."""
    off: float
    """The largest distance from eager's loss at any step, relative to it."""
    seed: int = 0
    """Of the weights and of dropout."""
    gradient_error: float | None = None
    """The largest measured gradient error of lossy codecs, where some are used."""

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.losses[-1])

    @property
    def loss(self) -> float:
        """The mean of the last steps."""
        last = self.losses[-LAST:]
        return sum(last) / len(last)


@dataclass(frozen=True, slots=True)
class AccuracySuite(Written):
    """One run of the suite."""

    layout = Layout("encore_accuracy", 3)

    machine: Machine
    quick: bool
    steps: int
    trainings: dict[str, tuple[Training, ...]]
    """By workload."""
    seconds: float = 0.0
    """What all of it took."""


def run_accuracy(*, quick: bool = False) -> AccuracySuite:
    """Train everything, reporting progress on stderr."""
    steps = QUICK_STEPS if quick else STEPS
    trainings = {}
    for name, sizes in SIZES.items():
        make = functools.partial(build, name, **(TINY_SIZES[name] if quick else sizes))
        with progress(f"{name:<11}", len(runs())) as advance:
            trainings[name] = _trainings(make, steps, advance)
    return AccuracySuite(this_machine(), quick, steps, trainings)


def variants() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """How a model is trained, by name."""
    found: dict[str, Callable[[nn.Module], nn.Module]] = {
        EAGER: lambda model: model,
        ONE_ROUNDING_APART: one_rounding_apart,
        LOSSLESS: _encoded,
        BOUNDED: functools.partial(_encoded, lossy=True, lossy_check=CHECKED),
    }
    for name in LOSSY:
        found[f"Encore, {name}"] = functools.partial(_encoded, lossy=(name,))
        found[f"{name} at once"] = functools.partial(reduce_at_once, codec=CODECS[name])
    return found


@dataclass(frozen=True, slots=True)
class SeedNoise:
    """A number over seeds: of eager, and of a variant."""

    what: str
    eager: tuple[float, ...]
    variant: tuple[float, ...]

    @property
    def spread(self) -> float:
        """What eager's numbers differ by."""
        return max(self.eager) - min(self.eager)

    @property
    def difference(self) -> float:
        """Between the means."""
        return sum(self.variant) / len(self.variant) - sum(self.eager) / len(self.eager)

    @property
    def within(self) -> bool:
        """Is the mean no further from eager's than eager's own seeds are from each other?"""
        return math.isfinite(self.difference) and abs(self.difference) <= self.spread


def within_seed_noise(trainings: Sequence[Training], variant: str) -> list[SeedNoise]:
    """The end loss and every score of a variant next to eager's, over the seeds that both have trained from."""
    eager = {one.seed: one for one in trainings if one.variant == EAGER}
    mine = {one.seed: one for one in trainings if one.variant == variant and one.seed in eager}
    numbers: dict[str, Callable[[Training], float]] = {"loss": lambda one: one.loss}
    for name in next(iter(eager.values())).score:
        numbers[name] = functools.partial(_score, name=name)
    return [
        SeedNoise(name, tuple(number(eager[seed]) for seed in mine), tuple(number(one) for one in mine.values()))
        for name, number in numbers.items()
    ]


def _score(training: Training, name: str) -> float:
    return training.score.get(name, math.nan)


def one_rounding_apart(model: nn.Module) -> nn.Module:
    """The model with one weight, the largest of its last matrix, moved to the next number of its type."""
    *_, last = (parameter for parameter in model.parameters() if parameter.dim() > 1)
    with torch.no_grad():
        weights = last.view(-1)
        largest = weights.abs().argmax()
        weights[largest] = torch.nextafter(weights[largest], weights.new_tensor(math.inf))
    return model


def _encoded(model: nn.Module, **options: Any) -> nn.Module:
    return encore.compile(model, budget="min", methods="encode", **options)


def runs() -> list[tuple[int, str]]:
    """Every seed and variant that is trained; eager first of each seed."""
    return [(seed, variant) for seed in SEEDS for variant in variants() if seed == SEEDS[0] or variant in SEEDED]


def _trainings(make: Callable[..., Workload], steps: int, advance: Callable[[str], None]) -> tuple[Training, ...]:
    found: list[Training] = []
    eager: dict[int, tuple[float, ...]] = {}
    for seed, variant in runs():
        prepare = variants()[variant]
        found.append(_train(variant, make(seed=seed), prepare, steps, eager.get(seed, ()), seed))
        if variant == EAGER:
            eager[seed] = found[-1].losses
        advance(f"{variant}, seed {seed}: loss {found[-1].loss:.4f}")
        torch.compiler.reset()
        gc.collect()
    return tuple(found)


def _train(
    variant: str,
    workload: Workload,
    prepare: Callable[[nn.Module], nn.Module],
    steps: int,
    truth: tuple[float, ...],
    seed: int,
) -> Training:
    model = prepare(workload.model)
    optimizer = torch.optim.Adam(workload.model.parameters(), workload.learning_rate)
    losses: list[float] = []
    torch.manual_seed(seed)
    for number in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(*workload.batch(number))
        loss.backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.step()
    finished = math.isfinite(losses[-1])
    off = max((abs(mine - its) / abs(its) for mine, its in zip(losses, truth, strict=False)), default=0.0)
    off = off if finished else math.inf  # `max` ignores a NaN
    optimizer.zero_grad(set_to_none=True)
    peak = encore.measure(lambda: model(*workload.batch(0)).backward()).step_peak
    score = workload.score(model) if finished else {}
    return Training(variant, tuple(losses), score, peak, off, seed, _gradient_error(model, variant))


def _gradient_error(model: nn.Module, variant: str) -> float | None:
    lossy = encore.report(model).lossy if variant.startswith("Encore") else None
    return None if lossy is None else lossy.error


def reduce_at_once(model: nn.Module, codec: Codec) -> nn.Module:
    """Every module within the model hands on its outputs as the codec gives them back: layers, and recurrent cells
    their states. Gradients pass as if nothing had happened."""

    def reduced(module: nn.Module, args: Any, output: Any) -> Any:
        return _reduced(output, codec)

    for module in model.modules():
        if module is not model:
            module.register_forward_hook(reduced)
    return model


def _reduced(output: Any, codec: Codec) -> Any:
    if isinstance(output, tuple | list):
        return type(output)(_reduced(one, codec) for one in output)
    if not isinstance(output, Tensor) or not codec.accepts(output.shape, output.dtype):
        return output
    return _Reduce.apply(output, codec)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: Codec) -> Tensor:
        code = codec.encode(*codec.encode_args(x))
        return codec.decode(*codec.decode_args(code, x.shape, x.stride(), x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
