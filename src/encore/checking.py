"""`ENCORE_CHECK=1`: every step is checked while it is compiled and while it runs; slow, for finding bugs.

The replayer checks the schedule that is lowered (`schedule/replayer.py`), every operator is checked while it runs
(`lower/checked.py`), and the first call of every graph is compared with plain PyTorch (`compiler/first_call.py`).
"""

from __future__ import annotations

import os

VARIABLE = "ENCORE_CHECK"


def checks_enabled() -> bool:
    """Return whether the environment variable is set, and not to 0."""
    return os.environ.get(VARIABLE, "") not in ("", "0")
