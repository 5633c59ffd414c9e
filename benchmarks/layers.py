"""The suite `rnn`: Encore's recurrent layers compared with `torch.nn`'s, layer by layer.

A step is forward and backward of the layers alone, with gradients for input, states and weights, in one process and in
turns. Beside the times stand the step's peak, what autograd saves between forward and backward, and for the largest
layers **their products alone**: the matrix products that the step consists of, each in the operand order that is
fastest here and into memory that is there already, with nothing in between. No layer can be faster than that with these
products. All but the largest sizes are tuned first, as `encore tune` does it. Rounds are as many as fit a time for each
size, and three at least. Attention's scores follow (`attention.py`).
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import encore
from benchmarks.attention import AttentionRow, attention_rows
from benchmarks.schema import Layout, Written
from encore.compare.trainee import median_ratio, ratio_spread
from encore.machine import Machine, this_machine
from encore.rnn import tuning
from encore.rnn.layer import kernels_for
from encore.terminal import progress

THEIRS, PRODUCTS = "torch.nn", "products alone"
SECONDS, QUICK_SECONDS = 3.0, 0.5
"""Spent on the rounds of a size of the grid."""
HEADLINE_SECONDS = 20.0
"""Spent on the rounds of every other size."""
LEAST, MOST = 3, 25
"""Rounds of a size."""
TUNED = 1 << 31
"""Sizes whose products have at most so many multiplications for each gate are tuned: larger ones would take minutes."""
GATES = {"LSTM": 4, "GRU": 3}
CALLS = 50
"""A single step of a cell is over before the clock has moved much: so many are timed together."""
BYTES_A_UNIT, SHARE = 256, 1 / 3
"""Of a layer's every unit and step, at most, and how much of the machine's memory that may be."""
BATCHES, HIDDEN, STEPS = (1, 8, 32, 64, 128), (64, 256, 512, 1024), (10, 35, 100, 500)
QUICK_BATCHES, QUICK_HIDDEN, QUICK_STEPS = (1, 8, 32), (64, 256), (10, 35)


@dataclass(frozen=True, slots=True)
class Case:
    """Layers of one size."""

    group: str
    """`large`, `grid`, `gru`, `packed`, `bfloat16` or `cells`."""
    kind: str
    """The class, of `torch.nn` and of `encore.nn`."""
    steps: int
    batch: int
    hidden: int
    """Also the width of the input."""
    layers: int = 1
    dtype: str = "float32"
    packed: bool = False
    """Sequences of lengths from all steps down to a quarter of them."""
    stashes: tuple[str, ...] = ("fast", "lean")

    def size(self, stash: str) -> tuning.Size:
        """What the layout of such a layer depends on."""
        return tuning.Size(
            self.kind.lower(), self.hidden, self.hidden, self.steps, self.batch, stash == "fast",
            getattr(torch, self.dtype), "cpu", torch.get_num_threads(),
        )  # fmt: skip

    @property
    def tuned(self) -> bool:
        return self.group != "cells" and self.steps * self.batch * self.hidden**2 <= TUNED

    def __str__(self) -> str:
        layers = f" x{self.layers}" if self.layers > 1 else ""
        kind = f"{self.kind}{' packed' if self.packed else ''}{'' if self.dtype == 'float32' else ' ' + self.dtype}"
        return f"{kind} T{self.steps} B{self.batch} H{self.hidden}{layers}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One system at one size. Bytes and seconds of a step."""

    case: Case
    system: str
    seconds: float
    """The median of the rounds."""
    quietest: float
    """The fastest round."""
    speed: float
    """`torch.nn`'s time over this one's: the median of the rounds."""
    spread: tuple[float, float]
    """Its lowest and highest round."""
    rounds: int
    peak: int = 0
    saved: int = 0
    """What autograd saves between forward and backward, without inputs and parameters."""
    layout: str = ""
    """How its work is laid out, where there is a choice."""


@dataclass(frozen=True, slots=True)
class LayerSuite(Written):
    """One run of the suite."""

    layout = Layout("encore_bench_rnn", 4)

    machine: Machine
    quick: bool
    outcomes: tuple[Outcome, ...]
    attention: tuple[AttentionRow, ...] = ()
    left_out: tuple[Case, ...] = ()
    """Sizes that are too large for this machine."""
    seconds: float = 0.0
    """What all of it took."""

    def of(self, group: str) -> list[Outcome]:
        return [one for one in self.outcomes if one.case.group == group]

    def theirs(self, case: Case) -> Outcome:
        return next(one for one in self.outcomes if one.case == case and one.system == THEIRS)


def cases(*, quick: bool) -> list[Case]:
    """All sizes of the suite."""
    steps, batch, hidden = (20, 16, 128) if quick else (100, 64, 512)
    found = [
        Case("large", "LSTM", steps, batch, hidden, layers=2),
        Case("gru", "GRU", steps, batch, hidden),
        Case("packed", "LSTM", steps, batch, hidden, packed=True),
        Case("bfloat16", "LSTM", steps, batch, hidden, dtype="bfloat16"),
    ]
    cells = (1, 16), (64, 128) if quick else (64, 512)
    for kind in ("LSTMCell", "GRUCell"):
        found += [Case("cells", kind, 1, count, units, stashes=("fast",)) for count, units in cells]
    grid = (QUICK_HIDDEN, QUICK_STEPS, QUICK_BATCHES) if quick else (HIDDEN, STEPS, BATCHES)
    return [*found, *(Case("grid", "LSTM", steps, batch, units) for units, steps, batch in itertools.product(*grid))]


def run_layers(*, quick: bool = False) -> LayerSuite:
    """Measure everything, reporting progress on stderr. `quick` takes few and small sizes."""
    outcomes: list[Outcome] = []
    asked: list[Case] = []
    left_out: list[Case] = []
    for case in cases(quick=quick):
        (asked if _fits(case) else left_out).append(case)
    if not quick:
        _tune(asked)
    with progress("layers", len(asked) + 1) as advance:
        for case in asked:
            seconds = QUICK_SECONDS if quick else SECONDS if case.group in ("grid", "cells") else HEADLINE_SECONDS
            found = {one.system: one for one in compare_layers(case, seconds)}
            outcomes += found.values()
            advance(f"{case}: {found[case.stashes[0]].speed:.2f}x")
            gc.collect()
        attention = attention_rows(quick=quick)
        advance("attention")
    return LayerSuite(this_machine(), quick, tuple(outcomes), tuple(attention), tuple(left_out))


def _tune(asked: list[Case]) -> None:
    """Measure the layouts that are not known yet."""
    sizes = {size.key: size for case in asked if case.tuned for size in map(case.size, case.stashes)}
    with progress("tuning", len(sizes)) as advance:
        for size in sizes.values():
            if not tuning.measured(size):
                tuning.tune(size)
            advance(f"{size.cell} T{size.steps} B{size.batch} H{size.hidden}: {tuning.of_module(size)}")


def _fits(case: Case) -> bool:
    """Return whether `torch.nn`'s step, all systems' inputs and what the allocator keeps stay in memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return case.steps * case.batch * case.hidden * case.layers * BYTES_A_UNIT <= memory * SHARE


def compare_layers(case: Case, seconds: float) -> Iterator[Outcome]:
    """All systems at one size, `torch.nn` first."""
    kernels_for(torch.device("cpu"))  # compiled before any clock runs
    torch.manual_seed(0)
    theirs = _module(nn, case)
    contestants: dict[str, Contestant] = {THEIRS: Contestant(case, theirs)}
    for stash in case.stashes:
        ours = _module(encore.nn, case, stash=stash)
        ours.load_state_dict(theirs.state_dict())
        contestants[stash] = Contestant(case, ours)
    runs: dict[str, Callable[[], float]] = {system: one.timed for system, one in contestants.items()}
    if case.group in ("large", "gru"):
        runs[PRODUCTS] = Products(case).timed
    took = _in_turns(runs, seconds)
    bytes_ = {system: (one.peak(), one.saved()) for system, one in contestants.items()}
    for system, mine in took.items():
        yield Outcome(
            case, system, statistics.median(mine), min(mine), median_ratio(took[THEIRS], mine),
            ratio_spread(took[THEIRS], mine), len(mine),
            *bytes_.get(system, (0, 0)), layout=_layout(case, system),
        )  # fmt: skip


def _layout(case: Case, system: str) -> str:
    if case.group == "cells" or system not in case.stashes:
        return ""
    size = case.size(system)
    facts = size.cell, size.inputs, size.hidden, size.steps, size.batch, size.keeps, size.dtype, size.device
    return str(tuning.layout_of(*facts) if case.packed else tuning.of_module(size))


def _in_turns(runs: dict[str, Callable[[], float]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each, round by round until the time is over; who begins changes. The first round is not counted unless
    it fills the time."""
    order, took = list(runs), {system: [run()] for system, run in runs.items()}
    if sum(first for (first,) in took.values()) < seconds:
        took = {system: [] for system in order}
    spent, number = 0.0, len(took[order[0]])
    while number < LEAST or (number < MOST and spent < seconds):
        for system in order[number % len(order) :] + order[: number % len(order)]:
            took[system].append(runs[system]())
            spent += took[system][-1]
        number += 1
    return took


def _module(library: Any, case: Case, **options: Any) -> nn.Module:
    if not case.kind.endswith("Cell"):
        options["num_layers"] = case.layers
    return getattr(library, case.kind)(case.hidden, case.hidden, **options).to(getattr(torch, case.dtype))


class Contestant:
    """Layers with an input, and a gradient for their output."""

    def __init__(self, case: Case, module: nn.Module) -> None:
        self.module = module
        self.calls = CALLS if case.group == "cells" else 1
        dtype = getattr(torch, case.dtype)
        shape = (case.batch, case.hidden) if case.group == "cells" else (case.steps, case.batch, case.hidden)
        self.x: Any = torch.randn(shape, dtype=dtype)
        self.leaf: Tensor = self.x.requires_grad_()
        self.states: Any = None
        if case.group == "cells":
            states = tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(2))
            self.states = states if case.kind == "LSTMCell" else states[0]
        if case.packed:
            lengths = torch.linspace(case.steps, case.steps / 4, case.batch).round().long()
            packed: Any = pack_padded_sequence(self.x.detach(), lengths)
            data, *rest = packed
            self.leaf = data.requires_grad_()
            self.x = PackedSequence(self.leaf, *rest)
        self.grad = torch.randn_like(self.leaf)

    def output(self) -> Tensor:
        found = self.module(self.x, self.states) if self.states is not None else self.module(self.x)
        found = found[0] if isinstance(found, tuple) else found
        return found.data if isinstance(found, PackedSequence) else found

    def step(self) -> None:
        self.output().backward(self.grad)

    def clear(self) -> None:
        self.module.zero_grad(set_to_none=True)
        self.leaf.grad = None
        for state in self.states if isinstance(self.states, tuple) else (self.states,):
            if state is not None:
                state.grad = None

    def timed(self) -> float:
        """Seconds of a step."""
        self.clear()
        began = time.perf_counter()
        for _ in range(self.calls):
            self.step()
        return (time.perf_counter() - began) / self.calls

    def peak(self) -> int:
        self.clear()
        return encore.measure(self.step).step_peak

    def saved(self) -> int:
        """Bytes of all storages that autograd saves and that were not there before."""
        before = {tensor.untyped_storage().data_ptr() for tensor in (self.leaf, *self.module.parameters())}
        kept: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self.output()
        total = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in before)
        del output
        return total


class Products:
    """The matrix products of a layer's step and nothing else."""

    def __init__(self, case: Case) -> None:
        rows, units, gates = case.steps * case.batch, case.hidden, GATES[case.kind] * case.hidden
        self.case = case
        self.x, self.grad_x = torch.randn(rows, units), torch.empty(rows, units)
        self.gates = torch.randn(rows, gates)
        self.weight = torch.randn(gates, units)
        self.other = self.weight.t().contiguous().t()  # the same, lying the other way
        self.grad_weight, self.state = torch.empty(gates, units), torch.randn(case.batch, units)
        self.step_gates, self.grad_state = torch.randn(case.batch, gates), torch.empty(case.batch, units)
        self.whole = self._faster(lambda weight: torch.mm(self.x, weight.t(), out=self.gates), 1)
        self.back = self._faster(lambda weight: torch.mm(self.gates, weight, out=self.grad_x), 1)
        self.forth = self._faster(lambda weight: torch.mm(self.state, weight.t(), out=self.step_gates), 10)
        self.carry = self._faster(lambda weight: torch.mm(self.step_gates, weight, out=self.grad_state), 10)

    def _faster(self, product: Callable[[Tensor], Any], calls: int) -> Tensor:
        """The weight, lying in the way that this product is faster with."""

        def seconds(weight: Tensor) -> float:
            product(weight)
            began = time.perf_counter()
            for _ in range(calls):
                product(weight)
            return time.perf_counter() - began

        return min((self.weight, self.other), key=lambda weight: min(seconds(weight) for _ in range(3)))

    def timed(self) -> float:
        began = time.perf_counter()
        for _ in range(self.case.layers):
            torch.mm(self.x, self.whole.t(), out=self.gates)
            for _ in range(self.case.steps):
                torch.mm(self.state, self.forth.t(), out=self.step_gates)
            for _ in range(self.case.steps):
                torch.mm(self.step_gates, self.carry, out=self.grad_state)
            torch.mm(self.gates, self.back, out=self.grad_x)
            torch.mm(self.gates.t(), self.x, out=self.grad_weight)
            torch.mm(self.gates.t(), self.x, out=self.grad_weight)
        return time.perf_counter() - began
