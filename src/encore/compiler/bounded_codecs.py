"""Lossy codecs for one graph, chosen by their measured effect on the gradients of the first batch.

1. **Layer by layer.** The step runs once as it is, for the exact gradients. Then it runs once for every group of like
   activations (same operator and shape, module paths alike up to numbers) with these in a probe codec, and the error of
   the gradients is measured. While it runs, every other codec is tried on a sample of the activations: to first order
   the error of the gradients is proportional to that of the activation, so one run prices all codecs of a group.
2. **Together.** `plan/admission.py` picks the pairs of activation and codec whose errors, added in quadrature, stay
   within the bound. One run with all of them, the worst codec of each, measures their joint error; the allowance
   shrinks until the bound is kept, and grows once or twice if much of the bound is unused.
3. **As planned.** The plan that the planner makes of these pairs is measured again: what is recomputed from a lossy
   code has an error as well. If it misses the bound, the allowance shrinks and the planner starts over.

Steps run operator by operator, on the tensors that the step was called with, and everything is kept for them if that
fits into the budget and the free memory; otherwise a proposal of the strategies is recomputed. Effort is bounded:
`MOST_RUNS` groups, fewer if a step takes long (then groups are coarser).
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from encore.capture.torch_private import real_tensors
from encore.codecs import CODECS, Codec
from encore.cost.gradient_error import (
    GradientError,
    Gradients,
    compare_gradients,
    extra_bytes,
    gradient_bytes,
    lossy_codec,
    lower_in_memory,
    random_tangents,
    run_gradients,
    why_unmeasurable,
)
from encore.cost.probe import device_of_step
from encore.cost.room import step_has_room
from encore.fates import Encode, Recompute, codes_of, owned
from encore.plan import Plan, Planner, feature_maps
from encore.plan.admission import Admitted, LossyCandidate, admit, worst_of
from encore.schedule import Schedule, carry_out, schedule_step
from encore.terminal import progress

log = logging.getLogger("encore")

MARGIN = 0.95
"""Share of the bound that is used: the step as it runs rounds a little differently."""
SHRINK = 0.8
"""Errors shrink a little less than the allowance does."""
MUCH_UNUSED = 0.6
"""If the measured error is below this share of the bound, the allowance grows."""
MOST_ROUNDS = 8
MOST_GROWN = 2
MOST_RUNS = 32
"""Runs of the step, one a group of activations."""
MOST_SECONDS = 60.0
FEWEST_RUNS = 8
LONG_SECONDS = 5.0
"""Measurements that take longer show a progress bar, if there is a terminal."""
PROBES = ("int8", "fp8_e4m3", "fp10", "bf16", "fp16")
"""Codecs by which groups are measured, best first: their errors are much larger than rounding, and much less than 1."""
SAMPLE, CHUNKS = 1 << 15, 4
"""Codecs are tried on chunks of an activation: the elements of a chunk, and the number of chunks."""
SHARED_SCALES = ("int8", "int4")
"""Formats in which the error of an element depends on its neighbours."""
NUMBER = re.compile(r"\d+")


class BoundedCodecs:
    """Admits pairs of activation and lossy codec whose measured gradient error stays within a bound."""

    def __init__(
        self,
        planner: Planner,
        primals: Sequence[Any],
        bound: float,
        limit: float = math.inf,
        tangents: Sequence[torch.Tensor] = (),
    ) -> None:
        self.planner = planner
        self.primals = [one.detach() if isinstance(one, torch.Tensor) else one for one in primals]
        self.bound = bound
        self.limit = limit
        """Bytes that a measurement takes at most, if possible."""
        self.allowed = MARGIN * bound
        self.candidates: list[LossyCandidate] = []
        self.sizes: dict[tuple[str, str], int] = {}
        self.tangents = list(tangents)
        """Gradients of the outputs: those of a step that has run, or random ones."""
        self.why_none = why_unmeasurable(planner.graph, primals)
        """Why no lossy codec can be used; empty if one can."""
        self.rounds = 0

    def admitted(self) -> Admitted:
        """The pairs that a planner may use. None is admitted if nothing can be measured."""
        with self._measuring():
            if not self.why_none:
                self.tangents = self.tangents or random_tangents(self.planner.graph)
                base = self._base()
                if not self.why_none:
                    self._price(base)
                    return self._verified(base)
        return frozenset()

    def tightened(self, measured: float) -> Admitted:
        """The pairs for the next plan, after one has exceeded the bound with this error."""
        self.rounds += 1
        shrunk = SHRINK * MARGIN * self.bound / measured if math.isfinite(measured) else 0.0
        self.allowed *= min(SHRINK, shrunk)
        return admit(self.candidates, self.allowed) if self.rounds < MOST_ROUNDS else frozenset()

    def error_of(self, plan: Plan) -> GradientError | None:
        """The error of a plan, run operator by operator; None if there is too little memory to measure it."""
        graph = plan.schedule.graph
        need = plan.timeline.step_peak + extra_bytes(graph) + 2 * gradient_bytes(graph)
        if not step_has_room(need, device_of_step(self.planner.graph)):
            return None
        with self._measuring():
            exact = self._run(plan.schedule, exact=True)
            return compare_gradients(graph, exact, self._run(plan.schedule, exact=False))

    # -- runs --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        with real_tensors():
            yield

    def _run(
        self, schedule: Schedule, *, exact: bool, watches: Mapping[int, Callable[..., Any]] | None = None
    ) -> Gradients:
        lowered = lower_in_memory(schedule, exact=exact, watches=watches)
        return run_gradients(schedule.graph, lowered, self.primals, self.tangents)

    def _base(self) -> frozenset[int]:
        """The values that are recomputed while codecs are measured: none, or as few as memory allows."""
        planner = self.planner
        extra = 2 * gradient_bytes(planner.graph)
        found = [(planner.kept.timeline.step_peak + extra, frozenset[int]())]
        if found[0][0] > self.limit or not step_has_room(found[0][0], device_of_step(self.planner.graph)):
            plans = ((planner.plan(frozenset(map(Recompute, values))), values) for values in planner.proposed)
            found += [(plan.timeline.step_peak + extra, values) for plan, values in plans]
        within = [one for one in found if one[0] <= self.limit]
        need, values = max(within, key=lambda one: one[0]) if within else min(found, key=lambda one: one[0])
        if not step_has_room(need, device_of_step(self.planner.graph)):
            self.why_none = "there is too little free memory to measure them in"
        return values

    def _encoding(self, base: Collection[int], encode: Collection[Encode]) -> Schedule:
        again = frozenset(base) - {one.value for one in encode}
        fates = [*map(Recompute, again), *encode]
        return schedule_step(carry_out(self.planner.graph, fates, exact=self.planner.exact))

    # -- layer by layer ----------------------------------------------------------------------------------------------

    def _price(self, base: frozenset[int]) -> None:
        """Measure the error of every candidate."""
        began = time.perf_counter()
        self.exact = self._run(self._encoding(base, ()), exact=True)
        seconds = time.perf_counter() - began
        runs = int(min(MOST_RUNS, max(FEWEST_RUNS, MOST_SECONDS / max(seconds, 1e-6))))
        groups = self._groups(self._codes(), runs)
        long = seconds * len(groups) > LONG_SECONDS
        with progress("measuring lossy codecs", len(groups), lines=False) if long else _silent() as advance:
            for group in groups:
                self._price_group(base, group)
                advance("")

    def _codes(self) -> dict[int, list[tuple[Codec, int]]]:
        """The lossy codes, with their bytes, of every activation that is large enough to matter."""
        planner, ours = self.planner, owned(self.planner.graph) - self.planner.frozen
        found = {}
        for value in feature_maps(planner.kept.schedule):
            if value in ours and planner.is_large(value):
                codes = list(codes_of(planner.graph, value, planner.methods.codecs, planner.densities))
                lossless = [size for codec, size in codes if codec.lossless]
                least = min([planner.graph.values[value].bytes, *lossless])
                lossy = [(codec, size) for codec, size in codes if not codec.lossless and size < least]
                if lossy:
                    found[value] = lossy
                    self.sizes |= {(self._name(value), codec.name): least - size for codec, size in lossy}
        return found

    def _name(self, value: int) -> str:
        return self.planner.graph.values[value].name

    def _groups(
        self, codes: Mapping[int, list[tuple[Codec, int]]], most: int
    ) -> list[dict[int, list[tuple[Codec, int]]]]:
        """Group like activations into at most so many groups: by module, operator and shape if these are few enough,
        else by fewer of these."""
        graph = self.planner.graph
        for level in range(4):
            groups: dict[object, dict[int, list[tuple[Codec, int]]]] = {}
            for value, found in codes.items():
                producer = graph.producer(value)
                module = NUMBER.sub("#", producer.module) if producer else ""
                key = (graph.values[value].shape, str(producer.target) if producer else "", module)
                groups.setdefault(key[: 3 - level], {})[value] = found
            if len(groups) <= most:
                break
        return list(groups.values())

    def _price_group(self, base: frozenset[int], group: Mapping[int, list[tuple[Codec, int]]]) -> None:
        chosen = {value: _probe(codes) for value, codes in group.items()}
        schedule = self._encoding(base, [Encode(value, codec.name, size) for value, (codec, size) in chosen.items()])
        noise: dict[int, dict[str, float]] = {}
        watches = {}
        for op in schedule.graph.ops:
            if op.forward and op.reads and op.reads[0] in group and lossy_codec(op) is not None:
                value = op.reads[0]
                codecs = [codec for codec, _ in group[value]]
                watches[op.id] = _Noise(chosen[value][0], codecs, noise.setdefault(value, {}))
        error = compare_gradients(
            self.planner.graph, self.exact, self._run(schedule, exact=False, watches=watches)
        ).relative
        probed = math.hypot(*(noise[value][chosen[value][0].name] for value in noise))
        for value, seen in noise.items():
            for codec, share in seen.items():
                expected = 0.0 if share == 0 else (error * share / probed if probed else math.inf)
                name = self._name(value)
                if math.isfinite(expected):
                    self.candidates.append(LossyCandidate(name, codec, self.sizes[name, codec], expected))

    # -- together ----------------------------------------------------------------------------------------------------

    def _verified(self, base: frozenset[int]) -> Admitted:
        """The largest admission whose error, measured with all of it, stays within the bound."""
        found: Admitted = frozenset()
        grown = 0
        for _ in range(MOST_ROUNDS):
            admitted = admit(self.candidates, self.allowed)
            if not admitted or admitted == found:
                break
            error = self._together(base, admitted)
            log.info("%d lossy pairs admitted for %.3g: error %.3g", len(admitted), self.allowed, error)
            if not error <= MARGIN * self.bound:
                if found:
                    break
                self.allowed *= min(SHRINK, SHRINK * MARGIN * self.bound / error if math.isfinite(error) else 0.0)
                continue
            found, taken = admitted, self.allowed
            grown += 1
            if error >= MUCH_UNUSED * self.bound or grown > MOST_GROWN or len(admitted) == len(self.candidates):
                break
            self.allowed *= SHRINK * self.bound / max(error, 1e-3 * self.bound)
        if found:
            self.allowed = taken
        self.exact = []
        return found

    def _together(self, base: frozenset[int], admitted: Admitted) -> float:
        graph = self.planner.graph
        numbers = {value.name: value.id for value in graph.values}
        encode = []
        for name, one in worst_of(self.candidates, admitted).items():
            lossy = codes_of(graph, numbers[name], (one.codec,), self.planner.densities)
            encode += [Encode(numbers[name], codec.name, size) for codec, size in lossy]
        lossy_gradients = self._run(self._encoding(base, encode), exact=False)
        return compare_gradients(graph, self.exact, lossy_gradients).relative


@contextlib.contextmanager
def _silent() -> Iterator[Callable[[str], None]]:
    yield lambda note: None


def _probe(codes: Sequence[tuple[Codec, int]]) -> tuple[Codec, int]:
    by_name = {codec.name: (codec, size) for codec, size in codes}
    names = (*PROBES, *(f"sparse_{name}" for name in PROBES))
    return next((by_name[name] for name in names if name in by_name), codes[0])


class _Noise:
    """Calls an encoder, and measures other codecs on a sample of its operand: the norm of their errors over that of the
    sample."""

    def __init__(self, codec: Codec, codecs: Sequence[Codec], seen: dict[str, float]) -> None:
        self.codec, self.seen = codec, seen
        self.codecs = sorted(codecs, key=lambda one: one.name.startswith("sparse_"))

    def __call__(self, x: torch.Tensor, *options: Any) -> torch.Tensor:
        flat = x.reshape(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))  # codes follow memory
        parts = [flat]
        if flat.numel() > CHUNKS * SAMPLE:
            parts = [flat[at * (flat.numel() - SAMPLE) // (CHUNKS - 1) :][:SAMPLE] for at in range(CHUNKS)]
        parts = [torch.where(part.isfinite(), part, 0) for part in parts]
        size = math.hypot(*(float(part.double().norm()) for part in parts))
        for codec in self.codecs:
            alike = codec.name.removeprefix("sparse_")
            if alike in self.seen and alike not in SHARED_SCALES:  # zeros are exact in either
                self.seen[codec.name] = self.seen[alike]
                continue
            apart = math.hypot(*(float((_round_trip(codec, part) - part).double().norm()) for part in parts))
            self.seen[codec.name] = apart / size if size else 0.0
        return CODECS[self.codec.name].encode(x, *options)


def _round_trip(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    code = codec.encode(*codec.encode_args(x))
    return codec.decode(*codec.decode_args(code, x.shape, x.stride(), x.dtype))
