"""Facts about a captured training step: values, storages, aliases, bytes, readers, classes of operators.

A graph is read-only once built: passes make another one with the `Editor` (`editor.py`), and `verify_graph` checks
that a graph is legal. Nothing in this folder decides, orders or runs anything.
"""

from encore.graph.build import Primal, UnsupportedGraphError, build_graph
from encore.graph.ops import OpClass, classify
from encore.graph.values import Graph, Op, Role, Storage, Value, refs
from encore.graph.verify import verify_graph

__all__ = [
    "Graph",
    "Op",
    "OpClass",
    "Primal",
    "Role",
    "Storage",
    "UnsupportedGraphError",
    "Value",
    "build_graph",
    "classify",
    "refs",
    "verify_graph",
]
