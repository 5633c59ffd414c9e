"""A scan has the numbers of the loop written out: outputs, gradients, buffers and random state, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encore.bptt import ScanReport, scan
from encore.errors import EncoreError
from encore.tiers import Disk, Host, Parcel
from support.rounding import assert_close
from support.scan_reference import (
    BATCH,
    LOOPS,
    WAYS,
    WIDTH,
    Lazy,
    Loop,
    by_hand,
    flag,
    gru_with_dropout,
    leaves_as_results,
    lstm,
    outcome,
    own_generator,
    same,
    scanning,
    words,
    written_out,
)
from support.watchdog import watchdog


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watchdog(300):
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", LOOPS, ids=[make.__name__ for make in LOOPS])
def test_the_numbers_of_the_loop_written_out(make: Callable[[int], Loop], way: str) -> None:
    loop = make(23)
    expected = outcome(loop, written_out)
    report = ScanReport()
    found = outcome(loop, scanning(report=report, **WAYS[way]))
    assert same(found, expected)
    assert report.counts.taped == 23
    if not report.late_stores:
        assert report.counts.forwards == report.predicted_forwards
    assert same(outcome(loop, written_out), expected), "nothing is left changed"


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_comes_back_to_its_first_value(way: str) -> None:
    loop = flag(20)
    assert same(outcome(loop, scanning(**WAYS[way])), outcome(loop, written_out))


@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_results(way: str) -> None:
    """Their gradients are sums over all steps, added up in another order."""
    loop = leaves_as_results(23)
    for found, expected in zip(outcome(loop, scanning(**WAYS[way])), outcome(loop, written_out), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_of_an_embedding(way: str) -> None:
    table = nn.Embedding(11, WIDTH, sparse=True)
    words = torch.randint(0, 11, (23, BATCH))

    def gradient(run: Callable[[], Tensor]) -> Tensor:
        table.zero_grad(set_to_none=True)
        run().sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        return table.weight.grad.to_dense()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(h + table(x)), None

    def plain() -> Tensor:
        h = torch.zeros(BATCH, WIDTH)
        for x in words:
            h, _ = step(h, x)
        return h

    found = gradient(lambda: scan(step, torch.zeros(BATCH, WIDTH), words, **WAYS[way])[0])
    assert_close(found, gradient(plain))


class Unhurried(Host):
    """A store takes no time, so that every state leaves when it was planned to."""

    def store(self, tensors: Sequence[Tensor]) -> Parcel:
        parcel = super().store(tensors)
        self.transfers.fastest_store = 0.0
        return parcel


@pytest.mark.parametrize("steps", [1, 50, 97])
@pytest.mark.parametrize("memory", [{"slots": 2}, {"budget": 4_000}, {"budget": 9_000}], ids=str)
def test_a_tier_that_keeps_up_has_the_runs_that_were_predicted(steps: int, memory: dict[str, int]) -> None:
    loop, report = lstm(steps), ScanReport()
    with Unhurried() as tier:
        found = outcome(loop, scanning(report=report, tiers=tier, schedule="multistage", **memory))
    assert same(found, outcome(loop, written_out))
    assert report.late_stores == 0
    assert report.counts.forwards == report.predicted_forwards
    assert report.counts.tier_stores


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("way", WAYS)
def test_short_sequences(way: str, steps: int) -> None:
    loop = by_hand(steps)
    found = outcome(loop, scanning(**WAYS[way]))
    assert same(found, outcome(loop, written_out))


def test_no_steps_at_all() -> None:
    carry = torch.ones(2, requires_grad=True)
    assert scan(lambda carry, x: (carry, x), carry, torch.zeros(0, 2), slots=1) == (carry, None)
    assert scan(lambda carry, x: (carry, x), carry, iter(()), slots=1) == (carry, None)
    assert scan(lambda carry, x: (carry, x), carry, length=0) == (carry, None)


@pytest.mark.parametrize("way", ["keep", "revolve", "blocks", "disk"])
@pytest.mark.parametrize("truncate", [1, 4, 100])
def test_truncated(way: str, truncate: int) -> None:
    for make in (gru_with_dropout, by_hand):
        loop = make(18)
        expected = outcome(loop, lambda given, consts: written_out(given, consts, truncate=truncate))
        found = outcome(loop, scanning(truncate=truncate, **WAYS[way]))
        assert same(found, expected)


def test_autocast_is_entered_again() -> None:
    loop = lstm(12)

    def cast(loop: Loop, consts: Any) -> tuple[Any, Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return written_out(loop, consts)

    def scanned(loop: Loop, _: Any) -> tuple[Any, Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scan(loop.step, loop.carry, loop.xs, slots=3)

    loop.carry = tuple(tensor.detach().bfloat16() for tensor in loop.carry)
    assert same(outcome(loop, scanned), outcome(loop, cast))
    assert outcome(loop, scanned)[0].dtype == torch.bfloat16


def test_backward_is_not_under_the_autocast_of_forward() -> None:
    """A step that leaves autocast has gradients in float32, as a plain loop's."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(h.float() @ weight + x), None

    loop = Loop(step, torch.zeros(BATCH, WIDTH), torch.randn(20, BATCH, WIDTH), [weight])

    def under(run: Callable[[Loop, Any], tuple[Any, Any]]) -> Callable[[Loop, Any], tuple[Any, Any]]:
        def cast(loop: Loop, consts: Any) -> tuple[Any, Any]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run(loop, consts)

        return cast

    for options in ({}, {"slots": 3}):
        assert same(outcome(loop, under(scanning(**options))), outcome(loop, under(written_out)))


def test_steps_that_compute_otherwise_without_gradients() -> None:
    """oneDNN's inference is not training's; such steps run with gradients on the way forward, too."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(h @ weight + x) * (1.0 if torch.is_grad_enabled() else 1.0 + 1e-6), None

    loop = Loop(step, torch.zeros(BATCH, WIDTH), torch.randn(20, BATCH, WIDTH), [weight])
    found = outcome(loop, scanning(slots=3))
    assert same(found, outcome(loop, written_out))

    def told(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ weight + x)
        return h, h * (1.0 if torch.is_grad_enabled() else 1.0 + 1e-6)

    loop.step = told
    found = outcome(loop, scanning(slots=3))
    assert same(found, outcome(loop, written_out)), "of y as well as of the carry"


# -- inputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if way != "keep"])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_iterators_of_unknown_length(way: str, steps: int) -> None:
    loop = gru_with_dropout(steps)
    expected = outcome(loop, written_out)
    assert same(outcome(loop, lambda given, _: scan(given.step, given.carry, iter(given.xs), **WAYS[way])), expected)
    report = ScanReport()
    loop.xs = lazy = Lazy(loop.xs)
    assert same(outcome(loop, scanning(report=report, **WAYS[way])), expected)
    assert lazy.asked == report.counts.forwards + 1, "once a run, and once to look at the first step"


def test_an_iterator_may_hold_trees_and_other_things() -> None:
    weight = nn.Parameter(torch.ones(3))

    def step(h: Tensor, x: tuple[dict[str, Tensor], int]) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * weight + x[0]["x"] * x[1])
        return h, h.sum()

    def items() -> Iterator[tuple[dict[str, Tensor], int]]:
        for number in range(30):
            yield {"x": torch.full((3,), number / 30)}, number % 3

    results = []
    for options in ({"slots": 40}, {"slots": 2, "tiers": "disk", "schedule": "multistage"}, {"slots": 3}):
        weight.grad = None
        carry, ys = scan(step, torch.zeros(3), items(), **options)  # type: ignore[arg-type]
        (carry.sum() + ys.sum()).backward()
        results.append([carry.detach(), ys.detach(), weight.grad])
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_steps_without_inputs() -> None:
    weight = nn.Parameter(torch.tensor(0.9))
    carry, ys = scan(lambda h, _: (h * weight, h), torch.ones(()), length=5, slots=2)
    carry.backward()
    assert weight.grad == pytest.approx(5 * 0.9**4)
    assert ys.shape == (5,)


@pytest.mark.parametrize("enabled", [True, False])
def test_without_gradients_it_is_a_loop(enabled: bool) -> None:
    loop = lstm(6)
    with torch.set_grad_enabled(enabled):
        detached = scan(lambda h, x: (h + x, h), torch.zeros(3), torch.ones(6, 3), slots=2)
    assert not detached[0].requires_grad
    assert detached[0].eq(6).all()
    assert detached[1][5].eq(5).all()
    with torch.no_grad():
        (h, _), ys = scan(loop.step, loop.carry, loop.xs, budget="min")
    assert ys is None
    assert torch.equal(h, written_out(loop, None)[0][0])


# -- around ------------------------------------------------------------------------------------------------------------


def test_scans_in_scans() -> None:
    """All bits but those of the weight's gradient: an inner scan hands over the sum of its own steps, where a plain
    loop adds them one by one to what later ones have left."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def inner(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ weight + x)
        return h, h.sum(-1)

    def nested(h: Tensor, x: Tensor, run: Callable[..., tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
        h, ys = run(h, x)
        return h, ys.sum()

    def loop_of(run: Callable[..., tuple[Any, Any]]) -> Loop:
        xs = torch.linspace(-1, 1, 6 * 5 * BATCH * WIDTH).view(6, 5, BATCH, WIDTH)
        return Loop(lambda h, x: nested(h, x, run), torch.zeros(BATCH, WIDTH), xs, [weight])

    plain = loop_of(lambda h, x: written_out(Loop(inner, h, x), None))
    scanned = loop_of(lambda h, x: scan(inner, h, x, slots=2))
    expected = outcome(plain, written_out)
    found = outcome(scanned, scanning(slots=2))
    (summed,) = (place for place, tensor in enumerate(found) if tensor is weight.grad)
    assert_close(found[summed], expected[summed])
    del found[summed], expected[summed]
    assert same(found, expected)


def test_scans_in_scans_share_a_tier(tmp_path: Path) -> None:
    """Inner scans are run again by the outer one's, and leave nothing behind in the tier."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def inner(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(torch.tanh(h @ weight + x), 0.2)
        return h, h.sum(-1)

    xs = torch.linspace(-1, 1, 6 * 5 * BATCH * WIDTH).view(6, 5, BATCH, WIDTH)
    results = []
    with Disk(tmp_path) as tier:
        staged: dict[str, Any] = {"slots": 2, "tiers": tier, "schedule": "multistage"}
        few: dict[str, Any] = {"slots": 2}
        ways: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}), (staged, staged), (few, staged), (staged, few)]
        for within, around in ways:

            def outer(h: Tensor, x: Tensor, within: dict[str, Any] = within) -> tuple[Tensor, Tensor]:
                h, ys = scan(inner, h, x, **within)
                return h, ys.sum()

            loop = Loop(outer, torch.zeros(BATCH, WIDTH), xs, [weight])
            results.append(outcome(loop, scanning(**around)))
        tier.wait()
        tier.has_room(1)
        free = sum(size * len(slots) for size, slots in tier._file._free.items())
        assert free == tier._file._end, "every slot came back"
    assert all(same(found, results[0]) for found in results)


@pytest.mark.parametrize("make", [lstm, own_generator])
def test_two_threads(make: Callable[[int], Loop]) -> None:
    """With random numbers as well, where they come from generators of their own: there is one default for all."""
    loops = [make(30) for _ in range(2)]
    expected = [outcome(loop, written_out)[:-1] for loop in loops]
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        way = WAYS["disk"] if number else WAYS["revolve"]
        found[number] = outcome(loops[number], scanning(**way))[:-1]

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "deadlock"
    assert all(same(found[number], expected[number]) for number in range(2))


def test_hooks_see_whole_gradients_once() -> None:
    loop = lstm(10)
    seen: list[Tensor] = []
    expected = outcome(loop, written_out)
    handle = loop.watched[0].register_hook(lambda gradient: seen.append(gradient.clone()))
    assert same(outcome(loop, scanning(slots=3)), expected)
    assert len(seen) == 1
    assert torch.equal(seen[0], expected[2])
    handle.remove()


def test_some_gradients_may_not_be_wanted() -> None:
    loop = by_hand(9)
    for pick in (lambda carry, ys: ys[0][4].sum(), lambda carry, ys: carry["a"].sum(), lambda carry, ys: ys[1].sum()):
        runs = (written_out, scanning(slots=2))
        gradients = [torch.autograd.grad(pick(*run(loop, None)), loop.watched) for run in runs]
        assert same(list(gradients[0]), list(gradients[1]))


def test_parameters_written_to_before_backward_are_noticed() -> None:
    loop = words(5)
    carry, _ = scan(loop.step, loop.carry, loop.xs, slots=2)
    with torch.no_grad():
        loop.watched[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        carry.sum().backward()


def test_backward_happens_once() -> None:
    loop = words(5)
    carry, _ = scan(loop.step, loop.carry, loop.xs, slots=2)
    carry.sum().backward(retain_graph=True)
    with pytest.raises(EncoreError, match="gone after one backward"):
        carry.sum().backward()
