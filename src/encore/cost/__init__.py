"""Seconds and bytes: what is measured, and kept on disk per machine; arithmetic where nothing is.

`measure` asks the allocator about a call, `workspace` about single operators, `seconds` the clock; `cache` remembers.
"""

from encore.cost.kernel_timing import kernel_seconds, time_kernels
from encore.cost.measure import Measurement, measure
from encore.cost.seconds import Seconds
from encore.cost.workspace import Workspaces

__all__ = ["Measurement", "Seconds", "Workspaces", "kernel_seconds", "measure", "time_kernels"]
