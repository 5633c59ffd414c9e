"""Encore: a training-memory compiler for PyTorch. ENcode, COmpute again, REtrieve.

>>> model = encore.compile(model, budget="2GiB")   # the fastest training step that fits
"""

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
    VerificationError,
)
from encore.plan import SavedPlan
from encore.report.points import Point
from encore.report.report import Report
from encore.verification import verify

__version__ = "0.1.0"
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
