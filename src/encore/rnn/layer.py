"""What the recurrent operators share: the sizes of a call, which kernels run it, and the rows of a chunk.

A layer's large products are PyTorch's own, a chunk of time at a time. Its steps are `native.py`'s on the CPU,
`gpu.py`'s on CUDA devices, and `plain.py`'s without a compiler or Triton. Narrow types (bfloat16, half) are computed in
float32: weights are widened once a call, inputs a chunk at a time, and what is kept for backward stays narrow, except
c, which is float32 throughout. In a **narrow** layout, products read bfloat16 directly, and only their sums and what
cells compute are float32; gradients of gates are rounded before they are multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from encore.errors import OperandError, OptionError
from encore.rnn import native, plain
from encore.rnn.arena import Arena
from encore.rnn.choice import chosen_kernels, compiled_kernels
from encore.rnn.sequence import Chunk, Walk, chunk_steps, dense_walk, packed_walk, previous_rows
from encore.rnn.steps import StepKernels, clear_reset
from encore.rnn.torch_private import has_no_data
from encore.rnn.tuning import LEAST_ROWS, LayerLayout, layout_of

WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Types that are computed in another."""

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PLAIN: StepKernels = plain


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Everything about a call that its memory depends on."""

    steps: int
    batch: int
    rows: int
    inputs: int
    hidden: int
    width: int
    """Of h: smaller than `hidden` if an LSTM projects it."""
    dtype: torch.dtype
    keep: int
    """0: gates and c are kept. K: c is kept every K steps and gates are recomputed."""
    x_in_place: bool
    """Whether products can read the inputs where they are: contiguous, and in the type of operands."""
    a_chunk: int
    """Steps of a chunk."""
    weight: str
    """The layout of the recurrent weight: `packed` for Encore's kernels, or one of `products.py`, a product a step."""
    narrow: bool
    """Whether products read narrow numbers directly."""

    @property
    def real(self) -> torch.dtype:
        """The type that is computed in."""
        return WIDE.get(self.dtype, self.dtype)

    @property
    def mixed(self) -> bool:
        """Whether the compute type differs from that of the sequences."""
        return self.real != self.dtype

    @property
    def wide(self) -> bool:
        """Whether everything is widened that products read."""
        return self.mixed and not self.narrow

    @property
    def operand(self) -> torch.dtype:
        """The type that products read."""
        return self.dtype if self.narrow else self.real

    @property
    def chunk_rows(self) -> int:
        """The most rows a chunk can have."""
        return min(self.rows, self.a_chunk * self.batch)


def sizes_of(
    cell: str, gates: int, named: Mapping[str, Any], batch_sizes: Tensor | None, keep: int, chunked_by_keep: bool
) -> LayerSizes:
    """Check the operands of a call, by name, against each other. Works on tensors without data."""
    x, h0 = named["x"], named["h0"]
    _check_ranks(f"{cell}_forward", x, h0, batch_sizes)
    if x.dtype not in TYPES:
        raise OperandError(
            f"recurrent layers compute in {', '.join(map(str, TYPES))}; got {x.dtype}: convert the input"
        )
    if keep < 0:
        raise OptionError(f"keep must be 0 (everything) or the number of steps between kept states; got {keep}")
    steps = x.shape[0] if batch_sizes is None else batch_sizes.shape[0]
    if steps == 0:
        raise OperandError("a sequence must have at least one step; got an input without any")
    batch, width = h0.shape
    inputs, hidden = x.shape[-1], named["w_hh"].shape[0] // gates
    if batch_sizes is None and x.shape[1] != batch:
        raise OperandError(f"the input has a batch of {x.shape[1]}, the initial state one of {batch}")
    _check_tensors(f"{cell}_forward", gates * hidden, hidden, named)
    if all(isinstance(size, int) for size in (inputs, hidden, steps, batch)):
        layout = layout_of(cell, inputs, hidden, steps, batch, keep == 0, x.dtype, x.device.type)
    else:  # symbolic sizes: only shapes are needed
        layout = LayerLayout("packed", LEAST_ROWS)
    may_narrow = layout.weight == "packed" and named.get("w_hr") is None
    narrow = layout.narrow and may_narrow and multiplies_narrow(x.dtype, x.device)
    return LayerSizes(
        steps=steps,
        batch=batch,
        rows=steps * batch if batch_sizes is None else x.shape[0],
        inputs=inputs,
        hidden=hidden,
        width=width,
        dtype=x.dtype,
        keep=keep,
        x_in_place=(narrow or x.dtype not in WIDE) and x.is_contiguous(),
        a_chunk=chunk_steps(steps, batch, keep if chunked_by_keep else 0, layout.rows),
        weight=layout.weight,
        narrow=narrow,
    )


def _check_ranks(operator: str, x: Tensor, h0: Tensor, batch_sizes: Tensor | None) -> None:
    if x.dim() != (3 if batch_sizes is None else 2):
        wanted = "[T, B, input]" if batch_sizes is None else "[rows, input], packed"
        raise OperandError(f"encore::{operator} takes an input {wanted}; got {tuple(x.shape)}")
    if h0.dim() != 2:
        raise OperandError(f"encore::{operator} takes an initial state [B, hidden]; got {tuple(h0.shape)}")
    if batch_sizes is not None and (
        batch_sizes.dim() != 1 or (batch_sizes.device.type != "cpu" and not has_no_data(batch_sizes))
    ):
        raise OperandError("batch_sizes must be a one-dimensional tensor on the CPU, as PackedSequence has it")


def _check_tensors(operator: str, rows: int, hidden: int, named: Mapping[str, Any]) -> None:
    x, (batch, width) = named["x"], named["h0"].shape
    shapes: dict[str, tuple[int, ...]] = {
        "w_ih": (rows, x.shape[-1]),
        "w_hh": (rows, width),
        "h0": (batch, hidden if named.get("w_hr") is None else width),
        "c0": (batch, hidden),
        "b_ih": (rows,),
        "b_hh": (rows,),
        "w_hr": (width, hidden),
    }
    for name, shape in shapes.items():
        tensor = named.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise OperandError(f"{name} of encore::{operator} must have the shape {shape}; got {tuple(tensor.shape)}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise OperandError(
                f"{name} is {tensor.dtype} on {tensor.device}, the input {x.dtype} on {x.device}: convert one of them"
            )


def check_resets(operator: str, x: Tensor, batch_sizes: Tensor | None, resets: Tensor | None) -> None:
    if resets is None:
        return
    if batch_sizes is not None:
        raise OperandError(
            f"encore::{operator} takes no resets with batch_sizes: rows of a packed sequence are one sequence each"
        )
    if resets.dtype != torch.bool or tuple(resets.shape) != tuple(x.shape[:2]) or resets.device != x.device:
        raise OperandError(
            f"resets of encore::{operator} must be booleans of the shape {tuple(x.shape[:2])} on {x.device}; got "
            f"{resets.dtype} of the shape {tuple(resets.shape)} on {resets.device}"
        )


def kernels_for(device: torch.device) -> StepKernels:
    """The functions that run steps on this device: compiled ones, if they are available."""
    return chosen_kernels(device, _cpu_kernels, _gpu_kernels, PLAIN, "recurrent layers run")


def _gpu_kernels() -> StepKernels:
    from encore.rnn import gpu  # imports Triton

    return gpu


@functools.cache
def _cpu_kernels() -> StepKernels:
    return compiled_kernels(native.recurrent_library, native, plain, "recurrent layers run step by step")


def multiplies_narrow(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a narrow layout is available."""
    return device.type == "cpu" and kernels_for(device) is native and native.multiplies(dtype)


def walk_of(sizes: LayerSizes, batch_sizes: Tensor | None, reverse: bool) -> Walk:
    if batch_sizes is None:
        return dense_walk(sizes.steps, sizes.batch, reverse, sizes.a_chunk)
    return packed_walk(batch_sizes, reverse, sizes.a_chunk, sizes.batch, sizes.rows)


def input_rows(x: Tensor, chunk: Chunk, arena: Arena) -> Tensor:
    """A chunk's inputs as a matrix: where they are, or gathered into the arena."""
    if x.dim() == 3:
        low = min(chunk.times)
        x = x[low : low + len(chunk.times)]
    else:
        x = x[chunk.first : chunk.last]
    buffer = arena.get("x")
    if buffer is None:
        return x.view(chunk.rows, x.shape[-1])
    gathered = buffer[: chunk.rows]
    gathered.view(x.shape).copy_(x)
    return gathered


def previous_states(
    output: Tensor, initial: Tensor, walk: Walk, chunk: Chunk, buffer: Tensor, resets: Tensor | None
) -> Tensor:  # fmt: skip
    """The h that each row of a chunk finds, as a matrix. `output` is `[rows, width]`, `resets` `[rows]`."""
    runs = previous_rows(walk, chunk)
    if len(runs) == 1 and runs[0][1] >= 0 and output.dtype == buffer.dtype and resets is None:
        return output[runs[0][1] : runs[0][1] + runs[0][2]]
    gathered = buffer[: chunk.rows]
    for to, source, count in runs:
        if source >= 0:
            gathered[to : to + count] = output[source : source + count]
        else:
            gathered[to : to + count] = initial[-1 - source : -1 - source + count]
    clear_reset(gathered, resets, chunk.in_memory)
    return gathered


def last_states(output: Tensor, walk: Walk, into: Tensor) -> None:
    """The last state of each row: h of its last step."""
    if walk.reverse:
        into.copy_(output[: walk.batch])
        return
    ended = 0
    for time in range(walk.steps - 1, -1, -1):
        active = walk.active[time]
        if active > ended:
            into[ended:active] = output[walk.starts[time] + ended : walk.starts[time] + active]
            ended = active


def with_contiguous_rows(tensor: Tensor | None) -> Tensor | None:
    """The tensor as kernels read it: rows may lie anywhere, the numbers of a row are contiguous."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def copied_bytes(tensor: Tensor | None) -> int:
    """The bytes that `with_contiguous_rows` allocates."""
    return 0 if tensor is None or tensor.stride(-1) == 1 else tensor.numel() * tensor.element_size()
