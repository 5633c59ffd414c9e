"""Models and data to train, to measure and to show: real architectures, written here, fed by data made here.

Each file holds one workload: a model in plain `torch.nn` whose `forward(*batch)` is the scalar training loss,
so that model and loss are one compiled region, with what it takes to say how well the model does on data that
it was never trained on. Where the data comes from is told in `data/`; nothing is downloaded. Default sizes are
for benchmarks (feature maps outweigh weights, a step takes a second or so on two cores); `tiny` sizes are for
tests.

What may not live here: anything that knows of Encore, its errors aside (models import torch and each other, no
more), training loops, measurements, and models whose graph depends on the values in a batch.
"""

from collections.abc import Callable

import torch

from encore.workloads import lm, nmt, resnet, speech, transformer
from encore.workloads.workload import Batch, Workload

__all__ = ["TINY_SIZES", "WORKLOADS", "Batch", "Workload", "build", "tiny"]

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "lm": lm.workload,
    "nmt": nmt.workload,
    "resnet": resnet.workload,
    "speech": speech.workload,
    "transformer": transformer.workload,
}
"""Factories by name. The keyword arguments of each are its sizes, and their defaults its benchmark size."""

TINY_SIZES: dict[str, dict[str, int]] = {
    "lm": {"batch_size": 8, "hidden": 32, "steps": 16},
    "nmt": {"batch_size": 8, "hidden": 32, "steps": 6},
    "resnet": {"batch_size": 8, "width": 8, "resolution": 64, "classes": 4},
    "speech": {"batch_size": 4, "frames": 24, "bins": 32, "channels": 4, "hidden": 32},
    "transformer": {"batch_size": 8, "hidden": 32, "layers": 2, "heads": 2, "steps": 20},
}
"""Sizes at which the same architecture trains a step in a fraction of a second."""


def build(name: str, *, seed: int = 0, **sizes: int | float) -> Workload:
    """The workload called `name`, its weights drawn from `seed`; the global generator is left as it was."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload is called {name!r}; known workloads: {', '.join(sorted(WORKLOADS))}")
    with torch.random.fork_rng(devices=[]):  # models are initialised on the CPU, by its generator alone
        torch.default_generator.manual_seed(seed)
        return WORKLOADS[name](**sizes)


def tiny(name: str, *, seed: int = 0) -> Workload:
    """The workload called `name` at its `TINY_SIZES`: the same graph in kind, small enough for any test."""
    return build(name, seed=seed, **TINY_SIZES.get(name, {}))
