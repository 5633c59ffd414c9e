"""How a recurrent layer lays out its work, and which way is fastest here.

A few things can be chosen without changing a result. The recurrent **weight** is packed into the tiles of
`kernels/recurrent.cpp`, which costs a pass over it and pays from the second step on, or a library multiplies once a
step: with the weight as stored, transposed, or prepacked by MKL, or with states turned (`products.py`). The large
products take a **chunk** of so many rows at a time: more rows are faster on some machines and take more memory aside.
They run before and after a chunk's steps on all threads, or beside them on half of the threads, in two **lanes**
(`lanes.py`). Products of bfloat16 read it widened to float32, or **narrow**, as it is, where the processor multiplies
such numbers. And the module `encore.nn.LSTM` can leave a call that keeps everything to `torch.nn`'s layer: around a
small one, an operator in Python takes longer than its work.

Which is best differs by size and machine, so it is measured: `encore tune` runs the layouts of given sizes in turns and
keeps their seconds in the machine's cache (`measurements.py`). Nothing is measured while a model trains.
Where the cache has nothing for a size, `rule` decides, so that one machine and one cache always give one answer, and
a workspace that is told beforehand is the one that is taken. A process reads the cache once.

Keys hold the cell, its widths, the type, the device and the threads as they are, and steps and batch by powers of two:
layouts win by factors of sizes, and training sees many lengths. On a CUDA device the batch is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from encore.measurements import machine_cache
from encore.rnn import native
from encore.rnn.products import has_prepacked, worth_prepacking

CHUNKS = (0.5, 1, 2)
"""What is tried: chunks of so many times `chunk_rows`."""
LEAST_ROWS, MOST_ROWS, CHUNK_NUMBERS = 512, 4096, 1024 * 512
"""A chunk has so many rows at least, and so many numbers of a unit's each."""
SINGLE = 16
"""A single row's weight is packed from a step for so many units on."""
LEAN_STEPS = 8
"""Steps between two kept cell states, at least: every eighth costs half a byte a unit and step."""
SECONDS = 0.25
"""Spent on a layout, on average; those that are not far behind run three times or more."""
MUST_GAIN, LANES_MUST_GAIN = 1.05, 1.15
"""So many times as long as a layout, and as one of two lanes, must the usual one take for it to be given up."""
BEHIND = 1.5
"""A layout that takes so many times as long as the best is not run again."""
PREFIX = "rnn layout 5"
"""Entries of the cache begin so; the number changes when layouts do."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay out a layer's work."""

    weight: str
    """The recurrent one: `packed`, or `stored`, `transposed`, `prepacked` or `turned` and multiplied once a step."""
    rows: int
    """Of a chunk, at most; an LSTM that keeps c every K steps has chunks of K steps instead."""
    lanes: int = 1
    """2: the steps run on half of the threads while the other half multiplies."""
    narrow: bool = False
    """Products read bfloat16 as it is; packed weights alone can be."""

    def __str__(self) -> str:
        if self == TORCHS:
            return "torch.nn's"
        words = ("two lanes" * (self.lanes == 2), "narrow" * self.narrow)
        return ", ".join((f"{self.weight}, {self.rows} rows", *filter(None, words)))


TORCHS = Layout("torch.nn", 0)
"""No layout of ours: `torch.nn`'s own layer."""
NARROW, FEW, SHORT = 128, 1 << 20, 256
"""Layers of so few units, and sequences of so few numbers and fewer steps, are left to `torch.nn`."""


@dataclass(frozen=True, slots=True)
class Size:
    """What the best layout depends on."""

    cell: str
    inputs: int
    hidden: int
    steps: int
    batch: int
    keeps: bool
    """Are gates kept? (`stash="fast"`)"""
    dtype: torch.dtype
    device: str
    threads: int

    @property
    def key(self) -> str:
        """Steps and batch by powers of two, the batch only on the CPU."""
        batch = "any" if self.device != "cpu" else _power(self.batch)
        facts = (
            self.cell, self.inputs, self.hidden, _power(self.steps), batch, "gates" if self.keeps else "lean",
            str(self.dtype).removeprefix("torch."), self.device, self.threads,
        )  # fmt: skip
        return "|".join(map(str, (PREFIX, *facts)))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()


def chunk_rows(hidden: int) -> int:
    """Rows from which matrix products of a layer run at nearly full speed; more take more memory aside.

    A product of narrow matrices needs more rows: on a two-core Ice Lake server, an LSTM of 64 units, batch 64 and 100
    steps took 20 ms in chunks of 512 rows and 15 in chunks of 4096, where one of 512 units took 466 and 430 in chunks
    of 1024.
    """
    return max(LEAST_ROWS, min(CHUNK_NUMBERS // max(hidden, 1), MOST_ROWS))


def rule(size: Size) -> Layout:
    """What a module does at a size that nobody has measured.

    On that server and on an Emerald Rapids one, `torch.nn`'s LSTM of 64 units was up to 1.5 times as fast for up to 100
    steps, and slower beyond that; with 256 units it was at most a tenth faster.
    """
    numbers = size.steps * size.batch * size.hidden
    if may_leave(size) and size.hidden <= NARROW and numbers <= FEW and size.steps < SHORT:
        return TORCHS
    return operator_rule(size)


def operator_rule(size: Size) -> Layout:
    """The layout of an operator that nobody has measured: packed from the second step on, in one lane.

    Over 64 to 1024 units, batches of 1 to 128 and 10 to 500 steps on those servers, packing won or was within a tenth,
    but for single rows and few steps with a large weight: it is read once more to be packed. Two lanes took 0.9 to 1.15
    of one's time with both cores to themselves, and 0.6 to 0.85 beside others' work.
    """
    if size.steps == 1 or (size.batch == 1 and SINGLE * size.steps <= size.hidden):
        return Layout("stored", chunk_rows(size.hidden))
    return Layout("packed", chunk_rows(size.hidden), narrow=may_narrow(size))


def may_narrow(size: Size) -> bool:
    """Does the processor multiply such numbers as they are?"""
    return size.device == "cpu" and native.multiplies(size.dtype)


def may_share(size: Size) -> bool:
    """Can two lanes be worth trying?"""
    return size.device == "cpu" and size.threads > 1 and size.steps * size.batch >= 2 * chunk_rows(size.hidden)


def may_leave(size: Size) -> bool:
    """Is `torch.nn`'s layer worth trying? It is one call of oneDNN's for these alone."""
    compiled = size.device == "cpu" and torch.backends.mkldnn.is_available()
    return size.cell == "lstm" and size.keeps and size.dtype == torch.float32 and compiled


def lean_steps(batch: int, hidden: int) -> int:
    """How many steps should lie between two kept states, so that products which build gates again are large.

    Half of a chunk's rows: whoever asks for few bytes would rather not have them aside, and is 3 % slower for it.
    """
    return max(LEAN_STEPS, -(-max(LEAST_ROWS, chunk_rows(hidden) // 2) // max(batch, 1)))


def ways(size: Size) -> list[Layout]:
    """All that a module can do."""
    return [*layouts(size), *([TORCHS] if may_leave(size) else [])]


def layouts(size: Size) -> list[Layout]:
    """Those of the operators; chunks that hold the whole sequence are one and the same."""
    usual, all_rows = chunk_rows(size.hidden), size.steps * size.batch
    if size.steps == 1:
        return [Layout("stored", usual)]
    rows = [usual]
    if size.cell != "lstm" or size.keeps:
        others = (int(usual * times) for times in CHUNKS)
        rows += [count for count in others if count != usual and min(count, usual) < all_rows and count < 2 * all_rows]
    weights = ["stored", "transposed", "turned"]
    rows_of_weight = {"lstm": 4, "gru": 3, "elman": 1}[size.cell] * size.hidden
    if has_prepacked(size.dtype, size.device) and worth_prepacking(size.batch, rows_of_weight, size.hidden):
        weights.append("prepacked")
    found = [*(Layout("packed", count) for count in rows), *(Layout(weight, usual) for weight in weights)]
    if may_share(size):
        found += [Layout("packed", count, 2) for count in rows if count * 2 <= all_rows]
    if may_narrow(size):
        found += [dataclasses.replace(layout, narrow=True) for layout in found if layout.weight == "packed"]
    return found


_forced: list[Layout] = []


@contextlib.contextmanager
def forced(layout: Layout) -> Iterator[None]:
    """Every layer uses this layout: what measuring takes."""
    _forced.append(layout)
    try:
        yield
    finally:
        _forced.pop()


def layout_of(
    cell: str, inputs: int, hidden: int, steps: int, batch: int, keeps: bool, dtype: torch.dtype, device: str
) -> Layout:
    """The layout that a call of an operator uses."""
    if steps == 1:
        return Layout("stored", chunk_rows(hidden))
    if _forced:
        return _forced[-1]
    threads = torch.get_num_threads() if device == "cpu" else 0
    return _chosen(cell, inputs, hidden, steps, batch, keeps, dtype, device, threads)[0]


def left_to_torch(cell: str, inputs: int, hidden: int, steps: int, batch: int, dtype: torch.dtype, device: str) -> bool:
    """Should a module that keeps everything leave this call to `torch.nn`'s layer?"""
    if _forced:
        return _forced[-1] == TORCHS
    threads = torch.get_num_threads() if device == "cpu" else 0
    return _chosen(cell, inputs, hidden, steps, batch, True, dtype, device, threads)[1] == TORCHS


def of_module(size: Size) -> Layout:
    """What a module does at this size."""
    return _chosen(*(getattr(size, field.name) for field in dataclasses.fields(size)))[1]


@functools.lru_cache(maxsize=4096)
def _chosen(*facts: Any) -> tuple[Layout, Layout]:
    """For an operator, and for a module."""
    size = Size(*facts)
    known = measured(size)
    if not known:
        return operator_rule(size), rule(size)
    return best_of(known, operator_rule(size), layouts(size)), best_of(known, rule(size), known)


def best_of(known: Mapping[Layout, float], usual: Layout, among: Iterable[Layout]) -> Layout:
    """The fastest, if it is clearly faster than the usual one: clocks are not that exact, and lanes take memory."""

    def price(layout: Layout) -> float:
        return known[layout] * (1 if layout == usual else LANES_MUST_GAIN if layout.lanes == 2 else MUST_GAIN)

    return min(among, key=price)


def measured(size: Size) -> dict[Layout, float]:
    """Seconds of each way, from the cache; nothing unless all of them are there."""
    cache = machine_cache()
    found: dict[Layout, float] = {}
    for layout in ways(size):
        seconds = cache.get(_entry(size, layout))
        if seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return {}
        found[layout] = float(seconds)
    return found


def _entry(size: Size, layout: Layout) -> str:
    return f"{size.key}|{layout}"


def forget() -> None:
    """Look at the cache again: for the process that tunes."""
    _chosen.cache_clear()


# ---- measuring -----------------------------------------------------------------------------------------------------


def tune(size: Size, seconds: float = SECONDS) -> dict[Layout, float]:
    """Run the layouts of a size in turns, forward and backward, and keep the best time of each."""
    step = _step(size)
    best = dict.fromkeys(ways(size), math.inf)
    racing = list(best)
    threads = torch.get_num_threads()
    try:
        if size.device == "cpu":
            torch.set_num_threads(size.threads)
        ends = time.perf_counter() + seconds * len(best)
        rounds = 0
        while rounds < 4 or time.perf_counter() < ends:
            for layout in racing:
                with forced(layout):
                    took = step()
                if rounds:  # the first round warms up
                    best[layout] = min(best[layout], took)
            if rounds > 1:  # once may be bad luck
                racing = [layout for layout in racing if best[layout] <= BEHIND * min(best.values())]
            rounds += 1
    finally:
        torch.set_num_threads(threads)
    cache = machine_cache()
    for layout, took in best.items():
        cache.put(_entry(size, layout), took)
    cache.save()
    forget()
    return best


def _step(size: Size) -> Callable[[], float]:
    """A function that runs a layer of this size forward and backward once and tells its seconds."""
    from encore.rnn import modules

    kinds: dict[str, Callable[..., torch.nn.Module]]
    kinds = {"lstm": modules.LSTM, "gru": modules.GRU, "elman": modules.RNN}
    module = kinds[size.cell](size.inputs, size.hidden, stash="fast" if size.keeps else "lean").to(
        size.device, size.dtype
    )

    def some(width: int) -> torch.Tensor:
        return torch.randn((size.steps, size.batch, width), device=size.device).mul_(0.1).to(size.dtype)

    x, grad = some(size.inputs).requires_grad_(), some(size.hidden)
    wanted = [x, *module.parameters()]

    def step() -> float:
        began = time.perf_counter()
        torch.autograd.grad(module(x)[0], wanted, grad)
        if size.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return step
