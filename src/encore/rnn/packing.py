"""Packed sequences whose shapes do not depend on data: rows of a packed batch in a block as large as the padded one.

`pack_padded_sequence` gives as many rows as the lengths add up to, so that every batch has shapes of its own. Here the
rows lie in a **block** of T * B rows, step after step as in a `PackedSequence`; rows after the last one are zero.
`batch_sizes` has T numbers, 0 for steps that no sequence reaches. Shapes depend on T and B alone. The recurrent
operators (`cell.py`) read and write such blocks; a dropout in between draws for the rows that are there.

Packing and padding are copies, a run of steps with the same sequences at a time, and each is the other's derivative.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from encore.errors import OperandError
from encore.rnn.registry import MADE_UP, WORKSPACES, define
from encore.rnn.sequence import fill_sizes
from encore.rnn.torch_private import check_packed_lengths, untraced

_library = torch.library.Library("encore", "FRAGMENT")


class ShorterSequencesError(RuntimeError):
    """`pad_packed_sequence` gives fewer steps than its batch was padded to: its shape is not the captured one."""


def runs(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Steps in a row that have the same sequences: (first step, one beyond the last, sequences, first row)."""
    step = row = 0
    for active, group in itertools.groupby(sizes):
        steps = len(list(group))
        if active:
            yield step, step + steps, active, row
        step, row = step + steps, row + steps * active


def rows_of(batch_sizes: Tensor) -> int:
    """How many rows a packed batch has."""
    return int(batch_sizes.sum())


def _time_major(tensor: Tensor, batch_first: bool) -> Tensor:
    return tensor.transpose(0, 1) if batch_first else tensor


# -- operators --------------------------------------------------------------------------------------------------------


def _batch_sizes(lengths: Tensor, steps: int) -> Tensor:
    """How many sequences have a row at each step; what PyTorch raises for lengths that it rejects."""
    found: list[int] = lengths.tolist()
    falling = all(before >= after for before, after in itertools.pairwise(found))
    if not found or not falling or found[-1] < 1 or found[0] > steps:
        check_packed_lengths(lengths, steps)
        raise OperandError(f"lengths must fall from at most {steps} to at least 1; got {found[:8]}")
    return (lengths.unsqueeze(0) > torch.arange(steps).unsqueeze(1)).sum(1)


def _pack(padded: Tensor, batch_sizes: Tensor, batch_first: bool) -> Tensor:
    source = _time_major(padded, batch_first)
    block = _fake_pack(padded, batch_sizes, batch_first)
    sizes = batch_sizes.tolist()
    for first, last, active, row in runs(sizes):
        rows = block[row : row + (last - first) * active]
        rows.view(last - first, active, *source.shape[2:]).copy_(source[first:last, :active])
    block[sum(sizes) :].zero_()
    return block


def _fake_pack(padded: Tensor, batch_sizes: Tensor, batch_first: bool) -> Tensor:
    batch = padded.shape[0 if batch_first else 1]
    return padded.new_empty((batch_sizes.shape[0] * batch, *padded.shape[2:]))


def _pad(rows: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, steps: int, whole: bool) -> Tensor:
    sizes = batch_sizes.tolist()
    if whole and steps and sizes[steps - 1] == 0:
        raise ShorterSequencesError
    padded = _fake_pad(rows, batch_sizes, batch_first, value, steps, whole)
    into = _time_major(padded, batch_first)
    done = 0
    for first, last, active, row in runs(sizes):
        source = rows[row : row + (last - first) * active].view(last - first, active, *rows.shape[1:])
        into[first:last, :active].copy_(source)
        into[first:last, active:].fill_(value)
        done = last
    into[done:].fill_(value)
    return padded


def _fake_pad(rows: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, steps: int, whole: bool) -> Tensor:
    batch = rows.shape[0] // batch_sizes.shape[0]
    return rows.new_empty((*((batch, steps) if batch_first else (steps, batch)), *rows.shape[1:]))


def _lengths(batch_sizes: Tensor, batch: int) -> Tensor:
    """The length of each sequence, longest first."""
    return (batch_sizes.unsqueeze(0) > torch.arange(batch).unsqueeze(1)).sum(1)


def _dropout_noise(like: Tensor, batch_sizes: Tensor, p: float) -> Tensor:
    """What dropout multiplies the rows by; drawn as eager PyTorch draws it for a packed sequence."""
    noise = torch.zeros_like(like, memory_format=torch.contiguous_format)
    noise[: rows_of(batch_sizes)].bernoulli_(1 - p).div_(1 - p)
    return noise


def _fake_dropout_noise(like: Tensor, batch_sizes: Tensor, p: float) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def dropped_rows(block: Tensor, batch_sizes: Tensor | None, p: float) -> Tensor:
    """Dropout of the rows of a block: eager's draws for them."""
    assert batch_sizes is not None
    if p == 1:
        return block * torch.zeros((), dtype=block.dtype, device=block.device)
    return block * torch.ops.encore.packed_dropout_noise(block.detach(), batch_sizes, p)


def _small(schema: str, run: Any, fake: Any, workspace: Any, tags: tuple[Any, ...] = ()) -> None:
    """Define an operator without a derivative."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, untraced(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"encore::{name}", fake, lib=_library)
    WORKSPACES[getattr(torch.ops.encore, name).default] = workspace


_small(
    "packed_batch_sizes(Tensor lengths, int steps) -> Tensor",
    _batch_sizes,
    lambda lengths, steps: lengths.new_empty(steps),
    lambda lengths, steps: 8 * steps + steps * lengths.shape[0],
)
_small(
    "packed_lengths(Tensor batch_sizes, int batch) -> Tensor",
    _lengths,
    lambda batch_sizes, batch: batch_sizes.new_empty(batch),
    lambda batch_sizes, batch: 8 * batch + batch * batch_sizes.shape[0],
)
_small(
    "packed_dropout_noise(Tensor like, Tensor batch_sizes, float p) -> Tensor",
    _dropout_noise,
    _fake_dropout_noise,
    lambda like, batch_sizes, p: 16,
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _save_pack(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    padded, batch_sizes, batch_first = inputs
    ctx.save_for_backward(batch_sizes)
    ctx.batch_first, ctx.steps = batch_first, padded.shape[1 if batch_first else 0]


def _differentiate_pack(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (batch_sizes,) = ctx.saved_tensors
    return torch.ops.encore.pad_rows(grad, batch_sizes, ctx.batch_first, 0.0, ctx.steps, False), None, None


def _save_pad(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.batch_first = inputs[2]


def _differentiate_pad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (batch_sizes,) = ctx.saved_tensors
    return (torch.ops.encore.pack_rows(grad, batch_sizes, ctx.batch_first), *[None] * 5)


define(
    "pack_rows(Tensor padded, Tensor batch_sizes, bool batch_first) -> Tensor",
    _pack, _fake_pack, lambda *_: 0, _differentiate_pack, _save_pack,
)  # fmt: skip
define(
    "pad_rows(Tensor rows, Tensor batch_sizes, bool batch_first, float value, int steps, bool whole) -> Tensor",
    _pad, _fake_pad, lambda *_: 0, _differentiate_pad, _save_pad,
)  # fmt: skip


def _in_block(rows: Tensor, batch_sizes: Tensor, batch: int) -> Tensor:
    """Rows of a packed batch in a block."""
    if rows_of(batch_sizes) != len(rows):
        raise OperandError(
            f"a packed sequence must have as many rows as its batch_sizes add up to; got {len(rows)} rows, and "
            f"batch_sizes with a sum of {rows_of(batch_sizes)}"
        )
    block = _fake_in_block(rows, batch_sizes, batch)
    block[: len(rows)] = rows
    block[len(rows) :].zero_()
    return block


def _fake_in_block(rows: Tensor, batch_sizes: Tensor, batch: int) -> Tensor:
    return rows.new_empty((batch_sizes.shape[0] * batch, *rows.shape[1:]))


def _save_count(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rows = inputs[0].shape[0]


define(
    "rows_in_block(Tensor rows, Tensor batch_sizes, int batch) -> Tensor",
    _in_block, _fake_in_block, lambda *_: 0, lambda ctx, grad: (grad[: ctx.rows].clone(), None, None), _save_count,
)  # fmt: skip


def _full(position: int, batch: Any) -> Any:
    """Made-up operands with batch sizes at this position: every sequence is as long as it can be."""

    def made_up(args: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = args[position]
        return args if sizes is None else (*args[:position], sizes.fill_(batch(args)), *args[position + 1 :])

    return made_up


MADE_UP[torch.ops.encore.rows_in_block.default] = lambda args: (
    args[0],
    fill_sizes(args[1], len(args[0]), args[2]),
    args[2],
)
MADE_UP[torch.ops.encore.pack_rows.default] = _full(1, lambda args: args[0].shape[0 if args[2] else 1])
MADE_UP[torch.ops.encore.pad_rows.default] = _full(1, lambda args: args[0].shape[0] // args[1].shape[0])
MADE_UP[torch.ops.encore.packed_dropout_noise.default] = MADE_UP[torch.ops.encore.pad_rows.default]
MADE_UP[torch.ops.encore.packed_batch_sizes.default] = lambda args: (args[0].fill_(args[1]), args[1])
