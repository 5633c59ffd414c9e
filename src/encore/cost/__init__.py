"""Seconds and bytes: what is measured, and kept on disk per machine.

`measure` asks the allocator about a call, `workspace` about single operators, `cache` remembers.
"""

from encore.cost.measure import Measurement, measure
from encore.cost.workspace import Workspaces

__all__ = ["Measurement", "Workspaces", "measure"]
