"""Layouts of recurrent layers: the same results and bytes told exactly in each, and a choice that is remembered."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import encore
from encore.cli import main
from encore.measurements import machine_cache
from encore.rnn import native, tuning
from encore.rnn.products import NarrowProduct
from encore.rnn.tuning import LayerLayout, Size
from support.recurrent_pairs import KINDS, Workspace, both_kernels, everything, in_double, kernels, pair
from support.rounding import assert_all_as_accurate, assert_as_accurate

pytestmark = pytest.mark.usefixtures("own_layers")

SIZE = Size("lstm", 8, 16, 12, 4, True, torch.float32, "cpu", 1)
LAYOUTS = [LayerLayout(weight, rows) for weight in ("packed", "stored", "transposed") for rows in (512, 16)]
NARROW = [LayerLayout("packed", rows, narrow=True) for rows in (512, 16)]
multiplies_bfloat16 = pytest.mark.skipif(
    not native.multiplies(torch.bfloat16), reason="this processor has no products of bfloat16"
)
SMALL = ["--hidden", "16", "--batch", "4", "--steps", "12"]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(tmp_path))
    tuning.forget()
    yield tmp_path
    tuning.forget()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@both_kernels
@pytest.mark.parametrize("stash", ["fast", 4])
@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), ("LSTM", {"proj_size": 6})])
def test_every_layout_gives_the_same(kind: str, options: dict[str, Any], stash: str | int, steps: Any) -> None:
    theirs, ours = pair(kind, 7, 20, stash=stash, bidirectional=True, **options)
    x = torch.randn(11, 5, 7, requires_grad=True)
    lengths = torch.tensor([11, 11, 8, 3, 1])
    for given in (lambda: x, lambda: pack_padded_sequence(x, lengths)):
        expected, exact = everything(theirs, given(), wanted=[x]), in_double(theirs, given(), wanted=[x])
        for layout in LAYOUTS:
            with tuning.forced(layout), kernels(steps):
                found = everything(ours, given(), wanted=[x])
            assert_all_as_accurate(found, expected, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stash", ["fast", 4])
@pytest.mark.parametrize("kind", KINDS)
def test_workspace_of_every_layout_to_the_byte(kind: str, stash: str | int, dtype: torch.dtype) -> None:
    module = getattr(encore.nn, kind)(20, 40, stash=stash).to(dtype)
    x = torch.randn(30, 7, 20, dtype=dtype, requires_grad=True)
    told = set()
    for layout in [*LAYOUTS, *NARROW]:
        with tuning.forced(layout), Workspace() as workspace:
            output = module(x)[0]
            output.backward(torch.randn_like(output))
        for func, bytes_, measured in workspace.seen:
            assert measured == bytes_, (func, layout)
        told.add(tuple(bytes_ for _, bytes_, _ in workspace.seen))
    assert len(told) >= 3, "the weights' layouts differ in their workspaces"


@multiplies_bfloat16
@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("stash", ["fast", 4])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_layouts_of_odd_sizes_and_packed_sequences(kind: str, stash: str | int, needs_x: bool) -> None:
    """As close to float64 as torch.nn; bytes are predicted exactly."""
    theirs, ours = pair(kind, 7, 21, stash=stash, bidirectional=True)
    theirs, ours = theirs.bfloat16(), ours.bfloat16()
    x = torch.randn(11, 5, 7).bfloat16().requires_grad_(needs_x)
    exact, exact_x = copy.deepcopy(theirs).double(), x.detach().double().requires_grad_(needs_x)
    lengths = torch.tensor([11, 11, 8, 3, 1])
    ways: list[Callable[[torch.Tensor], Any]] = [lambda x: x, lambda x: pack_padded_sequence(x, lengths)]
    for given in ways:
        truth = everything(exact, given(exact_x), wanted=[exact_x] * needs_x)

        def error(found: list[torch.Tensor], truth: list[torch.Tensor] = truth) -> float:
            pairs = zip(found, truth, strict=True)
            return sum(((mine - true).norm() / true.norm()).item() for mine, true in pairs)

        reference = error(everything(theirs, given(x), wanted=[x] * needs_x))
        for layout in NARROW:
            with tuning.forced(layout), Workspace() as workspace:
                found = everything(ours, given(x), wanted=[x] * needs_x)
            assert error(found) <= 1.05 * reference, layout  # at small sizes, rounding has its luck
            assert all(told == measured for _, told, measured in workspace.seen), layout


@multiplies_bfloat16
@pytest.mark.parametrize(("rows", "units", "depth"), [(1, 1, 1), (9, 50, 33), (64, 96, 128), (3, 17, 2)])
def test_products_of_narrow_rows(rows: int, units: int, depth: int) -> None:
    left, weight = torch.randn(rows, depth + 3).bfloat16()[:, :depth], torch.randn(units, depth).bfloat16()
    packed = torch.full((native.packed_numel(1, units, depth, torch.bfloat16),), math.nan).bfloat16()
    wide = torch.full((rows, units + 5), 2.0)
    exact, eager = left.double() @ weight.double().t(), left.float() @ weight.float().t()
    product = NarrowProduct(weight, packed)
    for times in (1, 2):
        (product.write if times == 1 else product.add)(left, wide[:, 2 : units + 2])
        assert_as_accurate(wide[:, 2 : units + 2], times * eager, times * exact)
    assert (wide[:, :2] == 2).all()
    assert (wide[:, units + 2 :] == 2).all()


@multiplies_bfloat16
@pytest.mark.parametrize(("depth", "rows", "columns"), [(1, 1, 1), (7, 9, 5), (129, 130, 49), (300, 33, 100)])
def test_sums_over_narrow_rows(depth: int, rows: int, columns: int) -> None:
    left, right = torch.randn(depth, rows + 3).bfloat16()[:, :rows], torch.randn(depth, columns + 2).bfloat16()[:, 2:]
    into = torch.full((rows, columns), math.nan)
    exact, eager = left.double().t() @ right.double(), left.float().t() @ right.float()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for times in (1, 2):
                native.multiply_columns(left, right, into, add=times == 2)
                assert_as_accurate(into, times * eager, times * exact)
            found.append(into.clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found), "a sum is one thread's"


def test_narrow_layouts_where_the_processor_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size("lstm", 8, 512, 100, 64, True, torch.bfloat16, "cpu", 2)
    for has in (True, False):
        monkeypatch.setattr(native, "multiplies", lambda dtype, has=has: has and dtype == torch.bfloat16)
        assert tuning.operator_rule(size) == LayerLayout("packed", 1024, narrow=has)
        assert (LayerLayout("packed", 512, narrow=True) in tuning.layouts(size)) == has
        assert not any(layout.narrow for layout in tuning.layouts(dataclasses.replace(size, dtype=torch.float32)))
    assert str(LayerLayout("packed", 512, narrow=True)) == "packed, 512 rows, narrow"


def test_the_measured_best_is_chosen_and_the_rule_before(own_cache: Path) -> None:
    facts = ("lstm", 8, 16, 12, 4, True, torch.float32, "cpu")
    size = Size(*facts, torch.get_num_threads())
    assert tuning.layout_of(*facts) == tuning.operator_rule(size)
    for seconds, layout in enumerate(tuning.ways(size), 1):
        machine_cache().put(tuning._entry(size, layout), 1.0 / seconds)
    tuning.forget()
    assert tuning.layout_of(*facts) == tuning.layouts(size)[-1] != tuning.operator_rule(size)
    assert tuning.layout_of("lstm", 8, 16, 9, 3, *facts[5:]) == tuning.layouts(size)[-1]  # the same powers of two
    assert tuning.layout_of("lstm", 8, 16, 8, 3, *facts[5:]) == tuning.operator_rule(size)
    machine_cache().put(tuning._entry(size, tuning.layouts(size)[0]), math.nan)
    tuning.forget()
    assert tuning.layout_of(*facts) == tuning.operator_rule(size)


def test_the_usual_layout_is_given_up_for_a_clear_gain_only() -> None:
    usual, other = LayerLayout("packed", 1024), LayerLayout("stored", 1024)
    for seconds, best in (((1.0, 0.96), usual), ((1.0, 0.94), other), ((1.0, 2.0), usual)):
        known = dict(zip((usual, other), seconds, strict=True))
        assert tuning.best_of(known, usual, known) == best


class Names(TorchDispatchMode):
    """Which of two kinds of layer run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {name for name in ("mkldnn_rnn_layer", "lstm_forward") if name in str(func)}
        return func(*args, **(kwargs or {}))


def layers_of(module: torch.nn.Module, x: torch.Tensor) -> set[str]:
    with Names() as names:
        module(x)
    return names.seen


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch.nn's layer is oneDNN's, and it is not here")
def test_small_layers_are_torchs_own(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of what the other tests here ask for
    monkeypatch.setenv("ENCORE_CACHE_DIR", str(own_cache))
    tuning.forget()
    x = torch.randn(12, 4, 8)
    theirs, ours = pair("LSTM", 8, 16)
    assert layers_of(ours, x) == {"mkldnn_rnn_layer"}
    assert torch.equal(ours(x)[0], theirs(x)[0])
    for options in ({"stash": "lean"}, {"proj_size": 4}):
        assert layers_of(encore.nn.LSTM(8, 16, **options), x) == {"lstm_forward"}
    assert layers_of(encore.nn.LSTM(8, 16).double(), x.double()) == {"lstm_forward"}
    assert layers_of(encore.nn.LSTM(8, tuning.NARROW + 1), x) == {"lstm_forward"}
    assert layers_of(ours, torch.randn(tuning.SHORT, 4, 8)) == {"lstm_forward"}
    size = Size("lstm", 8, 16, 12, 4, True, torch.float32, "cpu", torch.get_num_threads())
    for layout in tuning.ways(size):
        machine_cache().put(tuning._entry(size, layout), 2.0 if layout == tuning.TORCHS else 1.0)
    tuning.forget()
    assert layers_of(ours, x) == {"lstm_forward"}


def test_batches_are_no_part_of_a_gpu_key() -> None:
    def key(batch: int, device: str) -> str:
        return Size("gru", 8, 16, 12, batch, True, torch.float32, device, 0).key

    assert key(4, "cuda") == key(64, "cuda")
    assert key(4, "cpu") != key(64, "cpu")


def test_layouts_of_a_size() -> None:
    known = [f"{weight}, 4096 rows" for weight in ("packed", "stored", "transposed")]
    assert [str(layout) for layout in tuning.layouts(SIZE)] == known
    long = Size("lstm", 8, 512, 100, 64, True, torch.float32, "cpu", 1)
    libraries = ["stored", "transposed"]
    chunked = [LayerLayout("packed", rows) for rows in (1024, 512, 2048)]
    assert tuning.layouts(long) == [*chunked, *(LayerLayout(weight, 1024) for weight in libraries)]
    lean = dataclasses.replace(long, keeps=False)
    assert tuning.ways(lean) == [LayerLayout("packed", 1024), *(LayerLayout(weight, 1024) for weight in libraries)]
    two = dataclasses.replace(long, threads=2)
    assert tuning.layouts(two) == tuning.layouts(long)
    assert tuning.rule(long) == tuning.operator_rule(long) == LayerLayout("packed", 1024)
    for size in (SIZE, long, lean, two, dataclasses.replace(two, steps=10), dataclasses.replace(two, hidden=256)):
        assert tuning.operator_rule(size) in tuning.layouts(size)
        assert tuning.rule(size) in tuning.ways(size)


@pytest.mark.parametrize("text", ["{", '{"a": "b"}', "[1, 2]"])
def test_a_broken_cache_is_ignored_with_one_warning(own_cache: Path, text: str) -> None:
    machine_cache().path.write_text(text)
    module = encore.nn.LSTM(8, 16)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for steps in (3, 30, 300):
            module(torch.randn(steps, 4, 8))[0].sum().backward()
        tuning.tune(SIZE, seconds=0.0)
    assert len([warning for warning in seen if "measuring again" in str(warning.message)]) == 1
    assert tuning.measured(SIZE)


def test_the_command_fills_the_cache_and_shows_a_table(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *SMALL, "--cell", "LSTM", "GRU", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["encore_tune"] == 1
    assert [(one["cell"], one["stash"], one["known"]) for one in told["sizes"]] == [
        ("lstm", "fast", False), ("lstm", "lean", False), ("gru", "fast", False), ("gru", "lean", False)
    ]  # fmt: skip
    for one in told["sizes"]:
        assert one["layouts"][one["best"]] == min(one["layouts"].values())
        assert one["gain"] >= 1
    tuning.forget()
    assert main(["tune", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "best layout" in shown
    assert "2 of 2 sizes were known" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cell", "lstm"], "--cell takes LSTM, GRU, RNN; got 'lstm'"),
        (["--stash", "none"], "--stash takes"),
        (["--dtype", "int8"], "--dtype takes"),
        (["--batch", "0"], "--batch takes numbers from 1 to"),
    ],
)
def test_the_command_names_mistakes(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert main(["tune", *arguments]) == 1
    assert message in capsys.readouterr().err
