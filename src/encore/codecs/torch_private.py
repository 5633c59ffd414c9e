"""What codecs need of PyTorch that is not public; `untraced` is `torch.compiler.disable`, and does not import Dynamo
before the first call."""

from torch._compile import _disable_dynamo as untraced
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

__all__ = ["OpOverload", "suggest_memory_format", "untraced"]
