"""The driver, the only folder that imports all stages: it compiles graphs from Dynamo to callables that run a plan.

`backend` is called by Dynamo, `pipeline` has the stages that a graph goes through (`carried_plans` and `searched_plans`
find its candidates, `chosen_plan` picks one, `lowered_plan` makes callables of it), `session` has what was compiled for
one model, `compiled` replaces the user's callable, `variants` runs a graph with the gradients that its outputs receive,
`step` plans steps of several calls; `lossy_check` and `first_call` check steps while they run, `summary` makes their
reports. docs/architecture.md follows one batch through these modules.
"""

from encore.compiler.session import CapturedGraph, Mode, Session, sessions

__all__ = ["CapturedGraph", "Mode", "Session", "sessions"]
