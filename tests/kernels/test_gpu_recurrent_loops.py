"""Time loops of recurrent layers in one launch, in Triton's interpreter: numbers, launches, and programs that meet."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from encore.rnn import gpu_loops, tuning
from encore.rnn.gpu_loops import LoopGrid, loop_grid, steps_why
from encore.rnn.tuning import Size
from support.gpu_kernels import TARGETS, compiled, interpreted, kernels_of, programs_together, triton
from support.recurrent_pairs import KINDS, assert_as_torch, everything, kernels, pair
from support.rounding import assert_close
from support.segments import expected, found_by, some_resets, some_states

pytestmark = pytest.mark.usefixtures("own_layers")

gpu = pytest.importorskip("encore.rnn.gpu")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "recurrent", interpreted("recurrent"))
    monkeypatch.setattr(gpu, "recurrent_loops", interpreted("recurrent_loops"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Kernels that were launched, with their grids."""
    found: list[tuple[str, tuple[int, ...]]] = []
    launch = gpu.launch

    def noted(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        found.append((kernel.__name__, grid))
        launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(gpu, "launch", noted)
    return found


def share(patch: pytest.MonkeyPatch, kind: str, hidden: int) -> None:
    """Have two programs share the weight of such a layer, for two blocks of rows."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    patch.setattr(gpu_loops, "ALONE", gates * hidden * hidden * 2)
    patch.setattr(gpu_loops, "processors", lambda device: 4)


def check(
    kind: str, sizes: tuple[int, int, int], stash: str | int, resets: Tensor | None, **options: Any
) -> None:  # fmt: skip
    """Outputs, last states and gradients against float64."""
    steps, batch, hidden = sizes
    theirs, ours = pair(kind, 3, hidden, stash=stash, **options)
    x = torch.randn(steps, batch, 3, requires_grad=True)
    states = some_states(theirs, batch, x.dtype)
    if resets is None:
        hx = tuple(states) if len(states) > 1 else states[0]
        with kernels(gpu):
            found = everything(ours, x, hx, wanted=[x, *states])
        assert_as_torch(found, theirs, x, hx, wanted=[x, *states])
        return
    with kernels(gpu):
        found = found_by(ours, x, states, resets)
    for one, other in zip(found, expected(theirs, x, states, resets), strict=True):
        assert_close(one, other.to(one.dtype))


@pytest.mark.parametrize("stash", ["fast", 3])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind: str, stash: str | int) -> None:
    """More rows and units than a tile has, in both directions; tiles and chunks end in the middle."""
    check(kind, (7, 18, 41), stash, None, bidirectional=True)


@pytest.mark.parametrize("kind", KINDS)
def test_resets(kind: str) -> None:
    for stash in ("fast", 2):
        check(kind, (6, 3, 5), stash, some_resets(6, 3), bidirectional=True)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_resets_step_by_step() -> None:
    """Projected layers are left out of the loops."""
    for stash in ("fast", 2):
        check("LSTM", (6, 3, 5), stash, some_resets(6, 3), proj_size=2)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_sizes(data: st.DataObject) -> None:
    kind: str = data.draw(st.sampled_from(KINDS))
    steps, batch = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2, 16, 17]))
    hidden: int = data.draw(st.sampled_from([1, 7, 32, 33]))
    stash: Any = data.draw(st.sampled_from(["fast", "lean", 2]))
    resets = some_resets(steps, batch) if data.draw(st.booleans()) else None
    with pytest.MonkeyPatch.context() as patch:
        for name in ("recurrent", "recurrent_loops"):
            patch.setattr(gpu, name, interpreted(name))
        check(kind, (steps, batch, hidden), stash, resets, bidirectional=data.draw(st.booleans()))


@pytest.mark.parametrize("relu", [False, True])
def test_relu_and_nan(relu: bool) -> None:
    theirs, ours = pair("RNN", 3, 5, nonlinearity="relu" if relu else "tanh")
    x = torch.randn(4, 2, 3)
    x[1, 0] = torch.nan
    x.requires_grad_()
    with kernels(gpu):
        found = everything(ours, x, wanted=[x])
    assert_as_torch(found, theirs, x, wanted=[x])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_types(kind: str, dtype: torch.dtype) -> None:
    theirs, ours = pair(kind, 3, 6, stash=2)
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    x = torch.randn(5, 2, 3).to(dtype).requires_grad_()
    states = some_states(theirs, 2, dtype)
    resets = some_resets(5, 2)
    with kernels(gpu):
        found = found_by(ours, x, states, resets)
    for one, other in zip(found, expected(theirs, x, states, resets), strict=True):
        assert_close(one, other.to(dtype))


# ---- launches ------------------------------------------------------------------------------------------------------


def launches(module: nn.Module, steps: int, launched: list[tuple[str, tuple[int, ...]]]) -> list[str]:
    launched.clear()
    x = torch.randn(steps, 2, 3, requires_grad=True)
    with kernels(gpu):
        everything(module, x, wanted=[x])
    return [name for name, _ in launched]


@pytest.mark.parametrize("steps", [4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "name"), [("LSTM", "lstm"), ("GRU", "gru"), ("RNN", "elman")])
def test_one_launch_a_direction(
    kind: str, name: str, steps: int, launched: list[tuple[str, tuple[int, ...]]]
) -> None:  # fmt: skip
    """Whatever the length, and one more for the biases."""
    _, ours = pair(kind, 3, 6, 2, bidirectional=True)
    found = launches(ours, steps, launched)
    assert found == 4 * [f"{name}_loop"] + 4 * [f"{name}_loop_backward", "column_sums"]


def test_launches_of_chunks(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    """With a state kept every 4 steps, three launches for 4 steps and one for the biases: 40 in place of 160."""
    _, ours = pair("LSTM", 3, 6, stash=4)
    again = ["lstm_loop_again", "lstm_loop_backward", "column_sums"]
    assert launches(ours, 40, launched) == 10 * ["lstm_loop"] + 10 * again


def test_a_chunk_has_64_mib_of_gates() -> None:
    def rows(cell: str, keeps: bool) -> int:
        size = Size(cell, 512, 512, 1000, 64, keeps, torch.float32, "cuda", 0)
        assert tuning.operator_rule(size) in tuning.layouts(size)
        return tuning.operator_rule(size).rows

    assert rows("lstm", True) == (64 << 20) // (4 * 512 * 4)
    assert rows("elman", True) == (64 << 20) // (512 * 4)
    assert rows("lstm", False) == tuning.chunk_rows(512)


# ---- programs that share a weight ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_shared_step_by_step(
    kind: str, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[str, tuple[int, ...]]]
) -> None:  # fmt: skip
    """A launch for each step is the same computation without meetings."""
    share(monkeypatch, kind, 70)
    monkeypatch.setattr(gpu_loops, "MOST_STEPS", 1)
    check(kind, (4, 18, 70), "fast", None)
    check(kind, (4, 18, 70), 2, some_resets(4, 18))
    assert (f"{'elman' if kind == 'RNN' else kind.lower()}_loop_backward", (2, 2)) in launched


@pytest.mark.parametrize("kind", KINDS)
def test_programs_meet(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs at once, in whatever order they go on, give the numbers of one after the other."""
    share(monkeypatch, kind, 40)
    for seed in range(3):
        with programs_together(seed) as grids:
            check(kind, (4, 18, 40), "fast" if seed else 2, some_resets(4, 18), bidirectional=seed == 2)
        assert 4 in grids


@pytest.mark.parametrize("kind", KINDS)
def test_without_meetings_numbers_are_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    share(monkeypatch, kind, 40)
    monkeypatch.setattr(interpreted("recurrent_loops"), "_meet", lambda *_: None)
    theirs, ours = pair(kind, 3, 40)
    x = torch.randn(4, 18, 3)
    with torch.no_grad(), kernels(gpu), programs_together(0), pytest.raises(AssertionError):
        assert_close(ours(x)[0], theirs(x)[0])


def test_who_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    device, dtype = torch.device("cuda"), torch.float32
    monkeypatch.setattr(gpu_loops, "processors", lambda device: 108)
    assert loop_grid("lstm", 1000, 256, dtype, device) == LoopGrid(63, 1)
    assert loop_grid("gru", 64, 512, dtype, device) == LoopGrid(4, 16)
    assert loop_grid("lstm", 96, 1024, dtype, device) == LoopGrid(6, 18)
    assert loop_grid("lstm", 128, 1024, dtype, device) is None
    monkeypatch.setattr(gpu_loops, "is_here", lambda device: True)
    why = {"projected": False, "packed": False}
    assert steps_why("lstm", 96, 1024, dtype, device, **why) is None
    assert "too many" in str(steps_why("lstm", 128, 1024, dtype, device, **why))
    assert "projects" in str(steps_why("lstm", 96, 1024, dtype, device, projected=True, packed=False))
    assert "packed" in str(steps_why("lstm", 96, 1024, dtype, device, projected=False, packed=True))


# ---- machine code --------------------------------------------------------------------------------------------------


TYPES = {
    **dict.fromkeys(("inputs", "bias", "weight", "before", "after", "cell", "cells", "entering"), "*fp32"),
    **dict.fromkeys(("grad_state", "grad_gates", "grad_cell", "previous"), "*fp32"),
    **dict.fromkeys(("output", "gates", "grad_output"), "*bf16"),
    **dict.fromkeys(("begin", "end", "count", "batch", "hidden", "grad_step", "grad_stride"), "i32"),
    "resets": "*i1",
    "meeting": "*i32",
}


def machine_code(name: str, programs: int, precision: str, capability: int) -> Any:
    """A loop as it is launched."""
    tile = {"ROWS": gpu_loops.ROWS, "UNITS": gpu_loops.UNITS, "DEPTH": gpu_loops.DEPTH, "PRECISION": precision}
    constants = {"RELU": False, "REVERSE": False, "PROGRAMS": programs, **tile}
    options = {"num_warps": gpu_loops.WARPS, "num_stages": LoopGrid(1, programs).stages}
    return compiled(kernels_of("recurrent_loops")[name], TYPES, constants, capability, **options)


def test_meetings_in_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier of threads, an atomic sum that all of the device sees, and a barrier again; no meeting for a single
    program; and states of other programs are read past the first cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shared, alone = (machine_code("elman_loop", count, "ieee", 80).asm["ptx"] for count in (8, 1))
    first = shared.index("atom.global.gpu.acq_rel.add.u32")
    assert "bar.sync" in shared[shared.rindex("st.global", 0, first) : first]
    assert "bar.sync" in shared[shared.rindex("atom.global.gpu.acq_rel.add.u32") :]
    assert "atom" not in alone
    assert "ld.global.cg" in shared
    assert "cp.async" not in shared


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("name", kernels_of("recurrent_loops"))
def test_loops_fit_into_a_processor(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Shared memory that every GPU from 8.0 on has, and registers with next to nothing beside them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for programs in (1, 8):
        for precision in ("ieee", "tf32"):
            kernel = machine_code(name, programs, precision, capability)
            assert kernel.metadata.shared <= 99 << 10
            source = tmp_path / "loop.ptx"
            source.write_text(kernel.asm["ptx"])
            command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={_architecture(kernel)}", str(source)]
            said = subprocess.run([*command, "-o", str(tmp_path / "loop.cubin")], capture_output=True, check=True)
            (registers,) = re.findall(rb"Used (\d+) registers", said.stderr)
            (spilled,) = re.findall(rb"(\d+) bytes spill stores", said.stderr)
            assert int(registers) <= 255
            assert int(spilled) <= 64


def _architecture(kernel: Any) -> str:
    found = re.search(r"\.target (sm_\w+)", kernel.asm["ptx"])
    assert found is not None
    return found[1]
