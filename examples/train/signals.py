"""A request to stop that lets the current step end: SIGINT (Ctrl-C) and SIGTERM."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Which signal asked to stop, if any has."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """The first signal is noted, the second does what it did before: nobody has to wait for a step that takes long."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may listen
        yield request
        return
    before = {number: signal.getsignal(number) for number in STOPPING}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore()
        print("encore: stopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    for number in STOPPING:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
