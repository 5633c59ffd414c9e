"""What happens to every feature map between its forward and its backward use, and which plan a budget picks.

`strategies/` propose, `search` improves on estimates (`step_model`), `planner` builds, `budget.choose` picks;
`schedule/` orders. Nothing here runs.
"""

from encore.plan.budget import (
    allocated_bytes,
    choose,
    keeps_budget,
    lowest,
    may_win,
    room_for,
    stack_plans,
    taken,
    will_do,
)
from encore.plan.candidate import Candidate, worth_having
from encore.plan.device_bytes import DeviceBytes
from encore.plan.footprint import DeviceRoom, ReservedFootprint, Resident, resident_on
from encore.plan.gathered import without_saved_weights
from encore.plan.methods import Methods, allowed_methods
from encore.plan.patterns import PlanPattern, roles_of
from encore.plan.plan import Plan, feature_maps, keep_everything
from encore.plan.planner import Planner, candidates_of
from encore.plan.saved import GraphPlan, SavedPlan
from encore.plan.seconds import step_seconds

__all__ = [
    "Candidate",
    "DeviceBytes",
    "DeviceRoom",
    "GraphPlan",
    "Methods",
    "Plan",
    "PlanPattern",
    "Planner",
    "ReservedFootprint",
    "Resident",
    "SavedPlan",
    "allocated_bytes",
    "allowed_methods",
    "candidates_of",
    "choose",
    "feature_maps",
    "keep_everything",
    "keeps_budget",
    "lowest",
    "may_win",
    "resident_on",
    "roles_of",
    "room_for",
    "stack_plans",
    "step_seconds",
    "taken",
    "will_do",
    "without_saved_weights",
    "worth_having",
]
