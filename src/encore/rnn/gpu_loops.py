"""The time loop of a recurrent layer on a GPU in one launch: which sizes it is for, and how many programs share it.

A program of `kernels/gpu/recurrent_loops.py` takes `ROWS` rows of the batch through all steps, and reads the recurrent
weight once a step. Up to `ALONE` bytes of it, a program does so on its own. A larger weight is shared: programs of a
row have equal parts of the units and meet once a step, which takes as many processors as there are programs. That is
the table:

| recurrent weight, in the type that is computed in | programs for each `ROWS` rows |
|---|---|
| up to `ALONE` bytes | 1 |
| more | as many as processors allow, if each reads at most `ALONE` bytes; a single launch is cooperative |
| more, and too many rows for the processors | none: a product and a kernel a step |

Layers that project h and packed sequences of several lengths take a product and a kernel a step as well (`steps_why`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.devices import is_here, processors
from encore.rnn.sequence import Chunk

ROWS, UNITS, DEPTH = 16, 32, 32
"""Of a tile of a product: rows of the batch, units, and the numbers that are multiplied in one piece."""
WARPS = 8
ALONE = 1 << 20
"""Bytes of the weight that a program reads a step, at most."""
MOST_STEPS = 1 << 14
"""Of a launch: where a display is attached, a launch of seconds is ended."""
GATES = {"lstm": 4, "gru": 3, "elman": 1}
FORWARD = {getattr(torch.ops.encore, f"{cell}_forward").default: cell for cell in GATES}


@dataclass(frozen=True, slots=True)
class LoopGrid:
    """The programs of a launch."""

    blocks: int
    """Of rows."""
    programs: int
    """Of each block of rows."""

    @property
    def stages(self) -> int:
        """Pieces of a product that are loaded ahead: none if they were written by other programs, since copies to
        shared memory of so few bytes would go through the first cache."""
        return 2 if self.programs == 1 else 1


def loop_grid(cell: str, batch: int, hidden: int, dtype: torch.dtype, device: torch.device) -> LoopGrid | None:
    """The programs for a loop of this size; None if there are too few processors."""
    blocks = -(-batch // ROWS)
    weight = GATES[cell] * hidden * hidden * dtype.itemsize
    if weight <= ALONE:
        return LoopGrid(blocks, 1)
    programs = min(-(-hidden // UNITS), processors(device) // blocks)
    return LoopGrid(blocks, programs) if programs * ALONE >= weight else None


def steps_why(
    cell: str, batch: int, hidden: int, dtype: torch.dtype, device: torch.device, *, projected: bool, packed: bool
) -> str | None:
    """Why a layer runs step by step; None if its loop is one launch, or if that depends on a device elsewhere."""
    if projected:
        return "it projects h"
    if packed:
        return "its sequences are packed"
    if is_here(device) and loop_grid(cell, batch, hidden, dtype, device) is None:
        return f"{batch} rows of {hidden} units are too many for the device's processors"
    return None


def steps_why_of_call(target: Any, arguments: Sequence[Any]) -> str | None:
    """The same for a call of a layer's forward operator, from the shapes of its arguments; None for other operators."""
    cell = FORWARD.get(target)
    if cell is None:
        return None
    named = dict(zip((each.name for each in target._schema.arguments), arguments, strict=False))
    x, h0, w_hh, sizes = named["x"], named["h0"], named["w_hh"], named["batch_sizes"]
    device = torch.device(x.device)
    if device.type != "cuda" or (sizes is None and x.shape[0] == 1):
        return None
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    return steps_why(
        cell, h0.shape[0], w_hh.shape[0] // GATES[cell], real, device, projected=named.get("w_hr") is not None,
        packed=sizes is not None,
    )  # fmt: skip


def precision(dtype: torch.dtype) -> str:
    """How products are computed: as PyTorch's own are."""
    exact = dtype == torch.float64 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def entering_states(chunk: Chunk, state: Tensor, known: int, initial: Tensor) -> Tensor | None:
    """The one tensor that the first step's states are in; None if there are two."""
    if known == 0:
        return initial
    return state if known >= chunk.active[0] else None


def gradient_rows(chunk: Chunk, grad: Tensor | None) -> tuple[Tensor | None, int, int]:
    """The gradients of a chunk's outputs from its first row in memory on, and their strides from step to step and from
    row to row."""
    if grad is None:
        return None, 0, 0
    if grad.dim() == 3:
        return grad[min(chunk.times) :], grad.stride(0), grad.stride(1)
    return grad[chunk.first :], chunk.active[0] * grad.stride(0), grad.stride(0)
