"""Whether a rewrite pays: both ways are timed, interleaved, on made-up tensors, once a machine and shape. For other
sizes of a graph of known structure, the judgement at the nearest ones counts (`known_ratios.py`).

Where nothing may run (an estimate), what was measured before counts; else a rule read off such measurements: products
with few rows gain from every rewrite, those with many from none.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encore.cost.room import has_room
from encore.cost.torch_private import profiler_is_running
from encore.devices import synchronize
from encore.graph import Graph
from encore.measurements import machine_cache
from encore.rewrite.additive_scores import AdditiveScores
from encore.rewrite.dot_attention import DotAttention
from encore.rewrite.known_ratios import KnownRatios
from encore.rewrite.matmuls import Product
from encore.rewrite.queries import device_of

ROUNDS = 7
WORTH_IT = 0.95
"""A rewrite must save a twentieth of the time of the products it touches."""
FEW_ROWS = 64
SPEAKERS = 4
"""Convolutions that are timed to stand for all of a model."""
SAMPLE = 8
"""Products of a long loop that are timed to stand for all."""
LARGE_MIDDLE = 1 << 15
"""Numbers from which on attention scores gain from an operator of their own."""
LONG = 256
"""Keys from which on attention is faster some heads at a time: scores of all do not stay in a cache."""
AS_FAST = 1.0
"""What saves memory must not cost time."""
REWRITE, CHANNELS_LAST = "rewrite ", "channels last "
"""How the keys begin under which this machine's judgements are kept."""

Sides = tuple[Callable[[], None], Callable[[], None]]
"""As it is, and as a pass would have it."""


def judgements() -> dict[str, float]:
    """Every judgement made on this machine so far. Sums come out in an order that depends on them, so another
    process that is to get the same bits needs them."""
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

    @property
    def bytes(self) -> int:
        """Of the input, the weight, the output and the gradients of all three, about."""
        output = math.prod(self.source) // self.source[1] * self.weight[0] // math.prod(self.stride)
        return 2 * self.dtype.itemsize * (math.prod(self.source) + math.prod(self.weight) + output)


class Judge:
    """Compares products as they are with products as a pass would have them."""

    def __init__(self, *, run: bool, exact: bool = False, known: KnownRatios | None = None) -> None:
        self.run = run and not profiler_is_running()
        self.known = known
        """What was judged for other sizes."""
        self.exact = exact
        """Whether results must equal those of eager bit for bit."""
        self.cache = machine_cache()

    def transposed_pays(self, graph: Graph, readers: Sequence[Product]) -> bool:
        """Return whether to lay a weight out transposed once, for all its readers."""
        left, right, uses = *_operands(graph, readers[0]), min(len(readers), SAMPLE)
        return self._pays(
            f"transpose {uses}", graph, readers[0],
            lambda: _multiply(left(), [right()] * uses),
            lambda: _multiply(left(), [right().contiguous()] * uses),
        )  # fmt: skip

    def stacking_pays(self, graph: Graph, part: Sequence[Product]) -> bool:
        """Return whether to multiply several left sides at once."""
        left, right, uses = *_operands(graph, part[0]), min(len(part), SAMPLE)
        return self._pays(
            f"stack {uses}", graph, part[0],
            lambda: _multiply(left(), [right()] * uses),
            lambda: _multiply(torch.cat([left()] * uses), [right()]),
        )  # fmt: skip

    def stacking_gradients_pays(self, graph: Graph, part: Sequence[Product]) -> bool:
        """Return whether to sum up over one long inner dimension instead of over several products."""
        left, right, uses = *_operands(graph, part[0]), min(len(part), SAMPLE)

        def before() -> None:
            total = torch.mm(left(), right())
            for _ in range(uses - 1):
                total.addmm_(left(), right())

        def after() -> None:
            torch.mm(torch.cat([left().t()] * uses).t(), torch.cat([right()] * uses))

        return self._pays(f"stack gradients {uses}", graph, part[0], before, after)

    def merging_pays(self, graph: Graph, siblings: Sequence[Product], times: int) -> bool:
        """Return whether to multiply by several weights at once, laid side by side once for `times` uses."""
        left, uses = _like(graph, siblings[0].left), min(times, SAMPLE)
        rights = [_like(graph, sibling.right) for sibling in siblings]
        widths = [graph.values[sibling.right].shape[1] for sibling in siblings]
        return self._pays(
            f"merge {uses} {widths}", graph, siblings[0],
            lambda: _multiply(left(), [right() for right in rights] * uses),
            lambda: _multiply(left(), [torch.cat([right() for right in rights], 1)] * uses),
        )  # fmt: skip

    def scoring_pays(self, found: AdditiveScores, dtype: torch.dtype) -> bool:
        """Return whether to compare queries with keys in one operator. The other side is what fused kernels would have
        to do at least: write the middle twice, and go over it for each product and sum; on memory that is there
        already. One query at a time, as decoders go, the middle is small and is fused into kernels that do more: they
        are faster."""
        if found.shape[1] == 1:
            return False
        key = (
            f"{REWRITE}scores {dtype} {found.shape} {found.hidden} norm={found.norm is not None} "
            f"backward={found.grad is not None} threads={torch.get_num_threads()}"
        )
        middle = math.prod(found.shape) * found.hidden * dtype.itemsize
        ratio = self._known_ratio(key, lambda: _scoring(found, dtype), footprint=3 * middle)
        return math.prod(found.shape) * found.hidden >= LARGE_MIDDLE if ratio is None else ratio < WORTH_IT

    def blocks_pay(self, found: DotAttention, dtype: torch.dtype) -> bool:
        """Return whether to attend some heads at a time. The other side is what fused kernels would have to do at
        least: one pass over all scores between products, forward and backward; on memory that is there already, nothing
        recomputed."""
        key = (
            f"{REWRITE}attention {dtype} {found.shape} {found.sizes} masks={len(found.added)},{len(found.hidden)} "
            f"{'dropped ' if found.draw is not None else ''}"
            f"backward={found.grad is not None} threads={torch.get_num_threads()}"
        )
        scores = math.prod(found.shape) * dtype.itemsize
        ratio = self._known_ratio(key, lambda: _attention(found, dtype), footprint=5 * scores)
        return found.shape[3] >= LONG if ratio is None else ratio <= AS_FAST

    def channels_last_pays(self, convolutions: Sequence[ConvolutionShape]) -> bool:
        """Return whether convolutions, forward and backward, are faster with channels last. The heaviest few
        speak for all."""
        heaviest = sorted(set(convolutions), key=lambda shape: -shape.work * convolutions.count(shape))[:SPEAKERS]
        total = sum(shape.work * convolutions.count(shape) for shape in heaviest)
        ratio = 0.0
        for shape in heaviest:
            key = f"{CHANNELS_LAST}{shape} threads={torch.get_num_threads()}"
            measured = self._known_ratio(key, functools.partial(_layouts, shape), footprint=2 * shape.bytes)
            if measured is None:
                return False
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
        sides = left.bytes + right.bytes + left.shape[0] * right.shape[1] * left.bytes // max(1, math.prod(left.shape))
        device = device_of(graph, example.left)
        ratio = self._known_ratio(key, lambda: (before, after), footprint=(SAMPLE + 1) * sides, device=device)
        return left.shape[0] <= FEW_ROWS if ratio is None else ratio < WORTH_IT

    def _known_ratio(
        self, key: str, sides: Callable[[], Sides], *, footprint: int, device: str = "cpu"
    ) -> float | None:
        """Time of the second side over that of the first: from before, also at other sizes, or measured now; None where
        nothing may run, or where there is no memory for operands and results of `footprint` bytes."""
        ratio = found = self.cache.get(key)
        if ratio is None and self.known is not None:
            ratio = self.known.near(key)
        if ratio is None and self.run and has_room(footprint, device):
            ratio = _ratio(*sides())
        if ratio is not None and found is None:  # also of other sizes: another process must judge alike
            self.cache.put(key, ratio)
        if ratio is not None and self.known is not None:
            self.known.note(key, ratio)
        return ratio


class LeanJudge(Judge):
    """Judges by memory alone: rewrites that keep less pay, rewrites that compute faster do not.

    No time decides, so the lowest peak of a graph that is rewritten this way is the same whatever was measured.
    """

    def __init__(self) -> None:
        super().__init__(run=False)

    def transposed_pays(self, graph: Graph, readers: Sequence[Product]) -> bool:
        """It keeps a second copy of a weight."""
        return False

    def stacking_pays(self, graph: Graph, part: Sequence[Product]) -> bool:
        """It keeps several left sides, and their results, at once."""
        return False

    def stacking_gradients_pays(self, graph: Graph, part: Sequence[Product]) -> bool:
        """It keeps the operands of several products until the last one."""
        return False

    def merging_pays(self, graph: Graph, siblings: Sequence[Product], times: int) -> bool:
        """It keeps second copies of weights."""
        return False

    def channels_last_pays(self, convolutions: Sequence[ConvolutionShape]) -> bool:
        """It changes the layout of activations, not their number."""
        return False

    def scoring_pays(self, found: AdditiveScores, dtype: torch.dtype) -> bool:
        """Backward needs the inputs alone."""
        return found.shape[1] > 1

    def blocks_pay(self, found: DotAttention, dtype: torch.dtype) -> bool:
        """Only the scores of some heads are there at once."""
        return True


VERDICTS = (
    "transposed_pays", "stacking_pays", "stacking_gradients_pays", "merging_pays", "scoring_pays", "blocks_pay",
    "channels_last_pays",
)  # fmt: skip


class ComparedJudge(Judge):
    """A judge, with a record of whether another one would have decided alike."""

    def __init__(self, judge: Judge, other: Judge) -> None:
        self.run, self.exact, self.cache, self.known = judge.run, judge.exact, judge.cache, judge.known
        self.alike = True
        for verdict in VERDICTS:
            setattr(self, verdict, functools.partial(self._ask, getattr(judge, verdict), getattr(other, verdict)))

    def _ask(self, judge: Callable[..., bool], other: Callable[..., bool], *question: Any) -> bool:
        verdict = judge(*question)
        self.alike &= verdict == other(*question)
        return verdict


def _operands(graph: Graph, example: Product) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    return _like(graph, example.left), _like(graph, example.right)


def _multiply(left: torch.Tensor, rights: Sequence[torch.Tensor]) -> None:
    for right in rights:
        torch.mm(left, right)


def _like(graph: Graph, number: int) -> Callable[[], torch.Tensor]:
    """Gives a tensor with the layout of a value; made when first asked for."""
    value, device = graph.values[number], device_of(graph, number)
    made: list[torch.Tensor] = []

    def get() -> torch.Tensor:
        if not made:
            made.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device).fill_(0.01))
        return made[0]

    return get


def _layouts(shape: ConvolutionShape) -> Sides:
    """A convolution with channels first, and with channels last."""
    return _convolution(shape, torch.contiguous_format), _convolution(shape, torch.channels_last)


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


def _scoring(found: AdditiveScores, dtype: torch.dtype) -> Sides:
    """Scores and, where there is a backward, their gradients: by way of the middle, and without."""
    batch, queries, keys = found.shape
    middle, gradient = (torch.full((*found.shape, found.hidden), 0.01, dtype=dtype) for _ in range(2))
    query, key = (torch.full((batch, steps, found.hidden), 0.01, dtype=dtype) for steps in (queries, keys))
    weight, grad = torch.full((found.hidden,), 0.01, dtype=dtype), torch.full(found.shape, 0.01, dtype=dtype)
    affine = (None, None) if found.norm is None else (weight, weight)
    operands = (query, key, weight, None, *affine, None if found.norm is None else 1e-5)

    def make_middle() -> None:
        torch.add(query.unsqueeze(2), key.unsqueeze(1), out=middle)
        torch.ops.aten.tanh_(middle)

    def before() -> None:
        rows = middle.view(-1, found.hidden)
        make_middle()
        torch.mv(rows, weight)
        if found.grad is not None:
            make_middle()
            torch.mv(rows.t(), grad.flatten())
            torch.mul(grad.unsqueeze(-1), weight, out=gradient)
            torch.ops.aten.tanh_backward.grad_input(gradient, middle, grad_input=gradient)
            gradient.sum(1)
            gradient.sum(2)

    def after() -> None:
        torch.ops.encore.additive_scores(*operands)
        if found.grad is not None:
            torch.ops.encore.additive_scores_backward(None, grad, *operands, True, True, True)

    return before, after


def _attention(found: DotAttention, dtype: torch.dtype) -> Sides:
    """Attention and, where there is a backward, its gradients: by way of all scores, and some heads at a time."""
    aten = torch.ops.aten
    batch, heads, queries, keys = found.shape
    given = [torch.full(shape, 0.01, dtype=dtype) for shape in found.shapes.values()]
    query, key, value = (one.flatten(0, 1) for one in given)
    scores, gradient = (torch.empty(batch * heads, queries, keys, dtype=dtype) for _ in range(2))
    grad = torch.full((batch, heads, queries, found.sizes[1]), 0.01, dtype=dtype)
    rows = grad.flatten(0, 1)
    added = [torch.zeros(queries, keys, dtype=dtype) for _ in found.added]
    hidden = [torch.zeros(queries, keys, dtype=torch.bool) for _ in found.hidden]
    kept = None if found.draw is None else torch.ones(found.shape, dtype=torch.bool)
    noise = None if kept is None else torch.ones_like(scores)
    operands = (*given, added, hidden, found.fills, found.scale, kept, 1.0)

    def before() -> None:
        torch.bmm(query, key, out=scores)
        aten._softmax.out(scores, -1, False, out=scores)
        if noise is not None:
            torch.mul(scores, noise, out=gradient)
        torch.bmm(scores, value)
        if found.grad is not None:
            torch.bmm(scores.mT, rows)
            torch.bmm(rows, value.mT, out=gradient)
            if noise is not None:
                gradient.mul_(noise)
            aten._softmax_backward_data.out(gradient, scores, -1, dtype, grad_input=gradient)
            torch.bmm(query.mT, gradient)
            torch.bmm(gradient, key.mT)

    def after() -> None:
        torch.ops.encore.dot_attention(*operands)
        if found.grad is not None:
            torch.ops.encore.dot_attention_backward(grad, *operands, True, True, True)

    return before, after


def _ratio(before: Callable[[], None], after: Callable[[], None]) -> float:
    """Time of the second over that of the first: best of several rounds, interleaved."""
    best = [float("inf"), float("inf")]
    with torch.no_grad():
        for _ in range(ROUNDS):
            for side, run in enumerate((before, after)):
                started = time.perf_counter()
                run()
                synchronize()
                best[side] = min(best[side], time.perf_counter() - started)
    return best[1] / best[0]
