"""Copies on side streams, ordered by events with the streams that compute.

Memory belongs to the pool of the stream that was current when it was allocated. Once it is freed, the allocator gives
it to what comes next on that stream, and waits for no other. So a tensor that a side stream copies is freed only behind
its copy: after its own stream, or the host, has waited for an event of the side stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from encore.devices import KINDS

Events = Mapping[torch.device, torch.Event]
"""An event of one stream of each device."""


def current_streams(tensors: Iterable[Tensor]) -> dict[torch.device, torch.Stream]:
    """The current stream of each accelerator that these tensors are on."""
    devices = dict.fromkeys(tensor.device for tensor in tensors if not KINDS[tensor.device.type].is_host)
    return {device: torch.accelerator.current_stream(device) for device in devices}


def record_events(streams: Mapping[torch.device, torch.Stream]) -> Events:
    """Record what these streams have been given so far."""
    return {device: stream.record_event() for device, stream in streams.items()}


class SideStreams:
    """A stream of each device, made when it is first used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    @contextlib.contextmanager
    def behind(self, computed: Events, others: Iterable[torch.Event] = ()) -> Iterator[None]:
        """Issue copies between these devices and the host on the side streams, behind an event of each device, and
        behind others."""
        others = list(others)
        with contextlib.ExitStack() as stack:
            for device, event in computed.items():
                side = self._of(device)
                side.wait_event(event)
                for other in others:
                    side.wait_event(other)
                stack.enter_context(side)
            yield

    def record(self, devices: Iterable[torch.device]) -> Events:
        """Record what the side streams of these devices have been given so far."""
        return {device: self._of(device).record_event() for device in devices}

    @property
    def idle(self) -> bool:
        """Whether everything is done."""
        return all(stream.query() for stream in list(self._streams.values()))

    def synchronize(self) -> None:
        """Wait until everything is done."""
        for stream in self._streams.values():
            stream.synchronize()

    def _of(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]
