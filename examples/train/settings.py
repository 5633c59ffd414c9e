"""What a run is: everything that its loss curve depends on, checked before anything is built."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from benchmarks.workloads import NAMED_SIZES, WORKLOADS, Workload, build, named_sizes
from encore.errors import OptionError, listed
from encore.options import make_options
from encore.tiers.limits import available_memory
from encore.units import MOST_COUNT, SHOWN_LETTERS, bytes_text

Size = int | float | str
FILES = ("source", "target")
"""Sizes that name files: what stands in them belongs to the run."""
LARGE_BATCH = 1 << 16
"""Larger ones are compared with the memory before they are made."""


@dataclass(frozen=True)
class Settings:
    """What is trained, and how. A run goes on from a checkpoint only if these are the same."""

    workload: str
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Those that differ from the workload's own; `batch_size` is one of them."""
    learning_rate: float | None = None
    """None is the workload's own."""
    seed: int = 0
    """Of the weights and of dropout; batches are numbered and have no other seed."""
    every: int = 50
    """Steps from one checkpoint, and one look at the metric, to the next."""
    budget: str | None = None
    overhead: float | None = None
    lowering: str | None = None
    tiers: str | None = None
    """Where feature maps may go, separated by commas."""
    eager: bool = False
    """Plain PyTorch, to compare with."""

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise OptionError(f"no workload is called {self.workload!r}; there are {listed(WORKLOADS)}")
        if self.every < 1:
            raise OptionError(f"--every {self.every} is not accepted; give a count of at least 1")
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"--seed {self.seed} is not accepted; give a whole number from 0 to 2**63 - 1")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise OptionError(f"--learning-rate {rate} is not accepted; give a positive number, such as 1e-3")
        if self.eager and (self.budget, self.overhead, self.lowering, self.tiers) != (None, None, None, None):
            raise OptionError("--eager is plain PyTorch; give it without --budget, --overhead, --lowering and --tiers")
        make_options(self.compile_options)

    @property
    def compile_options(self) -> dict[str, Any]:
        """What `encore.compile` is told."""
        tiers = self.tiers and self.tiers.split(",")
        return {"budget": self.budget, "overhead": self.overhead, "lowering": self.lowering, "tiers": tiers}

    @property
    def all_sizes(self) -> dict[str, Size]:
        """With the workload's own where nothing was said."""
        return {**default_sizes(self.workload), **self.sizes}

    @property
    def batch_size(self) -> int:
        return int(self.all_sizes["batch_size"])

    def build(self, **sizes: Size) -> Workload:
        """The workload, at other sizes where some are given."""
        chosen: dict[str, Any] = {**self.sizes, **sizes}
        if chosen.get("batch_size", 0) > LARGE_BATCH:
            self._check_batch(chosen["batch_size"])
        try:
            return build(self.workload, seed=self.seed, **chosen)
        except (ValueError, TypeError, RuntimeError, OSError, MemoryError, OverflowError) as error:
            told = ", ".join(f"{name}={size}" for name, size in chosen.items()) or "its own sizes"
            why = " ".join(str(error).split())
            raise OptionError(f"{self.workload} cannot be built with {told}: {why}") from error

    def _check_batch(self, batch_size: int) -> None:
        """A batch whose inputs alone are larger than the memory would take hours to make, and end in a kill."""
        example = sum(tensor.untyped_storage().nbytes() for tensor in self.build(batch_size=1).batch(0))
        needed, free = batch_size * example, available_memory()
        if free is not None and needed > free:
            raise OptionError(
                f"a batch of {batch_size} examples takes {bytes_text(needed)} for its inputs alone, and "
                f"{bytes_text(free)} of memory are free; give a smaller --batch-size"
            )

    def facts(self) -> dict[str, Size | bool | None]:
        """The run as flat facts, for a checkpoint to carry: sizes one by one, files by what stands in them."""
        told = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "sizes"}
        for name, size in self.all_sizes.items():
            told[name] = _digest(str(size)) if name in FILES and size is not None else size
        return told


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a resumed run asks for that its checkpoint was not made with, in the user's words."""
    return [
        f"{_spelled(name)} was {_shown(then.get(name))} and is {_shown(now.get(name))}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    ]


def _spelled(name: str) -> str:
    options = {item.name for item in dataclasses.fields(Settings)} | {"batch_size", *FILES}
    if name == "workload":
        return "the workload"
    if name in FILES:
        return f"the text of --{name}"
    return f"--{name.replace('_', '-')}" if name in options else f"--size {name}"


def _shown(value: Any) -> str:
    return "not given" if value is None or value is False else "given" if value is True else str(value)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}; name a text file") from error


def default_sizes(workload: str) -> dict[str, Size]:
    """The keyword arguments of a workload's factory, and their defaults."""
    parameters = inspect.signature(WORKLOADS[workload]).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def read_sizes(workload: str, given: Sequence[str]) -> dict[str, Size]:
    """`["hidden=512", "dropout=0.1"]` as sizes of a workload, each of the kind that it wants. A name, such as
    `tiny`, stands for several; those given beside it differ from them."""
    if workload not in WORKLOADS:
        raise OptionError(f"no workload is called {workload!r}; there are {listed(WORKLOADS)}")
    known, names = default_sizes(workload), {"tiny", *NAMED_SIZES.get(workload, {})}
    several: dict[str, Size] = {}
    sizes: dict[str, Size] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if text in names:
            several |= named_sizes(workload, text)
            continue
        if not (name and equals and value):
            raise OptionError(
                f"--size {text} cannot be read; write name=number, such as batch_size=8, or {listed(names)} for several"
            )
        if name not in known:
            raise OptionError(f"{workload} has no size {name!r}; it has {listed(known)}")
        if name in sizes:
            raise OptionError(f"--size {name} is given twice; give it once")
        sizes[name] = _read_size(workload, name, value)
    return {**several, **sizes}


def _read_size(workload: str, name: str, value: str) -> Size:
    """A size as its annotation wants it."""
    kind = get_type_hints(WORKLOADS[workload])[name]
    kinds = set(get_args(kind)) or {kind}
    if not kinds & {int, float}:
        return value
    whole = float not in kinds
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = -1
    if not (1 if whole else 0) <= number <= MOST_COUNT:  # never true of NaN
        accepted = f"a whole number from 1 to {MOST_COUNT}" if whole else "a number of at least 0"
        raise OptionError(f"--size {name}={value[:SHOWN_LETTERS]} is not accepted; give {accepted}")
    return number
