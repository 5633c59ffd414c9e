"""Plan + graph -> one linear stream of actions for forward and one for backward; what they hold, byte by byte.

Nothing here chooses what to keep, and nothing here runs on real tensors.
"""

from encore.schedule.actions import Action, Free, Fused, Run, Schedule
from encore.schedule.fusion import Fusion, fuse
from encore.schedule.order import schedule_step
from encore.schedule.replay import replay
from encore.schedule.simulate import Change, Kind, Timeline, alive_at_worst, changes, simulate
from encore.schedule.stack import Stack, residents, stack, stretches

__all__ = [
    "Action",
    "Change",
    "Free",
    "Fused",
    "Fusion",
    "Kind",
    "Run",
    "Schedule",
    "Stack",
    "Timeline",
    "alive_at_worst",
    "changes",
    "fuse",
    "replay",
    "residents",
    "schedule_step",
    "simulate",
    "stack",
    "stretches",
]
