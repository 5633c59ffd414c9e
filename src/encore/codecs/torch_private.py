"""What codecs need of PyTorch that is not public."""

from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

__all__ = ["OpOverload", "suggest_memory_format"]
