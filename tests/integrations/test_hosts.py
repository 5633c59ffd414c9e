"""Models of several kinds in every host's loop: with Encore, the losses are those without it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from support.host_loops import LOOPS
from support.host_models import MODELS, build

FAST = (("transformers", "llama"), ("lightning", "tagger"), ("accelerate", "resnet"))


def losses(host: str, name: str, steps: int, options: dict[str, Any] | None) -> list[float]:
    model, batches = build(name)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return LOOPS[host](model, batches, steps, options)


@pytest.mark.parametrize(("host", "name"), FAST)
def test_losses_of_five_steps(host: str, name: str) -> None:
    options: Any = {"lowering": "eager", "overhead": 0.2}
    assert losses(host, name, 5, options) == losses(host, name, 5, None)


@pytest.mark.slow
@pytest.mark.parametrize("host", LOOPS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_fifty_steps(host: str, name: str) -> None:
    options: Any = {"lowering": "eager", "budget": "min"}
    assert losses(host, name, 50, options) == losses(host, name, 50, None)
