"""What happens to every feature map between its forward and its backward use, and which plan a budget picks.

`strategies/` propose, `search` improves in outline (`sketch`), `planner` builds, `budget.choose` picks; `schedule/`
orders. Nothing here runs.
"""

from encore.plan.budget import choose, keeps_budget, stack_plans, will_do
from encore.plan.decisions import Decision, Encode, Keep, Offload, Recompute, Stash
from encore.plan.offer import Offer, worth_having
from encore.plan.plan import Plan, feature_maps, keep_everything
from encore.plan.planner import Planner, menu, step_seconds
from encore.plan.saved import GraphPlan, SavedPlan
from encore.plan.stand_ins import Methods, allowed_methods

__all__ = [
    "Decision",
    "Encode",
    "GraphPlan",
    "Keep",
    "Methods",
    "Offer",
    "Offload",
    "Plan",
    "Planner",
    "Recompute",
    "SavedPlan",
    "Stash",
    "allowed_methods",
    "choose",
    "feature_maps",
    "keep_everything",
    "keeps_budget",
    "menu",
    "stack_plans",
    "step_seconds",
    "will_do",
    "worth_having",
]
