"""`python -m benchmarks`: help text to the letter, and errors in one line before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.command import main

HELP = """\
usage: python -m benchmarks [-h] [--quick] [--minutes MINUTES] [--only PART] [--parts FOLDER] [--json FILE]
                            [--plots FOLDER] [--docs] [--schema]
                            [suite]

Compare Encore with eager PyTorch and with torch.compile.

positional arguments:
  suite              spine, steps, lengths, fast, plan, echo, gist, rnn, rnn-workloads, accuracy, devices or bptt
                     (default: echo)

options:
  -h, --help         show this help message and exit
  --quick            tiny sizes: does everything work?
  --minutes MINUTES  leave systems out to be done in about so many minutes
  --only PART        run one part of the suite; may be given again
  --parts FOLDER     keep parts in FOLDER, and continue a run from there
  --json FILE        write the numbers to FILE as JSON
  --plots FOLDER     draw the suite into FOLDER, as PNG and as a page
  --docs             write the suite's page in docs
  --schema           print the JSON Schema of the suite's JSON; nothing runs
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out == HELP


def test_a_missing_folder_is_reported_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--docs"]) == 1
    assert "--docs writes into 'docs', but there is no such folder here" in capsys.readouterr().err


def test_an_unknown_suite_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ecko"]) == 1
    assert "no suite is called 'ecko'; known suites: spine, steps, lengths, fast, plan, echo" in capsys.readouterr().err
    assert main(["fast", "--plots", "."]) == 1
    assert "has no picture" in capsys.readouterr().err


def test_minutes_are_for_suites_that_can_leave_systems_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnn", "--minutes", "5"]) == 1
    assert "'rnn' leaves nothing out; --minutes is for echo, gist, rnn-workloads" in capsys.readouterr().err
    for minutes in ("0", "-1", "nan", "inf"):
        assert main(["gist", "--minutes", minutes]) == 1
        assert "is no time to run a suite in" in capsys.readouterr().err


def test_parts_are_for_suites_that_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fast", "--only", "bert"]) == 1
    assert "'fast' has no parts; --only is for lengths" in capsys.readouterr().err
    assert main(["lengths", "--only", "gru"]) == 1
    assert "no part 'gru'; its parts: tagger, loop, seq2seq, bert, llama, t5, speech, " in capsys.readouterr().err
    assert main(["lengths", "--only", "bert", "--docs"]) == 1
    assert "leave --only out" in capsys.readouterr().err
    assert main(["lengths", "--parts", "missing"]) == 1
    assert "--parts writes into 'missing', but there is no such folder here" in capsys.readouterr().err
