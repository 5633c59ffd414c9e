"""One captured graph for many sizes of its inputs: each size is planned when it comes, and runs its own plan."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from encore.capture import torch_private
from encore.capture.symbolic_joint import SymbolicJoint
from encore.capture.unused_outputs import Tangents
from encore.compiler.session import Session
from encore.compiler.variants import GraphRunner, Variant

MOST_SIZES = 128
"""Sizes that are kept of one graph; the least recently used are dropped."""

Sizes = tuple[int, ...]
PlanSizes = Callable[[Sizes, Sequence[Any]], GraphRunner]
"""Plan the graph for these sizes, given its inputs."""


class SizedRunner:
    """What AOTAutograd calls for a graph that was traced with symbols."""

    def __init__(self, session: Session, symbolic: SymbolicJoint, first: GraphRunner, plan: PlanSizes) -> None:
        self.session = session
        self._symbolic = symbolic
        self._plan = plan
        self._runners: OrderedDict[Sizes, GraphRunner] = OrderedDict()
        """By sizes, the latest used last."""
        self._numbers: dict[Sizes, int] = {}
        """The numbers of their graphs in the session."""
        self.latest = first
        self._add(symbolic.traced, first)

    @property
    def tangents(self) -> Tangents:
        return self.latest.tangents

    @property
    def current(self) -> Variant:
        return self.latest.current

    def groups(self, inputs: Sequence[Any]) -> torch_private.Groups:
        return self._runner(inputs).groups(inputs)

    def forward(self, args: list[Any]) -> Any:
        runner = self._runner(args)
        torch_private.running_node().encore_runner = runner
        return runner.forward(args)

    def backward(self, args: list[Any]) -> Any:
        runner: GraphRunner = torch_private.running_node().encore_runner
        return runner.backward(args)

    def _runner(self, args: Sequence[Any]) -> GraphRunner:
        sizes = self._symbolic.sizes_of(args)
        runner = self._runners.get(sizes)
        if runner is None:
            if self.session.one_graph:
                self.session.begin_call()
            runner = self._plan(sizes, args)
            self._add(sizes, runner)
        elif runner is not self.latest:
            self._runners.move_to_end(sizes)
        self.latest = runner
        return runner

    def _add(self, sizes: Sizes, runner: GraphRunner) -> None:
        number = self.session.captured_so_far - 1
        self._runners[sizes], self._numbers[sizes] = runner, number
        self.session.when_dropped(number, functools.partial(_drop, weakref.ref(self), sizes))
        while len(self._runners) > MOST_SIZES:
            self.session.forget([self._numbers[next(iter(self._runners))]])


def _drop(reference: weakref.ref[SizedRunner], sizes: Sizes) -> None:
    runners = reference()
    if runners is not None:
        runners._runners.pop(sizes, None)
        runners._numbers.pop(sizes, None)
