"""Whoever may do more is never answered worse: as small within the same time, as fast within the same memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from benchmarks.workloads.inception import Inception
from encore.codecs import CODECS, Share
from encore.options import Budget, Options
from encore.plan import Candidate, Methods, candidates_of, choose, keep_everything
from encore.plan.plan import Plan
from encore.plan.planner import Planner
from support.captured_graphs import captured
from support.mask_models import Gated
from support.random_steps import ByBytes, kept_step, no_workspace

LOSSLESS = tuple(name for name, codec in CODECS.items() if codec.lossless)
SETS = {
    "recompute": Methods(),
    "encode": Methods(frozenset(), codecs=LOSSLESS),
    "encode, lossy": Methods(frozenset(), codecs=tuple(CODECS)),
    "both": Methods(codecs=LOSSLESS),
    "both, lossy": Methods(codecs=tuple(CODECS)),
}
MORE = [(few, many) for few, many in itertools.permutations(SETS, 2) if SETS[few].within(SETS[many])]
OVERHEADS = (0.01, 0.1, 1.0)


class TwoInceptions(nn.Module):
    """A stem and two modules of four branches, one of which pools: as GoogLeNet has nine of."""

    def __init__(self) -> None:
        super().__init__()
        first = Inception(16, [8, 12, 16, 4, 8, 8])
        second = Inception(first.outputs, [16, 16, 24, 4, 12, 8])
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), first, second, nn.MaxPool2d(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3)).logsumexp(1).sum()


def offered(kept: Plan, density: float) -> dict[str, list[Candidate]]:
    """By set of methods, for a step whose maps are so dense."""
    densities = {Share.NON_ZEROS: {value.name: density for value in kept.schedule.graph.values}}
    return {
        name: candidates_of([Planner(kept, no_workspace, ByBytes(), methods=methods, densities=densities)])
        for name, methods in SETS.items()
    }


def assert_more_is_no_worse(candidates: dict[str, list[Candidate]]) -> None:
    for few, many in MORE:
        for overhead in OVERHEADS:
            options = Options(overhead=overhead)
            theirs, ours = (choose(candidates[name], options).plan for name in (few, many))
            assert ours.timeline.step_peak <= theirs.timeline.step_peak, (few, many, overhead)
            budget = Budget(bytes=theirs.timeline.resident + theirs.timeline.step_peak)
            theirs, ours = (choose(candidates[name], Options(budget=budget)).plan for name in (few, many))
            assert ours.overhead <= theirs.overhead, (few, many, budget)


def test_sets_of_methods_come_with_all_that_are_within_them() -> None:
    found = SETS["both, lossy"].narrower()
    assert found[-1] == SETS["both, lossy"]
    assert all(methods in found and methods.within(found[-1]) for methods in SETS.values())
    assert all(
        found.index(few) < found.index(many) for few, many in itertools.permutations(found, 2) if few.within(many)
    )
    with_tiers = frozenset({"recompute", "offload"})
    assert Methods(with_tiers) in Methods(with_tiers, LOSSLESS).narrower()
    assert len(MORE) == 7


@pytest.mark.parametrize("seed", range(3))
def test_on_random_steps(seed: int) -> None:
    assert_more_is_no_worse(offered(kept_step(seed), 0.5))


def test_on_masks() -> None:
    torch._dynamo.reset()
    assert_more_is_no_worse(offered(captured(Gated(), torch.randn(512, 64)).unplanned, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.4, 0.7])
def test_on_inception_modules(density: float) -> None:
    torch._dynamo.reset()
    found = captured(TwoInceptions(), torch.randn(4, 3, 32, 32), overhead=1e-9)
    kept = keep_everything(found.plan.schedule.graph, no_workspace)
    candidates = offered(kept, density)
    assert_more_is_no_worse(candidates)
    smallest = {name: min(candidate.plan.timeline.step_peak for candidate in candidates[name]) for name in SETS}
    assert smallest["both"] < min(smallest["recompute"], smallest["encode"])
