"""A test that hangs takes its process down instead of the whole run with it.

Seconds are counted while the process runs: one that was stopped for a while has not hung.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Iterator

TICK = 0.25


@contextlib.contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    done = threading.Event()

    def watch() -> None:
        for _ in range(int(seconds / TICK)):
            if done.wait(TICK):
                return
        faulthandler.dump_traceback()
        os._exit(70)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
