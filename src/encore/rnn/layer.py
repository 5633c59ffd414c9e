"""What the recurrent operators have in common: their sizes, which kernels run them, and the rows of a chunk.

A layer's large products are PyTorch's own, a chunk of time at a time; its steps are `native.py`'s, or `plain.py`'s
where there is no compiler. Narrow types (bfloat16, half) are computed in float32: weights are widened once a call,
inputs a chunk at a time, and what is kept for backward stays narrow, except c, which lives in float32 throughout.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from encore.errors import OptionError
from encore.kernels import BuildError
from encore.rnn import native, plain
from encore.rnn.arena import Arena
from encore.rnn.sequence import Chunk, Walk, chunk_steps, dense_walk, packed_walk, previous_rows

WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Types that are computed in another."""

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything about a call that its memory depends on."""

    steps: int
    batch: int
    rows: int
    inputs: int
    hidden: int
    width: int
    """Of h: smaller than `hidden` where an LSTM projects it."""
    dtype: torch.dtype
    keep: int
    """0: gates and c are kept. K: c is kept every K steps and gates are built again."""
    x_in_place: bool
    """Products can read the inputs where they are: contiguous, and in the compute type."""
    a_chunk: int
    """Steps of a chunk."""

    @property
    def real(self) -> torch.dtype:
        """The type that is computed in."""
        return WIDE.get(self.dtype, self.dtype)

    @property
    def wide(self) -> bool:
        return self.real != self.dtype

    @property
    def single(self) -> bool:
        """One step: packing the recurrent weight would cost more than multiplying with it as it is."""
        return self.steps == 1

    @property
    def chunk_rows(self) -> int:
        """The most rows a chunk can have."""
        return min(self.rows, self.a_chunk * self.batch)


def sizes_of(
    kind: str, x: Tensor, h0: Tensor, w_ih: Tensor, w_hh: Tensor, batch_sizes: Tensor | None, gates: int, keep: int,
    others: dict[str, tuple[Tensor | None, tuple[int, ...]]], chunked_by_keep: bool = True,
) -> Sizes:  # fmt: skip
    """Check the operands of a call against each other. Works on tensors without data."""
    if x.dim() != (3 if batch_sizes is None else 2):
        wanted = "[T, B, input]" if batch_sizes is None else "[rows, input], packed"
        raise OptionError(f"encore::{kind} takes an input {wanted}; got {tuple(x.shape)}")
    if h0.dim() != 2:
        raise OptionError(f"encore::{kind} takes an initial state [B, hidden]; got {tuple(h0.shape)}")
    if batch_sizes is not None and (
        batch_sizes.dim() != 1 or (batch_sizes.device.type != "cpu" and not _fake(batch_sizes))
    ):
        raise OptionError("batch_sizes must be a one-dimensional tensor on the CPU, as PackedSequence has it")
    if x.dtype not in TYPES:
        raise OptionError(f"recurrent layers compute in {', '.join(map(str, TYPES))}; got {x.dtype}: convert the input")
    if keep < 0:
        raise OptionError(f"keep must be 0 (everything) or the number of steps between kept states; got {keep}")
    steps = x.shape[0] if batch_sizes is None else batch_sizes.shape[0]
    if steps == 0:
        raise OptionError("a sequence must have at least one step; got an input without any")
    batch, width = h0.shape
    hidden = w_hh.shape[0] // gates
    checks: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "w_ih": (w_ih, (gates * hidden, x.shape[-1])),
        "w_hh": (w_hh, (gates * hidden, width)),
        **others,
    }
    if batch_sizes is None and x.shape[1] != batch:
        raise OptionError(f"the input has a batch of {x.shape[1]}, the initial state one of {batch}")
    for name, (tensor, shape) in checks.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise OptionError(f"{name} of encore::{kind} must have the shape {shape}; got {tuple(tensor.shape)}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise OptionError(
                f"{name} is {tensor.dtype} on {tensor.device}, the input {x.dtype} on {x.device}: convert one of them"
            )
    rows = steps * batch if batch_sizes is None else x.shape[0]
    in_place = x.dtype not in WIDE and x.is_contiguous()
    a_chunk = chunk_steps(steps, batch, keep if chunked_by_keep else 0)
    return Sizes(steps, batch, rows, x.shape[-1], hidden, width, x.dtype, keep, in_place, a_chunk)


def _fake(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor)


def kernels_for(device: torch.device) -> ModuleType:
    """The functions that run steps: compiled ones on the CPU, where they can be had."""
    return _cpu_kernels() if device.type == "cpu" else plain


@functools.cache
def _cpu_kernels() -> ModuleType:
    try:
        native.recurrent_library()
    except BuildError as error:
        warnings.warn(
            f"encore: recurrent layers run step by step in PyTorch's own operators, slower than they could: {error}. "
            "Install a C++ compiler, or set CXX to one",
            stacklevel=2,
        )
        return plain
    return native


def walk_of(sizes: Sizes, batch_sizes: Tensor | None, reverse: bool) -> Walk:
    if batch_sizes is None:
        return dense_walk(sizes.steps, sizes.batch, reverse, sizes.a_chunk)
    return packed_walk(batch_sizes, reverse, sizes.a_chunk, sizes.batch, sizes.rows)


def widened(arena: Arena, name: str, tensor: Tensor) -> Tensor:
    """The tensor in the compute type: itself, or a copy in the arena's buffer of that name."""
    buffer = arena.get(name)
    return tensor if buffer is None else buffer.copy_(tensor)


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


def previous_states(output: Tensor, initial: Tensor, walk: Walk, chunk: Chunk, arena: Arena) -> Tensor:
    """The h that each row of a chunk found, as a matrix. `output` is `[rows, width]`."""
    runs = previous_rows(walk, chunk)
    buffer = arena["previous"]
    if len(runs) == 1 and runs[0][1] >= 0 and output.dtype == buffer.dtype:
        return output[runs[0][1] : runs[0][1] + runs[0][2]]
    gathered = buffer[: chunk.rows]
    for to, source, count in runs:
        if source >= 0:
            gathered[to : to + count] = output[source : source + count]
        else:
            gathered[to : to + count] = initial[-1 - source : -1 - source + count]
    return gathered


def last_states(output: Tensor, walk: Walk, into: Tensor) -> Tensor:
    """The state in which each row left the walk: h of its last step."""
    if walk.reverse:
        into.copy_(output[: walk.batch])
        return into
    ended = 0
    for time in range(walk.steps - 1, -1, -1):
        active = walk.active[time]
        if active > ended:
            into[ended:active] = output[walk.starts[time] + ended : walk.starts[time] + active]
            ended = active
    return into


def usable_gradient(grad: Tensor | None) -> Tensor | None:
    """Gradients of outputs as the kernels read them: rows may lie anywhere, the numbers of a row side by side."""
    return grad if grad is None or grad.stride(-1) == 1 else grad.contiguous()


def copied_bytes(grad: Tensor | None) -> int:
    """What `usable_gradient` allocates."""
    return 0 if grad is None or grad.stride(-1) == 1 else grad.numel() * grad.element_size()


def added_biases(arena: Arena, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor:
    """The sum of the biases, in the arena's `bias`; a narrow one is widened in `other_bias` first."""
    into = arena["bias"].zero_()
    for bias in (b_ih, b_hh):
        if bias is not None:
            into.add_(widened(arena, "other_bias", bias))
    return into


def accumulator(arena: Arena, name: str, result: Tensor) -> Tensor:
    """Where a gradient is added up: the result itself, or the arena's buffer of that name in the compute type."""
    buffer = arena.get(name)
    return result if buffer is None else buffer


def started(into: Tensor, with_: Tensor | None) -> Tensor:
    """A sum that starts with a tensor, or with zeros where there is none."""
    return into.zero_() if with_ is None else into.copy_(with_)


def add_product(left: Tensor, right: Tensor, into: Tensor, first: bool) -> None:
    """`into += left @ right`, or `into = left @ right` for the first of a sum: what lies there is not read then."""
    if first:
        torch.mm(left, right, out=into)
    else:
        into.addmm_(left, right)


def write_product(left: Tensor, right: Tensor, into: Tensor, buffer: Tensor | None) -> None:
    """`into = left @ right`, by way of a buffer in the compute type where there is one."""
    if buffer is None:
        torch.mm(left, right, out=into)
    else:
        into.copy_(torch.mm(left, right, out=buffer[: left.shape[0]]))
