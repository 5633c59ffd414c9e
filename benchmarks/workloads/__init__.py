"""Models and data to train, to measure and to show: real architectures, written here, fed by data made here.

Each file holds one workload: a model in plain `torch.nn` whose `forward(*batch)` is the scalar training loss,
so that model and loss are one compiled region, with what it takes to say how well the model does on data that
it was never trained on. Where the data comes from is told in `data/`; nothing is downloaded. Default sizes are
for benchmarks (feature maps outweigh weights, a step takes a second or so on two cores); `tiny` sizes are for
tests.

What may not live here: anything that knows of Encore, its errors aside (models import torch and each other, no
more), training loops, measurements, and models whose graph depends on the values in a batch.
"""

import inspect
from collections.abc import Callable, Mapping

import torch

from benchmarks.workloads import (
    alexnet,
    deepspeech2,
    inception,
    lm,
    nin,
    nmt,
    overfeat,
    resnet,
    speech,
    transformer,
    vgg16,
)
from benchmarks.workloads.workload import Batch, Workload
from encore.errors import OptionError, listed

__all__ = ["NAMED_SIZES", "TINY_SIZES", "WORKLOADS", "Batch", "Workload", "build", "named_sizes", "tiny"]

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "alexnet": alexnet.workload,
    "deepspeech2": deepspeech2.workload,
    "inception": inception.workload,
    "lm": lm.workload,
    "nin": nin.workload,
    "nmt": nmt.workload,
    "overfeat": overfeat.workload,
    "resnet": resnet.workload,
    "resnet152": resnet.workload_152,
    "speech": speech.workload,
    "transformer": transformer.workload,
    "vgg16": vgg16.workload,
}
"""Factories by name. The keyword arguments of each are its sizes, and their defaults its benchmark size."""

TINY_SIZES: dict[str, dict[str, int]] = {
    "alexnet": {"batch_size": 16, "width": 8, "resolution": 64, "classes": 4},
    "deepspeech2": {"batch_size": 8, "frames": 32, "bins": 32, "channels": 4, "hidden": 32, "layers": 2},
    "inception": {"batch_size": 16, "width": 16, "resolution": 32, "classes": 4},
    "lm": {"batch_size": 8, "hidden": 32, "steps": 16},
    "nin": {"batch_size": 16, "width": 4, "resolution": 67, "classes": 4},
    "nmt": {"batch_size": 8, "hidden": 32, "steps": 6},
    "overfeat": {"batch_size": 16, "width": 4, "resolution": 71, "classes": 4},
    "resnet": {"batch_size": 8, "width": 8, "resolution": 64, "classes": 4},
    "resnet152": {"batch_size": 8, "width": 4, "resolution": 64, "classes": 4},
    "speech": {"batch_size": 4, "frames": 24, "bins": 32, "channels": 4, "hidden": 32},
    "transformer": {"batch_size": 8, "hidden": 32, "layers": 2, "heads": 2, "steps": 20},
    "vgg16": {"batch_size": 16, "width": 8, "resolution": 32, "classes": 4},
}
"""Sizes at which the same architecture trains a step in a fraction of a second."""


NAMED_SIZES: dict[str, dict[str, dict[str, int | str]]] = {
    "deepspeech2": {"paper": {"batch_size": 32, "frames": 300, "bins": 161, "hidden": 1760, "layers": 7}},
    "lm": {"ecornn": {"batch_size": 32, "hidden": 650, "layers": 2, "steps": 35, "level": "word"}},
    "nmt": {
        "ecornn": {"batch_size": 128, "hidden": 512, "layers": 2, "steps": 100, "task": "diary"},
        "ecornn-batch": {"batch_size": 256, "hidden": 512, "layers": 2, "steps": 100, "task": "diary"},
        "ecornn-hidden": {"batch_size": 128, "hidden": 1024, "layers": 2, "steps": 100, "task": "diary"},
    },
    "resnet152": {"echo": {"batch_size": 32, "resolution": 224, "classes": 1000}},
}
"""Sizes at which others have published figures: EcoRNN's translation (as it was; twice the batch, which its savings
made room for; twice as wide) and language model, Echo's ResNet, and Deep Speech 2 as its paper has it."""


def build(name: str, *, seed: int = 0, **sizes: int | float | str) -> Workload:
    """The workload called `name`, its weights drawn from `seed`; the global generator is left as it was.

    `size="tiny"`, or the name of one of its `NAMED_SIZES`, stands for several sizes at once; those given beside it
    differ from them.
    """
    if name not in WORKLOADS:
        raise OptionError(f"no workload is called {name!r}; known workloads: {', '.join(sorted(WORKLOADS))}")
    if "size" in sizes:
        sizes = {**named_sizes(name, str(sizes.pop("size"))), **sizes}
    factory = WORKLOADS[name]
    if unknown := sizes.keys() - (known := inspect.signature(factory).parameters.keys()):
        raise OptionError(f"{name} has no size {listed(unknown)}; it has {listed(known)}, and size for several at once")
    with torch.random.fork_rng(devices=[]):  # models are initialised on the CPU, by its generator alone
        torch.default_generator.manual_seed(seed)
        return factory(**sizes)


def named_sizes(name: str, size: str) -> Mapping[str, int | str]:
    """What `size="tiny"` or another name stands for."""
    named: dict[str, Mapping[str, int | str]] = {"tiny": TINY_SIZES[name], **NAMED_SIZES.get(name, {})}
    if size not in named:
        raise OptionError(f"{name} has no size called {size!r}; known names: {listed(named)}")
    return named[size]


def tiny(name: str, *, seed: int = 0) -> Workload:
    """The workload called `name` at its `TINY_SIZES`: the same graph in kind, small enough for any test."""
    return build(name, seed=seed, size="tiny")
