"""Many shapes of one model: each is planned, what is kept of them is bounded, and nothing outlives the model."""

from __future__ import annotations

import copy
import functools
import gc
import linecache
import warnings
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import encore
from encore.capture import torch_private
from encore.compiler import padding, shapes
from encore.compiler.padding import advice_for
from encore.compiler.sizes import named_sizes, sizes_of
from support.compare_with_eager import assert_same, run_step, session_of


class Tagger(nn.Module):
    """A tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.tags = nn.Linear(16, 5)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        x = self.embedding(words)
        x = x + self.down(torch.sigmoid(self.up(x)).square())
        return F.cross_entropy(self.tags(x).flatten(0, 1), tags.flatten())


class Broken(nn.Module):
    """Three graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).tanh()
        torch._dynamo.graph_break()
        x = self.layers[1](x).tanh()
        torch._dynamo.graph_break()
        return self.layers[2](x).square().sum()


def sentences(length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (3, length)), torch.randint(5, (3, length))


def generated() -> set[str]:
    """The functions that Encore has generated and that are alive, by the names of their sources."""
    for _ in range(3):  # a model, what was compiled for it, what that kept
        gc.collect()
    return {name for name in linecache.cache if name.startswith("<encore graph")}


def step(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    model(*batch).backward()
    model.zero_grad()


# -- no limit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_shapes_are_planned_within_the_budget_with_eager_gradients(count: int) -> None:
    torch.manual_seed(0)
    plain = Tagger()
    largest = encore.estimate(plain, *sentences(70))
    unplanned = largest.resident + largest.unplanned.step_peak
    budget = (largest.floor + unplanned) // 2
    assert largest.floor < budget < unplanned
    planned = encore.compile(copy.deepcopy(plain), lowering="eager", budget=budget)
    for length in range(71 - count, 71):
        batch = sentences(length)
        assert_same(run_step(planned, batch), run_step(plain, batch), "eager")
        measured = encore.measure(functools.partial(step, planned, batch))
        report = encore.report(planned)
        assert measured.step_peak <= report.planned.step_peak
        assert report.resident + measured.step_peak <= budget
    session = session_of(planned)
    assert (len(session.graphs), session.forwards_run) == (count, 2 * count)


def test_numbers_that_no_graph_reads_do_not_make_another_shape() -> None:
    @encore.compile(lowering="eager")
    def step(x: Tensor, number: int, names: list[str]) -> Tensor:
        return (x * x).sum()

    for number in range(3):
        step(torch.ones(3, requires_grad=True), number, ["a"] * number)
    assert len(session_of(step).graphs) == 1


# -- bounded memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Tagger, pytest.param(Broken, marks=pytest.mark.slow)])
def test_the_least_recently_used_shapes_are_dropped(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 1 if kind is Tagger else 3
    monkeypatch.setattr(shapes, "MOST_GRAPHS", 2 * parts)
    monkeypatch.setattr(shapes, "LEAST_SHAPES", 1)
    torch.manual_seed(0)
    plain = kind()
    planned = encore.compile(copy.deepcopy(plain), lowering="eager", budget="1GiB" if kind is Broken else None)
    before = generated()
    session = session_of(planned)

    def run(length: int) -> None:
        batch = sentences(length) if kind is Tagger else (torch.randn(length, 4),)
        assert_same(run_step(planned, batch), run_step(plain, batch), "eager")

    captured = []
    for length in (2, 3, 2, 4, 2, 3):
        run(length)
        captured.append(session.captured_so_far // parts)
    assert captured == [1, 2, 2, 3, 3, 4]
    assert len(session.graphs) == 2 * parts
    assert encore.report(planned).graphs
    kept = len(generated() - before)
    for length in (5, 6):
        run(length)
    assert len(generated() - before) == kept


def test_backward_of_a_shape_that_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_GRAPHS", 2)
    monkeypatch.setattr(shapes, "LEAST_SHAPES", 1)
    torch.manual_seed(0)
    plain = Tagger()
    planned = encore.compile(copy.deepcopy(plain), lowering="eager")
    batches = [sentences(length) for length in range(3, 7)]
    losses = [planned(*batch) for batch in batches]
    assert len(session_of(planned).graphs) == 2
    for loss in losses:
        loss.backward()
    for batch in batches:
        plain(*batch).backward()
    have, want = ([parameter.grad for parameter in model.parameters()] for model in (planned, plain))
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True) if a is not None and b is not None)


def test_fake_results_of_a_compiled_graph_are_dropped() -> None:
    """Those of erased nodes, too, whose names the graph keeps."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    read, unread = (graph.call_function(torch.relu, (given,)) for _ in range(2))
    graph.output(read)
    for node in (given, read, unread):
        node.meta["example_value"] = torch.ones(3)
    graph.erase_node(unread)
    torch_private.drop_results(fx.GraphModule({}, graph))
    assert ["example_value" in node.meta for node in (given, read, unread)] == [True, False, False]


def test_a_graph_for_each_value_of_a_counter_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Linear):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(x) * self.steps

    monkeypatch.setattr(shapes, "MOST_GRAPHS", 2)
    monkeypatch.setattr(shapes, "LEAST_SHAPES", 1)
    plain = Counting(3, 3)
    planned = encore.compile(copy.deepcopy(plain), lowering="eager")
    for _ in range(5):
        x = torch.randn(2, 3)
        assert_same(run_step(planned, (x,)), run_step(plain, (x,)), "eager")
        assert len(session_of(planned).graphs) <= 2


def test_a_model_of_many_graphs_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_GRAPHS", 1)
    plain = Broken()
    planned = encore.compile(copy.deepcopy(plain), lowering="eager")
    captured = []
    for length in (3, 4, 3, 4):
        x = torch.randn(length, 4)
        assert_same(run_step(planned, (x,)), run_step(plain, (x,)), "eager")
        captured.append(session_of(planned).captured_so_far)
    assert captured[0] > 1
    assert captured[1] == captured[2] == captured[3]


@pytest.mark.parametrize("kind", [Tagger, pytest.param(Broken, marks=pytest.mark.slow)])
def test_a_model_that_is_deleted_takes_its_graphs_along(kind: type[nn.Module]) -> None:
    before = generated()
    planned = encore.compile(kind(), lowering="eager")
    for length in (3, 4):
        planned(*(sentences(length) if kind is Tagger else (torch.randn(length, 4),))).backward()
    session = weakref.ref(session_of(planned))
    assert generated() > before
    del planned
    assert generated() == before
    assert session() is None


def test_a_function_that_is_deleted_takes_its_graphs_along() -> None:
    before = generated()
    x = torch.randn(4, requires_grad=True)
    planned = encore.compile(_squared, lowering="eager")
    planned(x).backward()
    planned(x[:2]).backward()
    session = weakref.ref(session_of(planned))
    del planned
    assert generated() == before
    assert session() is None


def _squared(x: Tensor) -> Tensor:
    return x.square().sum()


# -- the largest batch ------------------------------------------------------------------------------------------------


def test_a_largest_batch_that_cannot_fit_is_an_error_before_anything_runs() -> None:
    model = Tagger()
    found = encore.estimate(model, *sentences(300))
    with pytest.raises(encore.BudgetError, match=r"the largest batch of Tagger .*cannot be met") as raised:
        encore.compile(model, budget=found.floor - 1, largest=sentences(300))
    assert raised.value.floor == found.floor
    assert model._compiled_call_impl is None
    encore.compile(model, budget=found.floor - 1)(*sentences(3)).backward()


@pytest.mark.parametrize("kind", ["module", "function", "graphs"])
def test_percentages_are_of_the_largest_batch(kind: str) -> None:
    model = Broken() if kind == "graphs" else Tagger()

    def batch(length: int) -> tuple[Tensor, ...]:
        return (torch.randn(length, 4),) if kind == "graphs" else sentences(length)

    longest = tuple(tensor.to("meta") for tensor in batch(200))
    unplanned = encore.estimate(model, *longest).taken_unplanned
    function = model if kind != "function" else lambda words, tags: model(words, tags)
    planned = encore.compile(function, lowering="eager", budget="110%", largest=longest)
    planned(*batch(20)).backward()
    assert encore.report(planned).budget == int(1.1 * unplanned)


def test_an_estimate_with_a_largest_batch() -> None:
    model = Tagger()
    alone, long = (encore.estimate(model, *sentences(length)) for length in (20, 200))
    both = encore.estimate(model, *sentences(20), largest=dict(zip(("words", "tags"), sentences(200), strict=True)))
    assert both.largest is not None
    assert both.largest.floor == long.floor > alone.floor == both.floor
    assert alone.fits(long.floor - 1)
    assert not both.fits(long.floor - 1)
    assert both.fits(long.floor)
    assert not alone.fits("30%")
    assert both.plan("80%").budget == int(0.8 * long.taken_unplanned)
    more = both.beside(resident=1 << 20)
    assert more.largest is not None
    assert more.largest.floor == long.floor + (1 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"largest": sentences(3)}, "give a budget"),
        ({"largest": 3, "budget": "1GiB"}, "largest= is a int; give a tensor"),
        ({"largest": (torch.zeros(3), 4), "budget": "1GiB"}, "cannot be called with these arguments"),
    ],
)
def test_a_largest_batch_that_is_none(options: dict[str, object], message: str) -> None:
    with pytest.raises(encore.OptionError, match=message):
        encore.compile(Tagger(), **options)


# -- shapes that never repeat -----------------------------------------------------------------------------------------


def test_shapes_that_never_repeat_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "WINDOW", 6)
    monkeypatch.setattr(padding, "FEW_SIZES", 4)
    planned = encore.compile(Tagger(), lowering="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(11, 25):
            planned(*sentences(length)).backward()
    (warning,) = [entry for entry in caught if "encore" in str(entry.message)]
    assert warning.category is UserWarning
    assert warning.filename == __file__
    for part in ("Tagger", "dimension 1 of words has 6 sizes from 11 to 16", "multiple of 8, which leaves 1"):
        assert part in str(warning.message)


def test_shapes_that_repeat_are_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "WINDOW", 5)
    planned = encore.compile(Tagger(), lowering="eager")
    for _ in range(3):  # warnings are errors
        for length in range(3, 7):
            planned(*sentences(length)).backward()


def test_advice_names_what_varies() -> None:
    recent = [((8, length), (length,), dict) for length in range(3, 300, 3)]
    advice = advice_for(["ids", "batch['mask']", "batch"], recent)
    assert advice == (
        "dimension 1 of ids has 99 sizes from 3 to 297; pad it to a multiple of 32, which leaves 10; "
        "dimension 0 of batch['mask'] has 99 sizes from 3 to 297; pad it to a multiple of 32, which leaves 10"
    )
    assert "TORCH_LOGS=recompiles" in advice_for(["ids"], [((8, 3),)] * 20)
    mixed = [((1,) * (count % 2 + 1),) for count in range(3)] + [((count,),) for count in range(20)]
    assert advice_for(["ids"], mixed) == "ids has 21 shapes; pad it to a few of them"


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


def test_sizes_of_nested_arguments() -> None:
    def function(x: Tensor, pair: Pair, *more: Tensor, **batch: Tensor) -> None: ...

    def arguments(length: int, number: int = 0) -> tuple[tuple[object, ...], dict[str, object]]:
        pair = Pair(torch.zeros(2), [torch.zeros(length), torch.zeros(1)])
        return (torch.zeros(3), pair, torch.zeros(4), number), {"mask": {"a": torch.zeros(5, length)}}

    assert sizes_of(*arguments(3)) == sizes_of(*arguments(3, number=5))
    assert sizes_of(*arguments(3)) != sizes_of(*arguments(4))
    named = dict(zip(named_sizes(function, *arguments(7)), sizes_of(*arguments(7)), strict=True))
    assert {name: size for name, size in named.items() if isinstance(size, tuple) and name} == {
        "x": (3,), "pair.first": (2,), "pair.second[0]": (7,), "pair.second[1]": (1,), "more 0": (4,),
        "mask['a']": (5, 7),
    }  # fmt: skip
