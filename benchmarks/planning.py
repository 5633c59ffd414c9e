"""How long planning takes: from the traced joint graph to the chosen plan, compared with PyTorch's partitioner on that
graph.

Both get the same joint graph in the same process; neither tracing nor the compilation of kernels counts. What Encore
measures on a machine only once (operators, rewrites) is measured in a first planning that does not count either.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from benchmarks.workloads import Workload
from encore.capture import torch_private
from encore.compiler.backend import GraphCompilation, GraphCompiler
from encore.compiler.session import Session
from encore.compiler.variants import GraphRunner
from encore.options import make_options

SIZES: dict[str, dict[str, int]] = {"nmt": {"batch_size": 256, "steps": 36}, "transformer": {"layers": 16}}
"""A loop of ten thousand joint nodes, and a deep stack of layers."""
STAGES = ("facts", "verify", "plan")
"""What lies between the joint graph and the plan."""
RECOMPILE_LIMIT = 8


@dataclass(frozen=True, slots=True)
class PlanningTime:
    """One workload. Seconds."""

    workload: str
    nodes: int
    """Of the joint graph."""
    operators: int
    """Of Encore's graph of it."""
    encore: float
    stages: dict[str, float]
    """Where Encore's seconds go."""
    pytorch: float
    """`min_cut_rematerialization_partition`."""


class _Timed(GraphCompilation):
    """Lets PyTorch's partitioner split a copy of the graph first."""

    nodes = 0
    pytorch = 0.0

    def split(self, joint: fx.GraphModule, num_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        with warnings.catch_warnings():  # copying makes PyTorch use a class that it has deprecated
            warnings.simplefilter("ignore", FutureWarning)
            theirs = copy.deepcopy(joint)
        gc.collect()
        started = time.perf_counter()
        torch_private.plain_partition(theirs, num_outputs)
        self.pytorch = time.perf_counter() - started
        self.nodes = len(joint.graph.nodes)
        del theirs
        gc.collect()
        self.clock.started = time.perf_counter()
        return super().split(joint, num_outputs)


def planning_time(make: Callable[[], Workload]) -> PlanningTime:
    """Plan a workload twice, each time from the beginning, and time the second."""
    runs: list[_Timed] = []

    def compilation(session: Session, module: fx.GraphModule, inputs: Sequence[Any]) -> GraphCompilation:
        runs.append(_Timed(session, module, inputs))
        return runs[-1]

    for _ in range(2):
        torch.compiler.reset()
        gc.collect()
        workload = make()
        session = Session(workload.name, make_options({}), one_graph=True)
        compiler = GraphCompiler(session, compilation)
        planned = torch_private.dynamo_compile(workload.model.forward, compiler, RECOMPILE_LIMIT)
        with torch_private.whole_graphs():
            planned(*workload.batch(0))
    torch.compiler.reset()
    last = runs[-1]
    assert isinstance(last.runner, GraphRunner)
    stages = {stage: last.clock.seconds[stage] for stage in STAGES}
    return PlanningTime(
        workload=workload.name,
        nodes=last.nodes,
        operators=len(last.runner.current.captured.unplanned.schedule.graph.ops),
        encore=sum(stages.values()),
        stages=stages,
        pytorch=last.pytorch,
    )
