"""The suite of learning curves: what it tells, and the variant that rounds at once."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from benchmarks import plots, results
from benchmarks.accuracy import (
    BOUNDED,
    SEEDED,
    AccuracySuite,
    SeedNoise,
    Training,
    one_rounding_apart,
    reduce_at_once,
    run_accuracy,
    runs,
    within_seed_noise,
)
from benchmarks.accuracy_table import COLUMNS, cells, noise_rows, page, render
from benchmarks.workloads.cell import LSTMStack
from encore.codecs import CODECS
from encore.compare.plots import png
from encore.machine import this_machine
from support.json_schema import violations

MIB = 2**20


def suite() -> AccuracySuite:
    found = (
        Training("eager", (2.0, 1.0), {"accuracy": 0.9}, 10 * MIB, 0.0),
        Training("Encore, fp16", (2.0, 1.001), {"accuracy": 0.9}, 4 * MIB, 1e-3),
        Training("fp8_e4m3 at once", (2.0, math.nan), {}, 10 * MIB, 0.5),
    )
    bounded = tuple(
        Training("Encore, lossy within 0.01", (2.0, loss), {"accuracy": 0.9}, 4 * MIB, 1e-3, seed, 0.008)
        for seed, loss in ((0, 1.01), (1, 1.2))
    )
    seeded = (Training("eager", (2.0, 1.1), {"accuracy": 0.8}, 10 * MIB, 0.0, 1), *bounded)
    return AccuracySuite(this_machine(), True, 2, {"vgg16": (*found, *seeded)})


def test_a_row_tells_what_was_lost_and_saved() -> None:
    eager, held, at_once, *_, bounded = suite().trainings["vgg16"]
    assert cells("vgg16", eager, eager.peak)[2:] == ("1.5000", "accuracy 0.900", "", "10.00 MiB", "1.00x", "")
    assert cells("vgg16", held, eager.peak)[2:] == ("1.5005", "accuracy 0.900", "1.0e-03", "4.00 MiB", "2.50x", "")
    assert cells("vgg16", bounded, eager.peak)[-1] == "0.008"
    assert cells("vgg16", at_once, eager.peak)[2] == "diverged at step 2"


def test_seeds_say_what_is_noise() -> None:
    loss, accuracy = within_seed_noise(suite().trainings["vgg16"], BOUNDED)
    assert (loss.what, loss.eager, loss.variant) == ("loss", (1.5, 1.55), (1.505, 1.6))
    assert loss.spread == pytest.approx(0.05)
    assert loss.difference == pytest.approx(0.0275)
    assert loss.within
    assert accuracy.within
    assert not SeedNoise("loss", (1.0, 1.1), (1.3, 1.1)).within
    assert not SeedNoise("loss", (1.0, 1.1), (math.nan, 1.1)).within
    assert noise_rows(suite())[0][2:] == ("loss", "1.5250", "1.5525", "0.0500", "yes")
    assert all(variant in SEEDED for seed, variant in runs() if seed)


def test_table_page_and_picture_show_every_variant() -> None:
    for text in (render(suite()), page(suite())):
        assert all(column in text for column in COLUMNS)
        assert all(one.variant in text for one in suite().trainings["vgg16"])
    assert png(plots.learning(suite().trainings)).startswith(b"\x89PNG")


def test_the_json_says_its_version() -> None:
    told = json.loads(suite().to_json())
    assert violations(told, results.SUITES["accuracy"].found.schema()) == []
    assert told["trainings"]["vgg16"][1]["losses"] == [2.0, 1.001]


def test_one_rounding_apart_changes_one_weight_by_its_last_bit() -> None:
    torch.manual_seed(0)
    last = nn.Linear(4, 2)
    model = nn.Sequential(nn.Linear(3, 4), last)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    one_rounding_apart(model)
    changed = [(old != new).sum().item() for old, new in zip(before, model.parameters(), strict=True)]
    assert changed == [0, 0, 1, 0]
    where = before[2] != last.weight
    assert last.weight[where] == torch.nextafter(before[2][where], torch.tensor(math.inf))


def test_reducing_at_once_rounds_the_states_of_recurrent_cells() -> None:
    torch.manual_seed(0)
    stack = LSTMStack(4, 4, 2)
    reduce_at_once(nn.Sequential(stack), CODECS["fp8_e4m3"])
    states = stack(torch.randn(3, 4), stack.initial_states(torch.randn(3, 2, 4)))
    for state in (one for pair in states for one in pair):
        assert torch.equal(state, state.detach().to(torch.float8_e4m3fn).float())


def test_reducing_at_once_rounds_what_layers_hand_on_and_lets_gradients_pass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh())
    x = torch.randn(3, 7)
    exact = model(x)
    reduce_at_once(model, CODECS["fp10"])
    rounded = model(x)
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.1)
    mantissa = rounded.detach().frexp().mantissa * 2**5
    assert torch.equal(mantissa, mantissa.round())
    rounded.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.slow
def test_every_variant_trains() -> None:
    found = run_accuracy(quick=True)
    for trainings in found.trainings.values():
        assert [(one.seed, one.variant) for one in trainings] == runs()
        eager, apart, lossless, bounded, *others = trainings
        assert bounded.gradient_error is not None
        assert bounded.gradient_error <= 0.01
        assert lossless.peak <= eager.peak
        assert apart.peak == eager.peak
        assert max(apart.off, lossless.off) < 1e-4  # four steps: rounding has not grown yet
        assert all(math.isfinite(one.loss) and one.score.keys() == eager.score.keys() for one in others)
