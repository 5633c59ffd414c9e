"""The fastest step within a budget, solved exactly: a mixed integer program like Checkmate's (Jain et al. 2020).

Forward runs once. Backward's operators run in their order, a stage each; before each, any operator of forward may run
again, in forward's order, however often. What is decided is what every stage begins with and what runs again in it;
what is alive follows, by the simulator's rules: memory belongs to owners, a value goes after its last reader, and a
pointwise operator writes over an operand that dies there, if this phase has made it. The answer is written out as a
schedule, so that the simulator and the replayer can judge it. For operators with one result and no workspace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from encore.fates import owners, recomputable
from encore.graph import Graph, Op, OpClass, Storage, Value
from encore.graph.values import Ref, map_refs, refs
from encore.plan.seconds import ActionSeconds
from encore.schedule import Schedule
from encore.schedule.order import free_at_last_use, order_backward
from encore.schedule.reuse import write_over_dying

Sum = dict[int, float]
"""A linear expression: a factor for every variable in it, by number."""
INFEASIBLE = 2
"""What HiGHS answers where there is no solution."""


@dataclass(frozen=True)
class Optimum:
    """The fastest step that fits."""

    schedule: Schedule
    seconds: float
    """What is run again costs this much."""


class Program:
    """The program of one graph, to be solved for one budget after the other."""

    def __init__(self, graph: Graph, seconds: ActionSeconds) -> None:
        self.graph = graph
        self.owner = owners(graph, forward_only=False)
        self.order, _ = order_backward(graph)
        self.forward = [op for op in graph.ops if op.forward and op.kind is not OpClass.VIEW]
        self.backward = [op for op in self.order if op.kind is not OpClass.VIEW]
        assert all(len(op.writes) == 1 for op in (*self.forward, *self.backward)), "one result each"
        self.place = {op.writes[0]: number for number, op in enumerate(self.forward)}
        """By forward value: its number. Values and the operators that make them have the same."""
        self.size = [graph.bytes_of(self._result(op)) for op in self.forward]
        self.inputs = [self._forward_values(op.reads) for op in self.forward]
        self.asked = [self._forward_values(op.reads) for op in self.backward]
        self.over = [self._written_over(op) for op in (*self.forward, *self.backward)]
        held = {graph.values[value].storage for value in (*graph.outputs, *graph.gradients) if value is not None}
        self.outputs = {number for number, op in enumerate(self.forward) if self._storage(op) in held}
        free = recomputable(graph)
        self.again = {number for number, op in enumerate(self.forward) if op.writes[0] in free}
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[Sum, float]] = []
        self.moments: list[tuple[Sum, float]] = []
        self._variables()
        self._availability()
        self._forward_memory()
        self._backward_memory()
        self.cost = {
            variable: seconds(graph, self.forward[number]) for row in self.runs for number, variable in row.items()
        }

    # -- the graph, without its views --------------------------------------------------------------------------------

    def _result(self, op: Op) -> int:
        (value,) = op.writes
        assert value is not None
        return value

    def _storage(self, op: Op) -> int | None:
        return self.graph.values[self._result(op)].storage

    def _forward_values(self, values: Iterable[int]) -> list[int]:
        made = (self.place.get(self.owner.get(value, value)) for value in values)
        return [number for number in dict.fromkeys(made) if number is not None]

    def _written_over(self, op: Op) -> set[int]:
        """Owners whose memory the operator would take over if they died there and were this phase's own."""
        return {
            self.owner[value]
            for value in op.reads
            if value in self.owner
            and write_over_dying(
                self.graph, [op], {value: 0}, frozenset(), frozenset(other for other in op.reads if other != value)
            )
        }

    # -- the program -------------------------------------------------------------------------------------------------

    def _variable(self, upper: float = 1, *, whole: bool = False) -> int:
        self.lower.append(0)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.lower) - 1

    def _at_least(self, sum_: Sum, bound: float) -> None:
        self.rows.append((sum_, bound))

    def _variables(self) -> None:
        stages, values = range(len(self.backward)), range(len(self.forward))
        self.runs = [{number: self._variable(whole=True) for number in values if number in self.again} for _ in stages]
        """By stage: is this operator run again in it?"""
        self.held = [[self._variable(whole=True) for _ in values] for _ in stages]
        """By stage: does it begin with this value?"""
        self.held.append([self._variable(0) for _ in values])

    def _availability(self) -> None:
        for stage, runs in enumerate(self.runs):
            held, later = self.held[stage], self.held[stage + 1]
            for number in range(len(self.forward)):
                there = {held[number]: 1.0} | ({runs[number]: 1.0} if number in runs else {})
                if number not in self.outputs:
                    self._at_least({**there, later[number]: -1}, 0)
                    if number in self.asked[stage]:
                        self._at_least(there, 1)
                if number in runs:
                    self._at_least(dict.fromkeys(there, -1.0), -1)
                for reader in range(len(self.forward)):
                    if reader in runs and number in self.inputs[reader] and number not in self.outputs:
                        self._at_least({**there, runs[reader]: -1}, 0)

    def _forward_memory(self) -> None:
        last = list(range(len(self.forward)))
        for position, reads in enumerate(self.inputs):
            for number in reads:
                last[number] = position
        for position in range(len(self.forward)):
            saved: Sum = {}
            static = 0.0
            for number in range(position + 1):
                if number in self.outputs or last[number] >= position:
                    static += self.size[number]
                else:
                    saved[self.held[0][number]] = self.size[number]
            dying = [
                number
                for number in self.inputs[position]
                if last[number] == position
                and number not in self.outputs
                and self.forward[number].writes[0] in self.over[position]
            ]
            if dying:
                reused = self._variable()
                saved[reused] = -self.size[position]
                self._at_least({reused: -1, **{self.held[0][number]: -1.0 for number in dying}}, -len(dying))
            self.moments.append((saved, static))

    def _backward_memory(self) -> None:
        final = len(self.forward)
        outputs = sum(self.size[number] for number in self.outputs)
        before, during = self._gradients_alive()
        for stage, runs in enumerate(self.runs):
            alive = [self._alive(stage, number) for number in range(final)]
            for position in (*runs, final):
                memory = {
                    alive[number][position]: float(self.size[number])
                    for number in range(final)
                    if number not in self.outputs and position in alive[number]
                }
                fresh = (
                    self.size[position] if position < final else self.graph.bytes_of(self._result(self.backward[stage]))
                )
                if position < final or not self._statically_over(stage):
                    reused = self._reuse(stage, position, alive)
                    if reused is not None:
                        memory[reused] = -fresh
                self.moments.append((memory, outputs + (during if position == final else before)[stage]))

    def _alive(self, stage: int, number: int) -> dict[int, int]:
        """By moment of a stage (the operators run again in it, then backward's own): is the value there?"""
        runs, later, final = self.runs[stage], self.held[stage + 1][number], len(self.forward)
        moments = [*runs, final]
        found: dict[int, int] = {}
        for position in moments:
            made = runs.get(number)
            if number in self.outputs:
                continue
            if (
                made is None
                and number not in self.asked[stage]
                and not any(number in self.inputs[reader] for reader in runs)
                and stage == len(self.backward) - 1
            ):
                continue
            found[position] = variable = self._variable()
            fresh = {} if made is None or number <= position else {made: 1.0}
            self._at_least({variable: 1.0, later: -1.0, **fresh}, 0)
            if number in self.asked[stage]:
                self._at_least({variable: 1.0, **fresh}, 1)
            for reader in runs:
                if reader >= position and number in self.inputs[reader]:
                    self._at_least({variable: 1.0, runs[reader]: -1.0, **fresh}, 0)
            if number == position:
                assert made is not None
                self._at_least({variable: 1.0, made: -1.0}, 0)
        return found

    def _reuse(self, stage: int, position: int, alive: list[dict[int, int]]) -> int | None:
        """Does the operator at this moment write over something that was made again and dies there?"""
        final = len(self.forward)
        item = position if position < final else final + stage
        reads = self.inputs[position] if position < final else self.asked[stage]
        runs = self.runs[stage]
        each = []
        for number in reads:
            if number not in self.again or self.forward[number].writes[0] not in self.over[item]:
                continue
            one = self._variable()
            after = [moment for moment in (*runs, final) if moment > position]
            dead_then = alive[number].get(after[0]) if after else self.held[stage + 1][number]
            if dead_then is not None:
                self._at_least({one: -1, dead_then: -1}, -1)
            made = {self.runs[earlier][number]: 1.0 for earlier in range(stage + 1)}
            self._at_least({**made, one: -1}, 0)
            each.append(one)
        if not each:
            return None
        reused = self._variable()
        self._at_least({reused: -1, **dict.fromkeys(each, 1.0)}, 0)
        if position < final:
            self._at_least({reused: -1, runs[position]: 1.0}, 0)
        return reused

    def _gradients_alive(self) -> tuple[list[float], list[float]]:
        """Bytes of backward's own values before each of its operators, and with its result."""
        graph = self.graph
        place = {self._result(op): stage for stage, op in enumerate(self.backward)}
        last = dict(place.items())
        for stage, op in enumerate(self.backward):
            for value in op.reads:
                if (owner := self.owner.get(value, value)) in last:
                    last[owner] = stage
        for gradient in graph.gradients:
            if gradient is not None and (owner := self.owner.get(gradient, gradient)) in last:
                last[owner] = len(self.backward)
        self.last_backward = last
        tangents = {graph.values[value].storage for value in graph.tangents} - graph.external
        always = sum(graph.storages[storage].bytes for storage in tangents if storage is not None)
        before, during = [], []
        for stage, op in enumerate(self.backward):
            alive = sum(graph.bytes_of(value) for value, made in place.items() if made < stage <= last[value])
            before.append(float(always + alive))
            fresh = 0 if self._statically_over(stage) else graph.bytes_of(self._result(op))
            during.append(float(always + alive + fresh))
        return before, during

    def _statically_over(self, stage: int) -> bool:
        item = len(self.forward) + stage
        return any(self.last_backward.get(value) == stage for value in self.over[item])

    # -- its solution ------------------------------------------------------------------------------------------------

    def within(self, budget: int) -> Optimum | None:
        """The fastest step that holds at most `budget` bytes, if there is one."""
        rows = [*self.rows, *((_negated(memory), static - budget) for memory, static in self.moments)]
        solution = self._solve(rows, self.cost)
        return None if solution is None else self._optimum(solution)

    def floor(self) -> int:
        """The lowest peak there is, at any price."""
        highest = self._variable(np.inf)
        rows = [*self.rows, *(({highest: 1.0, **_negated(memory)}, static) for memory, static in self.moments)]
        solution = self._solve(rows, {highest: 1.0})
        assert solution is not None
        for bounds in (self.lower, self.upper, self.whole):
            bounds.pop()
        return round(solution[highest])

    def _solve(self, rows: list[tuple[Sum, float]], cost: Sum) -> np.ndarray | None:
        count = len(self.lower)
        entries = [(row, column, factor) for row, (sum_, _) in enumerate(rows) for column, factor in sum_.items()]
        across, down, factors = zip(*entries, strict=True)
        matrix = csr_array((factors, (across, down)), shape=(len(rows), count))
        objective = np.zeros(count)
        for variable, price in cost.items():
            objective[variable] = price
        scale = objective.max()
        answer = milp(
            objective / scale,
            constraints=LinearConstraint(matrix, lb=np.array([bound for _, bound in rows])),
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            integrality=np.array(self.whole, dtype=int),
            options={"mip_rel_gap": 1e-4},
        )
        if answer.status == INFEASIBLE:
            return None
        assert answer.success, answer.message
        return answer.x

    def _optimum(self, solution: np.ndarray) -> Optimum:
        again = [[number for number, variable in runs.items() if solution[variable] > 0.5] for runs in self.runs]
        seconds = sum(price for variable, price in self.cost.items() if solution[variable] > 0.5)
        return Optimum(_Writer(self, again).schedule(), seconds)


def _negated(sum_: Sum) -> Sum:
    return {variable: -factor for variable, factor in sum_.items()}


class _Writer:
    """The schedule in which each stage runs again what it was told to. Views are taken where they are read."""

    def __init__(self, program: Program, again: list[list[int]]) -> None:
        self.program = program
        self.graph = program.graph
        self.again = again
        self.values: list[Value] = [dataclasses.replace(value, readers=[]) for value in self.graph.values]
        self.storages: list[Storage] = [
            dataclasses.replace(storage, values=list(storage.values)) for storage in self.graph.storages
        ]
        self.order: list[Op] = []
        self.copies: dict[int, int] = {}
        self.there: set[int] = set()

    def schedule(self) -> Schedule:
        graph = self.graph
        for stage, op in enumerate(self.program.backward):
            for number in self.again[stage]:
                original = self.program.forward[number]
                self.copies[self.program._result(original)] = self._copy(original)
            self.order.append(self._reading(op))
        for gradient in graph.gradients:
            if gradient is not None:
                self._current(gradient)
        return self._scheduled()

    def _scheduled(self) -> Schedule:
        forward = [op for op in self.graph.ops if op.forward]
        fresh = [op for op in self.order if not op.forward]
        ops = [dataclasses.replace(op, id=number) for number, op in enumerate((*forward, *fresh))]
        numbered = {op.name: op for op in ops}
        assert len(numbered) == len(ops)
        for op in ops:
            for written in op.writes:
                if written is not None:
                    self.values[written].producer = op.id
            for read in op.reads:
                self.values[read].readers.append(op.id)
        graph = dataclasses.replace(self.graph, values=self.values, storages=self.storages, ops=ops)
        order = [numbered[op.name] for op in self.order]
        made = {value for op in order for value in op.writes} | {*graph.tangents, *graph.constants}
        saved = tuple(dict.fromkeys(value for op in order for value in op.reads if value not in made))
        outputs = {value for value in graph.outputs if value is not None}
        gradients = {value for value in graph.gradients if value is not None}
        constants = set(graph.constants)
        return Schedule(
            graph=graph,
            forward=free_at_last_use(graph, ops[: len(forward)], graph.primals, keep=outputs | {*saved} | constants),
            backward=free_at_last_use(graph, order, (*saved, *graph.tangents), keep=gradients | constants),
            saved=saved,
        )

    def _current(self, value: int) -> int:
        """What stands for a value now: itself or its latest copy, looked at in the same way."""
        producer = self.graph.producer(value)
        if producer is None or producer.kind is not OpClass.VIEW:
            return self.copies.get(value, value)
        if self.program.owner[value] in self.copies:
            return self._copy(producer)
        if value not in self.there:
            self.there.add(value)
            self.order.append(self._reading(producer))
        return value

    def _reading(self, op: Op) -> Op:
        now = {read: self._current(read) for read in op.reads}
        if all(read == current for read, current in now.items()):
            return op
        args, kwargs = map_refs((op.args, op.kwargs), lambda value: Ref(now[value]))
        return dataclasses.replace(op, args=args, kwargs=kwargs, reads=tuple(dict.fromkeys(refs((args, kwargs)))))

    def _copy(self, op: Op) -> int:
        copy = self._reading(op)
        result = self.graph.values[self.program._result(op)]
        name = f"{op.name}_{len(self.values)}"
        if op.kind is OpClass.VIEW:
            storage = self.values[copy.reads[0]].storage
        else:
            assert result.storage is not None
            storage = len(self.storages)
            self.storages.append(dataclasses.replace(self.storages[result.storage], id=storage, values=[]))
        made = dataclasses.replace(result, id=len(self.values), name=name, storage=storage, readers=[], role=None)
        self.values.append(made)
        assert storage is not None
        self.storages[storage].values.append(made.id)
        self.order.append(dataclasses.replace(copy, name=name, writes=(made.id,), forward=False))
        return made.id
