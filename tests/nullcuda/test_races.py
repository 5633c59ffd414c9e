"""Tiers on streams: random programs have no race and read what was stored; without any one of the tiers' guards, races
are seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from encore.tiers import Tier
from nullcuda.noted_tiers import NotedTiers, all_guards, without_guard
from nullcuda.schedules import Found, run_program

GUARDS = all_guards()
NAMES = ("host", "disk")


def maker(tiers: NotedTiers, name: str, folder: Path) -> Callable[[int], Tier]:
    if name == "host":
        return lambda depth: tiers.host(depth=depth)
    return lambda depth: tiers.disk(folder, depth=depth, workers=1 + depth % 2)


def runs(name: str, seeds: range, folder: Path) -> list[Found]:
    make = maker(NotedTiers(), name, folder)
    return [run_program(make, seed) for seed in seeds]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(500), marks=pytest.mark.slow)], ids=len)
def test_random_programs_have_no_race(name: str, seeds: range, tmp_path: Path) -> None:
    found = runs(name, seeds, tmp_path)
    assert [one.races for one in found if one.races] == []
    assert sum(one.wrong for one in found) == 0
    assert sum(one.stored for one in found) > 5 * len(seeds)
    assert sum(one.loaded for one in found) > 2 * len(seeds)


@pytest.mark.parametrize(("module", "number", "guard"), GUARDS, ids=[f"{one[0]}, {one[2]}" for one in GUARDS])
def test_every_guard_is_noticed_when_it_is_taken_away(module: str, number: int, guard: str, tmp_path: Path) -> None:
    tiers = without_guard(module, number)
    names = [name for name in NAMES if module in ("layout", "streams", "tier", name)]
    for seed in range(200):
        for name in names:
            if run_program(maker(tiers, name, tmp_path), seed).races:
                return
    raise AssertionError(f"nothing notices that {guard!r} is missing in tiers/{module}.py")
