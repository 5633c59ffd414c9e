"""Schedule -> one boxed callable for forward, one for backward; kernels compiled once per structure. Nothing here
chooses or reorders."""

from encore.lower.codegen import BackwardInParts, Lowered, lower
from encore.lower.kernels import kernel_store
from encore.lower.transport import Transport

__all__ = ["BackwardInParts", "Lowered", "Transport", "kernel_store", "lower"]
