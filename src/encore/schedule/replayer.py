"""An independent check of every schedule: execute the stream abstractly.

It shares no code with the scheduler or the simulator. Memory is modelled as blocks; names point to blocks, and the
caller and autograd may keep blocks too. Rejected: a use before definition, a use after free, a read of memory that was
written over, a write over memory that the schedule does not own, a free of what is not there, a name left behind (a
leak), a result that is missing, a byte over the limit; of what is on its way to a tier, a write or a free; of what is
on its way back, a read; a wait for nothing, and a transfer that is never waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from encore.errors import IllegalGraphError
from encore.graph import Graph, Op, refs
from encore.schedule.actions import Action, Free, Fused, Load, Run, Schedule, Store, Wait


@dataclass(slots=True)
class _Block:
    """A piece of memory: how many look at it, how often it was written, whether the schedule may write over it, and
    which way a transfer is moving its bytes."""

    bytes: int
    looks: int = 0
    writes: int = 0
    ours: bool = True
    moving: str = ""


class _Machine:
    def __init__(self, graph: Graph, limit: int | None, workspace: Callable[[Graph, Op | Fused], int]) -> None:
        self.graph = graph
        self.limit = limit
        self.workspace = workspace
        self.names: dict[int, tuple[_Block, int]] = {}
        """Value -> its block, and how often that had been written when the value was made."""
        self.moving: dict[int, _Block] = {}
        """Operator of a transfer that has not been waited for -> the memory it reads or fills."""
        self.live = 0
        self.highest = 0

    def give(self, values: Iterable[int], *, charged: bool) -> None:
        """Bring values in that the caller keeps; aliases of one storage share a block."""
        blocks: dict[int, _Block] = {}
        for value in values:
            block = self._block_in(blocks, value, charged)
            block.ours = False
            self._look(block)
            self._define(value, block)

    def give_copies(self, values: Iterable[int]) -> None:
        """Bring in copies of values that the caller keeps; the copies are the schedule's alone."""
        blocks: dict[int, _Block] = {}
        for value in values:
            self.live += self.graph.values[value].bytes
            self._define(value, self._block_in(blocks, value, charged=True))
            self.names[value][0].ours = False

    def follow(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Free):
                if action.value not in self.names:
                    self._fail(f"free of {self._name(action.value)}, which is not there")
                self._forget(action.value)
            elif isinstance(action, Fused):
                self._run_kernel(action)
            elif isinstance(action, Store | Load):
                self._begin(action)
            elif isinstance(action, Wait):
                self._wait(action)
            else:
                self._run(action)

    def expect_exactly(self, values: set[int], phase: str) -> None:
        for op in self.moving:
            self._fail(f"{phase} ends before {self.graph.ops[op].name} is waited for")
        for value in values:
            if value not in self.names:
                self._fail(f"{phase} ends without {self._name(value)}")
            self._check_intact(value, f"{phase} returns")
        left = set(self.names) - values
        if left:
            self._fail(f"{phase} leaks {self._name(min(left))}")

    def hand_out(self, values: Iterable[int]) -> None:
        """The caller or autograd keeps these from now on."""
        for value in values:
            block, _ = self.names[value]
            block.ours = False
            self._look(block)

    def return_from_forward(self, keep: set[int]) -> None:
        """Forward's own names go; what is kept must not be written over, since backward may run twice."""
        for value in set(self.names) - keep:
            self._forget(value)
        for block, _ in self.names.values():
            block.ours = False

    def check_limit(self, extra: int, where: str) -> None:
        self.highest = max(self.highest, self.live + extra)
        if self.limit is not None and self.live + extra > self.limit:
            self._fail(f"{self.live + extra} bytes alive {where}, over the limit of {self.limit}")

    # -- one operator ------------------------------------------------------------------------------------------------

    def _run(self, action: Run) -> None:
        op = self.graph.ops[action.op]
        for value in op.reads:
            if value not in self.names:
                self._fail(f"{op.name} reads {self._name(value)}, which is not there (never made, or freed)")
            self._check_intact(value, f"{op.name} reads")
        results = [value for value in op.writes if value is not None]
        if action.over is not None:
            self._define(results[0], self._written_over(op, action.over, results[0]))
            for value in results[1:]:
                self._define(value, self._block_in({}, value, charged=True))
        else:
            blocks = {
                storage: self.names[value][0]
                for value in op.reads
                if (storage := self.graph.values[value].storage) is not None
            }
            for value in results:
                self._define(value, self._block_in(blocks, value, charged=True))
        self.check_limit(self.workspace(self.graph, op), f"while {op.name} runs")

    def _begin(self, action: Store | Load) -> None:
        """A transfer reads what it is given at once, but for the memory of what it stores, which it reads until a wait;
        what it loads has memory at once, and bytes after a wait."""
        self._run(Run(action.op))
        op = self.graph.ops[action.op]
        (value,) = op.reads if isinstance(action, Store) else op.writes
        assert value is not None
        block, _ = self.names[value]
        if block.moving or action.op in self.moving:
            self._fail(f"{op.name} moves {self._name(value)}, which is being moved")
        block.moving = "out" if isinstance(action, Store) else "back"
        self.moving[action.op] = block

    def _wait(self, action: Wait) -> None:
        if action.op not in self.moving:
            self._fail(f"a wait for {self.graph.ops[action.op].name}, which has not begun")
        self.moving.pop(action.op).moving = ""

    def _run_kernel(self, action: Fused) -> None:
        """A kernel reads all it is given before any of that counts as written; inside, every operator must find what
        it reads among the kernel's operands and the results of the operators before it."""
        name = f"the kernel of {self.graph.ops[action.ops[-1]].name}"
        for value in action.reads:
            if value not in self.names:
                self._fail(f"{name} reads {self._name(value)}, which is not there (never made, or freed)")
            self._check_intact(value, f"{name} reads")
        inside = set(action.reads)
        for op in (self.graph.ops[number] for number in action.ops):
            for value in op.reads:
                if value not in inside:
                    self._fail(f"{op.name} inside {name} reads {self._name(value)}, which the kernel does not have")
            inside.update(value for value in op.writes if value is not None)
        over = dict(action.over)
        if len(set(over.values())) < len(over) or not set(over) <= set(action.writes):
            self._fail(f"{name} writes twice over one operand, or over one for nothing")
        for value in action.writes:
            if value not in inside or value in action.reads:
                self._fail(f"{name} does not make {self._name(value)}")
            if value in over:
                if over[value] not in action.reads:
                    self._fail(f"{name} cannot write over {self._name(over[value])}")
                self._define(value, self._overwritten(name, over[value], value))
            else:
                self._define(value, self._block_in({}, value, charged=True))
        self.check_limit(self.workspace(self.graph, action), f"while {name} runs")

    def _written_over(self, op: Op, operand: int, result: int) -> _Block:
        if operand not in op.reads or result != op.writes[0] or not _may_write_over(op, operand):
            self._fail(f"{op.name} cannot write over {self._name(operand)}")
        return self._overwritten(op.name, operand, result)

    def _overwritten(self, who: str, operand: int, result: int) -> _Block:
        block, _ = self.names[operand]
        needed = self.graph.bytes_of(result)
        if not block.ours:
            self._fail(f"{who} writes over {self._name(operand)}, which the schedule does not own")
        if block.moving:
            self._fail(f"{who} writes over {self._name(operand)}, which is being moved")
        if block.bytes != needed:
            self._fail(f"{who} writes {needed} bytes over a block of {block.bytes}")
        block.writes += 1
        return block

    # -- names and blocks --------------------------------------------------------------------------------------------

    def _block_in(self, blocks: dict[int, _Block], value: int, charged: bool) -> _Block:
        storage = self.graph.values[value].storage
        if storage is None:
            return _Block(0)
        if storage not in blocks:
            blocks[storage] = _Block(self.graph.storages[storage].bytes if charged else 0)
        return blocks[storage]

    def _define(self, value: int, block: _Block) -> None:
        if value in self.names:
            self._fail(f"{self._name(value)} is made while it is still there")
        self.names[value] = (block, block.writes)
        self._look(block)

    def _forget(self, value: int) -> None:
        block, _ = self.names.pop(value)
        block.looks -= 1
        if block.looks == 0:
            self.live -= block.bytes
            if block.moving:
                self._fail(f"{self._name(value)} is forgotten while it is being moved")

    def _look(self, block: _Block) -> None:
        if block.looks == 0:
            self.live += block.bytes
        block.looks += 1

    def _check_intact(self, value: int, who: str) -> None:
        block, writes = self.names[value]
        if block.moving == "back":
            self._fail(f"{who} {self._name(value)}, whose bytes have not been waited for")
        if block.writes != writes:
            self._fail(f"{who} {self._name(value)}, whose memory was written over")

    def _name(self, value: int) -> str:
        return self.graph.values[value].name

    def _fail(self, message: str) -> None:
        raise IllegalGraphError(f"illegal schedule: {message}")


def _may_write_over(op: Op, operand: int) -> bool:
    """Pointwise operators may, wherever the operand stands; others only if they mention it once."""
    pointwise = torch.Tag.pointwise in getattr(op.target, "tags", ())
    return pointwise or list(refs((op.args, op.kwargs))).count(operand) == 1


def replay(
    schedule: Schedule, *, limit: int | None = None, workspace: Callable[[Graph, Op | Fused], int] = lambda graph, op: 0
) -> int:
    """Execute the schedule abstractly; raise `IllegalGraphError` at its first fault; return the highest live bytes."""
    graph = schedule.graph
    machine = _Machine(graph, limit, workspace)
    constants, saved = set(graph.constants), set(schedule.saved)
    outputs = {value for value in graph.outputs if value is not None}
    gradients = {value for value in graph.gradients if value is not None}

    machine.give((*graph.primals, *graph.constants), charged=False)
    machine.follow(schedule.forward)
    machine.expect_exactly(outputs | saved | constants, "forward")
    machine.hand_out(graph.returned)
    machine.return_from_forward(keep=saved | constants)

    machine.give((value for value in graph.tangents if value not in graph.copied_tangents), charged=True)
    machine.give_copies(graph.copied_tangents)
    machine.check_limit(0, "when backward begins")
    machine.follow(schedule.backward)
    machine.expect_exactly(gradients | constants, "backward")
    return machine.highest
