"""What every tier promises, and the bookkeeping that all tiers share.

A tier keeps a `Block` for every parcel: which of its tensors are still in memory, whether a transfer is under way, the
error of a store that failed. The base class owns these, the bounded queue and the statistics. A tier adds how room is
found and how bytes move: `_has_room`, `_reserve`, `_send`, `_fetch`, `_release`, `_poll` and `_await_transfer`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from encore.errors import TierError
from encore.tiers.layout import BlockLayout, layout_of
from encore.tiers.streams import current_streams
from encore.units import check_count


@dataclass(slots=True)
class Transfers:
    """What went through a tier so far."""

    stores: int = 0
    loads: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    store_seconds: float = 0.0
    """Work of all stores together, on the tier's own threads."""
    fastest_store: float = math.inf
    """Seconds of the fastest store: what the tier can do undisturbed."""
    load_seconds: float = 0.0
    waited_seconds: float = 0.0
    """How long callers waited: for room in the queue, or for bytes that had not arrived yet."""
    from_memory: int = 0
    """Loads of parcels that were still in memory."""

    def copy(self) -> Transfers:
        return dataclasses.replace(self)

    def since(self, before: Transfers) -> Transfers:
        """What went through after `before` was copied. The fastest store stays the tier's."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "fastest_store")
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(before, name) for name in fields})

    def add(self, other: Transfers) -> None:
        """Add what went through another tier."""
        for field in dataclasses.fields(self):
            mine, others = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, min(mine, others) if field.name == "fastest_store" else mine + others)


@dataclass(slots=True)
class Times:
    """When a parcel moved, by `time.perf_counter`; `None` before that, or if the tier cannot measure it."""

    stored: float | None = None
    """The end of its store."""
    fetched: tuple[float, float] | None = None
    """Beginning and end of the latest load."""


class Block:
    """The tensors of one parcel, and where they are. Its fields change under the tier's lock, or belong to the thread
    that moves it. It has no reference to its tier, which is closed when the last outside reference is gone."""

    __slots__ = (
        "error", "freed", "layout", "leaving", "loading", "place", "stored", "streams", "tensors", "times", "versions",
    )  # fmt: skip

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.layout: BlockLayout = layout_of(tensors)
        detached = {id(tensor): tensor.detach() for tensor in tensors}
        self.tensors: list[Tensor] | None = [detached[id(tensor)] for tensor in tensors]  # one tensor stays one
        """Kept until they are stored, and again from the beginning of a load until it is taken."""
        self.streams = current_streams(tensors)
        """Of each accelerator, the stream that computed its tensors, or that they were allocated by to be loaded."""
        self.versions = [tensor._version for tensor in tensors]
        self.times = Times()
        self.place: Any = None
        """What the tier notes about the room that the block takes; `None` if it takes none."""
        self.leaving = True
        """Its store has not finished."""
        self.stored = False
        """Its bytes are in the tier, and only there unless it is loaded."""
        self.loading = False
        self.freed = False
        self.error: TierError | None = None

    @property
    def bytes(self) -> int:
        return self.layout.bytes

    def check_unchanged(self, name: str) -> None:
        """Raise `TierError` if a tensor was written to since it was given to the tier."""
        if self.tensors is not None and [tensor._version for tensor in self.tensors] != self.versions:
            when = f"while the {name} tier stored it" if self.leaving else f"after the {name} tier took it"
            raise TierError(f"a tensor was written to {when}; store a copy of it instead")


class Parcel:
    """Tensors that were given to a tier: the only way back to them."""

    __slots__ = ("block", "tier")

    def __init__(self, tier: Tier, block: Block) -> None:
        self.tier = tier
        self.block = block

    @property
    def bytes(self) -> int:
        return self.block.bytes

    @property
    def times(self) -> Times:
        return self.block.times


class Tier(abc.ABC):
    """A place for tensors outside of the memory that computing happens in.

    `store`, `prefetch`, `load` and `free` may be called by any thread. The error of a store that failed is raised by
    the next call of any of them, and again by the load of that parcel; a load never returns other bytes than were
    stored.
    """

    name: str
    place: str = ""
    """Where its bytes lie, if its speed depends on that."""

    def __init__(self, depth: int) -> None:
        self.transfers = Transfers()
        self.depth = check_count(depth, "depth")
        """Transfers that may be under way at once, each way."""
        self._changed = threading.Condition()
        self._leaving: list[Block] = []
        """Stores that have not finished, oldest first."""
        self._ahead: set[Block] = set()
        """Blocks that are being loaded, or were loaded and not taken yet."""
        self._finished: list[Block] = []
        """Blocks whose tensors can be dropped, by the next call: the tier's own threads never free memory."""
        self._abandoned: deque[Block] = deque()
        self._failure: TierError | None = None
        self._closed = False

    # -- what callers use --------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way, in either direction."""
        with self._changed:
            self._settle()
            return bool(self._leaving) or any(block.loading for block in self._ahead)

    def ready(self, size: int) -> bool:
        """Return whether a store of `size` bytes would start now, without waiting. Raises the error of an earlier
        store."""
        self._enter()
        with self._changed:
            self._settle()
            self._raise_failure()
            return len(self._leaving) < self.depth

    def has_room(self, size: int, count: int = 1) -> bool:
        """Return whether `count` more parcels of `size` bytes fit."""
        self._enter()
        return self._has_room(size, count)

    def store(self, tensors: Sequence[Tensor]) -> Parcel:
        """Begin to store tensors, and return at once unless the queue is full. They must not be written to until the
        parcel is loaded or freed."""
        self._enter()
        block = Block(tensors)
        with self._changed:
            self._raise_failure()
            if len(self._leaving) >= self.depth:
                self._wait_until(lambda: len(self._leaving) < self.depth or self._failure is not None)
                self._raise_failure()
            self._settle()
            self._leaving.append(block)
        try:
            self._reserve(block)
            self._send(block)
        except BaseException:
            with self._changed:
                self._leaving.remove(block)
                self._drop(block)
                self._changed.notify_all()
            raise
        return Parcel(self, block)

    def prefetch(self, parcel: Parcel) -> bool:
        """Begin to load a parcel. Return `False` if too many are being loaded already; `load` will do it then."""
        self._enter()
        block = self._own(parcel)
        with self._changed:
            self._settle()
            if block.tensors is not None or block.error is not None:
                return True  # it is in memory, or being loaded, or `load` has an error to raise
            if len(self._ahead) >= self.depth:
                return False
            self._begin_loading(block)
        return True

    def load(self, parcel: Parcel) -> list[Tensor]:
        """The tensors of a parcel, with their shapes, strides and bits; waits until they have arrived. The parcel stays
        in the tier, and may be loaded again."""
        self._enter()
        block = self._own(parcel)
        with self._changed:
            self.transfers.loads += 1
            self._settle()
            while block.tensors is None or block.loading:  # another thread may take what it waited for, too
                if block.error is not None:
                    raise block.error
                self._own(parcel)
                if not block.loading:
                    self._begin_loading(block)
                self._wait_until(lambda: not block.loading)
                self._settle()
            if not block.stored:
                block.check_unchanged(self.name)
                self.transfers.from_memory += 1
                self.transfers.bytes_loaded += 0 if block.leaving else block.bytes
                tensors = list(block.tensors)
            else:
                tensors, block.tensors = block.tensors, None
                self._ahead.discard(block)
                self._changed.notify_all()
            self._hand_over(block, tensors)
            return tensors

    def free(self, parcel: Parcel) -> None:
        """Forget a parcel: its room can be used again."""
        if not self._closed:
            self._free(self._own(parcel))

    def abandon(self, parcel: Parcel) -> None:
        """Free a parcel with one of the next calls: for finalizers, which run at any time, even during a call of this
        very tier. A parcel that was freed already is ignored."""
        block = parcel.block
        if not block.leaving and not block.stored:
            block.tensors = None
        self._abandoned.append(block)

    def wait_for(self, parcel: Parcel) -> None:
        """Wait until this parcel is stored, and drop its tensors. Raises the error of its store."""
        self._enter()
        block = self._own(parcel)
        with self._changed:
            if block.leaving:
                self._wait_until(lambda: not block.leaving)
            self._settle()
            if block.error is not None:
                raise block.error

    def wait(self) -> None:
        """Wait until everything given so far is stored. Raises the error of a store that failed."""
        self._enter()
        with self._changed:
            self._wait_until(lambda: not self._leaving)
            self._settle()
            self._raise_failure()

    def forgive(self) -> None:
        """Forget that a store failed: its error has been raised, and the caller begins anew."""
        self._enter()
        with self._changed:
            self._failure = None

    @abc.abstractmethod
    def claim(self, sizes: Sequence[int]) -> None:
        """Claim room for more parcels of these sizes before the work begins; raises `TierError` if there is none."""

    @abc.abstractmethod
    def memory(self, size: int) -> int:
        """Bytes of computing memory that moving parcels of `size` bytes takes as a workspace."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Closing twice does nothing; any other call afterwards raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- how bytes move ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _has_room(self, size: int, count: int) -> bool: ...

    @abc.abstractmethod
    def _reserve(self, block: Block) -> None:
        """Find room for a block and note it as its `place`; raises `TierError` if there is none."""

    @abc.abstractmethod
    def _send(self, block: Block) -> None:
        """Begin to store a block; `_finish_store` is called when it is done."""

    @abc.abstractmethod
    def _fetch(self, block: Block) -> None:
        """Begin to load a block, under the lock: fills its `tensors`, and resets `loading` when they may be read."""

    @abc.abstractmethod
    def _release(self, block: Block) -> None:
        """Give the room of a block back, under the lock, if it has any, before its tensors are dropped."""

    @abc.abstractmethod
    def _await_transfer(self) -> None:
        """Wait, under the lock, until a transfer may have finished."""

    @abc.abstractmethod
    def _poll(self) -> None:
        """Finish the stores that are done, under the lock."""

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _count_store(self, block: Block, seconds: float) -> None:
        self.transfers.stores += 1
        self.transfers.bytes_stored += block.bytes
        self.transfers.store_seconds += seconds
        self.transfers.fastest_store = min(self.transfers.fastest_store, seconds)

    def _finish_store(self, block: Block, *, stored: bool = True, error: TierError | None = None) -> None:
        """End a store, under the lock. With `stored=False` its tensors stay in memory."""
        self._leaving.remove(block)
        block.leaving, block.stored = False, stored and error is None
        if stored:
            self._finished.append(block)
        if error is not None and not block.freed:
            block.error = self._failure = error
        self._changed.notify_all()

    def _begin_loading(self, block: Block) -> None:
        block.tensors = block.layout.make()  # may be out of memory
        block.streams = current_streams(block.tensors)
        self._ahead.add(block)
        block.loading = True
        self._fetch(block)

    def _hand_over(self, block: Block, tensors: Sequence[Tensor]) -> None:
        """Order what comes next on the current streams behind what made these tensors; their memory, once it is freed,
        is used again only behind both."""
        for device, stream in block.streams.items():
            current = torch.accelerator.current_stream(device)
            if current != stream:
                current.wait_stream(stream)
                for tensor in tensors:
                    if tensor.device == device:
                        tensor.record_stream(current)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        started = time.perf_counter()
        while not reached():
            self._await_transfer()
        self.transfers.waited_seconds += time.perf_counter() - started

    def _settle(self) -> None:
        """Drop the tensors of finished transfers."""
        self._poll()
        for block in self._finished:
            if block.freed:
                self._release(block)
            block.tensors = None
        self._finished.clear()

    def _free(self, block: Block) -> None:
        with self._changed:
            self._settle()
            block.freed = True
            if not block.leaving and not block.loading:  # else its room comes back when the transfer has finished
                self._ahead.discard(block)
                self._drop(block)

    def _drop(self, block: Block) -> None:
        self._release(block)
        block.tensors = None

    def _free_abandoned(self) -> None:
        while self._abandoned:
            block = self._abandoned.popleft()
            if not block.freed:
                self._free(block)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _own(self, parcel: Parcel) -> Block:
        if parcel.tier is not self:
            raise TierError("this parcel belongs to another tier; give it to the one that stored it")
        if parcel.block.freed:
            raise TierError("this parcel was freed; its bytes are gone")
        return parcel.block

    def _enter(self) -> None:
        """What every call begins with."""
        self._check_open()
        self._free_abandoned()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"this {self.name} tier was closed; make another")
