"""Published ways to decide which activations backward recomputes, one file each.

A strategy is a pure function from a graph to the forward values that are *dropped*: not kept, but recomputed from
their producer's operands, and those from theirs, until something kept is reached. Whatever backward needs and is not
dropped is kept. `forward.py` is the view of a graph that they share.
When a value is recomputed, and how often, is for `schedule/`; which proposal wins is for the planner.
"""

from collections.abc import Callable

from encore.graph import Graph
from encore.plan.strategies.chen_segments import chen
from encore.plan.strategies.echo_pass import echo
from encore.plan.strategies.forward import Forward
from encore.plan.strategies.minimum_cut import min_cut
from encore.plan.strategies.mirroring import mirror
from encore.plan.strategies.repeated_blocks import block_boundaries, blocks

__all__ = [
    "STRATEGIES",
    "Forward",
    "Strategy",
    "block_boundaries",
    "blocks",
    "chen",
    "echo",
    "min_cut",
    "mirror",
]

Strategy = Callable[[Graph], frozenset[int]]

STRATEGIES: dict[str, Strategy] = {
    "echo": echo,
    "mirror": mirror,
    "chen": chen,
    "blocks": blocks,
    "min cut": min_cut,
}
"""Strategies by the name a report gives them."""
