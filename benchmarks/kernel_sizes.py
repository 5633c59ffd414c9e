"""Kernels with symbols compared with kernels of fixed size: the same group, compiled both ways, timed interleaved.

Each group is compiled for two lengths, so that it has a kernel with symbols, then bound to further lengths and compared
with a kernel that is compiled for these. Compiling goes to empty folders, not to the cache.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import encore
from benchmarks.pairs import PairedTimes, paired_times
from encore.api import compiled_call
from encore.lower.kernels import KernelStore
from encore.schedule import Fused, fuse
from encore.schedule.kernel import Kernel

FIRST, LATER = (20, 23), (6, 29, 41)
ROUNDS = 41
SECONDS = 4e-3
"""Of a round: fast kernels are called several times."""


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """A group at one of the later lengths."""

    name: str
    length: int
    compiled: int
    """Kernels that were compiled for it: none, unless other code is right for this length."""
    binding: float
    """Seconds until it could run."""
    times: PairedTimes
    """Of a kernel of fixed size, and of the one with symbols."""


def _matrix(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _gates(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    take, forget, give, new = gates.chunk(4, 1)
    later = forget.sigmoid() * cell + take.sigmoid() * new.tanh()
    return give.sigmoid() * later.tanh(), later


def _heads(x: Tensor) -> Tensor:
    return ((x * 2).view(x.shape[0], x.shape[1], 8, 32).transpose(1, 2).contiguous() + 1).sin()


def _normalised(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x + residual, (512,), weight, bias) * 2


GROUPS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Tensor, ...]]]] = {
    "pointwise": (lambda x, y: (x * y + 1).sin().exp() * 2, lambda n: (_matrix(n * 32, 256), _matrix(n * 32, 256))),
    "pointwise, inner": (lambda x: (x * 3 + 1).sin().exp() * 2, lambda n: (_matrix(8192, n),)),
    "bias and GELU": (lambda x, b: functional.gelu(x + b) * 2, lambda n: (_matrix(n, 32, 512), _matrix(512))),
    "softmax over classes": (lambda x: (x * 2).softmax(-1) * 3, lambda n: (_matrix(32 * n, 500),)),
    "softmax over time": (lambda x: (x * 2).softmax(-1) * 3, lambda n: (_matrix(32, 8, n, n),)),
    "layer norm": (_normalised, lambda n: (_matrix(n, 32, 512), _matrix(n, 32, 512), _matrix(512), _matrix(512))),
    "sum over rows": (lambda x: (x * 2).exp().sum(0) + 1, lambda n: (_matrix(n * 32, 512),)),
    "sum over time": (lambda x: (x * 2).exp().sum(1) + 1, lambda n: (_matrix(32, n, 512),)),
    "sum over time, inner": (lambda x: (x * 2).exp().sum(-1) + 1, lambda n: (_matrix(16384, n),)),
    "LSTM gates": (_gates, lambda n: (_matrix(n, 1024), _matrix(n, 256))),
    "heads": (_heads, lambda n: (_matrix(32, n, 256),)),
    "transpose": (lambda x: ((x * 2).transpose(1, 2).contiguous() + 1).sin(), lambda n: (_matrix(32, n, 256),)),
    "joined": (lambda x, y: torch.cat([x * 2, y.exp()], 1) * 3, lambda n: (_matrix(32, n, 128), _matrix(32, n, 128))),
}


def kernel_of(function: Callable[..., Any], args: tuple[Tensor, ...]) -> Kernel:
    """The last kernel of a function's forward."""
    torch._dynamo.reset()
    compiled = encore.compile(function, lowering="eager", overhead=0.0)
    compiled(*args)
    (graph,) = compiled_call(compiled).session.graphs
    schedule = fuse(graph.plan.schedule)
    return [action.kernel for action in schedule.forward if isinstance(action, Fused)][-1]


def run_kernel_sizes(
    names: tuple[str, ...] = tuple(GROUPS), later: tuple[int, ...] = LATER, rounds: int = ROUNDS
) -> list[BoundKernel]:
    """Time groups at later lengths."""
    return [one for name in names for one in _of_group(name, later, rounds)]


def _of_group(name: str, later: tuple[int, ...], rounds: int) -> Iterator[BoundKernel]:
    function, make = GROUPS[name]
    with tempfile.TemporaryDirectory() as folder:
        store = KernelStore(Path(folder))
        for length in FIRST:
            store.compile([kernel_of(function, make(length))])
        for length in later:
            kernel = kernel_of(function, make(length))
            began = time.perf_counter()
            symbolic = store.compile([kernel])
            binding = time.perf_counter() - began
            with tempfile.TemporaryDirectory() as other:
                fixed = KernelStore(Path(other)).compile([kernel])
            operands = [torch.empty_strided(one.shape, one.stride).normal_() for one in kernel.operands]
            first, second = (_timed(made.compiled[kernel.key].call, operands) for made in (fixed, symbolic))
            yield BoundKernel(name, length, symbolic.fresh, binding, paired_times(first, second, rounds))


def _timed(call: Callable[[list[Any]], Any], operands: list[Tensor]) -> Callable[[], float]:
    def seconds(times: int) -> float:
        given = [[*operands] for _ in range(times)]
        began = time.perf_counter()
        for one in given:
            call(one)
        return (time.perf_counter() - began) / times

    times = max(1, int(SECONDS / min(seconds(3) for _ in range(5))))
    return lambda: seconds(times)


def table(found: list[BoundKernel]) -> str:
    """As text, a line a group and length."""
    lines = [f"{'':<24}{'length':>8}{'fixed':>10}{'symbols':>10}{'ratio':>8}{'bound in':>10}{'compiled':>10}"]
    for one in found:
        fixed, symbols = (f"{seconds * 1e6:.1f} us" for seconds in one.times.seconds)
        lines.append(
            f"{one.name:<24}{one.length:>8}{fixed:>10}{symbols:>10}{one.times.ratio:>8.2f}"
            f"{one.binding * 1e3:>7.2f} ms{one.compiled:>10}"
        )
    ratios = [one.times.ratio for one in found]
    return "\n".join([*lines, f"median {statistics.median(ratios):.3f}, largest {max(ratios):.2f}"])


if __name__ == "__main__":
    print(table(run_kernel_sizes()))
