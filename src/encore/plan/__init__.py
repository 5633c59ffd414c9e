"""What happens to every feature map between its forward and its backward use, and which plan a budget picks.

`strategies/` propose, `search` improves in outline (`sketch`), `planner` builds, `budget.choose` picks; `schedule/`
orders. Nothing here runs.
"""

from encore.plan.budget import choose, keeps_budget, stack_plans, will_do
from encore.plan.decisions import Decision, Keep, Recompute
from encore.plan.offer import Offer
from encore.plan.plan import Plan, keep_everything
from encore.plan.planner import Planner, menu, step_seconds
from encore.plan.saved import GraphPlan, SavedPlan

__all__ = [
    "Decision",
    "GraphPlan",
    "Keep",
    "Offer",
    "Plan",
    "Planner",
    "Recompute",
    "SavedPlan",
    "choose",
    "keep_everything",
    "keeps_budget",
    "menu",
    "stack_plans",
    "step_seconds",
    "will_do",
]
