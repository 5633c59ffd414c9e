"""What a step takes and what was decided, as data, and the ways to show it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encore.plan import SavedPlan
from encore.reports.allocations import Allocation
from encore.reports.points import Curve, Point
from encore.reports.profile import Profile
from encore.reports.steps import MeasuredStep
from encore.reports.table import render
from encore.whole_files import write_whole

FIRST_STEP = {
    "capture": ("dynamo", "capture", "capture of repeats", "facts", "verify"),
    "plan": ("rehearsal", "plan"),
    "compile": ("compile", "lower"),
    "first run": ("first forward", "first backward"),
}
"""What the stages of a first step are to a user who waits for it."""
NO_PLAN = SavedPlan("", ())
NUMBERS = re.compile(r"\[\n[-+.,eE\d\s]+\]")
"""A list of numbers in indented JSON, which goes on one line: a timeline has thousands."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step, predicted."""

    step_peak: int
    """The peak of the step: most bytes alive at once, gradients included, above those alive when it began."""
    saved: int
    """Bytes alive between forward and backward."""
    overhead: float
    """Extra time over the unplanned step, as a fraction."""
    seconds: float
    """The step's time; 0 where no plan was looked for."""
    at_peak: dict[str, int]
    """Bytes alive at the worst moment, by kind."""
    profile: Profile
    """Memory over the step, by kind."""
    stall: float = 0.0
    """Seconds of the step in which it waits for activations on their way to a tier or back."""
    moved: int = 0
    """Bytes that go to tiers."""


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """The decision for one activation."""

    value: str
    module: str
    source: str
    shape: tuple[int, ...]
    bytes: int
    action: str
    why: str
    seconds: float
    """The time that recomputing, decoding or reloading it takes."""
    operator: str = ""
    """The operator that computes it."""
    held: int = 0
    """Bytes that are saved for it between forward and backward: its own if it is kept."""
    code: str = ""
    """How it is saved, if not as it is: a codec, or every how many steps a recurrent layer keeps its state."""
    lossless: bool = True
    """Whether backward reads it bit for bit."""
    largest: int | None = None
    """Bytes of its largest code so far, where they depend on the data: `held` is what was planned."""
    dense: int | None = None
    """Bytes that its code takes at most, whatever the data, where they depend on it."""
    planned_density: float | None = None
    """The share of non-zeros that was planned for; of integers, the share of a number's bytes."""
    density: float | None = None
    """The largest such share so far."""
    error: float | None = None
    """Its error at the first step, if its codec is lossy: the largest difference as a share of its
    largest number."""
    error_bound: float | None = None
    """The bound on that error: what its codec promises for such numbers."""


@dataclass(frozen=True, slots=True)
class LossyRow:
    """What lossy codecs may do to the gradients, and what they do. Errors are relative, over all parameters together:
    `encore.cost.gradient_error` has the definition."""

    bound: float | None
    """Largest gradient error that codecs were chosen for; None: codecs were named, without a bound."""
    error: float | None
    """The largest gradient error that was measured; of a step of several graphs, the sum of theirs. None: not yet."""
    largest: float | None
    """The largest error of a single parameter in these measurements."""
    checks: tuple[tuple[int, float], ...] = ()
    """Steps that were checked, counted from 0, with their gradient errors; of the first graph that has lossy codecs."""
    why_not: str = ""
    """Why there is no measurement, or why the latest one could not be made."""

    @property
    def holds(self) -> bool | None:
        """Return whether every measured error is within the bound; None without a bound or a measurement."""
        return None if self.bound is None or self.error is None else self.error <= self.bound


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """What the step takes of one device."""

    device: str
    resident: int
    step_peak: int
    """The most that is allocated there at once, above what is resident. Devices need not peak at the same moment."""
    reserved: int | None = None
    """What its allocator reserves at most, as predicted; None unless a budget bounds it."""
    limit: int | None = None
    """How much it may reserve."""

    @property
    def allocated(self) -> int:
        """Resident bytes and the peak."""
        return self.resident + self.step_peak


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One graph of the step; a model that breaks has several."""

    name: str
    operators: int
    step_peak: int
    saved: int
    break_reason: str
    break_line: str
    seconds: dict[str, float]
    """The first step, stage by stage."""
    kernels: int
    """Distinct fused kernels."""
    kernel_calls: int
    """How often a step calls one."""
    kernels_compiled: int
    """How many of them were compiled for this graph: the others were there, in memory or on disk."""
    rewrites: tuple[str, ...]
    """Passes of the fused lowering that changed the graph."""
    notes: tuple[str, ...] = ()
    """Why the prediction, or equality with eager, may not hold."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a step takes, and what was decided, as plain numbers and names, without graphs and tensors. `print` it,
    look at it (`to_html`, `to_png`, `to_snapshot`), or take `to_json()`."""

    name: str
    resident: int
    """Bytes of parameters, buffers and inputs, and of what `resident=` or `optimizer=` added."""
    budget: int | None
    """Upper bound on resident + step_peak, in bytes, where one was given."""
    asked: str
    """The goal of the plan."""
    unplanned: Prediction
    planned: Prediction
    pareto: Curve
    """The plans there were to pick from: (resident + step_peak in bytes, overhead), fastest first. What the plan that
    was taken needs is exact, what others need is as close as the search looked."""
    decisions: tuple[DecisionRow, ...]
    graphs: tuple[GraphRow, ...]
    plain: tuple[str, ...]
    """Parts that run as plain PyTorch, and why."""
    lowering: str
    plan: SavedPlan = field(default=NO_PLAN, repr=False, compare=False)
    """What was decided, to be saved and used again: `encore.compile(model, plan=...)`."""
    allocations: tuple[Allocation, ...] = field(default=(), repr=False, compare=False)
    """Everything the planned step allocates, in order."""
    beside: int = 0
    """The part of `resident` that `resident=` or `optimizer=` added."""
    stalled: float | None = None
    """Seconds that the latest step did stand still for transfers; None before a step that has some."""
    lossy: LossyRow | None = None
    """The gradient error of lossy codecs; None where none were allowed."""
    devices: tuple[DeviceRow, ...] = ()
    """What the step takes of each of its devices; what is bounded by a budget is the device, and not their sum."""
    measured: MeasuredStep | None = None
    """The latest step that was measured, with what ran outside of the captured graphs; None before one was."""

    @property
    def densest_step_peak(self) -> int:
        """The peak if every activation that was planned as sparse were dense, and every integer took all of its bytes.
        The predicted peak itself, where no code depends on the data."""
        return self.planned.step_peak + sum(row.dense - row.held for row in self.decisions if row.dense is not None)

    @property
    def first_step(self) -> dict[str, float]:
        """Seconds of the first step: capture, plan, compile, first run."""
        total = dict.fromkeys(FIRST_STEP, 0.0)
        for row in {row.name: row for row in self.graphs}.values():
            for stage, seconds in row.seconds.items():
                total[next(name for name, stages in FIRST_STEP.items() if stage in stages)] += seconds
        return total

    def to_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(dataclasses.replace(self, plan=NO_PLAN, allocations=()))
        del found["plan"], found["allocations"]
        if self.measured is not None:
            found["measured"]["excess"] = self.measured.excess
        return {"encore_report": 1, **found}

    def to_json(self) -> str:
        """The whole report as JSON; `encore_report` is the version of its layout."""
        return NUMBERS.sub(lambda found: " ".join(found[0].split()), json.dumps(self.to_dict(), indent=2))

    def to_html(
        self, path: str | os.PathLike[str], *, measured: Sequence[Point] = (), peers: Sequence[Point] = ()
    ) -> Path:
        """Write a page with memory over the step, the plans there were and every decision. It opens without a network.
        What was `measured`, and what `peers` take, are drawn next to the plans."""
        from encore.reports.page import html_page

        return write_whole(path, html_page(self, measured=measured, peers=peers).encode())

    def to_png(self, path: str | os.PathLike[str]) -> Path:
        """Write a picture of memory over the step; wants matplotlib (`pip install encore-torch[plots]`)."""
        from encore.reports.picture import timeline_png

        return write_whole(path, timeline_png(self))

    def to_snapshot(self, path: str | os.PathLike[str]) -> Path:
        """Write the predicted step as a snapshot that PyTorch's memory viewer opens (pytorch.org/memory_viz)."""
        from encore.reports.snapshot import snapshot_bytes

        return write_whole(path, snapshot_bytes(self))

    def __str__(self) -> str:
        return render(self)
