"""The driver, the only room that knows all others: graphs from Dynamo go through it to callables that run a plan.

`backend` is what Dynamo calls, `pipeline` the stages that a graph goes through from there, `session` remembers what was
compiled for one model, `compiled` is what the user calls instead, `variants` runs a graph with the gradients that its
outputs receive; `lossy_check` and `first_call` check steps while they run.
"""

from encore.compiler.session import CapturedGraph, Mode, Session, sessions

__all__ = ["CapturedGraph", "Mode", "Session", "sessions"]
