"""How a running step offloads to a tier: store, wait, fetch and load, by tokens.

Autograd saves nothing but tensors between forward and backward, so the key of a stored tensor (a parcel) is a token: a
tensor of one number, whose memory is a Python object's. The parcel is freed when that memory is, whatever other
references autograd, a second backward or a hook have kept; until then it can be loaded again. A number is used once,
and no parcel is looked up by address.
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
    """The memory of a token: a bytearray that can have a finalizer."""


class Transport:
    """Moves tensors of compiled steps to and from a tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._numbers = itertools.count()
        self._parcels: dict[int, Parcel] = {}
        self._freed: deque[int] = deque()
        """Numbers whose tokens have been freed. That may happen at any time, even while the tier runs, so their parcels
        are freed at the next call of a step."""
        self._lock = threading.Lock()

    @property
    def waited(self) -> float:
        """Seconds that steps have waited for this tier so far."""
        return self.tier.transfers.waited_seconds

    @property
    def parcels(self) -> int:
        """The number of parcels in the tier."""
        return len(self._parcels)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Reserve space for the parcels of a step, which have these sizes."""
        self._free_parcels()
        self.tier.forgive()
        self.tier.claim(sizes)

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """Begin to store a tensor that fills its memory; return its token."""
        self._free_parcels()
        parcel = self.tier.store([x.detach().as_strided((x.numel(),), (1,))])
        with self._lock:
            number = next(self._numbers)
            self._parcels[number] = parcel
        memory = _Memory(number.to_bytes(TOKEN_BYTES, "little"))
        weakref.finalize(memory, self._freed.append, number).atexit = False
        return torch.frombuffer(memory, dtype=TOKEN_DTYPE)

    def stored(self, token: torch.Tensor) -> None:
        """Wait until a tensor is stored."""
        self.tier.wait_for(self._parcel(token))

    def store_now(self, x: torch.Tensor) -> torch.Tensor:
        """Store a tensor, and wait for it."""
        token = self.store(x)
        self.stored(token)
        return token

    def fetch(self, token: torch.Tensor) -> None:
        """Begin to load a tensor."""
        self.tier.prefetch(self._parcel(token))

    def load(self, token: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the stored tensor in its shape, once it is loaded."""
        (flat,) = self.tier.load(self._parcel(token))
        assert flat.dtype is dtype
        return flat.as_strided(size, stride)

    def _parcel(self, token: torch.Tensor) -> Parcel:
        parcel = self._parcels.get(int(token))
        if parcel is None:
            raise TierError(
                "an offloaded activation was freed before backward reloads it, since a saved-tensor hook has copied "
                "the token that autograd saves; remove such hooks, or leave out tiers="
            )
        return parcel

    def _free_parcels(self) -> None:
        while True:
            try:
                number = self._freed.popleft()
            except IndexError:
                return
            with self._lock:
                parcel = self._parcels.pop(number)
            self.tier.free(parcel)
