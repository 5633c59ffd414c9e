"""What has been compiled for one model, and which of it a step really ran."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from encore.cost import Workspaces
from encore.options import Options
from encore.plan import Plan


@dataclass(slots=True)
class CapturedGraph:
    """One graph of a model (a model that breaks has several), with its plan."""

    name: str
    unplanned: Plan
    plan: Plan
    break_reason: str = ""
    """Why the graph ended before the model did; empty for the last one."""
    break_line: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    """First-step time by stage."""
    sources: tuple[str, str] = ("", "")
    """The Python that runs: forward, backward."""


@dataclass(slots=True)
class PlainGraph:
    """A graph that runs as plain PyTorch, and why."""

    name: str
    reason: str


_births = itertools.count()


class Session:
    """The compiled graphs of one model. Each forward notes itself, so that the report knows what makes up a step."""

    def __init__(self, name: str, options: Options, *, run: bool = True) -> None:
        self.name = name
        self.options = options
        self.workspaces = Workspaces(run=run)
        self.graphs: list[CapturedGraph] = []
        self.plain: list[PlainGraph] = []
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.forwards_run = 0
        self.born = next(_births)
        self._step: list[CapturedGraph] = []
        self._backward_began = False
        self._lock = threading.Lock()
        sessions.add(self)

    def note_forward(self, graph: CapturedGraph) -> None:
        with self._lock:
            if self._backward_began:
                self._step = []
                self._backward_began = False
            self._step.append(graph)
            self.forwards_run += 1

    def note_backward(self) -> None:
        self._backward_began = True

    def plans_of_step_so_far(self) -> list[Plan]:
        """The plans that the running step has been through when its next graph is planned."""
        return [] if self._backward_began else [graph.plan for graph in self._step]

    def remember_tensors(self, inputs: Any) -> None:
        self.tensors += [weakref.ref(tensor) for tensor in inputs if isinstance(tensor, torch.nn.Parameter)]

    def owns_any(self, parameters: set[int]) -> bool:
        alive = (reference() for reference in self.tensors)
        return any(id(tensor) in parameters for tensor in alive if tensor is not None)

    @property
    def last_step(self) -> list[CapturedGraph]:
        """The graphs of the latest step, in the order their forwards ran."""
        return list(self._step) or list(self.graphs)


sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Every session whose compiled functions are still alive."""
