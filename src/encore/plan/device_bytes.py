"""What a step takes of each of its devices: peaks of several devices are not added up, since none serves another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from encore.graph import Role
from encore.plan.plan import Plan
from encore.schedule import device_peaks, resident_bytes, residents


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """What a step allocates on one device."""

    device: str
    resident: int
    """Parameters, buffers, inputs, and the share of the optimizer's state that its parameters have."""
    step_peak: int

    @property
    def total(self) -> int:
        return self.resident + self.step_peak

    @classmethod
    def of_step(cls, plans: Sequence[Plan], state: int = 0) -> list[DeviceBytes]:
        """Those of a step that runs these plans one after the other; `state` is the optimizer's, on all devices."""
        graphs = [plan.schedule.graph for plan in plans]
        own, peaks = (
            resident_bytes(graphs),
            device_peaks([one.schedule for one in plans], [one.timeline for one in plans]),
        )
        shares = dict.fromkeys(sorted(own.keys() | peaks.keys()), 0)
        for index, value, _ in residents(graphs):
            storage = graphs[index].values[value].storage
            if graphs[index].values[value].role is Role.PARAMETER and storage is not None:
                shares[graphs[index].storages[storage].device] += graphs[index].storages[storage].bytes
        if not any(shares.values()):  # without parameters
            shares[max(shares, key=lambda device: own.get(device, 0))] = 1
        whole = sum(shares.values())
        return [
            cls(device, own.get(device, 0) + state * share // whole, peaks.get(device, 0))
            for device, share in shares.items()
        ]
