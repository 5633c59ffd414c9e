"""What every tier promises."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor


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
    """Seconds of the fastest store: what the tier can do when nobody else is in its way."""
    load_seconds: float = 0.0
    waited_seconds: float = 0.0
    """How long callers stood still: for room in the queue, or for bytes that were not there yet."""
    from_memory: int = 0
    """Loads of parcels that were still in memory."""

    def copy(self) -> Transfers:
        return dataclasses.replace(self)

    def since(self, before: Transfers) -> Transfers:
        """What went through after `before` was copied. The fastest store stays the tier's."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "fastest_store")
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(before, name) for name in fields})

    def add(self, other: Transfers) -> None:
        """What went through another tier, too."""
        for field in dataclasses.fields(self):
            mine, others = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, min(mine, others) if field.name == "fastest_store" else mine + others)


@dataclass(slots=True)
class Times:
    """When a parcel moved, by `time.perf_counter`; `None` where it has not yet, or the tier cannot tell."""

    stored: float | None = None
    """The end of its store."""
    fetched: tuple[float, float] | None = None
    """Beginning and end of the latest way back."""


class Parcel:
    """Tensors that were given to a tier; only that tier knows what is inside."""

    __slots__ = ("bytes", "tier", "times")

    def __init__(self, tier: Tier, size: int, times: Times | None = None) -> None:
        self.tier = tier
        self.bytes = size
        self.times = times or Times()


class Tier(abc.ABC):
    """A place for tensors outside of the memory that computing happens in.

    `store`, `prefetch`, `load` and `free` may be called by any thread. A store that fails is told by the next call of
    any of them, and again by the load of that parcel; nothing is ever returned that was not stored.
    """

    name: str
    transfers: Transfers
    depth: int
    """Transfers that may be on their way, each way."""
    place: str = ""
    """Where its bytes lie, where its speed depends on that."""

    def __init__(self) -> None:
        self.transfers = Transfers()

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Is anything on its way, out or back?"""

    @abc.abstractmethod
    def ready(self, size: int) -> bool:
        """Would a store of so many bytes start now, without waiting? Raises the error of an earlier store."""

    @abc.abstractmethod
    def has_room(self, size: int, count: int = 1) -> bool:
        """Is there room for `count` parcels of so many bytes beside what is here?"""

    @abc.abstractmethod
    def store(self, tensors: Sequence[Tensor]) -> Parcel:
        """Put tensors aside, and return at once: waits only while the queue is full. They must not be written to
        until the parcel is loaded or freed."""

    @abc.abstractmethod
    def prefetch(self, parcel: Parcel) -> bool:
        """Begin to bring a parcel back. `False` where too many are on their way already; `load` will do it then."""

    @abc.abstractmethod
    def load(self, parcel: Parcel) -> list[Tensor]:
        """The tensors of a parcel, with their shapes, strides and bits; waits until they are here. The parcel stays in
        the tier, and may be loaded again."""

    @abc.abstractmethod
    def free(self, parcel: Parcel) -> None:
        """Forget a parcel: its room can be used again."""

    @abc.abstractmethod
    def abandon(self, parcel: Parcel) -> None:
        """Forget a parcel with one of the next calls: for finalizers, which run at any time, even amidst a call of this
        very tier. A parcel that was freed already is passed over."""

    @abc.abstractmethod
    def wait_for(self, parcel: Parcel) -> None:
        """Wait until this parcel is stored, and let go of its tensors. Raises the error of its store."""

    @abc.abstractmethod
    def claim(self, sizes: Sequence[int]) -> None:
        """Make sure of room for parcels of these sizes beside what is here, before the work begins; raises `TierError`
        where there is none."""

    @abc.abstractmethod
    def forgive(self) -> None:
        """Forget that a store failed: whoever stored has been told, and begins anew."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until everything given so far is stored. Raises the error of a store that failed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Closing twice does nothing; any other call afterwards raises."""

    @abc.abstractmethod
    def memory(self, size: int) -> int:
        """Bytes of computing memory that the tier takes aside to move parcels of `size` bytes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
