"""The command line: help text to the letter, exit codes, errors in one line, JSON that parses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from encore import demo
from encore.bench import machine
from encore.cli import main

HELP = """\
usage: encore [-h] [--version] COMMAND ...

A training-memory compiler for PyTorch.

options:
  -h, --help  show this help message and exit
  --version   show program's version number and exit

commands:
  COMMAND
    demo      train a translator in eager and, in half of the memory, through Encore
    env       show what Encore finds on this machine
    estimate  predict what a training step takes; nothing runs
    plan      show the plan that a budget gets, and all others; nothing runs
    train     train a workload within a budget; a run that was killed goes on
    tune      measure the layouts of recurrent layers, and keep the fastest of each size
    bench     compare Encore with eager PyTorch and with torch.compile
"""

HELP_OF = {
    "demo": """\
usage: encore demo [-h] [--steps N] [--output FOLDER] [--json]

Train a translator in eager and, in half of the memory, through Encore.

options:
  -h, --help       show this help message and exit
  --steps N        training steps of either side (default: 200)
  --output FOLDER  where the page goes (default: encore-demo)
  --json           print the numbers as JSON
""",
    "env": """\
usage: encore env [-h] [--json]

Show what Encore finds on this machine.

options:
  -h, --help  show this help message and exit
  --json      print the facts as JSON
""",
    "estimate": """\
usage: encore estimate [-h] [--budget B] [--tiers T] [--json] TARGET

Predict what a training step takes; nothing runs.

positional arguments:
  TARGET      package.module:factory; the factory returns (model, args) or (model, args, kwargs), on any device

options:
  -h, --help  show this help message and exit
  --budget B  bytes, 2GiB, 500MB, 60% or min; exit code 2 if out of reach
  --tiers T   where feature maps may go between forward and backward, such as disk or host,disk
  --json      print the estimate as JSON
""",
    "plan": """\
usage: encore plan [-h] [--budget B] [--tiers T] [--save FILE] [--html FILE] [--json] TARGET

Show the plan that a budget gets, and all others; nothing runs.

positional arguments:
  TARGET       package.module:factory; the factory returns (model, args) or (model, args, kwargs), on any device

options:
  -h, --help   show this help message and exit
  --budget B   bytes, 2GiB, 500MB, 60% or min (default: min)
  --tiers T    where feature maps may go between forward and backward, such as disk or host,disk
  --save FILE  write the plan to FILE, for encore.compile(plan=FILE)
  --html FILE  write the plan's page to FILE, for a browser
  --json       print the plan as JSON
""",
    "train": """\
usage: encore train [-h] [--budget B] [--overhead F] [--eager] [--lowering L] [--tiers T] [--steps N] [--batch-size N]
                    [--size NAME=N] [--source FILE] [--target FILE] [--learning-rate R] [--seed N] [--checkpoint DIR]
                    [--every N] [--largest-batch] [--json]
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
  --tiers T          where feature maps may go between forward and backward, such as disk or host,disk
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
""",
    "tune": """\
usage: encore tune [-h] [--cell CELL [CELL ...]] [--hidden N [N ...]] [--inputs N] [--batch N [N ...]]
                   [--steps N [N ...]] [--stash S [S ...]] [--dtype T] [--device D] [--again] [--json]

Measure the layouts of recurrent layers, and keep the fastest of each size.

options:
  -h, --help            show this help message and exit
  --cell CELL [CELL ...]
                        LSTM, GRU, RNN (default: LSTM)
  --hidden N [N ...]    units (256 512)
  --inputs N            width of the input (default: the units)
  --batch N [N ...]     sequences at a time (8 64)
  --steps N [N ...]     their length (35 100)
  --stash S [S ...]     fast, lean (default: both)
  --dtype T             such as bfloat16 (default: float32)
  --device D            cpu or cuda (default: cpu)
  --again               measure what is known already once more
  --json                print the figures as JSON
""",
    "bench": """\
usage: encore bench [-h] [--quick] [--minutes MINUTES] [--json FILE] [--plots FOLDER] [--docs] [--schema] [suite]

Compare Encore with eager PyTorch and with torch.compile.

positional arguments:
  suite              spine, fast, plan, echo, gist, rnn, rnn-workloads, accuracy or bptt (default: echo)

options:
  -h, --help         show this help message and exit
  --quick            tiny sizes: does everything work?
  --minutes MINUTES  leave systems out to be done in about so many minutes
  --json FILE        write the numbers to FILE as JSON
  --plots FOLDER     draw the suite into FOLDER, as PNG and as a page
  --docs             write the suite's page in docs
  --schema           print the JSON Schema of the suite's JSON; nothing runs
""",
}

TARGETS = """
import torch
from torch import nn


def on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
        return model, (torch.empty(1000, 64),)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, *, scale):
        return self.linear(x).sum() * scale


def with_keywords():
    return Scaled(), [torch.randn(2, 8)], {"scale": 2.0}


def broken():
    return 1 / 0


def nothing():
    return None
"""


@pytest.fixture(autouse=True)
def _folder_with_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "122")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "targets_of_test_cli.py").write_text(TARGETS)
    (tmp_path / "broken_module_of_test_cli.py").write_text("import torch\nimport no_such_module\n")


def help_text(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_text(capsys, "--help") == HELP


@pytest.mark.parametrize("command", sorted(HELP_OF))
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert help_text(capsys, command, "--help") == HELP_OF[command]


def test_the_default_named_in_the_help_is_the_default() -> None:
    assert f"(default: {demo.STEPS})" in HELP_OF["demo"]


@pytest.mark.parametrize("argv", [["hum"], [], ["estimate"], ["demo", "--steps", "many"]])
def test_what_is_not_understood_leaves_with_1(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("usage: encore")


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hum"])
    message = capsys.readouterr().err
    assert all(name in message for name in HELP_OF)


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(machine.Machine.__dataclass_fields__) | {"cache_directory"} == set(facts)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert facts["torch"] in text
    assert facts["cache_directory"] in text


def test_estimate_of_a_model_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "targets_of_test_cli:on_meta", "--budget", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Encore: Sequential")
    assert text.endswith("fits a budget of 1GiB\n")


def test_estimate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "targets_of_test_cli:with_keywords", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["encore_report"] == 1
    assert found["floor"] == found["resident"] + found["planned"]["step_peak"]


def test_a_plan_is_written_as_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main(["plan", "targets_of_test_cli:on_meta", "--html", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pareto"][-1][0] == found["resident"] + found["planned"]["step_peak"]
    assert file.read_text().startswith("<!DOCTYPE html>")


def test_a_budget_out_of_reach_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "targets_of_test_cli:on_meta", "--budget", "1KiB", "--json"]) == 2
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["fits"] is False
    assert told.err.startswith("encore: a budget of 1024 bytes")
    assert str(found["floor"]) in told.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["no_such_package:x"],
            "cannot import 'no_such_package': ModuleNotFoundError: No module named 'no_such_package'",
        ),
        (
            ["broken_module_of_test_cli:x"],
            "cannot import 'broken_module_of_test_cli': ModuleNotFoundError: No module named 'no_such_module' "
            "(broken_module_of_test_cli.py:2)",
        ),
        (["targets_of_test_cli"], "'targets_of_test_cli' is not a target; write package.module:factory"),
        (
            ["targets_of_test_cli:on_mars"],
            "'targets_of_test_cli' has no factory 'on_mars'; "
            "it has 'Scaled', 'broken', 'nothing', 'on_meta', 'with_keywords'",
        ),
        (
            ["targets_of_test_cli:broken"],
            "targets_of_test_cli:broken failed: ZeroDivisionError: division by zero (targets_of_test_cli.py:26)",
        ),
        (
            ["targets_of_test_cli:nothing"],
            "targets_of_test_cli:nothing must return (model, args) or (model, args, kwargs), not NoneType",
        ),
        (
            ["targets_of_test_cli:on_meta", "--budget", "lots"],
            "budget='lots' cannot be read; give a positive number of bytes, '2GiB', '500MB', '60%' "
            "(of the largest unplanned step) or 'min'",
        ),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *argv]) == 1
    told = capsys.readouterr()
    assert told.err == f"encore: {message}\n"
    assert "Traceback" not in told.out


def test_demo_needs_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1"]) == 1
    assert "at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save", "--html"])
def test_plan_tells_of_a_missing_folder_before_it_plans(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "targets_of_test_cli:broken", option, "nowhere/x"]) == 1
    assert capsys.readouterr().err == (
        "encore: nowhere/x cannot be written: there is no folder 'nowhere'; make it first\n"
    )


def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(machine, "this_machine", refuse)
    assert main(["env"]) == 1
    assert capsys.readouterr().err == "encore: [Errno 13] Permission denied: 'somewhere'\n"


def test_bench_tells_of_a_missing_folder_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--docs"]) == 1
    assert "--docs writes into 'docs', but there is no such folder here" in capsys.readouterr().err


def test_bench_lists_the_suites_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ecko"]) == 1
    assert "no suite is called 'ecko'; known suites: spine, fast, plan, echo, gist, rnn" in capsys.readouterr().err
    assert main(["bench", "fast", "--plots", "."]) == 1
    assert "has no picture" in capsys.readouterr().err


def test_bench_takes_minutes_for_suites_that_can_leave_systems_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rnn", "--minutes", "5"]) == 1
    assert "'rnn' leaves nothing out; --minutes is for echo, gist, rnn-workloads" in capsys.readouterr().err
    for minutes in ("0", "-1", "nan", "inf"):
        assert main(["bench", "gist", "--minutes", minutes]) == 1
        assert "is no time to run a suite in" in capsys.readouterr().err
