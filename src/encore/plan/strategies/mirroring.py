"""Mirror: every cheap result is recomputed (MXNet's MXNET_BACKWARD_DO_MIRROR, 2015).

Each operator is judged by its class alone: results of cheap ones are dropped, those of heavy and random ones are kept.
Nothing is weighed, so the operands that must be kept instead may be larger than what is saved; the Echo paper measures
ResNet-50 going up from 3317 to 4496 MB. It is here as the baseline that Echo improves on, with the same op classes.
"""

from __future__ import annotations

from encore.graph import Graph
from encore.plan.strategies.echo_pass import echo_recomputable
from encore.plan.strategies.forward import Forward


def mirror(graph: Graph) -> frozenset[int]:
    """Values that backward recomputes: results of cheap operators that it needs, itself or to make others."""
    forward = Forward.of(graph)
    cheap = echo_recomputable(forward)
    return forward.recomputed({value for op in cheap for value in forward.results(op)} & forward.droppable)
