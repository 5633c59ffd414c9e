"""What a running step does with a tier: store, wait, fetch, load, by tokens.

Autograd holds tensors between forward and backward and nothing else, so a parcel is known by a token: a tensor of one
number, whose memory is a Python object's. The parcel goes when the token's memory does, wherever autograd, a second
backward or a hook has let it wander; until then it can be loaded again. A number is given out once, and nothing is ever
looked up by address.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from encore.errors import TierError
from encore.graph.tier_ops import TOKEN_BYTES, TOKEN_DTYPE
from encore.tiers import Parcel, Tier


class _Memory(bytearray):
    """The memory of a token: unlike a plain bytearray, somebody can learn of its end."""


class Transport:
    """A tier on behalf of compiled steps."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._numbers = itertools.count()
        self._parcels: dict[int, Parcel] = {}
        self._gone: deque[int] = deque()
        """Numbers whose tokens are gone. That may happen at any time, even while the tier is at work, so their parcels
        are freed later, when a step asks for something."""
        self._lock = threading.Lock()

    @property
    def waited(self) -> float:
        """Seconds that steps have stood still for this tier so far."""
        return self.tier.transfers.waited_seconds

    @property
    def parcels(self) -> int:
        """How many are in the tier."""
        return len(self._parcels)

    def prepare(self, sizes: Sequence[int]) -> None:
        """A step begins that will store parcels of these sizes: make sure of the room."""
        self._free_gone()
        self.tier.forgive()
        self.tier.claim(sizes)

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """Begin to store a tensor that fills its memory; its token."""
        self._free_gone()
        parcel = self.tier.store([x.detach().as_strided((x.numel(),), (1,))])
        with self._lock:
            number = next(self._numbers)
            self._parcels[number] = parcel
        memory = _Memory(number.to_bytes(TOKEN_BYTES, "little"))
        weakref.finalize(memory, self._gone.append, number).atexit = False
        return torch.frombuffer(memory, dtype=TOKEN_DTYPE)

    def stored(self, token: torch.Tensor) -> None:
        """Wait until it is stored."""
        self.tier.wait_for(self._parcel(token))

    def store_now(self, x: torch.Tensor) -> torch.Tensor:
        """Store a tensor, and wait for it."""
        token = self.store(x)
        self.stored(token)
        return token

    def fetch(self, token: torch.Tensor) -> None:
        """Begin to load."""
        self.tier.prefetch(self._parcel(token))

    def load(self, token: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that was stored, in its shape; waits for it."""
        (flat,) = self.tier.load(self._parcel(token))
        assert flat.dtype is dtype
        return flat.as_strided(size, stride)

    def _parcel(self, token: torch.Tensor) -> Parcel:
        parcel = self._parcels.get(int(token))
        if parcel is None:
            raise TierError(
                "a feature map was given up by its tier before backward asked for it: somebody has copied what "
                "autograd saved (a saved-tensor hook?); leave such hooks out, or tiers="
            )
        return parcel

    def _free_gone(self) -> None:
        while True:
            try:
                number = self._gone.popleft()
            except IndexError:
                return
            with self._lock:
                parcel = self._parcels.pop(number)
            self.tier.free(parcel)
