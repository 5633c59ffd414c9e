"""Plan + graph -> one linear stream of actions for forward and one for backward; their memory, byte by byte.

Nothing here chooses what to keep, and nothing here runs on real tensors.
"""

from encore.schedule.actions import Action, Free, Fused, Load, Run, Schedule, Store, Wait
from encore.schedule.allocator_events import MemoryEvent, What, device_peaks, devices_of, memory_events, resident_bytes
from encore.schedule.copies import CarriedOut, carry_out, carry_out_fates
from encore.schedule.delivery import Cut, gradient_cuts, last_reads
from encore.schedule.fusion import Fusion, fuse
from encore.schedule.order import schedule_step
from encore.schedule.replayer import replay
from encore.schedule.simulator import Change, Kind, Timeline, alive_at_worst, changes, simulate
from encore.schedule.stacking import Stack, residents, stack, stretches
from encore.schedule.transfers import Placed, place_transfers

__all__ = [
    "Action",
    "CarriedOut",
    "Change",
    "Cut",
    "Free",
    "Fused",
    "Fusion",
    "Kind",
    "Load",
    "MemoryEvent",
    "Placed",
    "Run",
    "Schedule",
    "Stack",
    "Store",
    "Timeline",
    "Wait",
    "What",
    "alive_at_worst",
    "carry_out",
    "carry_out_fates",
    "changes",
    "device_peaks",
    "devices_of",
    "fuse",
    "gradient_cuts",
    "last_reads",
    "memory_events",
    "place_transfers",
    "replay",
    "resident_bytes",
    "residents",
    "schedule_step",
    "simulate",
    "stack",
    "stretches",
]
