"""Seconds and bytes: measured and cached per machine, or estimated if they cannot be measured.

`allocations` measures the memory of a call, `workspace` that of single operators, `seconds` their time.
"""

from encore.cost.allocations import Measurement, Meter, measure, start_meter
from encore.cost.density import densities, may_be_narrow, may_be_sparse
from encore.cost.kernel_timing import kernel_seconds, time_kernels, trace_kernels
from encore.cost.lessons import LinkLessons
from encore.cost.links import assumed_link, known_link, link_to
from encore.cost.roofline import AssumedSeconds
from encore.cost.scaled_seconds import ScaledSeconds
from encore.cost.seconds import Seconds
from encore.cost.workspace import Workspaces

__all__ = [
    "AssumedSeconds",
    "LinkLessons",
    "Measurement",
    "Meter",
    "ScaledSeconds",
    "Seconds",
    "Workspaces",
    "assumed_link",
    "densities",
    "kernel_seconds",
    "known_link",
    "link_to",
    "may_be_narrow",
    "may_be_sparse",
    "measure",
    "start_meter",
    "time_kernels",
    "trace_kernels",
]
