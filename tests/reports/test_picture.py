"""The timeline as a picture, and what is said where nothing can draw it."""

from __future__ import annotations

import dataclasses
import struct
import sys
from pathlib import Path

import pytest

import encore
from support.example_report import tower_plan


@pytest.fixture
def planned() -> encore.Report:
    return tower_plan()


def size_of(png: Path) -> tuple[int, int]:
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_a_picture_is_drawn(planned: encore.Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = planned.to_png(tmp_path / "timeline.png")
    assert path == tmp_path / "timeline.png"
    width, height = size_of(path)
    assert (width, height) == (1440, 576)
    far = dataclasses.replace(planned, budget=1 << 40).to_png(tmp_path / "far.png")
    none = dataclasses.replace(planned, budget=None).to_png(tmp_path / "none.png")
    assert len({path.read_bytes(), far.read_bytes(), none.read_bytes()}) == 3


def test_without_matplotlib_the_extra_is_named(
    planned: encore.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(encore.MissingPackageError, match=r"encore-torch\[plots\]"):
        planned.to_png(tmp_path / "timeline.png")
    assert not list(tmp_path.iterdir())
