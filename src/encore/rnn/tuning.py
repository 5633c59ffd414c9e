"""How a recurrent layer lays out its work, and which layout is fastest on this machine.

A few things can be chosen without changing a result. The recurrent **weight** is packed into the tiles of
`kernels/recurrent.cpp`, which costs a pass over it and pays from the second step on, or PyTorch multiplies once a step,
with the weight as stored or transposed (`products.py`). The large products take a **chunk** of so many rows at a time:
more rows are faster on some machines and take a larger workspace. Products of bfloat16 read it widened to float32, or
**narrow**, directly, if the processor multiplies such numbers. And the module `encore.nn.LSTM` can leave a call that
keeps everything to `torch.nn`'s layer: around a small one, an operator in Python takes longer than its work.

Which is best differs by size and machine, so it is measured: `encore tune` runs the layouts of given sizes interleaved
and keeps their seconds in the machine's cache (`measurements.py`). Nothing is measured while a model trains. If the
cache has nothing for a size, `rule` decides, so that one machine and one cache always give one answer, and a workspace
that is predicted is the one that is taken. A process reads the cache once.

Keys have the cell, its widths, the type, the device and the threads as they are, and steps and batch by powers of two:
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

from encore.devices import synchronize
from encore.measurements import machine_cache
from encore.rnn import native

CHUNKS = (0.5, 1, 2)
"""Chunks of so many times `chunk_rows` are candidates."""
LEAST_ROWS, MOST_ROWS, CHUNK_NUMBERS = 512, 4096, 1024 * 512
"""A chunk has so many rows at least, and so many numbers of a unit's each."""
LOOP_BYTES = 64 << 20
"""A chunk on a GPU has gates of so many bytes, if they are kept: a longer sequence is several launches."""
SINGLE = 16
"""A single row's weight is packed from a step for so many units on."""
LEAN_STEPS = 8
"""Steps between two kept cell states, at least: every eighth costs half a byte a unit and step."""
SECONDS = 0.25
"""Spent on a layout, on average; those that are not far behind run three times or more."""
MUST_GAIN = 1.05
"""So many times as long as a layout must the usual one take to be replaced by it."""
BEHIND = 1.5
"""A layout that takes so many times as long as the best is not run again."""
PREFIX = "rnn layout 5"
"""Entries of the cache begin so; the number changes when layouts do."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One way to lay out a layer's work."""

    weight: str
    """The recurrent one: `packed`, or `stored` or `transposed` and multiplied once a step."""
    rows: int
    """Of a chunk, at most; an LSTM that keeps c every K steps has chunks of K steps instead."""
    narrow: bool = False
    """Whether products read bfloat16 directly; only with a packed weight."""

    def __str__(self) -> str:
        if self == TORCHS:
            return "torch.nn's"
        return f"{self.weight}, {self.rows} rows{', narrow' * self.narrow}"


TORCHS = LayerLayout("torch.nn", 0)
"""`torch.nn`'s own layer instead of a layout of Encore's."""
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
    """Whether gates are kept (`stash="fast"`)."""
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
    """Rows from which matrix products of a layer run at nearly full speed; more take a larger workspace.

    A product of narrow matrices needs more rows: on a two-core Ice Lake server, an LSTM of 64 units, batch 64 and 100
    steps took 20 ms in chunks of 512 rows and 15 in chunks of 4096, where one of 512 units took 466 and 430 in chunks
    of 1024.
    """
    return max(LEAST_ROWS, min(CHUNK_NUMBERS // max(hidden, 1), MOST_ROWS))


def rule(size: Size) -> LayerLayout:
    """What a module does at a size that was not measured.

    On that server and on an Emerald Rapids one, `torch.nn`'s LSTM of 64 units was up to 1.5 times as fast for up to 100
    steps, and slower beyond that; with 256 units it was at most a tenth faster.
    """
    numbers = size.steps * size.batch * size.hidden
    if may_leave(size) and size.hidden <= NARROW and numbers <= FEW and size.steps < SHORT:
        return TORCHS
    return operator_rule(size)


def operator_rule(size: Size) -> LayerLayout:
    """The layout of an operator at a size that was not measured: packed from the second step on.

    Over 64 to 1024 units, batches of 1 to 128 and 10 to 500 steps on those servers, packing won or was within a tenth,
    except for single rows and few steps with a large weight, which is read once more to be packed.
    """
    if size.device == "cuda" and size.steps > 1:
        return LayerLayout("packed", usual_rows(size))
    if size.steps == 1 or (size.batch == 1 and SINGLE * size.steps <= size.hidden):
        return LayerLayout("stored", chunk_rows(size.hidden))
    return LayerLayout("packed", chunk_rows(size.hidden), narrow=may_narrow(size))


def usual_rows(size: Size) -> int:
    """Rows of a chunk at a size that was not measured: on a GPU, where the steps of a chunk are one launch, as many as
    `LOOP_BYTES` of gates have, if gates are kept."""
    if size.device != "cuda" or not size.keeps:
        return chunk_rows(size.hidden)
    columns = 1 if size.cell == "elman" else 4
    a_row = columns * size.hidden * max(4, size.dtype.itemsize)
    return max(chunk_rows(size.hidden), LOOP_BYTES // a_row)


def may_narrow(size: Size) -> bool:
    """Return whether the processor multiplies such numbers directly."""
    return size.device == "cpu" and native.multiplies(size.dtype)


def may_leave(size: Size) -> bool:
    """Return whether `torch.nn`'s layer is a candidate: only for these it is one call of oneDNN's."""
    compiled = size.device == "cpu" and torch.backends.mkldnn.is_available()
    return size.cell == "lstm" and size.keeps and size.dtype == torch.float32 and compiled


def lean_steps(batch: int, hidden: int) -> int:
    """Steps between two kept states, so that the products which recompute gates are large.

    Half of a chunk's rows: they make the step 3 % slower, and the workspace of a lean layer smaller.
    """
    return max(LEAN_STEPS, -(-max(LEAST_ROWS, chunk_rows(hidden) // 2) // max(batch, 1)))


def ways(size: Size) -> list[LayerLayout]:
    """All candidates of a module."""
    return [*layouts(size), *([TORCHS] if may_leave(size) else [])]


def layouts(size: Size) -> list[LayerLayout]:
    """Those of the operators; all chunks of the whole sequence are the same."""
    usual, all_rows = usual_rows(size), size.steps * size.batch
    if size.steps == 1:
        return [LayerLayout("stored", usual)]
    rows = [usual]
    if size.cell != "lstm" or size.keeps:
        others = (int(usual * times) for times in CHUNKS)
        rows += [count for count in others if count != usual and min(count, usual) < all_rows and count < 2 * all_rows]
    found = [LayerLayout("packed", count) for count in rows]
    found += [LayerLayout(weight, usual) for weight in ("stored", "transposed")]
    if may_narrow(size):
        found += [dataclasses.replace(layout, narrow=True) for layout in found if layout.weight == "packed"]
    return found


_forced: list[LayerLayout] = []


@contextlib.contextmanager
def forced(layout: LayerLayout) -> Iterator[None]:
    """A context in which every layer uses this layout, for measurements."""
    _forced.append(layout)
    try:
        yield
    finally:
        _forced.pop()


def layout_of(
    cell: str, inputs: int, hidden: int, steps: int, batch: int, keeps: bool, dtype: torch.dtype, device: str
) -> LayerLayout:
    """The layout that a call of an operator uses."""
    if steps == 1:
        return LayerLayout("stored", chunk_rows(hidden))
    if _forced:
        return _forced[-1]
    threads = torch.get_num_threads() if device == "cpu" else 0
    return _chosen(cell, inputs, hidden, steps, batch, keeps, dtype, device, threads)[0]


def left_to_torch(cell: str, inputs: int, hidden: int, steps: int, batch: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether a module that keeps everything leaves this call to `torch.nn`'s layer."""
    if _forced:
        return _forced[-1] == TORCHS
    threads = torch.get_num_threads() if device == "cpu" else 0
    return _chosen(cell, inputs, hidden, steps, batch, True, dtype, device, threads)[1] == TORCHS


def of_module(size: Size) -> LayerLayout:
    """What a module does at this size."""
    return _chosen(*(getattr(size, field.name) for field in dataclasses.fields(size)))[1]


@functools.lru_cache(maxsize=4096)
def _chosen(*facts: Any) -> tuple[LayerLayout, LayerLayout]:
    """For an operator, and for a module."""
    size = Size(*facts)
    known = measured(size)
    if not known:
        return operator_rule(size), rule(size)
    return best_of(known, operator_rule(size), layouts(size)), best_of(known, rule(size), known)


def best_of(known: Mapping[LayerLayout, float], usual: LayerLayout, among: Iterable[LayerLayout]) -> LayerLayout:
    """The fastest, if it is clearly faster than the usual one: clocks are not that exact."""

    def price(layout: LayerLayout) -> float:
        return known[layout] * (1 if layout == usual else MUST_GAIN)

    return min(among, key=price)


def measured(size: Size) -> dict[LayerLayout, float]:
    """Seconds of each candidate, from the cache; nothing unless all of them are there."""
    cache = machine_cache()
    found: dict[LayerLayout, float] = {}
    for layout in ways(size):
        seconds = cache.get(_entry(size, layout))
        if seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return {}
        found[layout] = float(seconds)
    return found


def _entry(size: Size, layout: LayerLayout) -> str:
    return f"{size.key}|{layout}"


def forget() -> None:
    """Read the cache again, in the process that tunes."""
    _chosen.cache_clear()


# ---- measuring -----------------------------------------------------------------------------------------------------


def tune(size: Size, seconds: float = SECONDS) -> dict[LayerLayout, float]:
    """Run the layouts of a size interleaved, forward and backward, and keep the best time of each."""
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
    """A function that runs a layer of this size forward and backward once and returns its seconds."""
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
        synchronize(size.device)
        return time.perf_counter() - began

    return step
