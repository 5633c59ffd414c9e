"""Does a rewrite pay? Both ways are timed in turns on made-up tensors, once a machine and shape, and remembered.

Where nothing may run (an estimate), what was measured before counts; else a rule read off such measurements: products
with few rows gain from every rewrite, those with many from none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from encore.cost.allocator import profiler_is_running
from encore.cost.cache import machine_cache
from encore.graph import Graph
from encore.rewrite.matmuls import Product, device_of

ROUNDS = 7
WORTH_IT = 0.95
"""A rewrite must save a twentieth of the time of the products it touches."""
FEW_ROWS = 64
SPEAKERS = 4
"""Convolutions that are timed to stand for all of a model."""
SAMPLE = 8
"""Products of a long loop that are timed to stand for all."""
REWRITE, CHANNELS_LAST = "rewrite ", "channels last "
"""How the keys begin under which this machine's judgements are kept."""


def judgements() -> dict[str, float]:
    """Every judgement made on this machine so far. Sums come out in an order that depends on them, so whoever wants the
    same bits in another process takes them along."""
    return machine_cache().matching((REWRITE, CHANNELS_LAST))


def remember_judgements(made: Mapping[str, float]) -> None:
    """Judge as before, whatever a new measurement would say."""
    for key, ratio in made.items():
        machine_cache().put(key, ratio)


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """What the time of a two-dimensional convolution depends on."""

    source: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    dtype: torch.dtype

    @property
    def work(self) -> float:
        """Multiplications, about."""
        return math.prod(self.source) * math.prod(self.weight) / self.source[1] / math.prod(self.stride)


class Judge:
    """Compares products as they are with products as a pass would have them."""

    def __init__(self, *, run: bool) -> None:
        self.run = run and not profiler_is_running()
        self.cache = machine_cache()

    def transposed_pays(self, graph: Graph, readers: Sequence[Product]) -> bool:
        """Lay a weight out transposed once, for all its readers?"""
        left, right = _like(graph, readers[0].left), _like(graph, readers[0].right)
        uses = min(len(readers), SAMPLE)

        def before() -> None:
            for _ in range(uses):
                torch.mm(left(), right())

        def after() -> None:
            laid_out = right().contiguous()
            for _ in range(uses):
                torch.mm(left(), laid_out)

        return self._pays(f"transpose {uses}", graph, readers[0], before, after)

    def stacking_pays(self, graph: Graph, part: Sequence[Product]) -> bool:
        """Multiply several left sides at once?"""
        uses = min(len(part), SAMPLE)
        left, right = _like(graph, part[0].left), _like(graph, part[0].right)

        def before() -> None:
            for _ in range(uses):
                torch.mm(left(), right())

        def after() -> None:
            torch.mm(torch.cat([left()] * uses), right())

        return self._pays(f"stack {uses}", graph, part[0], before, after)

    def stacking_gradients_pays(self, graph: Graph, part: Sequence[Product]) -> bool:
        """Sum up over one long inner dimension instead of over several products?"""
        uses = min(len(part), SAMPLE)
        left, right = _like(graph, part[0].left), _like(graph, part[0].right)

        def before() -> None:
            total = torch.mm(left(), right())
            for _ in range(uses - 1):
                total.addmm_(left(), right())

        def after() -> None:
            torch.mm(torch.cat([left().t()] * uses).t(), torch.cat([right()] * uses))

        return self._pays(f"stack gradients {uses}", graph, part[0], before, after)

    def merging_pays(self, graph: Graph, siblings: Sequence[Product], times: int) -> bool:
        """Multiply by several weights at once, laid side by side once for `times` uses?"""
        uses = min(times, SAMPLE)
        left = _like(graph, siblings[0].left)
        rights = [_like(graph, sibling.right) for sibling in siblings]

        def before() -> None:
            for _ in range(uses):
                for right in rights:
                    torch.mm(left(), right())

        def after() -> None:
            side_by_side = torch.cat([right() for right in rights], 1)
            for _ in range(uses):
                torch.mm(left(), side_by_side)

        widths = [graph.values[sibling.right].shape[1] for sibling in siblings]
        return self._pays(f"merge {uses} {widths}", graph, siblings[0], before, after)

    def channels_last_pays(self, convolutions: Sequence[ConvolutionShape]) -> bool:
        """Are the convolutions, forward and backward, faster on feature maps with channels last? The heaviest few
        speak for all."""
        heaviest = sorted(set(convolutions), key=lambda shape: -shape.work * convolutions.count(shape))[:SPEAKERS]
        total = sum(shape.work * convolutions.count(shape) for shape in heaviest)
        ratio = 0.0
        for shape in heaviest:
            key = f"{CHANNELS_LAST}{shape} threads={torch.get_num_threads()}"
            measured = self.cache.get(key)
            if measured is None:
                if not self.run:
                    return False
                measured = _ratio(
                    _convolution(shape, torch.contiguous_format), _convolution(shape, torch.channels_last)
                )
                self.cache.put(key, measured)
            ratio += measured * shape.work * convolutions.count(shape) / total
        return ratio < WORTH_IT

    def _pays(
        self, what: str, graph: Graph, example: Product, before: Callable[[], None], after: Callable[[], None]
    ) -> bool:
        left, right = graph.values[example.left], graph.values[example.right]
        key = (
            f"{REWRITE}{what} {left.dtype} {left.shape}{left.stride} @ {right.shape}{right.stride} "
            f"{device_of(graph, example.left)} threads={torch.get_num_threads()}"
        )
        ratio = self.cache.get(key)
        if ratio is None:
            if not self.run:
                return left.shape[0] <= FEW_ROWS
            ratio = _ratio(before, after)
            self.cache.put(key, ratio)
        return ratio < WORTH_IT


def _like(graph: Graph, number: int) -> Callable[[], torch.Tensor]:
    """Gives a tensor with the layout of a value; made when first asked for."""
    value, device = graph.values[number], device_of(graph, number)
    made: list[torch.Tensor] = []

    def get() -> torch.Tensor:
        if not made:
            made.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device).fill_(0.01))
        return made[0]

    return get


def _convolution(shape: ConvolutionShape, layout: torch.memory_format) -> Callable[[], None]:
    """A forward and a backward of one convolution, on feature maps of a layout."""
    source = torch.full(shape.source, 0.01, dtype=shape.dtype).contiguous(memory_format=layout)
    weight = torch.full(shape.weight, 0.01, dtype=shape.dtype)
    settings = (shape.stride, shape.padding, shape.dilation, False, (0, 0), shape.groups)
    gradient = torch.ops.aten.convolution(source, weight, None, *settings)

    def run() -> None:
        torch.ops.aten.convolution(source, weight, None, *settings)
        torch.ops.aten.convolution_backward(gradient, source, weight, None, *settings, (True, True, False))

    return run


def _ratio(before: Callable[[], None], after: Callable[[], None]) -> float:
    """Time of the second over that of the first: best of several rounds, in turns."""
    best = [float("inf"), float("inf")]
    with torch.no_grad():
        for _ in range(ROUNDS):
            for side, run in enumerate((before, after)):
                started = time.perf_counter()
                run()
                _wait()
                best[side] = min(best[side], time.perf_counter() - started)
    return best[1] / best[0]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
