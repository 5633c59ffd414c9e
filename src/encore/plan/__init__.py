"""What happens to every feature map between its forward and its backward use, and which plan a budget picks.

Strategies propose, `budget.choose` picks, `schedule/` orders. Nothing here runs.
"""

from encore.plan.budget import choose, stack_plans
from encore.plan.decisions import Decision, Keep
from encore.plan.plan import Plan, keep_everything

__all__ = ["Decision", "Keep", "Plan", "choose", "keep_everything", "stack_plans"]
