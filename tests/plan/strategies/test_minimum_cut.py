"""The smallest cut is the smallest there is, found by trying all of them on random graphs."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from encore.graph import Graph, verify_graph
from encore.plan.strategies import STRATEGIES, Forward, echo, min_cut, mirror
from encore.plan.strategies.max_flow import Network
from encore.plan.strategies.minimum_cut import recomputable_values
from support.hand_made_graphs import Drawing
from support.recompute_reference import kept_bytes

Drawn = tuple[bool, bool, list[int], int, bool]
"""Of an operator: is it cheap, is it read through a view, how far back its operands lie, its bytes, is it needed?"""

operators = st.tuples(
    st.booleans(), st.booleans(), st.lists(st.integers(1, 4), max_size=3), st.integers(1, 9), st.booleans()
)


def draw(drawn: list[Drawn]) -> Graph:
    drawing = Drawing()
    values = [drawing.primal(5)]
    needed = []
    for cheap, viewed, distances, size, is_needed in drawn:
        operands = [values[-min(distance, len(values))] for distance in distances] or [values[0]]
        value = (drawing.cheap if cheap else drawing.heavy)(*operands, size=size)
        values.append(drawing.view(value) if viewed else value)
        if is_needed:
            needed.append(values[-1])
    for value in needed:
        drawing.needs(value)
    verify_graph(drawing.graph)
    return drawing.graph


@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn=st.lists(operators, max_size=9))
def test_no_other_choice_keeps_fewer_bytes(drawn: list[Drawn]) -> None:
    graph = draw(drawn)
    cheap = recomputable_values(Forward.of(graph))
    choices = itertools.chain.from_iterable(itertools.combinations(cheap, count) for count in range(len(cheap) + 1))
    fewest = min(kept_bytes(graph, choice) for choice in choices)
    assert kept_bytes(graph, min_cut(graph)) == fewest
    assert kept_bytes(graph, echo(graph)) >= fewest
    assert kept_bytes(graph, mirror(graph)) >= fewest


@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn=st.lists(operators, max_size=40))
def test_every_strategy_proposes_only_what_may_be_dropped(drawn: list[Drawn]) -> None:
    graph = draw(drawn)
    allowed = Forward.of(graph).droppable
    for strategy in STRATEGIES.values():
        dropped = strategy(graph)
        assert dropped <= allowed
        assert dropped == strategy(graph)


def test_a_narrow_end_behind_a_wide_middle_is_kept_where_echo_looks_no_further() -> None:
    drawing = Drawing()
    begin = drawing.heavy(drawing.primal(1), size=100)
    middle = drawing.cheap(begin, size=1000)
    end = drawing.cheap(middle, size=10)
    drawing.needs(end)
    assert min_cut(drawing.graph) == frozenset()
    assert kept_bytes(drawing.graph) == 10
    assert echo(drawing.graph) == {middle, end}
    assert kept_bytes(drawing.graph, echo(drawing.graph)) == 100


def test_of_equal_cuts_the_one_closest_to_backward_is_taken() -> None:
    drawing = Drawing()
    begin = drawing.heavy(drawing.primal(1), size=10)
    middle = drawing.cheap(begin, size=10)
    drawing.needs(drawing.cheap(middle, size=10))
    assert min_cut(drawing.graph) == frozenset()


def test_the_flow_through_a_textbook_network() -> None:
    """Cormen et al., figure 26.1: 23 units from the factory to the warehouse."""
    network = Network()
    s, v1, v2, v3, v4, t = (network.node() for _ in range(6))
    edges: list[tuple[Any, ...]] = [
        (s, v1, 16), (s, v2, 13), (v1, v3, 12), (v2, v1, 4), (v2, v4, 14), (v3, v2, 9), (v3, t, 20), (v4, v3, 7),
        (v4, t, 4),
    ]  # fmt: skip
    for edge in edges:
        network.edge(*edge)
    assert network.fill(s, t) == 23
    assert network.before(t) == {t, v3}
