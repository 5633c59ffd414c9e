"""Lightning, for tests that run its loop."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

_OPERATORS: list[torch.library.Library] = []


def import_lightning() -> Any:
    """The package `lightning.pytorch`, or a skipped test. Lightning imports torchmetrics, and that torchvision, which
    fails if it was built for another PyTorch (CUDA, CPU): two operators of it are declared then, none is called."""
    try:
        __import__("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _OPERATORS.append(library)
    lightning = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning
