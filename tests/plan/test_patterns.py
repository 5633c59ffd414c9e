"""Plans that are carried over to graphs of other sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from encore.cost import AssumedSeconds, Workspaces
from encore.fates import Recompute
from encore.plan import Candidate, Planner, PlanPattern, keep_everything, roles_of
from encore.plan.patterns import Fates, stretched
from support.captured_graphs import captured

KEEP: Fates = ()
AGAIN: Fates = (("recompute", "recompute"),)
CODE: Fates = (("encode", "bits"),)


@pytest.mark.parametrize(
    ("fates", "count", "expected"),
    [
        ([AGAIN, KEEP, CODE], 3, [AGAIN, KEEP, CODE]),
        ([AGAIN, AGAIN, AGAIN], 5, [AGAIN] * 5),
        ([AGAIN, KEEP, AGAIN, KEEP], 7, [AGAIN, KEEP, AGAIN, KEEP, AGAIN, KEEP, AGAIN]),
        ([AGAIN, AGAIN, KEEP, KEEP], 8, [AGAIN] * 4 + [KEEP] * 4),
        ([AGAIN, AGAIN, KEEP, KEEP, KEEP, KEEP], 3, [AGAIN, KEEP, KEEP]),
        ([*[AGAIN] * 9, KEEP], 5, [*[AGAIN] * 4, KEEP]),
        ([CODE, *[AGAIN, KEEP] * 3, CODE], 6, [CODE, AGAIN, KEEP, AGAIN, KEEP, CODE]),
        ([KEEP, KEEP, *[AGAIN] * 5, CODE], 4, [KEEP, AGAIN, AGAIN, CODE]),
        ([AGAIN, AGAIN, KEEP, KEEP, CODE, CODE], 2, [AGAIN, KEEP]),
        ([AGAIN], 3, [AGAIN] * 3),
        ([AGAIN], 0, []),
    ],
)
def test_fates_of_a_longer_or_shorter_loop(fates: Sequence[Fates], count: int, expected: Sequence[Fates]) -> None:
    assert stretched(fates, count) == expected


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8)) for _ in range(4))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().sum()


@functools.cache
def planner(rows: int) -> Planner:
    torch._dynamo.reset()
    graph = captured(Deep(), torch.randn(rows, 8)).unplanned.schedule.graph
    workspaces = Workspaces(run=False)
    return Planner(keep_everything(graph, workspaces), workspaces, AssumedSeconds())


def names(planner: Planner, candidate: Candidate) -> set[tuple[str, str]]:
    return {(planner.graph.values[fate.value].name, fate.label) for fate in candidate.fates}


def patterns(planner: Planner) -> list[PlanPattern]:
    roles = roles_of(planner.graph)
    return [PlanPattern.of(roles, one) for one in planner.candidate_plans()[1:]]


def test_plans_carried_over_give_the_same_values_the_same_fates() -> None:
    searched, other = planner(512), planner(700)
    known = patterns(searched)
    assert known
    carried = other.carried_plans(known)
    assert [names(other, one) for one in carried] == [names(searched, one) for one in searched.candidate_plans()]
    assert [one.found_with for one in carried] == [one.found_with for one in searched.candidate_plans()]
    for one in carried:
        assert one.plan.timeline.step_peak < one.step_peak * 1.4, "built for the sizes at hand"


def test_nothing_is_searched_for_carried_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    known = patterns(planner(512))
    monkeypatch.setattr(Planner, "_searches", lambda self: pytest.fail("a search"))
    assert len(planner(300).carried_plans(known)) > 1


def test_a_pattern_names_no_value() -> None:
    one, other = planner(512), planner(300)
    for candidate in one.candidate_plans()[1:]:
        pattern = PlanPattern.of(roles_of(one.graph), candidate)
        dropped = {fate.value for fate in candidate.fates if isinstance(fate, Recompute)}
        assert set(pattern.recomputed(roles_of(one.graph))) == dropped
        assert set(pattern.recomputed(roles_of(other.graph))) == dropped, "the graphs have the same values by number"


def test_plans_of_another_form_are_left_out() -> None:
    other = planner(512)
    known = [PlanPattern(one.fates, lean=True, slices=4, found_with=one.found_with) for one in patterns(other)]
    assert len(other.carried_plans(known)) == 1
