"""Where bytes go when they leave: disk and host memory, asynchronous, bounded, checked.

`tier` is what every tier promises, `layout` turns tensors into one block of bytes and back, `disk` and `host` are the
tiers, `slot_file` is the file beneath the first, `limits` asks the machine for room. What may not live here: when to
store and what (that is `bptt/`, and the planner), graphs, schedules.

Tensors are never looked up by address. `store` returns a `Parcel`, and a parcel is the only way back to its bytes;
while it is being written it holds its tensors, so that no address is used again under its feet.
"""

from encore.tiers.disk import Disk
from encore.tiers.host import Host
from encore.tiers.table import FOR_STEPS, KINDS, check_tiers, open_tiers
from encore.tiers.tier import Parcel, Tier, Transfers

__all__ = ["FOR_STEPS", "KINDS", "Disk", "Host", "Parcel", "Tier", "Transfers", "check_tiers", "open_tiers"]
