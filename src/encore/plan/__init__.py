"""What happens to every feature map between its forward and its backward use, and which plan a budget picks.

`strategies/` propose, `search` improves on estimates (`step_model`), `planner` builds, `budget.choose` picks;
`schedule/` orders. Nothing here runs.
"""

from encore.plan.budget import choose, keeps_budget, lowest, may_win, room_for, stack_plans, will_do
from encore.plan.candidate import Candidate, worth_having
from encore.plan.gathered import without_saved_weights
from encore.plan.methods import Methods, allowed_methods
from encore.plan.patterns import PlanPattern, roles_of
from encore.plan.plan import Plan, feature_maps, keep_everything
from encore.plan.planner import Planner, candidates_of
from encore.plan.saved import GraphPlan, SavedPlan
from encore.plan.seconds import step_seconds

__all__ = [
    "Candidate",
    "GraphPlan",
    "Methods",
    "Plan",
    "PlanPattern",
    "Planner",
    "SavedPlan",
    "allowed_methods",
    "candidates_of",
    "choose",
    "feature_maps",
    "keep_everything",
    "keeps_budget",
    "lowest",
    "may_win",
    "roles_of",
    "room_for",
    "stack_plans",
    "step_seconds",
    "will_do",
    "without_saved_weights",
    "worth_having",
]
