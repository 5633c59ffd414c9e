"""Which pairs of activation and lossy codec are admitted within a bound."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from encore.plan.admission import LossyCandidate, admit, worst_of


def candidates(seed: int, activations: int, codecs: int) -> list[LossyCandidate]:
    draw = random.Random(seed)
    return [
        LossyCandidate(f"v{value}", f"c{codec}", draw.randrange(1, 1000), draw.uniform(1e-4, 0.02))
        for value in range(activations)
        for codec in range(codecs)
    ]


def together(found: list[LossyCandidate], admitted: frozenset[tuple[str, str]]) -> float:
    return math.hypot(*(one.error for one in worst_of(found, admitted).values()))


@pytest.mark.parametrize("seed", range(20))
def test_any_choice_among_the_admitted_stays_within_the_bound(seed: int) -> None:
    found = candidates(seed, 12, 5)
    sizes = []
    for allowed in (0.001, 0.01, 0.03, 1.0):
        admitted = admit(found, allowed)
        assert together(found, admitted) <= allowed
        sizes.append(len({value for value, _ in admitted}))
    assert sizes == sorted(sizes)
    assert sizes[-1] == 12


@pytest.mark.parametrize("seed", range(20))
def test_bytes_saved_are_close_to_the_most_there_can_be(seed: int) -> None:
    """Against every combination: the greedy walk over hulls misses at most one step."""
    found, allowed = candidates(seed, 4, 3), 0.015
    by_value = [[None, *(one for one in found if one.value == f"v{value}")] for value in range(4)]
    best = 0
    for chosen in itertools.product(*by_value):
        taken = [one for one in chosen if one is not None]
        if math.hypot(*(one.error for one in taken)) <= allowed:
            best = max(best, sum(one.saved for one in taken))
    admitted = admit(found, allowed)
    mine = 0
    for value in range(4):
        mine += max(
            (one.saved for one in found if (one.value, one.codec) in admitted and one.value == f"v{value}"), default=0
        )
    assert best - max(one.saved for one in found) <= mine <= best


def test_a_codec_without_an_error_is_always_admitted() -> None:
    found = [LossyCandidate("v", "exact", 10, 0.0), LossyCandidate("v", "coarse", 20, 0.5)]
    assert admit(found, 1e-9) == {("v", "exact")}
    assert admit(found, 0.6) == {("v", "exact"), ("v", "coarse")}


def test_what_saves_nothing_is_not_admitted() -> None:
    assert admit([LossyCandidate("v", "c", 0, 1e-6), LossyCandidate("w", "c", 5, math.inf)], 0.1) == frozenset()
