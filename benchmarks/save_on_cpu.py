"""`torch.autograd.graph.save_on_cpu` as a system to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SavedOnCpu(nn.Module):
    """The model under `save_on_cpu`: what backward needs is copied to the host's memory, and back. On a machine without
    another device that is a copy from memory to memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.model(*args)
