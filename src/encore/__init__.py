"""Encore: a training-memory compiler for PyTorch. ENcode, COmpute again, REtrieve.

>>> model = encore.compile(model, budget="2GiB")   # the fastest training step that fits
"""

from encore import nn
from encore.api import compile, estimate, report
from encore.cost import Measurement, measure
from encore.errors import (
    BudgetError,
    EncoreError,
    MissingPackageError,
    NeverRunError,
    OptionError,
    PlanError,
    VerificationError,
)
from encore.plan import SavedPlan
from encore.report.points import Point
from encore.report.report import Estimate, Report
from encore.verification import Verification, verify

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "EncoreError",
    "Estimate",
    "Measurement",
    "MissingPackageError",
    "NeverRunError",
    "OptionError",
    "PlanError",
    "Point",
    "Report",
    "SavedPlan",
    "Verification",
    "VerificationError",
    "compile",
    "estimate",
    "measure",
    "nn",
    "report",
    "verify",
]
