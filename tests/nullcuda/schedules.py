"""Random programs that use a tier from several streams, as a careful user does: what a program itself passes from one
stream to another, it orders and records; what it gives to a tier and takes back, it leaves to the tier."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from encore.tiers import Parcel, Tier
from nullcuda.null_device import Reader, device_with, late_fill, watched

SIZES = (2048, 4096)
"""Bytes of a tensor. There are few, so that memory is used again soon."""
MOST_US = 150
"""Microseconds that a copy or a kernel takes at most."""
STREAMS = {device: [torch.Stream(device) for _ in range(2)] for device in ("cuda:0", "cuda:1")}


@dataclass(slots=True)
class Found:
    """What a run showed."""

    races: list[str]
    wrong: int
    """Bytes that kernels read, and that were others than had been stored."""
    stored: int
    loaded: int


@dataclass(slots=True)
class _Value:
    """A tensor of the program."""

    tensor: torch.Tensor
    number: int
    """All of its bytes."""
    home: torch.Stream
    seen_by: list[torch.Stream] = field(default_factory=list)


class RandomProgram:
    """A program of random calls, the same for the same seed."""

    def __init__(self, tier: Tier, seed: int) -> None:
        self.tier = tier
        self.draw = random.Random(seed)
        self.device = self.draw.choice(list(STREAMS))
        self.values: list[_Value] = []
        self.parcels: list[tuple[Parcel, int]] = []
        self.reader = Reader()
        self.stored = 0

    def run(self, calls: int) -> None:
        """Make some calls, close the tier while transfers are under way, and use its memory again."""
        with torch.accelerator.device_index(torch.device(self.device).index):
            stream = self._any_stream()
            for _ in range(calls):
                if self.draw.random() < 0.1:
                    stream = self._any_stream()
                with stream:
                    self.draw.choice(self.CALLS)(self)
            with stream:
                self.tier.close()
                self.parcels.clear()
                for _ in range(4):
                    self.scratch()
        self.values.clear()

    def compute(self) -> None:
        number = self.draw.randrange(1, 100)
        self.values.append(_Value(self._filled(number), number, self._current()))

    def read(self) -> None:
        if self.values:
            value = self.draw.choice(self.values)
            self._reach(value)
            self.reader.expect(value.tensor, value.number, self._time())

    def drop(self) -> None:
        if self.values:
            del self.values[self.draw.randrange(len(self.values))]

    def scratch(self) -> None:
        """Memory that is used for a moment: what was freed last."""
        self._filled(255)

    def store(self) -> None:
        if not self.values:
            self.compute()
        at = self.draw.randrange(len(self.values))
        value = self.values[at]
        self._reach(value)
        self.parcels.append((self.tier.store([value.tensor]), value.number))
        self.stored += 1
        if self.draw.random() < 0.8:
            del self.values[at]

    def wait(self) -> None:
        if self.parcels:
            self.tier.wait_for(self.draw.choice(self.parcels)[0])

    def poll(self) -> None:
        self.tier.ready(0)

    def prefetch(self) -> None:
        if self.parcels:
            self.tier.prefetch(self.draw.choice(self.parcels)[0])

    def load(self) -> None:
        if self.parcels:
            parcel, number = self.draw.choice(self.parcels)
            (tensor,) = self.tier.load(parcel)
            self.reader.expect(tensor, number, self._time())
            if self.draw.random() < 0.5:
                self.values.append(_Value(tensor, number, self._current()))

    def free(self) -> None:
        if self.parcels:
            parcel, _ = self.parcels.pop(self.draw.randrange(len(self.parcels)))
            self.tier.free(parcel)

    CALLS = (compute, read, drop, scratch, store, store, store, wait, wait, poll, prefetch, prefetch, load, load, free)

    def _any_stream(self) -> torch.Stream:
        return self.draw.choice([torch.accelerator.current_stream(self.device), *STREAMS[self.device]])

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def _time(self) -> int:
        return self.draw.randrange(MOST_US)

    def _filled(self, number: int) -> torch.Tensor:
        tensor = torch.empty(self.draw.choice(SIZES), dtype=torch.uint8, device=self.device)
        late_fill(tensor, number, self._time())
        return tensor

    def _reach(self, value: _Value) -> None:
        """What a user does with a tensor of another stream."""
        current = self._current()
        if current != value.home and current not in value.seen_by:
            current.wait_stream(value.home)
            value.tensor.record_stream(current)
            value.seen_by.append(current)


def run_program(make: Callable[[int], Tier], seed: int, calls: int = 40) -> Found:
    """Run a random program on a tier of a random depth, on streams that are threads, with random delays."""
    with device_with(streams=1, random=1, copy_us=MOST_US), watched() as seen:
        program = RandomProgram(make(1 + seed % 4), seed)
        program.run(calls)
        return Found(seen.races, program.reader.others, program.stored, program.tier.transfers.loads)
