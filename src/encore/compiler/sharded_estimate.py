"""`ShardedEstimate`: a step of a model that FSDP2 would shard over many ranks, on one of them, without any of them.

The step runs on fake tensors, with FSDP2's allocations around its blocks (`simulated_sharding.py`), and is recorded as
for `encore.estimate`. Blocks of one class with the same shapes are one graph, which is traced and searched once.

Known shortcomings: bytes are those that tensors take, and leave out what an allocator rounds up or cannot use again;
for a device that is not here, operators are the CPU's, and workspaces other than Encore's own count as nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from encore.compiler.device_step import optimizer_class
from encore.compiler.estimate import Estimate
from encore.compiler.simulated_sharding import Sharding
from encore.devices import DeviceProfile
from encore.errors import OptionError
from encore.options import Budget, optimizer_bytes
from encore.reports.report import Report
from encore.units import bytes_text

MARGIN = 0.10
"""How much of a device an estimate leaves free, as a fraction of the step."""
DEVICE = "device"
"""The budget that is the whole device."""


@dataclass(frozen=True)
class ShardedEstimate:
    """A step that has not run, on one of the ranks of a sharded model."""

    name: str
    sharding: Sharding
    estimate: Estimate
    profile: DeviceProfile | None = None

    @property
    def resident(self) -> int:
        """Bytes that are there between two steps: shards, their optimizer's state, buffers, inputs."""
        return self.estimate.resident

    @property
    def unplanned(self) -> int:
        """The peak with everything kept, resident bytes included."""
        return self.estimate.taken_unplanned

    @property
    def floor(self) -> int:
        """The lowest reachable peak, resident bytes included."""
        return self.estimate.floor

    def fits(self, budget: int | float | str | Budget = DEVICE) -> bool:
        """Return whether there is a plan within the budget; on the device with its margin, if none is given."""
        return self.estimate.fits(self._limit(budget))

    def plan(self, budget: int | float | str | Budget = DEVICE) -> Report:
        """The report of the fastest plan within the budget; raises `BudgetError` if there is none."""
        return self.estimate.plan(self._limit(budget))

    def _limit(self, budget: int | float | str | Budget) -> int | float | str | Budget:
        if budget != DEVICE:
            return budget
        if self.profile is None:
            raise OptionError("no device was given; give a budget, or device= to encore.estimate")
        return int(self.profile.usable / (1 + MARGIN))

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "name": self.name,
            "shards": self.sharding.shards,
            "resident": self.resident,
            "unplanned": self.unplanned,
            "floor": self.floor,
            "device": None if self.profile is None else self.profile.name,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.name} on each of {self.sharding.shards} ranks (FSDP2)",
            f"  resident          {bytes_text(self.resident)}   shards, optimizer state, buffers, inputs",
            f"  everything kept   {bytes_text(self.unplanned)}",
            f"  lowest peak       {bytes_text(self.floor)}",
        ]
        if self.profile is not None:
            verdict = "fits with a plan" if self.fits() else "does not fit"
            verdict = "fits as it is" if self.unplanned * (1 + MARGIN) <= self.profile.usable else verdict
            lines.append(
                f"  {self.profile.name}: {verdict} ({bytes_text(self.profile.usable)}, {MARGIN:.0%} left free)"
            )
        return "\n".join(lines)


def shard_state_bytes(optimizer: Any, model: nn.Module, sharding: Sharding) -> int:
    """Bytes that an optimizer (an instance, a class or its name) keeps for this rank's shards."""
    if optimizer is None:
        return 0
    if isinstance(optimizer, torch.optim.Optimizer):
        return -(-optimizer_bytes(optimizer) // sharding.shards)
    shards = [
        nn.Parameter(torch.empty(-(-one.shape[0] // sharding.shards), *one.shape[1:], dtype=one.dtype, device="meta"))
        for _, _, group in sharding.groups(model)
        for one in group.parameters
        if one.trained
    ]
    return optimizer_bytes(optimizer_class(optimizer)(shards, lr=1e-3))
