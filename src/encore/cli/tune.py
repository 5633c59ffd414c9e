"""`encore tune`: measure and cache the fastest layout for each size of recurrent layer on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from encore.devices import is_here
from encore.errors import OptionError
from encore.rnn import tuning
from encore.terminal import progress, terminal_table
from encore.tiers.limits import available_memory
from encore.units import MOST_COUNT, bytes_text, seconds_text

CELLS = {"LSTM": "lstm", "GRU": "gru", "RNN": "elman"}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Tuned:
    """The measurements of one size."""

    size: tuning.Size
    seconds: dict[tuning.LayerLayout, float]
    """Seconds of forward and backward, by layout."""
    known: bool
    """Whether it was in the cache."""

    @property
    def best(self) -> tuning.LayerLayout:
        return min(self.seconds, key=lambda layout: self.seconds[layout])

    @property
    def gain(self) -> float:
        """How much faster the best layout is than the one that is used without measuring."""
        return self.seconds[tuning.rule(self.size)] / self.seconds[self.best]

    def to_dict(self) -> dict[str, object]:
        size = self.size
        return {
            "cell": size.cell,
            "inputs": size.inputs,
            "hidden": size.hidden,
            "steps": size.steps,
            "batch": size.batch,
            "stash": "fast" if size.keeps else "lean",
            "dtype": str(size.dtype).removeprefix("torch."),
            "device": size.device,
            "threads": size.threads,
            "layouts": {str(layout): seconds for layout, seconds in self.seconds.items()},
            "best": str(self.best),
            "gain": self.gain,
            "known": self.known,
        }


def sizes(arguments: argparse.Namespace) -> list[tuning.Size]:
    """The sizes that the arguments ask for; mistakes are reported before anything runs."""
    for name, given, known in (
        ("cell", arguments.cell, tuple(CELLS)),
        ("stash", arguments.stash, ("fast", "lean")),
        ("dtype", [arguments.dtype], tuple(DTYPES)),
        ("device", [arguments.device], ("cpu", "cuda")),
    ):
        for value in given:
            if value not in known:
                raise OptionError(f"--{name} takes {', '.join(known)}; got {value!r}")
    if not is_here(arguments.device):
        raise OptionError("--device cuda: PyTorch finds no CUDA device here; leave it out to tune for the CPU")
    for name in ("hidden", "batch", "steps", "inputs"):
        given = getattr(arguments, name)
        if not all(1 <= number <= MOST_COUNT for number in ([given] if isinstance(given, int) else given or ())):
            raise OptionError(f"--{name} takes numbers from 1 to {MOST_COUNT}; got {given}")
    threads = torch.get_num_threads() if arguments.device == "cpu" else 0
    found = [
        tuning.Size(
            CELLS[cell], arguments.inputs or hidden, hidden, steps, batch, stash == "fast", DTYPES[arguments.dtype],
            arguments.device, threads,
        )
        for cell in arguments.cell
        for stash in (arguments.stash if cell != "RNN" else ["fast"])
        for hidden in arguments.hidden
        for batch in arguments.batch
        for steps in arguments.steps
    ]  # fmt: skip
    for size in found:
        needed, free = least_bytes(size), available_memory()
        if size.device == "cpu" and free is not None and needed > free:
            raise OptionError(
                f"a layer of {size.hidden} units with {size.inputs} inputs, on {size.batch} sequences of {size.steps} "
                f"steps, takes {bytes_text(needed)} or more, and {bytes_text(free)} of memory are free; "
                "give smaller numbers"
            )
    return list({size.key: size for size in found}.values())


def least_bytes(size: tuning.Size) -> int:
    """The least memory of a step of this size: weights and their gradients, inputs, outputs and their gradients."""
    weights = size.hidden * (size.inputs + size.hidden)
    return 2 * (weights + size.steps * size.batch * (size.inputs + size.hidden)) * size.dtype.itemsize


def run(arguments: argparse.Namespace) -> list[Tuned]:
    """Measure the sizes that are not in the cache."""
    asked = sizes(arguments)
    found: list[Tuned] = []
    with progress("tuning", len(asked)) as advance:
        for size in asked:
            known = {} if arguments.again else tuning.measured(size)
            found.append(Tuned(size, known or tuning.tune(size), bool(known)))
            advance(f"{size.cell}, {size.hidden} units, batch {size.batch}, {size.steps} steps: {found[-1].best}")
    return found


COLUMNS = ("cell", "stash", "type", "inputs", "units", "batch", "steps", "best layout", "step", "slowest", "gain")


def render(found: Sequence[Tuned]) -> str:
    """A table for a terminal."""
    rows = [
        (
            one.size.cell, "fast" if one.size.keeps else "lean", str(one.size.dtype).removeprefix("torch."),
            str(one.size.inputs), str(one.size.hidden), str(one.size.batch), str(one.size.steps), str(one.best),
            seconds_text(one.seconds[one.best]), seconds_text(max(one.seconds.values())), f"{one.gain:.2f}x",
        )
        for one in found
    ]  # fmt: skip
    known = sum(one.known for one in found)
    notes = ["gain: the layout that is used without measuring over the best one"]
    notes += [f"the best one is used where it gains {tuning.MUST_GAIN - 1:.0%}"]
    notes += [f"{known} of {len(found)} sizes were known; --again measures them once more"] if known else []
    return "\n".join([terminal_table(COLUMNS, rows, words=3), "", *notes])


def to_json(found: Sequence[Tuned]) -> str:
    """Everything as JSON; `encore_tune` is the version of its layout."""
    return json.dumps({"encore_tune": 1, "sizes": [one.to_dict() for one in found]}, indent=2)
