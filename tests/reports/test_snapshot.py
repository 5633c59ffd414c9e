"""The predicted step as a memory snapshot: read by PyTorch's own functions, and by the rules of its viewer."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

import encore
from encore.reports.allocations import Allocation
from encore.reports.snapshot import memory_snapshot
from support.example_report import tower_plan

VIEWER_READS = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE",
    "SETITEM", "SETITEMS", "APPEND", "APPENDS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE", "NEWTRUE", "NEWFALSE",
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
}  # fmt: skip
"""The pickle instructions that the viewer's own reader knows."""


@pytest.fixture(scope="module")
def planned() -> encore.Report:
    return tower_plan()


@pytest.fixture(scope="module")
def path(planned: encore.Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned.to_snapshot(tmp_path_factory.mktemp("snapshot") / "snapshot.pickle")


@pytest.fixture
def data(path: Path) -> dict[str, Any]:
    return dict(pickle.loads(path.read_bytes()))


def test_the_viewer_can_read_the_pickle(path: Path) -> None:
    instructions = {opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())}
    assert instructions <= VIEWER_READS


def test_pytorch_sums_up_its_segments(data: dict[str, Any], planned: encore.Report) -> None:
    text = _memory_viz.segsum(data)
    assert "segments: 1\n" in text
    left = sum(item.bytes for item in planned.allocations if item.died is None)
    assert f"total_allocated: {_memory_viz.Bytes(left)}" in text


def test_pytorch_tells_its_trace(data: dict[str, Any], planned: encore.Report) -> None:
    text = _memory_viz.trace(data)
    lines = text.splitlines()
    assert lines[0].startswith("Device 0")
    assert sum(" = " in line for line in lines) == len(planned.allocations)
    assert sum(line.startswith("del ") for line in lines) == sum(item.died is not None for item in planned.allocations)


def test_pytorch_writes_flame_graphs_of_it(data: dict[str, Any], planned: encore.Report) -> None:
    for view in (_memory_viz.memory, _memory_viz.segments):
        lines = view(data, format_flamegraph=lambda text: text).splitlines()
        active = [line for line in lines if ";active_allocated;" in line]
        assert sum(int(line.rpartition(" ")[2]) for line in active) == sum(
            item.bytes for item in planned.allocations if item.died is None
        )
    same = _memory_viz.compare(data["segments"], data["segments"], format_flamegraph=lambda text: text)
    assert same == ""


def test_pytorch_makes_pages_of_it(data: dict[str, Any]) -> None:
    for view in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in view(data)
    filtered = _memory_viz.filter_alloc_free_pairs(data)
    left = [event["action"] for event in filtered["device_traces"][0]]
    assert set(left) == {"alloc", "snapshot"}


def test_its_trace_peaks_at_the_prediction(data: dict[str, Any], planned: encore.Report) -> None:
    held: dict[int, int] = {}
    most = 0
    for event in data["device_traces"][0]:
        if event["action"] == "alloc":
            for address, size in held.items():
                assert event["addr"] + event["size"] <= address or address + size <= event["addr"], "overlap"
            held[event["addr"]] = event["size"]
            most = max(most, sum(held.values()))
        elif event["action"] == "free_completed":
            assert held.pop(event["addr"]) == event["size"]
    assert most == planned.resident + planned.planned.step_peak
    (segment,) = data["segments"]
    assert segment["total_size"] >= most
    active = {block["address"]: block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"}
    assert active == held
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    ends = [segment["address"]]
    for block in segment["blocks"]:  # the viewer takes addresses from the sizes before
        assert block["address"] == ends[-1]
        ends.append(block["address"] + block["size"])


def test_frames_name_operator_module_and_line(data: dict[str, Any]) -> None:
    frames = [event["frames"] for event in data["device_traces"][0] if event["action"] == "alloc"]
    made = [[_memory_viz._frame_fmt(frame) for frame in found] for found in frames]
    assert any(
        found[0].startswith("example_report.py:")
        and "addmm -> " in found[0]
        and found[1].endswith(":module layers.0.inner")
        for found in made
    )


def test_colours_are_kinds_and_one_is_unknown(data: dict[str, Any]) -> None:
    categories = {event["category"] for event in data["device_traces"][0]}
    assert {"parameter", "input", "gradient", "feature map", "recomputed", "unknown"} <= categories


def test_each_device_has_a_trace_of_its_own() -> None:
    def item(device: str, born: int, died: int | None) -> Allocation:
        return Allocation("v", "mm", "m", "m.py:3", (2,), "temporary", 512, device, born, died)

    data = memory_snapshot([item("cuda:0", 0, 3), item("cpu", 1, None), item("cuda:0", 2, None)], beside=100)
    assert [segment["device"] for segment in data["segments"]] == [0, 1]
    assert [len(trace) for trace in data["device_traces"]] == [1 + 4 + 1, 1 + 1]
    assert [segment["total_size"] for segment in data["segments"]] == [100 + 1024, 512]
    assert data["device_traces"][0][0]["category"] == "beside the step"
    _memory_viz.segsum(data)
