"""The sizes of codes while steps run, and the errors of lossy codes.

Sizes that depend on the data are recorded at every step; a warning is given once if there are more bytes than planned.
The error is measured at the first step, in slices, so that it needs little memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from encore.codecs import CODECS, Codec, Share
from encore.lower.calls import callable_for
from encore.plan import Plan
from encore.units import bytes_text

SLICE = 1 << 16
"""Elements that are compared at a time."""

REASONS = {
    Share.NON_ZEROS: "its data is denser than that",
    Share.NUMBER_BYTES: "its integers reach further than those",
}


class CodeWatch:
    """Calls an encoder, and records the sizes and errors of its codes."""

    def __init__(self, name: str, codec: Codec, planned: int) -> None:
        self.name, self.codec, self.planned = name, codec, planned
        self.call: Callable[..., torch.Tensor] = callable_for(codec.encode)
        self.most = 0
        """Bytes of the largest code so far."""
        self.density: float | None = None
        """The largest density so far, if the size of a code depends on it."""
        self.error: float | None = None
        """The largest difference at the first step, as a share of the largest number."""
        self.error_bound: float | None = None
        """The largest possible error of the codec for such numbers."""
        self.warned = False

    def __call__(self, x: torch.Tensor, *options: Any) -> torch.Tensor:
        code = self.call(x, *options)
        if code.numel() > self.most:
            self.most = code.numel()
            if not self.codec.exact_size:
                self.density = self.codec.density(self.most, x.shape, x.stride(), x.dtype)
        if self.most > self.planned and not self.warned:
            self._warn()
        if self.error is None and not self.codec.lossless:
            self.error, self.error_bound = measured_error(self.codec, x)
        return code

    def _warn(self) -> None:
        self.warned = True
        warnings.warn(
            f"encore: the code of {self.name} takes {bytes_text(self.most)}, {bytes_text(self.planned)} were planned: "
            f"{REASONS[self.codec.share]} of the first batch. Gradients stay right; the peak may be higher by as much, "
            "and is at most report.densest_step_peak. Compile the model again for a new plan, or give methods= without "
            "'encode'",
            stacklevel=2,
        )


def watches(plan: Plan) -> dict[int, CodeWatch]:
    """By forward operator: a watch on every code of a plan whose size or error depends on the data."""
    graph = plan.schedule.graph
    codes = {one.value: one for one in plan.encodings}
    found: dict[int, CodeWatch] = {}
    for op in graph.ops if codes else ():
        one = codes.get(op.reads[0]) if op.forward and op.reads else None
        if one is not None and op.target is CODECS[one.codec].encode:
            codec = CODECS[one.codec]
            if not (codec.exact_size and codec.lossless):
                found[op.id] = CodeWatch(graph.values[one.value].name, codec, one.bytes)
    return found


def measured_error(codec: Codec, x: torch.Tensor) -> tuple[float, float]:
    """The largest difference between a tensor and its decoded code, and the largest that the codec's bound allows, both
    as a share of its largest number."""
    flat = x.reshape(-1) if x.is_contiguous() else x.as_strided((x.numel(),), (1,))  # codes follow memory
    difference = bound = largest = 0.0
    for first in range(0, flat.numel(), SLICE):
        part = flat[first : first + SLICE]
        code = codec.encode(*codec.encode_args(part))
        again = codec.decode(*codec.decode_args(code, part.shape, part.stride(), part.dtype))
        finite = part.isfinite()
        apart = torch.where(finite, again - part, 0).abs_().max()
        difference = max(difference, float(apart))
        if codec.error is not None:
            bound = max(bound, float(torch.where(finite, codec.error(part), 0).max()))
        largest = max(largest, float(torch.where(finite, part, 0).abs_().max()))
    return (difference / largest, bound / largest) if largest else (difference, bound)
