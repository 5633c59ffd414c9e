"""Encodings alone, on the networks that Gist was measured on, tiny: eager's very bits; dropout in a bit an element."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import encore
from benchmarks.contest import SUITES
from benchmarks.workloads import tiny
from support.captured_graphs import drop_gradients, train_step

QUICK = ("alexnet",)
REWRITTEN = ("alexnet", "overfeat", "inception")
"""Networks that are asked for these rewrites, though so small maps would be left alone."""
REWRITES = {"pool_maps", "sign_bits"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SUITES["gist"]]
)
def test_gradients_are_eagers_bit_for_bit_with_encodings_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name_of_pass in REWRITES if name in REWRITTEN else ():
        monkeypatch.setattr(f"encore.rewrite.{name_of_pass}.FEW", 0)
    workload = tiny(name)
    model = encore.compile(workload.model, budget="min", lowering="eager", methods="encode")
    batch = workload.batch(0)
    verification = encore.verify(model, *batch)
    assert verification.bit_equal
    assert verification.compared >= 10
    report = encore.report(model)
    applied = {rewrite for graph in report.graphs for rewrite in graph.rewrites}
    assert applied >= REWRITES or name not in REWRITTEN
    assert {row.action for row in report.decisions} <= {"keep", "encode"}
    assert all(row.lossless for row in report.decisions)
    drop_gradients(model)
    measured = encore.measure(lambda: model(*batch).backward()).step_peak
    assert measured <= report.planned.step_peak < report.unplanned.step_peak


class Dropped(nn.Module):
    """Dropout between products: backward reads its noise, and the product's operand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.sin(layer(x)), 0.25)
        return x.square().sum()


def test_a_dropout_mask_is_held_in_a_bit_an_element() -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    model = encore.compile(Dropped(), budget="min", lowering="eager", methods="encode")
    train_step(model, x)
    report = encore.report(model)
    masks = [row for row in report.decisions if row.code == "bits"]
    assert masks
    assert all(row.shape == (512, 64) and row.bytes == 512 * 64 and row.held == 512 * 64 // 8 for row in masks)
    assert encore.verify(model, x).bit_equal
