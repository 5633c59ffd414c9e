"""The speed of this machine: arithmetic, memory, and the call of an operator that does nothing.

Each is measured once, on one large matrix product, one large copy and one view, and cached. If nothing may run and
nothing is cached, the constants below are used: those of an average server, good enough to compare operators with each
other, not to predict seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from encore.cost.timing import seconds_of
from encore.cost.torch_private import profiler_is_running
from encore.devices import KINDS, is_here, kind_of
from encore.lower.calls import callable_for
from encore.measurements import machine_cache

CPU_FLOPS_A_THREAD = 50e9
CPU_BYTES_A_SECOND = 10e9
CUDA_FLOPS = 15e12
CUDA_FLOPS_IN_HALF = 120e12
CUDA_BYTES_A_SECOND = 800e9
VIEW_SECONDS = 1.5e-6

MULTIPLIED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Rates:
    """Speeds by device. With `run=False` nothing is run."""

    def __init__(self, *, run: bool) -> None:
        self.run = run
        self._cache = machine_cache()
        self._known: dict[str, float] = {}

    def flops(self, device: str, dtype: torch.dtype | None) -> float:
        """Floating-point operations a second, in a large matrix product."""
        kind = device.partition(":")[0]
        dtype = dtype if dtype in MULTIPLIED else torch.float32
        if kind == "cpu":
            default = CPU_FLOPS_A_THREAD * torch.get_num_threads()
        else:
            default = CUDA_FLOPS_IN_HALF if dtype.itemsize == 2 else CUDA_FLOPS
        return self._rate(f"flops {dtype} {device}", default, device, lambda: _multiply(device, dtype))

    def bandwidth(self, device: str) -> float:
        """Bytes read or written a second, in a large copy."""
        default = CPU_BYTES_A_SECOND if device == "cpu" else CUDA_BYTES_A_SECOND
        return self._rate(f"bandwidth {device}", default, device, lambda: _copy(device))

    @property
    def view(self) -> float:
        """Seconds of a call from Python of an operator that returns a view."""
        return 1 / self._rate("views", 1 / VIEW_SECONDS, "cpu", _view)

    def _rate(self, name: str, default: float, device: str, measure: Callable[[], float]) -> float:
        key = f"seconds rate {name} threads={torch.get_num_threads()}"
        if key not in self._known:
            cached = self._cache.get(key)
            if cached is None or not is_duration(cached):
                if not self.run or profiler_is_running() or not is_here(device):
                    return default
                with torch.no_grad():
                    cached = measure()
                self._cache.put(key, cached)
            self._known[key] = cached
        return self._known[key]


class AssumedRates(Rates):
    """The constants above, whatever was measured."""

    def __init__(self) -> None:
        super().__init__(run=False)

    def _rate(self, name: str, default: float, device: str, measure: Callable[[], float]) -> float:
        return default


def is_duration(number: float) -> bool:
    """Return whether a number from the cache can be a duration."""
    return math.isfinite(number) and number > 0


def _multiply(device: str, dtype: torch.dtype) -> float:
    side = KINDS[kind_of(device)].product_side
    left, right = (torch.full((side, side), 0.01, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / seconds_of([lambda: left @ right], device=device)


def _copy(device: str) -> float:
    size = KINDS[kind_of(device)].copied
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of([lambda: target.copy_(source)], device=device)


def _view() -> float:
    tensor, view = torch.zeros(8, 8), callable_for(torch.ops.aten.view.default)
    return 1 / seconds_of([lambda: view(tensor, [64])])
