"""Budgets as users write them, options that are refused with what is accepted, and the state an optimizer will hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from encore.errors import OptionError
from encore.options import Budget, Lossy, make_options, optimizer_bytes, parse_budget


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (1, 1), (4096, 4096), (1e9, 10**9), ("512", 512), ("512B", 512), ("2GiB", 2**31), ("2 GiB", 2**31),
        ("1.5MiB", 3 * 2**19), ("500MB", 5 * 10**8), ("500mb", 5 * 10**8), (" 3KiB ", 3072), ("1TB", 10**12),
    ],
)  # fmt: skip
def test_absolute_budgets(written: int | float | str, size: int) -> None:
    assert parse_budget(written) == Budget(bytes=size)
    assert parse_budget(written).resolve(unplanned=7) == size


def test_relative_budgets() -> None:
    assert parse_budget("60%").resolve(unplanned=1001) == 600
    assert parse_budget("min").is_floor
    assert parse_budget("MIN") == Budget()
    assert parse_budget(Budget(share=0.5)) == Budget(share=0.5)


@pytest.mark.parametrize(
    "written", [0, -1, 0.5, float("nan"), float("inf"), True, None, [1], "", "lots", "-1GiB", "0%", "0", "1 XB", "1e9"]
)
def test_budgets_that_are_refused_say_what_is_accepted(written: Any) -> None:
    with pytest.raises(OptionError, match="2GiB"):
        parse_budget(written)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bugdet": 1}, "unknown option 'bugdet'.*'budget'"),
        ({"budget": 1, "overhead": 0.1}, "exclude each other"),
        ({"overhead": -0.1}, "at least 0"),
        ({"overhead": "5%"}, "at least 0"),
        ({"overhead": float("nan")}, "at least 0"),
        ({"resident": 1.5}, "bytes"),
        ({"resident": True}, "bytes"),
        ({"recompile_limit": 0}, "at least 1"),
        ({"lowering": "fast"}, "'eager'"),
        ({"methods": "compress"}, "'compress' is not a method; there are .*'encode'"),
        ({"methods": ()}, "names none"),
        ({"lossy": "bits"}, "'bits' is not a lossy codec; there are .*'fp16'"),
        ({"lossy": 0}, "lossy=0 is not a bound on the relative gradient error; give True, False"),
        ({"lossy": 1}, "between 0 and 1"),
        ({"lossy": -0.01}, "between 0 and 1"),
        ({"lossy": float("nan")}, "between 0 and 1"),
        ({"lossy": float("inf")}, "between 0 and 1"),
        ({"lossy": "0.05"}, "'0.05' is not a lossy codec"),
        ({"lossy": {"fp16": 0.1}}, "give True, False"),
        ({"lossy_check": -1}, "a number of steps, or 0"),
        ({"lossy_check": 1.5}, "a number of steps, or 0"),
        ({"optimizer": "Adam"}, "not a torch.optim.Optimizer"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_options(given)


def test_lossy_is_a_bound_or_names() -> None:
    every = make_options({"lossy": True}).lossy
    assert every.bound == 0.01
    assert make_options({"lossy": 0.05}).lossy == Lossy(every.codecs, 0.05)
    assert make_options({"lossy": False}).lossy == make_options({}).lossy == Lossy()
    assert make_options({"lossy": ("int8", "fp16")}).lossy == Lossy(("fp16", "int8"))
    assert make_options({"lossy": "fp8"}).lossy == Lossy(("fp8_e4m3", "fp8_e5m2"))
    assert not make_options({}).lossy


def test_what_is_not_given_is_the_default() -> None:
    assert make_options({"budget": None, "overhead": None}) == make_options({})
    assert make_options({}).allowed_overhead == 0.05
    assert make_options({"overhead": 0}).allowed_overhead == 0


def adam_like(name: str, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **settings)


OPTIMIZERS = {
    "SGD": adam_like("SGD"),
    "SGD momentum": adam_like("SGD", momentum=0.9),
    "Adam": adam_like("Adam"),
    "Adam amsgrad": adam_like("Adam", amsgrad=True),
    "AdamW": adam_like("AdamW"),
    "RMSprop": adam_like("RMSprop"),
    "RMSprop momentum centered": adam_like("RMSprop", momentum=0.9, centered=True),
    "Adagrad": adam_like("Adagrad"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_an_optimizer_are_those_of_its_state_after_a_step(name: str) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model[0].weight.requires_grad_(False)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = optimizer_bytes(optimizer)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values() if torch.is_tensor(tensor)]
    real = sum(tensor.numel() * tensor.element_size() for tensor in state)
    assert optimizer_bytes(optimizer) == real
    assert before == real
    assert make_options({"optimizer": optimizer, "resident": 100}).resident == real + 100


def test_an_unknown_optimizer_is_refused_before_its_first_step() -> None:
    class Strange(torch.optim.SGD):
        pass

    with pytest.raises(OptionError, match="resident="):
        optimizer_bytes(Strange(nn.Linear(2, 2).parameters(), lr=0.1))
