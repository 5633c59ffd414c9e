"""The command line: help text to the letter, exit codes, errors in one line, JSON that parses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from encore import machine
from encore.cli import main

HELP = """\
usage: encore [-h] [--version] COMMAND ...

A training-memory compiler for PyTorch.

options:
  -h, --help  show this help message and exit
  --version   show program's version number and exit

commands:
  COMMAND
    env       show what Encore finds on this machine
    estimate  predict what a training step takes; nothing runs
    largest   find the largest batch that fits a budget; nothing runs
    plan      show the plan that a budget gets, and all others; nothing runs
    compare   run eager, torch.compile, checkpoints and Encore; recommend one
    tune      measure the layouts of recurrent layers, and keep the fastest of each size
"""

HELP_OF = {
    "env": """\
usage: encore env [-h] [--json]

Show what Encore finds on this machine.

options:
  -h, --help  show this help message and exit
  --json      print the facts as JSON
""",
    "estimate": """\
usage: encore estimate [-h] [--budget B] [--tiers T] [--device D] [--optimizer O] [--json] TARGET

Predict what a training step takes; nothing runs.

positional arguments:
  TARGET         package.module:factory; the factory returns (model, args) or (model, args, kwargs), on any device

options:
  -h, --help     show this help message and exit
  --budget B     bytes, 2GiB, 500MB, 60% or min; exit code 2 if out of reach
  --tiers T      where activations may be offloaded to, such as disk or host,disk
  --device D     a GPU that need not be here, such as RTX3060 or A100-40GB
  --optimizer O  with --device: its class in torch.optim, such as AdamW
  --json         print the estimate as JSON
""",
    "largest": """\
usage: encore largest [-h] --budget B [--tiers T] [--json] TARGET

Find the largest batch that fits a budget; nothing runs.

positional arguments:
  TARGET      package.module:factory; the factory returns (model, make_batch), and make_batch(size) the model's
              arguments

options:
  -h, --help  show this help message and exit
  --budget B  bytes, 2GiB, 500MB; exit code 2 if none fits
  --tiers T   where activations may be offloaded to, such as disk or host,disk
  --json      print the result as JSON
""",
    "plan": """\
usage: encore plan [-h] [--budget B] [--tiers T] [--save FILE] [--html FILE] [--json] TARGET

Show the plan that a budget gets, and all others; nothing runs.

positional arguments:
  TARGET       package.module:factory; the factory returns (model, args) or (model, args, kwargs), on any device

options:
  -h, --help   show this help message and exit
  --budget B   bytes, 2GiB, 500MB, 60% or min (default: min)
  --tiers T    where activations may be offloaded to, such as disk or host,disk
  --save FILE  write the plan to FILE, for encore.compile(plan=FILE)
  --html FILE  write the plan's page to FILE, for a browser
  --json       print the plan as JSON
""",
    "compare": """\
usage: encore compare [-h] [--budget B] [--minutes N] [--plot FILE] [--json] TARGET

Run eager, torch.compile, checkpoints and Encore; recommend one.

positional arguments:
  TARGET       package.module:factory; the factory returns (model, args) or (model, args, kwargs), on any device

options:
  -h, --help   show this help message and exit
  --budget B   bytes, 2GiB, 500MB, 60% or min; exit code 2 if nothing fits
  --minutes N  leave systems out to be done in about N minutes
  --plot FILE  draw peaks and step times into FILE, as PNG
  --json       print the figures as JSON
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
    (tmp_path / "targets_for_tests.py").write_text(TARGETS)
    (tmp_path / "broken_module_for_tests.py").write_text("import torch\nimport no_such_module\n")


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


@pytest.mark.parametrize("argv", [["hum"], [], ["estimate"], ["tune", "--batch", "many"]])
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
    assert main(["estimate", "targets_for_tests:on_meta", "--budget", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Encore: Sequential")
    assert text.endswith("fits a budget of 1GiB\n")


def test_estimate_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "targets_for_tests:with_keywords", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["encore_report"] == 1
    assert found["floor"] == found["resident"] + found["planned"]["step_peak"]


def test_a_plan_is_written_as_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main(["plan", "targets_for_tests:on_meta", "--html", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pareto"][-1][0] == found["resident"] + found["planned"]["step_peak"]
    assert file.read_text().startswith("<!DOCTYPE html>")


def test_a_budget_out_of_reach_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "targets_for_tests:on_meta", "--budget", "1KiB", "--json"]) == 2
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
            ["broken_module_for_tests:x"],
            "cannot import 'broken_module_for_tests': ModuleNotFoundError: No module named 'no_such_module' "
            "(broken_module_for_tests.py:2)",
        ),
        (["targets_for_tests"], "'targets_for_tests' is not a target; write package.module:factory"),
        (
            ["targets_for_tests:on_mars"],
            "'targets_for_tests' has no factory 'on_mars'; "
            "it has 'Scaled', 'broken', 'nothing', 'on_meta', 'with_keywords'",
        ),
        (
            ["targets_for_tests:broken"],
            "targets_for_tests:broken failed: ZeroDivisionError: division by zero (targets_for_tests.py:26)",
        ),
        (
            ["targets_for_tests:nothing"],
            "targets_for_tests:nothing must return (model, args) or (model, args, kwargs), not NoneType",
        ),
        (
            ["targets_for_tests:on_meta", "--budget", "lots"],
            "budget='lots' cannot be read; give a positive number of bytes, '2GiB', '500MB', '60%' "
            "(of the largest unplanned step), 'min' or, on a GPU, 'device'",
        ),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *argv]) == 1
    told = capsys.readouterr()
    assert told.err == f"encore: {message}\n"
    assert "Traceback" not in told.out


@pytest.mark.parametrize("option", ["--save", "--html"])
def test_plan_tells_of_a_missing_folder_before_it_plans(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "targets_for_tests:broken", option, "nowhere/x"]) == 1
    assert capsys.readouterr().err == (
        "encore: nowhere/x cannot be written: there is no folder 'nowhere'; create it first\n"
    )


def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(machine, "this_machine", refuse)
    assert main(["env"]) == 1
    assert capsys.readouterr().err == "encore: [Errno 13] Permission denied: 'somewhere'\n"
