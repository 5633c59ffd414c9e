"""Ranks of a sharded model run the same plans: the first rank to plan a step decides, and the others take its plans.

Ranks time operators each for themselves, and would plan differently: then some recompute while others wait for them.
No rank waits for a decision, so ranks may have batches of other shapes, which are planned apart. What a decision is
about is its key: the options, the calls of the step and how often it was planned. A plan that a rank takes over is
compared with what the rank would publish for it, so a difference in Encore or PyTorch is an error, not another plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from encore.capture import torch_private
from encore.errors import BudgetError, RanksDisagreeError
from encore.plan import GraphPlan
from encore.plan.calls import Around, SharedBudget, SharedChoice

if TYPE_CHECKING:
    from encore.compiler.call_plans import CallPlans
    from encore.options import Options

Decision = SharedChoice | BudgetError

_numbers: defaultdict[tuple[tuple[int, ...], str], Iterator[int]] = defaultdict(itertools.count)
"""Of models with one name: all ranks compile them in one order."""


class RankAgreement:
    """What the ranks that share a sharded model decide together."""

    def __init__(self, name: str, options: Options, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._options = repr(dataclasses.replace(options, plan=None))
        self._name = name
        self._number = next(_numbers[self._ranks, name])

    def require_same_options(self) -> None:
        """Raise if a rank has other options than the first."""
        mine = self._options
        first = self._first(f"options of {self._name} {self._number}", mine)
        if first != mine:
            raise RanksDisagreeError(
                f"the ranks of {self._name} were given different options: {mine} here, {first} on another rank. All "
                "ranks run the same plan; call encore.compile with the same options on every rank"
            )

    def decided(
        self,
        when: str,
        plans: Sequence[CallPlans],
        around: Sequence[Around],
        mine: Decision,
        least: int = 0,
    ) -> SharedChoice:
        """The choice of the first rank that planned this step; raises the error that it has raised. `plans` are those
        of every call."""
        distinct = list(dict.fromkeys(plans))
        graphs = [one.fingerprint for one in distinct]
        calls = [distinct.index(one) for one in plans]
        question = hashlib.sha256(json.dumps([self._options, graphs, calls, when]).encode()).hexdigest()
        first = json.loads(self._first(f"plan {question}", json.dumps(_published(plans, mine))))
        if "error" in first:
            raise (
                BudgetError(f"another rank found: {first['error']}", floor=first["floor"])
                if isinstance(mine, SharedChoice)
                else mine
            )
        if isinstance(mine, SharedChoice) and first == _published(plans, mine):
            return mine
        numbers = tuple(
            _adopted(one, GraphPlan.parse(first["plans"][place], "the plan of another rank"))
            for one, place in zip(plans, first["calls"], strict=True)
        )
        costs = [one.costs[number] for one, number in zip(plans, numbers, strict=True)]
        peak = SharedBudget(around, [[cost] for cost in costs], least=least).floor
        taken = SharedChoice(numbers, peak, sum(cost.seconds for cost in costs))
        ours = _published(plans, taken)
        if ours != first:
            raise RanksDisagreeError(
                f"this rank cannot run the plan of {self._name} that another rank chose: its plan is "
                f"{_digest(first)} there and {_digest(ours)} here. All ranks need the same versions of Encore and "
                "PyTorch and the same ENCORE_ variables"
            )
        return taken

    def _first(self, key: str, mine: str) -> str:
        """The value that the first of the ranks gave."""
        return torch_private.first_value(f"encore {self._ranks} {key}", mine) if torch_private.has_ranks() else mine


def _published(plans: Sequence[CallPlans], decision: Decision) -> Mapping[str, Any]:
    if isinstance(decision, BudgetError):
        return {"error": decision.message, "floor": decision.floor}
    numbers = list(zip(plans, decision.plans, strict=True))
    distinct = list(dict.fromkeys(numbers))
    data = [json.loads(one.graph_plan(number).to_json()) for one, number in distinct]
    return {"plans": data, "calls": [distinct.index(one) for one in numbers]}


def _adopted(plans: CallPlans, plan: GraphPlan) -> int:
    """The number of a plan among those of a graph, to which it is added if it is none of them."""
    known = (number for number in range(len(plans.candidates)) if plans.graph_plan(number) == plan)
    number = next(known, None)
    return plans.add(plan) if number is None else number


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
