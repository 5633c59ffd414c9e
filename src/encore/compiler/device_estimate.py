"""`DeviceEstimate`: whether a training step fits a device that is not here, as it is, and with a plan.

The step as it is: `device_step.py`. A plan is chosen on its graph, as for `encore.compile`, and its schedule goes
through the allocator of the device, between parameters, optimizer state and the optimizer's own temporary memory.

Known shortcomings: plans are searched on the operators that the CPU runs, with the CPU's seconds, and workspaces other
than cuBLAS's count as nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from encore.compiler.device_step import DeviceStep
from encore.compiler.estimate import Estimate
from encore.devices import CachingAllocator, DeviceBlock, DeviceProfile
from encore.errors import BudgetError, OptionError
from encore.options import parse_budget
from encore.plan import Plan, worth_having
from encore.reports.report import Report
from encore.schedule.simulator import changes
from encore.units import bytes_text, seconds_text

MARGIN = 0.10
"""How far a step without convolutions may be above its estimate, as a fraction: no measured one is further
(docs/benchmarks-devices.md)."""
CONVOLUTION_MARGIN = 0.22
"""The same with convolutions, whose workspaces are not known."""
STEPS = 2
"""Steps after which a planned step reserves nothing more."""
DEVICE = "device"
"""The budget that is the whole device."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan for a device."""

    report: Report
    reserved: int
    """Bytes that PyTorch reserves with it, everything included."""


@dataclass(frozen=True)
class DeviceEstimate:
    """A training step of plain PyTorch on a device that is not here."""

    name: str
    profile: DeviceProfile
    step: DeviceStep
    capture: Callable[[], Estimate]
    """Estimate the plans of the step."""

    @property
    def reserved(self) -> int:
        """Bytes that PyTorch reserves at most, with parameters, gradients and the optimizer: what a GPU runs out of."""
        return self.step.allocator.peak_reserved

    @property
    def allocated(self) -> int:
        """Bytes that are allocated at most."""
        return self.step.allocator.peak_allocated

    @property
    def seconds(self) -> float:
        """The sum of the operators' rooflines: a lower bound of the step's seconds, no prediction."""
        return self.step.seconds

    @property
    def notes(self) -> tuple[str, ...]:
        """What the estimate assumes of this model."""
        return tuple(self.step.notes)

    @property
    def margin(self) -> float:
        """How far the step may be above `reserved`, as a fraction."""
        return CONVOLUTION_MARGIN if self.step.convolves else MARGIN

    def fits(self, budget: int | float | str = DEVICE) -> bool:
        """Return whether the step fits a budget of reserved bytes, with the margin."""
        return not self.step.allocator.ran_out and self.reserved * (1 + self.margin) <= self._limit(budget)

    @property
    def verdict(self) -> str:
        """`"fits"`, `"may not fit"` (only the margin does not), or `"does not fit"`."""
        if self.fits():
            return "fits"
        return "does not fit" if self.step.allocator.ran_out else "may not fit"

    def plan(self, budget: int | float | str = DEVICE) -> DevicePlan:
        """The fastest plan that fits, with the margin; raises `BudgetError` if there is none."""
        limit = self._limit(budget)
        estimate = self._estimate
        if len(estimate.captured) != 1:
            raise OptionError(
                f"{self.name} is cut into {len(estimate.captured)} graphs, and plans for a device are made for one; "
                "estimate without device=, or remove the graph breaks (TORCH_LOGS=graph_breaks shows them)"
            )
        lowest = 0
        for offer in worth_having(estimate.captured[0].offers):
            reserved = self._reserved_by(offer.plan)
            if reserved * (1 + self.margin) <= limit:
                total = estimate.options.resident + offer.plan.timeline.resident + offer.plan.timeline.step_peak
                return DevicePlan(estimate.plan(total), reserved)
            lowest = min(lowest or reserved, reserved)
        raise BudgetError(
            f"no plan of {self.name} fits {bytes_text(limit)} of {self.profile.name}: the lowest peak reserves "
            f"{bytes_text(lowest)}, and may be {self.margin:.0%} above; use a smaller batch, a narrower type or a "
            "larger device",
            floor=lowest,
        )

    @functools.cached_property
    def _estimate(self) -> Estimate:
        return self.capture()

    def _limit(self, budget: int | float | str) -> int:
        if budget == DEVICE:
            return self.profile.usable
        parsed = parse_budget(budget)
        if parsed.bytes is not None:
            return parsed.bytes
        if parsed.share is None:
            raise OptionError("budget='min' is no limit for a device; give bytes, a percentage or 'device'")
        return int(parsed.share * self.reserved)

    def _reserved_by(self, plan: Plan) -> int:
        """What a planned step reserves, with everything around it."""
        allocator = CachingAllocator(self.profile.usable)
        allocator.allocate(self.step.resident)
        for _ in range(STEPS):
            blocks: dict[int | None, list[DeviceBlock | None]] = {}
            for change in changes(plan.schedule, plan.timeline):
                if change.bytes > 0:
                    blocks.setdefault(change.storage, []).append(allocator.allocate(change.bytes))
                elif change.bytes < 0:
                    allocator.free(blocks[change.storage].pop())
            allocator.use(self.step.optimizing)
            for left in blocks.values():
                for block in left:
                    allocator.free(block)
        return allocator.peak_reserved

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "name": self.name,
            "device": self.profile.name,
            "device_memory": self.profile.memory,
            "context": self.profile.context,
            "reserved": self.reserved,
            "allocated": self.allocated,
            "margin": self.margin,
            "verdict": self.verdict,
            "roofline_seconds": self.seconds,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.name} on {self.profile.name}: {self.verdict}",
            f"  reserved at most  {bytes_text(self.reserved)} of {bytes_text(self.profile.usable)} "
            f"(+{self.margin:.0%} at most; {bytes_text(self.profile.context)} for CUDA itself)",
            f"  allocated at most {bytes_text(self.allocated)}",
            f"  roofline          {seconds_text(self.seconds)} a step: a lower bound, no prediction",
            *(f"  note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)
