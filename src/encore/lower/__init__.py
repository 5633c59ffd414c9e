"""Schedule -> one boxed callable for forward, one for backward. Nothing here chooses or reorders."""

from encore.lower.codegen import Lowered, lower

__all__ = ["Lowered", "lower"]
