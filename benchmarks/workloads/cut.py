"""Steps that compilers cut into several calls: models, the loss around them, and their sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from benchmarks.workloads import blocks, hugging_face, seq2seq
from benchmarks.workloads.workload import CutWorkload
from encore.errors import OptionError, listed

CUT_WORKLOADS: dict[str, Callable[..., CutWorkload]] = {
    "seq2seq": seq2seq.workload,
    "blocks": blocks.workload,
    "gpt2": hugging_face.gpt2,
    "t5": hugging_face.t5,
    "whisper": hugging_face.whisper,
}
"""Factories by name. The last three need the package transformers."""

TINY_CUT_SIZES: dict[str, dict[str, int]] = {
    "seq2seq": {"batch_size": 16, "hidden": 24, "embedded": 16, "steps": 12},
    "blocks": {"batch_size": 128, "width": 32, "layers": 4},
    "gpt2": {"batch_size": 16, "width": 32, "layers": 2, "heads": 2, "steps": 32, "words": 200},
    "t5": {"batch_size": 16, "width": 32, "layers": 2, "heads": 2, "steps": 24, "words": 200},
    "whisper": {"batch_size": 16, "width": 32, "layers": 2, "heads": 2, "frames": 48, "words": 200},
}
"""Sizes at which a step takes a fraction of a second."""


def build_cut(name: str, *, seed: int = 0, **sizes: int | float) -> CutWorkload:
    """The workload called `name`, its weights drawn from `seed`; the global generator is left as it was."""
    if name not in CUT_WORKLOADS:
        raise OptionError(f"no workload of several calls is called {name!r}; known workloads: {listed(CUT_WORKLOADS)}")
    factory = CUT_WORKLOADS[name]
    if unknown := sizes.keys() - (known := inspect.signature(factory).parameters.keys()):
        raise OptionError(f"{name} has no size {listed(unknown)}; it has {listed(known)}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return factory(**sizes)
