"""Numbers that make no sense, in options, tiers and on the command line: an `EncoreError`, told in a line."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import encore
from encore import cli
from encore.options import make_options
from encore.tiers import Disk, Host
from encore.units import parse_bytes
from examples import demo
from examples.train import command

HUGE, DIGITS = 10**400, "9" * 5000


def one_line(error: BaseException) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 1500


ABSURD: dict[str, Iterable[Any]] = {
    "budget": (
        "inf", "nan", "nan%", "inf%", "0", "0%", "-5MiB", "-5%", "1e9", "", "%", "9" * 400, "9" * 400 + "%",
        DIGITS + "GiB", "²MiB", "٣MiB", 0, -1, 0.5, math.nan, math.inf, HUGE, True, [], b"2GiB", 1j,
    ),
    "overhead": (math.nan, math.inf, -1, HUGE, "0.1", True, [], torch.tensor(0.1)),
    "resident": (-1, 1.5, math.nan, HUGE, "1GiB", True),
    "recompile_limit": (0, -1, 1.5, math.nan, math.inf, "3", True, HUGE),
    "keep": (3, True, [3], "", [""], b"a", object()),
    "lossy": ("nonsense", "bits", [3], [[]], ["fp8_e4m3", "x"], {}, math.nan, math.inf, -1),
    "methods": ("nonsense", 3, True, 1.5, [], [3], [[]]),
    "skip": ("nonsense", 3, True, [3], [[]]),
    "tiers": ("nonsense", 3, True, [3], [[]], ["disk", "disk"], {"disk": 1}),
    "lowering": ("nonsense", 3, [], ["eager"], {}),
    "plan": (3, True, [], b"x", {}),
    "optimizer": (3, "Adam", torch.optim.SGD),
}  # fmt: skip


@pytest.mark.parametrize("option", ABSURD)
def test_options(option: str) -> None:
    for value in ABSURD[option]:
        with pytest.raises(encore.OptionError, match=f"{option}=") as error:
            make_options({option: value})
        one_line(error.value)


@pytest.mark.parametrize(
    "capacity", [0, -1, 1.5, math.nan, math.inf, HUGE, True, "", "0", "-1", "16XB", "60%", "min", "9" * 400, [], b"1"]
)
def test_capacities(tmp_path: Path, capacity: Any) -> None:
    for make in (lambda: Disk(tmp_path, capacity=capacity), lambda: Host(capacity=capacity)):
        with pytest.raises(encore.OptionError, match=r"capacity=.*; give a positive number of bytes") as error:
            make()
        one_line(error.value)


@pytest.mark.parametrize("count", [0, -1, 1.5, math.nan, HUGE, True, "2", None])
def test_counts_of_tiers(tmp_path: Path, count: Any) -> None:
    for make in (
        lambda: Disk(tmp_path, workers=count),
        lambda: Disk(tmp_path, depth=count),
        lambda: Host(depth=count),
    ):
        with pytest.raises(encore.OptionError, match="give a whole number of at least 1"):
            make()


def test_capacities_as_texts() -> None:
    assert parse_bytes("16KiB", "capacity") == 16384
    assert parse_bytes(" 1.5 MB ", "capacity") == 1_500_000
    assert parse_bytes(1, "capacity") == 1


@pytest.mark.parametrize("capacity", ["16KiB", 16384, 1])
def test_a_disk_that_is_too_small_is_named(tmp_path: Path, capacity: Any) -> None:
    with Disk(tmp_path, capacity=capacity) as disk:
        assert not disk.has_room(1 << 20)
        with pytest.raises(encore.TierError, match=r"the disk tier is full: .* give it more, Disk\(capacity=...\)"):
            disk.store([torch.zeros(1 << 20)])


# -- the commands ----------------------------------------------------------------------------------------------------

TRAIN = ["lm", "--size", "tiny"]
TUNE = ["tune", "--hidden", "2", "--batch", "1", "--steps", "2"]
WORDS = ("abc", "", "1.5", "1e3", "nan", "inf", DIGITS)
COUNTS = ("0", "-1", *WORDS)
LARGE = ("1000000000000", "9" * 30)


def refused(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed: a line, after the usage where the arguments could not be read."""
    try:
        code = main(arguments)
    except SystemExit as left:
        code = left.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert code == 1, (arguments, printed.err)
    assert "Traceback" not in printed.err
    said = printed.err.splitlines()
    if said[0].startswith("usage: "):
        program = " ".join(said[0].removeprefix("usage: ").partition(" [")[0].split())
        assert said[-1].startswith(f"{program}: ")
    else:
        assert len(said) == 1
        assert said[0].startswith("encore: ")
    return said[-1]


@pytest.mark.parametrize("count", [*COUNTS, *LARGE])
def test_batch_sizes(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(command.main, [*TRAIN, "--batch-size", count], capsys)
    refused(command.main, [*TRAIN, "--size", f"batch_size={count}"], capsys)
    refused(command.main, [*TRAIN, "--size", f"hidden={count}"], capsys)
    refused(cli.main, [*TUNE, "--batch", count], capsys)


@pytest.mark.parametrize("option", ["--steps", "--hidden", "--inputs"])
@pytest.mark.parametrize("count", [*COUNTS, *LARGE])
def test_sizes_to_tune(option: str, count: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(cli.main, [*TUNE, option, count], capsys)


@pytest.mark.parametrize("option", ["--steps", "--every"])
@pytest.mark.parametrize("count", COUNTS)
def test_counts(option: str, count: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(command.main, [*TRAIN, option, count], capsys)
    if option == "--steps":
        refused(demo.main, [option, count], capsys)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--seed", ("-1", "9" * 30, *WORDS)),
        ("--overhead", ("-1", "abc", "", "nan", "inf", DIGITS)),
        ("--learning-rate", ("-1", "0", "abc", "", "nan", "inf", DIGITS)),
        ("--budget", ("0", "-1", "nan", "inf", "abc", "", "1e3", "9" * 30, DIGITS)),
    ],
)
def test_other_numbers(option: str, values: Iterable[str], capsys: pytest.CaptureFixture[str]) -> None:
    for value in values:
        refused(command.main, [*TRAIN, option, value], capsys)


def test_a_batch_that_is_larger_than_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert "takes" in (said := refused(command.main, [*TRAIN, "--batch-size", "2000000000"], capsys))
    assert "for its inputs alone" in said
    assert "of memory are free; give a smaller --batch-size" in said


def test_a_layer_that_is_larger_than_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert "of memory are free; give smaller numbers" in refused(cli.main, [*TUNE, "--hidden", "2000000000"], capsys)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
def test_memory_that_runs_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(command, "train", fail)
    assert "there is not enough memory" in refused(command.main, TRAIN, capsys)


def test_other_errors_keep_their_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(command, "train", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        command.main(TRAIN)


def test_budgets_of_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "absurd_target.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(4, 4), (torch.zeros(2, 4),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("estimate", "plan"):
        for budget in ("0", "-1", "nan%", "9" * 30):
            refused(cli.main, [name, "absurd_target:make", f"--budget={budget}"], capsys)
    sys.modules.pop("absurd_target")
