"""`encore train`: from what was typed to a run."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from encore.errors import EncoreError, OptionError
from encore.train.batches import LargestBatch, largest_batch
from encore.train.loop import train
from encore.train.outcome import Outcome
from encore.train.settings import Settings, read_sizes
from encore.units import SHOWN_LETTERS

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""What PyTorch's allocators say."""


def run(arguments: argparse.Namespace) -> Outcome | LargestBatch:
    """Train, or look for the largest batch."""
    settings = _settings(arguments)
    if not arguments.largest_batch:
        with _warnings_in_a_line(), _memory_errors_in_a_line():
            return train(settings, arguments.steps, arguments.checkpoint)
    typed_batch = arguments.batch_size is not None or any(text.startswith("batch_size=") for text in arguments.size)
    if arguments.checkpoint is not None or typed_batch:
        raise OptionError("--largest-batch looks for a batch size; give it without --batch-size and --checkpoint")
    with _warnings_in_a_line(), _memory_errors_in_a_line():
        return largest_batch(settings)


def _settings(arguments: argparse.Namespace) -> Settings:
    typed = {"batch_size": arguments.batch_size, "source": arguments.source, "target": arguments.target}
    sizes = [*arguments.size, *(f"{name}={value}" for name, value in typed.items() if value is not None)]
    return Settings(
        workload=arguments.workload,
        sizes=read_sizes(arguments.workload, sizes),
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        every=arguments.every,
        budget=arguments.budget,
        overhead=arguments.overhead,
        lowering=arguments.lowering,
        tiers=arguments.tiers,
        eager=arguments.eager,
    )


@contextlib.contextmanager
def _memory_errors_in_a_line() -> Iterator[None]:
    """An allocation that fails is an error of the sizes that were given, and a stack trace does not explain it."""
    try:
        yield
    except EncoreError:
        raise
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and not any(words in text for words in OUT_OF_MEMORY):
            raise
        raise OptionError(
            f"there is not enough memory ({text[-SHOWN_LETTERS:] or type(error).__name__}); give a smaller "
            "--batch-size or --size, or a --budget"
        ) from error


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Encore's own warnings are sentences for whoever typed the command; where in the code they arose tells nothing."""
    before = warnings.formatwarning

    def sentence(message: Warning | str, *where: Any, **more: Any) -> str:
        told = str(message)
        return f"{told}\n" if told.startswith("encore: ") else before(message, *where, **more)

    warnings.formatwarning = sentence
    try:
        yield
    finally:
        warnings.formatwarning = before
