"""Replacements for `pack_padded_sequence` and `pad_packed_sequence` that Dynamo traces in captured models.

PyTorch's functions break the graph, since the number of packed rows depends on the lengths. The shapes of these depend
on the padded batch alone (`rnn/packing.py`): new lengths run the same graph, and the plan covers what the layers in
between save. Lengths in a Python list would be constants of the graph, a new one for every batch: the graph breaks
there, they become a tensor, and the batch is packed in the next graph. On devices other than the CPU, PyTorch's
functions run between two graphs.

`pad_packed_sequence` returns as many steps as the longest sequence has, which usually is what the batch was padded to.
The captured shape has all steps; the first batch whose longest sequence is shorter raises `ShorterSequencesError`, and
the model is captured once more, with a break of the graph at that function (`compiled.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from encore.capture import torch_private
from encore.capture.torch_private import Replacement
from encore.graph.torch_private import pytree
from encore.rnn.packed_rows import BatchSizes, CapturedSequence, PackedRows, block_of, end_graphs_at_reads
from encore.rnn.sequence import can_walk

end_graphs_at_reads()


class PackingSession(Protocol):
    """The part of a session that packing needs."""

    packs: bool
    """Whether one of its graphs packs or pads sequences."""

    def count_outside(self, size: int) -> None:
        """Record bytes that were allocated between graphs."""


_traced: ContextVar[dict[Any, Replacement] | None] = ContextVar("encore: functions that pack and pad", default=None)
_session: ContextVar[PackingSession | None] = ContextVar("encore: the session of the model that runs", default=None)


@contextlib.contextmanager
def traced_packing(*, whole: bool, session: PackingSession) -> Iterator[None]:
    """Trace packing into graphs; padding as well if `whole`: batches are padded no further than to their longest
    sequence."""
    pad = traced_pad_packed_sequence if whole else pad_to_a_given_length
    token = _traced.set(
        {
            rnn.pack_padded_sequence: Replacement(traced_pack_padded_sequence, "pack_between_graphs", __name__),
            rnn.pack_sequence: Replacement(traced_pack_sequence, "pack_sequence", rnn.__name__),
            rnn.pad_packed_sequence: Replacement(pad, "pad_packed_sequence", rnn.__name__),
            PackedSequence: Replacement(traced_packed_sequence, "SequenceBetweenGraphs", __name__),
        }
    )
    running = _session.set(session)
    try:
        with torch_private.replaced_readers(READERS):
            yield
    finally:
        _session.reset(running)
        _traced.reset(token)


def _replacement(function: Any) -> Replacement | None:
    """The replacement that Dynamo traces for a function now, if there is one."""
    found = (_traced.get() or {}).get(function)
    session = _session.get()
    if found is not None and session is not None and function is not PackedSequence:  # layers only check for that class
        session.packs = True
    return found


# -- what Dynamo traces -----------------------------------------------------------------------------------------------


def traced_pack_padded_sequence(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    if not _can_be_captured(input, lengths, batch_first):
        torch_private.graph_break(msg=PACKED)
    return _packed(input, lengths, batch_first, enforce_sorted, later=False)


def traced_pack_sequence(sequences: Any, enforce_sorted: bool = True) -> PackedSequence:
    """Lengths are sizes here, which a graph has pinned."""
    lengths = torch.tensor([sequence.size(0) for sequence in sequences])
    return traced_pack_padded_sequence(rnn.pad_sequence(sequences), lengths, enforce_sorted=enforce_sorted)


def traced_packed_sequence(
    data: Any, batch_sizes: Any = None, sorted_indices: Any = None, unsorted_indices: Any = None
) -> PackedSequence:
    """The number of sequences is the first batch size, which depends on data if batch sizes are a tensor."""
    if not isinstance(batch_sizes, BatchSizes):
        torch_private.graph_break(msg=CONSTRUCTED)
    return CapturedSequence(data, batch_sizes, sorted_indices, unsorted_indices)


def traced_pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    rows: Any = sequence[0]
    sizes: Any = sequence.batch_sizes
    if not isinstance(sizes, BatchSizes):
        torch_private.graph_break(msg=PADDED)
    if total_length is not None and total_length < sizes.numbers.shape[0]:
        torch_private.graph_break(msg=PADDED)  # whether that is an error depends on the lengths
    steps = sizes.numbers.shape[0] if total_length is None else total_length
    padded = torch.ops.encore.pad_rows(
        block_of(rows, sizes), sizes.numbers, batch_first, padding_value, steps, total_length is None
    )
    lengths = torch.ops.encore.packed_lengths(sizes.numbers, sizes.batch)
    unsorted_indices = sequence.unsorted_indices
    if unsorted_indices is None:
        return padded, lengths
    return padded.index_select(0 if batch_first else 1, unsorted_indices), lengths[unsorted_indices]


def pad_to_a_given_length(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """`pad_packed_sequence` that stays in the graph only if `total_length` is given."""
    if total_length is None:
        torch_private.graph_break(msg=PADDED)
    return traced_pad_packed_sequence(sequence, batch_first, padding_value, total_length)


PACKED = "encore: pack_padded_sequence: lengths that are not a tensor on the CPU cannot be part of a graph"
CONSTRUCTED = "encore: PackedSequence: the number of its sequences depends on data"
PADDED = "encore: pad_packed_sequence: the number of steps that it returns depends on data"


def _can_be_captured(input: Any, lengths: Any, batch_first: bool) -> bool:
    """Return whether PyTorch accepts these arguments and the lengths can be an input of the graph."""
    if not isinstance(lengths, Tensor) or lengths.device.type != "cpu" or lengths.dim() != 1:
        return False
    if input.device.type != "cpu" or input.dim() < 2 or input.numel() == 0:
        return False
    return bool(lengths.shape[0] == input.shape[0 if batch_first else 1])


def _packed(input: Tensor, lengths: Tensor, batch_first: bool, enforce_sorted: bool, later: bool) -> PackedSequence:
    """What `pack_padded_sequence` does, into a block: now, or where the rows are read."""
    batch_dim = 0 if batch_first else 1
    lengths = lengths.to(dtype=torch.int64)
    order = None
    if not enforce_sorted:
        lengths, order = torch.sort(lengths, descending=True)
    numbers = torch.ops.encore.packed_batch_sizes(lengths, input.shape[1 - batch_dim])
    rows: Any = PackedRows(input, numbers, True, batch_first, order)
    if not later:
        rows = PackedRows(rows.block, numbers)
    sizes: Any = BatchSizes(numbers, input.shape[batch_dim])
    return CapturedSequence(rows, sizes, order, None)


# -- what runs between graphs -----------------------------------------------------------------------------------------


@torch.compiler.disable
def pack_between_graphs(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """`pack_padded_sequence` between graphs: lengths from a list become a tensor, and the next graph packs."""
    numbers = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    if _can_be_captured(input, numbers, batch_first):
        packed = _packed(input, numbers, batch_first, enforce_sorted, later=True)
        session = _session.get()
        if session is not None:
            sizes: Any = packed.batch_sizes
            made = [numbers, sizes.numbers, packed.sorted_indices, packed.unsorted_indices]
            session.count_outside(sum(tensor.nbytes for tensor in made if tensor is not None))
        return packed
    return rnn.pack_padded_sequence(input, lengths, batch_first, enforce_sorted)


class _Between(type):
    """Makes every `PackedSequence` an instance."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, PackedSequence)


class SequenceBetweenGraphs(PackedSequence, metaclass=_Between):
    """`PackedSequence` between graphs: the next graph has the layers that read it."""

    @torch.compiler.disable
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = PackedSequence(*args, **kwargs)
        if not _is_packed(made):
            return made
        session = _session.get()
        if session is not None:
            session.packs = True
        sizes: Any = BatchSizes(made.batch_sizes, int(made.batch_sizes[0]))
        return CapturedSequence(made.data, sizes, made.sorted_indices, made.unsorted_indices)


def packed_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], session: PackingSession
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model with packed sequences in blocks; all other arguments are the same objects."""
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs), is_leaf=_is_packed) if _is_packed(leaf)]
    if not found:
        return args, kwargs
    session.packs = True
    session.count_outside(sum(packed.data.nbytes for packed in found))

    def in_blocks(argument: Any) -> Any:
        if not any(_is_packed(leaf) for leaf in pytree.tree_leaves(argument, is_leaf=_is_packed)):
            return argument
        return pytree.tree_map(lambda leaf: _in_block(leaf) if _is_packed(leaf) else leaf, argument, is_leaf=_is_packed)

    return tuple(map(in_blocks, args)), {key: in_blocks(argument) for key, argument in kwargs.items()}


def _in_block(packed: PackedSequence) -> PackedSequence:
    sizes: Any = BatchSizes(packed.batch_sizes, int(packed.batch_sizes[0]))
    rows: Any = PackedRows(block_of(packed.data, sizes), packed.batch_sizes)
    return CapturedSequence(rows, sizes, packed.sorted_indices, packed.unsorted_indices)


def _is_packed(thing: Any) -> bool:
    """Return whether this is a packed sequence that can be captured and is not in a block yet."""
    if not isinstance(thing, PackedSequence) or not isinstance(thing[0], Tensor):
        return False
    rows, sizes = thing[:2]
    if torch_private.is_plain_fake(sizes) or rows.device.type != "cpu":  # an estimate cannot read sizes
        return False
    found = sizes.tolist()
    return bool(found) and can_walk(found, found[0], len(rows))  # PyTorch rejects it otherwise


_function = torch_private.traced_as(_replacement)
_class = torch_private.constructed_as(CapturedSequence, PackedRows, _replacement)
READERS = {
    rnn.pack_padded_sequence: _function,
    rnn.pack_sequence: _function,
    rnn.pad_packed_sequence: _function,
    PackedSequence: _class,
}
"""Dynamo's readers of functions that pack and pad, while a compiled model runs."""
