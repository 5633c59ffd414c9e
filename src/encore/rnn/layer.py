"""What the recurrent operators have in common: their sizes, which kernels run them, and the rows of a chunk.

A layer's large products are PyTorch's own, a chunk of time at a time. Its steps are `native.py`'s on the CPU,
`gpu.py`'s on CUDA devices, and `plain.py`'s where there is no compiler or no Triton. Narrow types (bfloat16, half)
are computed in float32: weights are widened once a call, inputs a chunk at a time, and what is kept for backward stays
narrow, except c, which lives in float32 throughout. In a **narrow** layout, products read bfloat16 as it is, and only
their sums and what cells compute are float32; gradients of gates are rounded then before they are multiplied.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from encore.errors import OperandError, OptionError
from encore.kernels import BuildError
from encore.kernels.gpu import has_gpu_kernels
from encore.rnn import native, plain
from encore.rnn.arena import Arena
from encore.rnn.products import StepProduct, step_product
from encore.rnn.sequence import Chunk, Walk, chunk_steps, dense_walk, packed_walk, previous_rows
from encore.rnn.tuning import LEAST_ROWS, Layout, layout_of

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
    """Products can read the inputs where they are: contiguous, and in the type of operands."""
    a_chunk: int
    """Steps of a chunk."""
    weight: str
    """How the recurrent weight lies: `packed` for our own kernels, or a layout of `products.py`, a product a step."""
    lanes: int
    """Threads or groups of threads that share the work: see `lanes.py`."""
    narrow: bool
    """Products read narrow numbers as they are."""

    @property
    def real(self) -> torch.dtype:
        """The type that is computed in."""
        return WIDE.get(self.dtype, self.dtype)

    @property
    def mixed(self) -> bool:
        """Is that another type than the sequences'?"""
        return self.real != self.dtype

    @property
    def wide(self) -> bool:
        """Is everything widened that products read?"""
        return self.mixed and not self.narrow

    @property
    def operand(self) -> torch.dtype:
        """The type that products read."""
        return self.dtype if self.narrow else self.real

    @property
    def packs(self) -> bool:
        return self.weight == "packed"

    @property
    def chunk_rows(self) -> int:
        """The most rows a chunk can have."""
        return min(self.rows, self.a_chunk * self.batch)

    @property
    def forward_turns(self) -> int:
        """Sets of a chunk's buffers: with two lanes, products are made for one while another one's steps run."""
        return self.lanes

    @property
    def backward_turns(self) -> int:
        """With two lanes, a set's gradients are added up while another one's are made, and where gates are built again,
        those of a third."""
        return 1 if self.lanes == 1 else 3 if self.keep else 2


def sizes_of(
    cell: str, gates: int, named: Mapping[str, Any], batch_sizes: Tensor | None, keep: int, chunked_by_keep: bool
) -> Sizes:
    """Check the operands of a call, by name, against each other. Works on tensors without data."""
    kind = f"{cell}_forward"
    x, h0 = named["x"], named["h0"]
    if x.dim() != (3 if batch_sizes is None else 2):
        wanted = "[T, B, input]" if batch_sizes is None else "[rows, input], packed"
        raise OperandError(f"encore::{kind} takes an input {wanted}; got {tuple(x.shape)}")
    if h0.dim() != 2:
        raise OperandError(f"encore::{kind} takes an initial state [B, hidden]; got {tuple(h0.shape)}")
    if batch_sizes is not None and (
        batch_sizes.dim() != 1 or (batch_sizes.device.type != "cpu" and not _fake(batch_sizes))
    ):
        raise OperandError("batch_sizes must be a one-dimensional tensor on the CPU, as PackedSequence has it")
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
    shapes: dict[str, tuple[int, ...]] = {
        "w_ih": (gates * hidden, inputs),
        "w_hh": (gates * hidden, width),
        "h0": (batch, hidden if named.get("w_hr") is None else width),
        "c0": (batch, hidden),
        "b_ih": (gates * hidden,),
        "b_hh": (gates * hidden,),
        "w_hr": (width, hidden),
    }
    for name, shape in shapes.items():
        tensor = named.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise OperandError(f"{name} of encore::{kind} must have the shape {shape}; got {tuple(tensor.shape)}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise OperandError(
                f"{name} is {tensor.dtype} on {tensor.device}, the input {x.dtype} on {x.device}: convert one of them"
            )
    rows = steps * batch if batch_sizes is None else x.shape[0]
    if all(isinstance(size, int) for size in (inputs, hidden, steps, batch)):
        layout = layout_of(cell, inputs, hidden, steps, batch, keep == 0, x.dtype, x.device.type)
    else:  # sizes that stand for many: only shapes are asked for
        layout = Layout("packed", LEAST_ROWS)
    a_chunk = chunk_steps(steps, batch, keep if chunked_by_keep else 0, layout.rows)
    lanes = layout.lanes if a_chunk < steps else 1
    may_narrow = layout.weight == "packed" and named.get("w_hr") is None
    narrow = layout.narrow and may_narrow and multiplies_narrow(x.dtype, x.device)
    in_place = (narrow or x.dtype not in WIDE) and x.is_contiguous()
    return Sizes(
        steps, batch, rows, inputs, hidden, width, x.dtype, keep, in_place, a_chunk, layout.weight, lanes, narrow
    )  # fmt: skip


def _fake(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor)


def kernels_for(device: torch.device) -> ModuleType:
    """The functions that run steps: compiled ones, where they can be had."""
    if device.type == "cpu":
        return _cpu_kernels()
    if not has_gpu_kernels(device, "recurrent layers run in PyTorch's own operators"):
        return plain
    from encore.rnn import gpu  # imports Triton

    return gpu


def multiplies_narrow(dtype: torch.dtype, device: torch.device) -> bool:
    """Can a narrow layout be had?"""
    return device.type == "cpu" and kernels_for(device) is native and native.multiplies(dtype)


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


def started(into: Tensor, with_: Tensor | None) -> Tensor:
    """A sum that starts with a tensor, or with zeros where there is none."""
    return into.zero_() if with_ is None else into.copy_(with_)


def loaded_states(arena: Arena, h0: Tensor) -> Tensor:
    """The two buffers that hold h in turns; rows that no step touches are right in either."""
    states = arena["states"]
    states[0].copy_(h0)
    states[1].copy_(h0)
    return states


def recurrent_weight(
    sizes: Sizes, arena: Arena, kernels: ModuleType, weight: Tensor, gates: int, *, transposed: bool
) -> tuple[Tensor | None, StepProduct | None]:
    """The weight packed for the kernels, or a product for the steps, whichever the layout asks for."""
    buffer = arena.get("weight")
    if not sizes.packs:
        return None, step_product(sizes.weight, weight, transposed, sizes.batch, buffer)
    assert buffer is not None
    kernels.pack(weight, 1 if transposed else gates, transposed=transposed, out=buffer)
    return buffer, None


def parts_of(walk: Walk, chunk: Chunk, product: StepProduct | None) -> tuple[Chunk, ...]:
    """What the kernels run at a time: all steps, or where a library multiplies, one after each product."""
    return (chunk,) if product is None else walk.single_steps(chunk)


def within(part: Chunk, chunk: Chunk) -> slice:
    """The rows of a part, counted from the chunk's first."""
    return slice(part.first - chunk.first, part.last - chunk.first)


def add_product(sizes: Sizes, left: Tensor, right: Tensor, into: Tensor, first: bool) -> None:
    """`into += left^T @ right`, or `into = left^T @ right` for the first of a sum: what lies there is not read then."""
    if sizes.narrow:
        native.multiply_columns(left, right, into, add=not first)
    elif first:
        torch.mm(left.t(), right, out=into)
    else:
        into.addmm_(left.t(), right)


def write_product(left: Tensor, product: StepProduct, into: Tensor, buffer: Tensor | None) -> None:
    """Write a product, by way of a buffer in the compute type where there is one."""
    if buffer is None:
        product.write(left, into)
    else:
        product.write(left, buffer[: left.shape[0]])
        into.copy_(buffer[: left.shape[0]])
