"""`python -m examples.train`: from the arguments to a run."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from encore.cli.command_line import DONE, TIERS, CommandParser, run_command
from encore.errors import EncoreError, OptionError
from encore.units import SHOWN_LETTERS
from examples.train.batches import LargestBatch, largest_batch
from examples.train.loop import train
from examples.train.outcome import Outcome
from examples.train.settings import Settings, read_sizes

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""What PyTorch's allocators say."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code."""
    return run_command(parser(), argv)


def parser() -> argparse.ArgumentParser:
    """The workload and the options of its run."""
    summary = "Train a workload within a budget; a run that was killed goes on."
    top = CommandParser(prog="python -m examples.train", description=summary)
    top.set_defaults(run=run)
    top.add_argument("workload", metavar="WORKLOAD", help="its name; a wrong one lists those there are")
    top.add_argument("--budget", metavar="B", help="bytes, 2GiB, 500MB, 60%% or min; exit code 2 if out of reach")
    top.add_argument("--overhead", type=float, metavar="F", help="extra time allowed, as a fraction (default: 0.05)")
    top.add_argument("--eager", action="store_true", help="plain PyTorch, to compare with")
    top.add_argument("--lowering", metavar="L", help="fused or eager: whose gradients are plain PyTorch's, bit for bit")
    top.add_argument("--tiers", metavar="T", help=TIERS)
    top.add_argument("--steps", type=int, default=100, metavar="N", help="steps to train in all (default: 100)")
    top.add_argument("--batch-size", type=int, metavar="N", help="examples a step (default: the workload's)")
    top.add_argument(
        "--size", action="append", default=[], metavar="NAME=N", help="a size, such as hidden=512, or tiny"
    )
    top.add_argument("--source", metavar="FILE", help="your own text, a sentence a line (nmt)")
    top.add_argument("--target", metavar="FILE", help="its translation, line by line (nmt)")
    top.add_argument("--learning-rate", type=float, metavar="R", help="Adam's (default: the workload's)")
    top.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and dropout (default: 0)")
    top.add_argument("--checkpoint", type=Path, metavar="DIR", help="keep checkpoints there, and go on from the newest")
    top.add_argument("--every", type=int, default=50, metavar="N", help="steps between checkpoints (default: 50)")
    top.add_argument(
        "--largest-batch", action="store_true", help="find the largest batch that fits, with and without Encore"
    )
    top.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return top


def run(arguments: argparse.Namespace) -> int:
    """Print what came of a run."""
    found = outcome(arguments)
    print(found.to_json() if arguments.json else found)
    return DONE


def outcome(arguments: argparse.Namespace) -> Outcome | LargestBatch:
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
