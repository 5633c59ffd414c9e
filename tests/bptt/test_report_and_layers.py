"""What is told of a scan, and recurrent layers piece by piece."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import encore
from encore.bptt import ScanReport, over_time, scan
from encore.bptt import report as reporting
from encore.errors import NeverRunError, OptionError
from encore.tiers import Disk
from support.rounding import assert_close

pytestmark = pytest.mark.usefixtures("own_layers")


def trained(report: ScanReport, **options: object) -> None:
    cell = nn.LSTMCell(4, 4)
    start = torch.zeros(2, 4), torch.zeros(2, 4)
    (h, _), _ = scan(lambda s, x: (cell(x, s), None), start, torch.randn(40, 2, 4), report=report, **options)  # type: ignore[arg-type]
    h.sum().backward()


def test_counts_and_text() -> None:
    report = ScanReport()
    assert str(report) == "encore.scan: nothing has run yet"
    trained(report, slots=3)
    assert report.predicted_forwards == report.counts.forwards == 40 + 130
    assert report.state_bytes == 64
    told = str(report)
    assert told.startswith("encore.scan: revolve, 40 steps, 3 slots, 1 steps a tape\n  a state takes 64 B")
    assert "forwards: 170 (170 predicted), 4.25 a step; 40 with a tape" in told
    found = json.loads(report.to_json())
    assert found["encore_scan"] == 1
    assert found["counts"]["taped"] == 40
    assert {event["action"] for event in found["events"]} >= {
        "Advance",
        "Tape",
        "Reverse",
        "Store memory",
        "Load memory",
    }
    trained(report, slots=3)
    assert report.counts.taped == 40, "a report that is used again begins again"


def test_pictures(tmp_path: Path) -> None:
    report = ScanReport()
    with pytest.raises(NeverRunError, match="after backward"):
        report.to_png(tmp_path / "none.png")
    trained(report, slots=2, tiers="disk", schedule="multistage")
    assert "in the tier: " in str(report)
    assert report.to_png(tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    page = report.to_html(tmp_path / "schedule.html").read_text()
    assert "<svg" in page
    assert "multistage, 40 steps" in page


def test_a_picture_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ScanReport()
    trained(report, slots=2)
    assert len(report.events) == report.actions
    assert "actions" not in report._figure().axes[0].get_title()
    all_of_them = report.actions
    monkeypatch.setattr(reporting, "EVENTS", 30)
    trained(report, slots=2)
    assert len(report.events) == 30
    assert report._figure().axes[0].get_title().endswith(f"; the first 30 of {all_of_them} actions")


def test_transfers_are_drawn_for_as_long_as_they_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(real: Callable[..., int], *arguments: Any) -> int:
        time.sleep(0.01)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", functools.partial(slowly, os.pwrite))
    monkeypatch.setattr(os, "preadv", functools.partial(slowly, os.preadv))
    report, weight = ScanReport(), nn.Parameter(torch.ones(3))
    with Disk(tmp_path, workers=1) as tier:
        carry, _ = scan(
            lambda h, x: (h * weight + x, None), torch.zeros(3), torch.randn(40, 3), slots=2, tiers=tier,
            schedule="multistage", report=report,
        )  # fmt: skip
        tier.wait()
        carry.sum().backward()
    stored = [event for event in report.events if event.action == "Store tier"]
    read = [event for event in report.events if event.action == "Load tier"]
    assert all(event.ended - event.began >= 0.01 for event in stored)
    assert len(stored) == report.counts.tier_stores
    assert read
    assert all(event.ended - event.began >= 0.01 for event in read)


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    trained(ScanReport(), slots=3, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("scan forward 20/20") and "step 40 of 40" in line for line in lines)
    assert any(line.startswith("scan backward 20/20") for line in lines)
    assert len(lines) <= 24


def test_progress_over_an_unknown_length_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    weight = nn.Parameter(torch.ones(()))
    carry, _ = scan(lambda h, x: (h * weight, None), torch.ones(()), (0 for _ in range(2500)), slots=90, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"scan forward: step {step}" for step in ("1,000", "2,000")]
    carry.backward()
    assert "step 2,500 of 2,500" in capsys.readouterr().err


@pytest.mark.parametrize("truncate", [None, 8, 16])
@pytest.mark.parametrize("steps", [5, 24, 29])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_short_last_piece_is_part_of_the_scan(steps: int, truncate: int | None, batch_first: bool) -> None:
    layer = nn.GRU(5, 6, batch_first=batch_first)
    x = torch.randn(steps, 3, 5).transpose(0, 1) if batch_first else torch.randn(steps, 3, 5)
    x.requires_grad_()
    start = torch.zeros(1, 3, 6)

    def written_out() -> tuple[torch.Tensor, torch.Tensor]:
        state, outputs = start, []
        for number, piece in enumerate(x.split(8, dim=int(batch_first))):
            state = state.detach() if truncate and number * 8 % truncate == 0 else state
            output, state = layer(piece, state)
            outputs.append(output)
        return torch.cat(outputs, dim=int(batch_first)), state

    report = ScanReport()
    results = []
    for run in (written_out, lambda: over_time(layer, x, start, chunk=8, slots=1, truncate=truncate, report=report)):
        layer.zero_grad()
        x.grad = None
        output, state = run()
        (output.pow(2).sum() + state.sum()).backward()
        results.append([output.detach(), state.detach(), x.grad, *(one.grad for one in layer.parameters())])
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert report.steps == report.counts.taped == -(-steps // 8), "and so within its memory"


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_layers_piece_by_piece(kind: str, batch_first: bool) -> None:
    layer = getattr(nn, kind)(5, 6, num_layers=2, batch_first=batch_first)
    x = torch.randn(3, 50, 5) if batch_first else torch.randn(50, 3, 5)
    x.requires_grad_()
    results: list[list[torch.Tensor]] = []
    for run in (lambda: layer(x), lambda: over_time(layer, x, chunk=8, slots=2), lambda: over_time(layer, x, slots=1)):
        layer.zero_grad()
        x.grad = None
        output, state = run()
        states = state if isinstance(state, tuple) else (state,)
        (output.pow(2).sum() + sum(one.sum() for one in states)).backward()
        assert x.grad is not None
        results.append(
            [output.detach(), *(one.detach() for one in states), x.grad, *(p.grad for p in layer.parameters())]
        )
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("room", [nn, pytest.param(encore.nn, marks=pytest.mark.slow)], ids=["torch.nn", "encore.nn"])
def test_pieces_are_exact_and_drawn_the_same(room: Any) -> None:
    """`torch.nn.LSTM` computes otherwise without gradients, and `encore.nn` has kernels of its own."""
    layer = room.LSTM(5, 6, num_layers=2, dropout=0.4)
    x = torch.randn(24, 3, 5)
    start = torch.zeros(2, 3, 6), torch.zeros(2, 3, 6)

    def written_out() -> torch.Tensor:
        state, outputs = start, []
        for piece in x.split(8):
            output, state = layer(piece, state)
            outputs.append(output)
        return torch.cat(outputs)

    gradients = []
    for run in (written_out, lambda: over_time(layer, x, start, chunk=8, slots=1)[0]):
        layer.zero_grad()
        torch.manual_seed(3)
        run().pow(2).sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    assert all(
        torch.equal(one, other) for one, other in zip(*gradients, strict=True) if one is not None and other is not None
    )


def test_layers_that_are_refused() -> None:
    x = torch.zeros(4, 2, 5)
    with pytest.raises(OptionError, match="both ends"):
        over_time(nn.LSTM(5, 6, bidirectional=True), x)
    with pytest.raises(OptionError, match="not a Linear"):
        over_time(nn.Linear(5, 6), x)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="three dimensions"):
        over_time(nn.LSTM(5, 6), x[0])
    with pytest.raises(OptionError, match="chunk=0"):
        over_time(nn.LSTM(5, 6), x, chunk=0)
    with pytest.raises(OptionError, match="at least one step"):
        over_time(nn.LSTM(5, 6), x[:0])
    with pytest.raises(OptionError, match="truncate=3 steps of time do not end with a piece of 2"):
        over_time(nn.LSTM(5, 6), x, chunk=2, slots=1, truncate=3)
