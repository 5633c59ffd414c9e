"""Where tensors are offloaded to: disk and host memory, asynchronous, bounded, checked.

`tier` is what every tier promises, with the bookkeeping that all share; `disk` and `host` add how bytes move. `layout`
turns tensors into one block of bytes and back, `slot_file` is the file of the disk tier, `limits` reads how much room
the machine has. What may not live here: when to store and what (that is `bptt/`, and the planner), graphs, schedules.

Tensors are never looked up by address. `store` returns a `Parcel`, the only way back to its bytes; while it is being
written it keeps its tensors, so that their addresses are not used again.
"""

from encore.tiers.disk import Disk
from encore.tiers.host import Host
from encore.tiers.table import FOR_STEPS, KINDS, check_tiers, open_tiers
from encore.tiers.tier import Parcel, Tier, Transfers

__all__ = ["FOR_STEPS", "KINDS", "Disk", "Host", "Parcel", "Tier", "Transfers", "check_tiers", "open_tiers"]
