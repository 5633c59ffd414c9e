"""The seconds of every operator and fused kernel of a schedule, on this machine.

FLOP counts rank memory-bound operators wrongly, and do not include the time of the call from Python. So operators are
timed: each distinct call once on random operands, called as in the step, and the result is cached. A view costs its
call. A roofline model (`roofline.py`) gives the seconds of kernels that are not compiled yet and of what may not run:
anything in an estimate or under a user's profiler, and operators that write to operands, communicate or need too much
memory.
"""

from __future__ import annotations

import collections
import logging
import weakref
from collections.abc import Callable

import torch

from encore.codecs import Codec
from encore.cost.codec_timing import CodecCall, codec_of
from encore.cost.domains import domain_key
from encore.cost.probe import device_of_call, footprint, random_call
from encore.cost.rates import AssumedRates, Rates, is_duration
from encore.cost.roofline import kernel_roofline, op_roofline
from encore.cost.room import has_room, sets_of_operands
from encore.cost.scaled_seconds import KnownSizes, call_structure, kernel_structure
from encore.cost.signature import as_first_drawn, call_signature, can_run, is_pure_aten
from encore.cost.timing import MOST_SECONDS, seconds_of
from encore.cost.torch_private import profiler_is_running
from encore.devices import generators_kept, is_here
from encore.graph import Graph, Op, OpClass
from encore.graph.ops import is_codec
from encore.graph.random_ops import DrawState
from encore.graph.tier_ops import is_transfer
from encore.measurements import machine_cache
from encore.schedule import Fused, Run, Schedule
from encore.schedule.kernel import Kernel

log = logging.getLogger("encore")

WORTH_TIMING = 32 * 1024
"""Bytes below which an operator costs little more than its call."""
SETTLING = 2.0
"""Seconds for timing the operators of one step again, each by its share of the step."""
LEAST_SHARE = 0.005
"""Share of a step from which on an operator is timed again."""
ROUNDS = 2


class Seconds:
    """Returns the seconds of operators and kernels of graphs. With `run=False` nothing is run."""

    def __init__(self, *, run: bool) -> None:
        self.run = run
        self._cache = machine_cache()
        self._rates = Rates(run=run)
        self._model = AssumedRates()
        """By which seconds are scaled from one size to another."""
        self._known: dict[str, float] = {}
        self._guessed: dict[str, float] = {}
        self.sizes = KnownSizes()
        """What is known of calls at several sizes."""
        self._fresh: dict[str, tuple[Graph, Op, int | None]] = {}
        """Operators that this object has timed, and only once."""
        self._answers: weakref.WeakKeyDictionary[Graph, dict[tuple[int, int | None], float]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, graph: Graph, op: Op | Fused, over: int | None = None) -> float:
        """Seconds of one call; of an operator that writes over its operand `over`, if that is given."""
        if isinstance(op, Fused):
            return self._of_kernel(graph, op)
        if not _takes_time(op):
            return self._rates.view
        answers = self._answers.get(graph)
        if answers is None:
            answers = self._answers[graph] = {}
        known = answers.get((op.id, over))
        if known is None:
            known = answers[op.id, over] = self._of_operator(graph, op, over)
        return known

    def inside(self, graph: Graph, op: Op) -> float:
        """Seconds that a cheap operator takes as a kernel of its own, or at most adds to one."""
        return op_roofline(graph, op, self._rates)

    def scaled(self, graph: Graph, op: Op, over: int | None, may_scale: Callable[[str], bool]) -> float | None:
        """Seconds of an operator that was not timed at its size, from other sizes; None if they are not known, or if
        `may_scale` says so of the call."""
        if not self.run or not _is_timed(op):
            return None
        op = as_first_drawn(op)
        key = _operator(graph, op, over)
        if self._recall(key) is not None or not may_scale(key):
            return None
        return self.sizes.at(call_structure(graph, op, over), op_roofline(graph, op, self._model))

    def scaled_kernel(self, graph: Graph, action: Fused) -> float | None:
        """Seconds of a kernel that was not timed, from kernels of the same structure; None if there are none."""
        if not self.run or self._recall(_kernel(action.kernel.key)) is not None:
            return None
        return self.sizes.at(kernel_structure(action.kernel.text), kernel_roofline(graph, action, self._model))

    def learn(self, kernel: Kernel, seconds: float) -> None:
        """Record the measured seconds of a compiled kernel."""
        self._known[_kernel(kernel.key)] = seconds
        self._cache.put(_kernel(kernel.key), seconds)

    def knows(self, kernel: Kernel) -> bool:
        """Return whether a kernel has been timed, in this process or an earlier one."""
        return self._recall(_kernel(kernel.key)) is not None

    def settle(self, schedule: Schedule) -> None:
        """Time the operators again that take most of the step and were timed just now. A single measurement may fall
        into a moment when the machine is busy; the best of several, at different moments, seldom does."""
        graph, spent = schedule.graph, collections.defaultdict[str, float](float)
        runs = (action for action in (*schedule.forward, *schedule.backward) if isinstance(action, Run))
        costs = [(graph.ops[run.op], run.over, self(graph, graph.ops[run.op], run.over)) for run in runs]
        if not self._fresh:
            return
        for op, over, seconds in costs:
            if op.kind is not OpClass.VIEW:
                spent[_operator(graph, as_first_drawn(op), over)] += seconds
        total = sum(spent.values())
        large = [(key, share) for key in spent if (share := spent[key] / total) >= LEAST_SHARE]
        for _ in range(ROUNDS):
            for key, share in large:
                if key in self._fresh:
                    again = op_seconds(*self._fresh[key], most_seconds=SETTLING / ROUNDS * share)
                    self._known[key] = min(self._known[key], again)
                    self._cache.put(key, self._known[key])
        for key, call in self._fresh.items():
            self._note(key, *call)
        self._fresh.clear()
        self._answers.clear()

    def save(self) -> None:
        self._cache.save()

    def _of_kernel(self, graph: Graph, action: Fused) -> float:
        key = action.kernel.key
        known = self._recall(_kernel(key))
        if known is not None:
            if not self.sizes.is_noted(key):
                model = kernel_roofline(graph, action, self._model)
                self.sizes.note(key, kernel_structure(action.kernel.text), model, known)
            return known
        if key not in self._guessed:
            self._guessed[key] = kernel_roofline(graph, action, self._rates)
        return self._guessed[key]

    def _of_codec(self, graph: Graph, op: Op, codec: Codec) -> float:
        call = CodecCall(graph, op, codec)
        key = f"{call.key} threads={torch.get_num_threads()}"
        known = self._recall(key)
        if known is None:
            runs = self.run and not profiler_is_running() and is_here(call.device)
            if not runs or not has_room(call.footprint, call.device):
                return op_roofline(graph, op, self._rates)
            with torch.no_grad(), generators_kept():
                known = self._known[key] = call.time()
            self._cache.put(key, known)
        return known * call.share

    def _of_operator(self, graph: Graph, op: Op, over: int | None) -> float:
        codec = codec_of(op) if is_codec(op.target) else None
        if codec is not None:
            return self._of_codec(graph, op, codec)
        op = as_first_drawn(op)
        key = _operator(graph, op, over)
        known = self._recall(key)
        if known is not None:
            self._note(key, graph, op, over)
            return known
        if not self.run or profiler_is_running() or not may_run(graph, op):
            return op_roofline(graph, op, self._rates)
        try:
            seconds = op_seconds(graph, op, over)
        except Exception as error:  # of any kind: an operator may reject random operands, and still run in the step
            log.info("the seconds of %s are an estimate: it cannot be run (%s)", op.target, error)
            seconds = op_roofline(graph, op, self._rates)
        else:
            self._fresh[key] = (graph, op, over)
            self._cache.put(key, seconds)
            self._known[key] = seconds
            self._note(key, graph, op, over)
        self._known[key] = seconds
        return seconds

    def _note(self, key: str, graph: Graph, op: Op, over: int | None) -> None:
        """Note the size of a call whose seconds are known."""
        if self.run and (key in self._fresh or not self.sizes.is_noted(key)):
            structure, model = call_structure(graph, op, over), op_roofline(graph, op, self._model)
            self.sizes.note(key, structure, model, self._known[key])

    def _recall(self, key: str) -> float | None:
        if key not in self._known:
            cached = self._cache.get(key)
            if cached is None or not is_duration(cached):
                return None
            self._known[key] = cached
        return self._known[key]


def _takes_time(op: Op) -> bool:
    """Return whether a call takes more than that of a view."""
    return not (op.kind is OpClass.VIEW or isinstance(op.target, DrawState) or is_transfer(op.target))


def _is_timed(op: Op) -> bool:
    """Return whether a call is timed by itself; codecs are timed for a few sizes, and scaled anyway."""
    return _takes_time(op) and not is_codec(op.target)


def _operator(graph: Graph, op: Op, over: int | None) -> str:
    return f"seconds {call_signature(graph, op)}{domain_key(op)}{'' if over is None else ' over'}"


def _kernel(kernel_key: str) -> str:
    return f"seconds kernel {kernel_key} threads={torch.get_num_threads()}"


def may_run(graph: Graph, op: Op) -> bool:
    """Return whether an operator can safely be timed. Draws can: the states of generators are restored."""
    draws = op.kind is OpClass.RANDOM and op.target.namespace in ("aten", "encore")
    if not (draws or is_pure_aten(op)) or not can_run(graph, op):
        return False
    if any(isinstance(argument, torch.Generator) for argument in (*op.args, *op.kwargs.values())):
        return False  # the user's own
    size = footprint(graph, op)
    return size >= WORTH_TIMING and has_room(size, device_of_call(graph, op))


def op_seconds(graph: Graph, op: Op, over: int | None = None, *, most_seconds: float = MOST_SECONDS) -> float:
    """Time one operator on random operands. Those that it writes over are not restored between the few runs."""
    with torch.no_grad(), generators_kept():
        calls = [random_call(graph, op, over) for _ in range(sets_of_operands(footprint(graph, op)))]
        return seconds_of(calls, device=device_of_call(graph, op), most_seconds=most_seconds)
