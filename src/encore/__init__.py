"""Encore: a training-memory compiler for PyTorch. ENcode, COmpute again, REtrieve.

>>> model = encore.compile(model, budget="2GiB")   # the fastest training step that fits

Each name is imported when it is first used: `import encore` loads PyTorch, and neither its compilers nor Encore's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from encore.errors import (
    BudgetError,
    BudgetExceededError,
    EncoreError,
    MissingPackageError,
    NeverRunError,
    OptionError,
    PlanError,
    RanksDisagreeError,
    ReplayError,
    TierError,
    UnsupportedTorchError,
    VerificationError,
)
from encore.torch_version import check_torch

if TYPE_CHECKING:
    from encore import bptt, devices, nn, tiers
    from encore.api import compile, estimate, report
    from encore.batch_size import LargestBatch, largest_batch
    from encore.bptt import ScanReport, scan
    from encore.comparison import Verification
    from encore.compiler.device_estimate import DeviceEstimate
    from encore.compiler.estimate import Estimate
    from encore.compiler.sharded_estimate import ShardedEstimate
    from encore.compiler.simulated_sharding import Sharding
    from encore.cost import Measurement, measure
    from encore.plan import SavedPlan
    from encore.reports.points import Point
    from encore.reports.report import Report
    from encore.verification import verify

__version__ = "0.1.0"
check_torch(torch.__version__)
__all__ = [
    "BudgetError",
    "BudgetExceededError",
    "DeviceEstimate",
    "EncoreError",
    "Estimate",
    "LargestBatch",
    "Measurement",
    "MissingPackageError",
    "NeverRunError",
    "OptionError",
    "PlanError",
    "Point",
    "RanksDisagreeError",
    "ReplayError",
    "Report",
    "SavedPlan",
    "ScanReport",
    "ShardedEstimate",
    "Sharding",
    "TierError",
    "UnsupportedTorchError",
    "Verification",
    "VerificationError",
    "bptt",
    "compile",
    "devices",
    "estimate",
    "largest_batch",
    "measure",
    "nn",
    "report",
    "scan",
    "tiers",
    "verify",
]
_MODULES = ("bptt", "devices", "nn", "tiers")
_ELSEWHERE = {
    "api": ("compile", "estimate", "report"),
    "batch_size": ("LargestBatch", "largest_batch"),
    "bptt.report": ("ScanReport",),
    "bptt.scanning": ("scan",),
    "comparison": ("Verification",),
    "compiler.device_estimate": ("DeviceEstimate",),
    "compiler.estimate": ("Estimate",),
    "compiler.sharded_estimate": ("ShardedEstimate",),
    "compiler.simulated_sharding": ("Sharding",),
    "cost.allocations": ("Measurement", "measure"),
    "plan.saved": ("SavedPlan",),
    "reports.points": ("Point",),
    "reports.report": ("Report",),
    "verification": ("verify",),
}
_MODULE = {name: f"encore.{module}" for module, names in _ELSEWHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what a public name stands for."""
    if name in _MODULES:
        return import_module(f"encore.{name}")
    if name not in _MODULE:
        raise AttributeError(f"module 'encore' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
