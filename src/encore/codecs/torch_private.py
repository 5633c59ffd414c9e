"""What codecs need of PyTorch that is not public."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

__all__ = ["OpOverload", "suggest_memory_format", "untraced"]


def untraced(run: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.disable`, which does not import Dynamo before the first call."""

    def kernel(*args: Any, **kwargs: Any) -> Any:  # a function of its own: methods take no attributes
        return run(*args, **kwargs)

    return _disable_dynamo(kernel)
