"""A kernel's operators, run one by one by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from encore.graph.values import map_refs
from encore.schedule.kernel import Kernel, each_result


def one_by_one(kernel: Kernel, operands: Sequence[Tensor]) -> list[Tensor]:
    """What the kernel's operators give when PyTorch runs them."""
    values = list(operands)
    for call in kernel.calls:
        args, kwargs = map_refs((call.args, dict(call.kwargs)), values.__getitem__)
        values += each_result(call, call.target(*args, **kwargs))
    return [values[number] for number in kernel.outputs]
