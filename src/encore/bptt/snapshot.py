"""A state of the loop at one time: the carry, the buffers that the step writes to, and the random state.

The carry is kept as it is, since steps make new tensors instead of writing to old ones; only a view of something much
larger is copied, so that the rest can be freed. Buffers are written in place, so that they are always copied; those and
random states that are as they were when the loop began are not kept again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from encore.devices import default_generator
from encore.errors import ReplayError
from encore.tiers.layout import BlockLayout, layout_of


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that a snapshot of some tensors takes."""
    return min(held_bytes(tensors), layout_of(tensors).bytes)


class Held:
    """Tensors of the carry, by reference or packed."""

    __slots__ = ("_block", "_layout", "_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._block: Tensor | None = None
        self._layout: BlockLayout | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        if held_bytes(tensors) > sum(tensor.nbytes for tensor in tensors):
            self._layout = layout_of(tensors)
            self._block = torch.empty(self._layout.bytes, dtype=torch.uint8)
            self._layout.pack(tensors, self._block)
        else:
            self._tensors = list(tensors)
            self._versions = [tensor._version for tensor in tensors]

    def tensors(self) -> list[Tensor]:
        if self._layout is not None:
            assert self._block is not None
            return self._layout.unpack(self._block)
        if [tensor._version for tensor in self._tensors] != self._versions:
            raise ReplayError(
                "the step wrote into its carry, which was kept to run it again; return a new tensor instead"
            )
        return list(self._tensors)


@dataclass(slots=True)
class Surroundings:
    """What a step reads and changes besides its arguments."""

    buffers: list[Tensor]
    """As bytes, over the whole of each storage."""
    devices: list[torch.device]
    """Whose random numbers may be drawn, besides the CPU's."""
    generators: list[torch.Generator] = field(default_factory=list)
    """The step's own."""

    @property
    def states(self) -> int:
        """How many random states there are."""
        return 1 + len(self.devices) + len(self.generators)

    @property
    def storages(self) -> set[int]:
        """Of the buffers, as PyTorch knows them while they live."""
        return {buffer.untyped_storage()._cdata for buffer in self.buffers}

    def random_state(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._all_generators()]

    def set_random_state(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._all_generators(), states, strict=True):
            generator.set_state(state)

    def _all_generators(self) -> list[torch.Generator]:
        return [torch.default_generator, *map(default_generator, self.devices), *self.generators]

    def read(self, base: SurroundingState | None = None) -> SurroundingState:
        """Surroundings as they are now; what is as it was in `base` is shared with it."""
        found = [*self.random_state(), *(buffer.clone() for buffer in self.buffers)]
        if base is None:
            return SurroundingState(tuple(found), (True,) * len(found))
        changed = tuple(not torch.equal(old, new) for old, new in zip(base.tensors, found, strict=True))
        return base.with_changes(changed, [new for new, is_new in zip(found, changed, strict=True) if is_new])

    def write(self, around: SurroundingState) -> None:
        self.set_random_state(around.tensors[: self.states])
        with torch.no_grad():
            for buffer, value in zip(self.buffers, around.tensors[self.states :], strict=True):
                buffer.copy_(value)


@dataclass(frozen=True, slots=True)
class SurroundingState:
    """Surroundings at one time: random states, then buffers."""

    tensors: tuple[Tensor, ...]
    changed: tuple[bool, ...]
    """Which of them are others than in the base they were read against."""

    def changes(self) -> list[Tensor]:
        return [tensor for tensor, changed in zip(self.tensors, self.changed, strict=True) if changed]

    def with_changes(self, changed: tuple[bool, ...], tensors: Sequence[Tensor]) -> SurroundingState:
        """As these, with `tensors` where `changed` says so."""
        given = iter(tensors)
        made = (next(given) if is_new else old for old, is_new in zip(self.tensors, changed, strict=True))
        return SurroundingState(tuple(made), changed)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in its order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, bit for bit; NaNs are equal to themselves."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return torch.equal(as_bytes(one), as_bytes(other))
