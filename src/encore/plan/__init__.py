"""What happens to every feature map between its forward and its backward use, and which plan a budget picks.

`strategies/` propose, `search` improves in outline (`sketch`), `planner` builds, `budget.choose` picks; `schedule/`
orders. Nothing here runs.
"""

from encore.plan.budget import choose, keeps_budget, stack_plans, will_do
from encore.plan.methods import Methods, allowed_methods
from encore.plan.offer import Offer, worth_having
from encore.plan.plan import Plan, feature_maps, keep_everything
from encore.plan.planner import Planner, menu
from encore.plan.saved import GraphPlan, SavedPlan
from encore.plan.seconds import step_seconds

__all__ = [
    "GraphPlan",
    "Methods",
    "Offer",
    "Plan",
    "Planner",
    "SavedPlan",
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
