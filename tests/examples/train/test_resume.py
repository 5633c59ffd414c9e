"""Runs that end early and go on: killed, stopped, out of disk, with a damaged checkpoint. The curve stays the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.train.checkpoint import NAME, read_state
from examples.train.command import main

DROPOUT = ["transformer", "--size", "hidden=16", "--size", "layers=1", "--size", "heads=2", "--size", "steps=20"]
DROPOUT += ["--batch-size", "16", "--every", "5"]
"""Draws masks: what goes on must go on with the generator."""
BATCH_NORM = ["speech", "--size", "frames=12", "--size", "bins=16", "--size", "channels=2", "--size", "hidden=8"]
BATCH_NORM += ["--batch-size", "2", "--every", "5"]
"""Counts in buffers."""
ROOT = Path(__file__).parents[3]
PLANNED = ["--budget", "60%", "--lowering", "eager"]


def trained(*argv: str, directory: Path, steps: int) -> int:
    return main([*argv, "--checkpoint", str(directory), "--steps", str(steps)])


def history(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(match[1]) for path in directory.iterdir() if (match := NAME.fullmatch(path.name)))


def state(directory: Path) -> dict[str, Any]:
    return read_state(directory / f"step-{checkpoints(directory)[-1]:08d}.checkpoint")


def assert_same_run(one: Path, other: Path) -> None:
    """Every loss, metric, weight, buffer, optimizer state and generator, to the last bit."""
    assert history(one) == history(other)
    first, second = state(one), state(other)
    assert torch.equal(first["losses"], second["losses"])
    assert torch.equal(first["cpu_generator"], second["cpu_generator"])
    assert first["scores"] == second["scores"]
    assert first["model"].keys() == second["model"].keys()
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
    moments, others = first["optimizer"]["state"], second["optimizer"]["state"]
    assert moments.keys() == others.keys()
    assert all(torch.equal(moments[at][name], others[at][name]) for at in moments for name in moments[at])


@pytest.mark.parametrize(
    "run", [pytest.param(DROPOUT, marks=pytest.mark.slow), BATCH_NORM], ids=["dropout", "batch norm"]
)
def test_in_three_parts_as_in_one(run: list[str], tmp_path: Path) -> None:
    assert trained(*run, "--eager", directory=tmp_path / "whole", steps=17) == 0
    for steps in (5, 12, 17):  # the second part ends between two checkpoints
        assert trained(*run, "--eager", directory=tmp_path / "parts", steps=steps) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert checkpoints(tmp_path / "parts") == [15, 17]
    assert [line["step"] for line in history(tmp_path / "parts") if "score" in line] == [5, 10, 15]


# -- real processes --------------------------------------------------------------------------------------------------


class Process:
    """`python -m examples.train` on its own."""

    def __init__(self, *argv: str, directory: Path, steps: int = 1_000_000) -> None:
        command = [sys.executable, "-m", "examples.train", *argv, "--checkpoint", str(directory), "--steps", str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.directory = directory
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    def until_step(self, step: int) -> None:
        """Wait until it has come so far."""
        lines = self.directory / "history.jsonl"
        while not (lines.exists() and lines.read_text().count("\n") >= step):
            assert self.process.poll() is None, "it ended before it was killed"
            time.sleep(0.02)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send the signal; exit code and what it said last."""
        self.process.send_signal(number)
        _, told = self.process.communicate(timeout=120)
        return self.process.returncode, told


@pytest.fixture
def begun(request: pytest.FixtureRequest) -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for started in processes:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()


def kill_and_go_on(begun: list[Process], run: Sequence[str], directory: Path, at_steps: Sequence[int]) -> int:
    """Kill the run wherever it is once it has come so far, again and again; then let it end. How far it has come."""
    for step in at_steps:
        begun.append(Process(*run, directory=directory))
        begun[-1].until_step(step)
        assert begun[-1].end(signal.SIGKILL)[0] == -signal.SIGKILL
        last = checkpoints(directory)[-1]
        assert len(history(directory)) - last <= 5, "it lost more than the steps since the last checkpoint"
    steps = last + 7
    assert trained(*run, directory=directory, steps=steps) == 0
    return steps


def test_a_killed_run_goes_on_as_if_nothing_had_happened(begun: list[Process], tmp_path: Path) -> None:
    """Within a budget, in the eager lowering: the curve is that of plain PyTorch, too."""
    steps = kill_and_go_on(begun, [*DROPOUT, *PLANNED], tmp_path / "killed", at_steps=[18])
    assert trained(*DROPOUT, *PLANNED, directory=tmp_path / "whole", steps=steps) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert trained(*DROPOUT, "--eager", directory=tmp_path / "plain", steps=steps) == 0
    assert history(tmp_path / "plain") == history(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("run", [DROPOUT, BATCH_NORM], ids=["dropout", "batch norm"])
def test_killed_again_and_again_in_the_fused_lowering(
    run: list[str], begun: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last process measures anew what it would plan by: the checkpoint brings plan and judgements along."""
    budget = ["--overhead", "0.2"]
    begun.append(Process(*run, *budget, directory=tmp_path / "killed"))
    begun[-1].until_step(11)
    begun[-1].end(signal.SIGKILL)
    whole = [*(tmp_path / "killed").glob("*.checkpoint")]
    assert whole
    (tmp_path / "whole").mkdir()
    for path in whole:
        (tmp_path / "whole" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path / "another-cache"))
    steps = kill_and_go_on(begun, [*run, *budget], tmp_path / "killed", at_steps=[23, 31])
    assert trained(*run, *budget, directory=tmp_path / "whole", steps=steps) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_step_and_keeps_it(number: signal.Signals, begun: list[Process], tmp_path: Path) -> None:
    begun.append(Process(*DROPOUT, "--eager", directory=tmp_path))
    begun[-1].until_step(8)
    code, told = begun[-1].end(number)
    assert code == 1
    done = checkpoints(tmp_path)[-1]
    assert told.splitlines()[-2:] == [
        "encore: stopping after this step; once more to stop at once",
        f"encore: stopped by {number.name} after step {done} of 1000000; its checkpoint is in {tmp_path}, "
        "and the same command goes on from it",
    ]
    assert len(history(tmp_path)) == done == len(state(tmp_path)["losses"])
    assert {path.suffix for path in tmp_path.iterdir()} == {".checkpoint", ".jsonl"}


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_of_ten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert trained(*DROPOUT, "--eager", directory=tmp_path / "ten", steps=10) == 0
    capsys.readouterr()
    return tmp_path / "ten"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            [*DROPOUT, "--eager", "--seed", "1", "--size", "dropout=0.2"],
            "is of a run with other options: --seed was 0 and is 1, --size dropout was 0.1 and is 0.2; "
            "give the same ones, or name another directory",
        ),
        (DROPOUT, "is of a run with other options: --eager was given and is not given; give"),
        ([*BATCH_NORM, "--eager"], "is of the workload 'transformer', not 'speech'; name another directory"),
    ],
)
def test_another_run_is_refused(
    run: list[str], message: str, run_of_ten: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(*run, directory=run_of_ten, steps=20) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert checkpoints(run_of_ten) == [5, 10]


def test_fewer_steps_than_are_done_are_refused(run_of_ten: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(*DROPOUT, "--eager", directory=run_of_ten, steps=9) == 1
    assert "is at step 10 already; give --steps of at least that many" in capsys.readouterr().err


def test_a_run_that_is_done_is_not_done_again(run_of_ten: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = history(run_of_ten)
    assert trained(*DROPOUT, "--eager", directory=run_of_ten, steps=10) == 0
    assert "no step: all 10 were done before" in capsys.readouterr().out
    assert history(run_of_ten) == before


def test_a_damaged_checkpoint_costs_the_steps_since_the_elder(
    run_of_ten: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(run_of_ten / "step-00000010.checkpoint", 5000)
    with pytest.warns(UserWarning, match=r"is truncated: .* the run goes on from step-00000005.checkpoint"):
        assert trained(*DROPOUT, "--eager", directory=run_of_ten, steps=12) == 0
    assert trained(*DROPOUT, "--eager", directory=tmp_path / "whole", steps=12) == 0
    assert_same_run(run_of_ten, tmp_path / "whole")


def test_another_thread_count_is_told_of(run_of_ten: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match="the number of threads was"):
            assert trained(*DROPOUT, "--eager", directory=run_of_ten, steps=11) == 0
    finally:
        torch.set_num_threads(threads)
