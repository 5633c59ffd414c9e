"""An observation of a step that is not over when the process ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from encore.cost.observation import Observation

observation = Observation.start()
tensors = [torch.ones(1000) for _ in range(3)]
observation.mark()
del tensors[0]
print("over")
"""


def test_the_process_ends_as_usual() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
