"""The arguments of `python -m examples.train`: what is understood, and refusals in one line with what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.workloads import TINY_SIZES, WORKLOADS
from encore.errors import OptionError, listed
from examples.train.command import main
from examples.train.settings import Settings, differences, read_sizes


def test_sizes_are_of_the_kind_that_the_workload_wants() -> None:
    assert read_sizes("transformer", ["hidden=512", "dropout=0.2"]) == {"hidden": 512, "dropout": 0.2}
    assert read_sizes("nmt", ["decoder_layers=3"]) == {"decoder_layers": 3}
    assert read_sizes("lm", ["level=word"]) == {"level": "word"}
    assert read_sizes("lm", ["hidden=7", "tiny"]) == {**TINY_SIZES["lm"], "hidden": 7}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["mlp"], f"no workload is called 'mlp'; there are {listed(WORKLOADS)}"),
        (
            ["transformer", "--size", "width=3"],
            "transformer has no size 'width'; it has 'batch_size', 'dropout', 'heads', 'hidden', 'layers', 'steps'",
        ),
        (
            ["lm", "--size", "hidden"],
            "--size hidden cannot be read; write name=number, such as batch_size=8, or 'ecornn', 'tiny' for several",
        ),
        (
            ["lm", "--size", "hidden=many"],
            "--size hidden=many is not accepted; give a whole number from 1 to 2147483647",
        ),
        (["lm", "--size", "hidden=-4"], "--size hidden=-4 is not accepted; give a whole number from 1 to 2147483647"),
        (["lm", "--batch-size", "0"], "--size batch_size=0 is not accepted; give a whole number from 1 to 2147483647"),
        (["transformer", "--size", "dropout=nan"], "--size dropout=nan is not accepted; give a number of at least 0"),
        (["lm", "--batch-size", "2", "--size", "batch_size=3"], "--size batch_size is given twice; give it once"),
        (["lm", "--steps", "0"], "--steps 0 is not accepted; give a count of at least 1"),
        (["lm", "--every", "0"], "--every 0 is not accepted; give a count of at least 1"),
        (["lm", "--seed", "-1"], "--seed -1 is not accepted; give a whole number from 0 to 2**63 - 1"),
        (["lm", "--learning-rate", "inf"], "--learning-rate inf is not accepted; give a positive number, such as 1e-3"),
        (
            ["lm", "--eager", "--budget", "1GiB"],
            "--eager is plain PyTorch; give it without --budget, --overhead, --lowering and --tiers",
        ),
        (
            ["lm", "--budget", "1GiB", "--overhead", "0.1"],
            "budget= and overhead= exclude each other; give one of them",
        ),
        (
            ["transformer", "--size", "tiny", "--size", "heads=5"],
            "transformer cannot be built with batch_size=8, hidden=32, layers=2, heads=5, steps=20: "
            "hidden=32 cannot be shared out among heads=5: take a multiple of it",
        ),
        (["lm", "--tiers", "dick"], "tiers='dick' is not a tier; there are 'disk', 'host' and encore.tiers.Disk(...)"),
        (["lm", "--lowering", "fast"], "lowering='fast' does not exist; it can be 'eager', 'fused'"),
        (
            ["lm", "--largest-batch"],
            "--largest-batch looks for what a budget holds; give --budget, such as 2GiB",
        ),
        (
            ["lm", "--largest-batch", "--budget", "50%"],
            "--largest-batch wants a budget in bytes, such as 2GiB: '50%' is another for every batch",
        ),
        (
            ["lm", "--largest-batch", "--budget", "1GiB", "--batch-size", "4"],
            "--largest-batch looks for a batch size; give it without --batch-size and --checkpoint",
        ),
        (
            ["lm", "--checkpoint", "file/run"],
            "checkpoints cannot be written to file/run: Not a directory; name another directory",
        ),
    ],
)
def test_refusals_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(argv) == 1
    assert capsys.readouterr().err == f"encore: {message}\n"


def test_what_a_workload_refuses_is_told_in_one_line() -> None:
    with pytest.raises(OptionError, match=r"^nmt cannot be built with steps=3: .*too short.*$"):
        Settings("nmt", {"steps": 3}).build()


def test_a_text_that_was_edited_makes_another_run(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one\n")
    then = Settings("nmt", {"source": str(text)}).facts()
    text.write_text("two\n")
    (changed,) = differences(then, Settings("nmt", {"source": str(text)}).facts())
    assert changed.startswith("the text of --source was ")
    with pytest.raises(OptionError, match=r"nowhere cannot be read: No such file"):
        Settings("nmt", {"source": "nowhere"}).facts()


def test_a_difference_is_told_in_the_words_that_were_typed() -> None:
    then = Settings("transformer", {"hidden": 32}, budget="1GiB").facts()
    now = Settings("transformer", {"batch_size": 4}, learning_rate=0.1, eager=True).facts()
    assert differences(then, now) == [
        "--learning-rate was not given and is 0.1",
        "--budget was 1GiB and is not given",
        "--eager was not given and is given",
        "--batch-size was 16 and is 4",
        "--size hidden was 32 and is 256",
    ]
    assert differences(then, then) == []


HELP = """\
usage: python -m examples.train [-h] [--budget B] [--overhead F] [--eager] [--lowering L] [--tiers T] [--steps N]
                                [--batch-size N] [--size NAME=N] [--source FILE] [--target FILE] [--learning-rate R]
                                [--seed N] [--checkpoint DIR] [--every N] [--largest-batch] [--json]
                                WORKLOAD

Train a workload within a budget; a run that was killed goes on.

positional arguments:
  WORKLOAD           its name; a wrong one lists those there are

options:
  -h, --help         show this help message and exit
  --budget B         bytes, 2GiB, 500MB, 60% or min; exit code 2 if out of reach
  --overhead F       extra time allowed, as a fraction (default: 0.05)
  --eager            plain PyTorch, to compare with
  --lowering L       fused or eager: whose gradients are plain PyTorch's, bit for bit
  --tiers T          where activations may be offloaded to, such as disk or host,disk
  --steps N          steps to train in all (default: 100)
  --batch-size N     examples a step (default: the workload's)
  --size NAME=N      a size, such as hidden=512, or tiny
  --source FILE      your own text, a sentence a line (nmt)
  --target FILE      its translation, line by line (nmt)
  --learning-rate R  Adam's (default: the workload's)
  --seed N           of weights and dropout (default: 0)
  --checkpoint DIR   keep checkpoints there, and go on from the newest
  --every N          steps between checkpoints (default: 50)
  --largest-batch    find the largest batch that fits, with and without Encore
  --json             print the numbers as JSON
"""


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out == HELP
