"""What every kind of fate has: how the search, the schedule, prices, plan files and reports see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from encore.codecs import Densities
from encore.fates.link import Link
from encore.fates.ownership import owned
from encore.graph import Graph, Op, Value

if TYPE_CHECKING:
    from encore.fates.encode import Encode

Shape = tuple[int, ...]
OpSeconds = Callable[[Graph, Op], float]
"""What an operator takes."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What candidates are priced with, and what they may use."""

    seconds: OpSeconds
    workspace: Callable[[Graph, Op], int] = lambda graph, op: 0
    codecs: Collection[str] = ()
    densities: Densities = field(default_factory=dict)
    """What is known of the data."""
    admitted: Collection[tuple[str, str]] | None = None
    """The lossy codecs that may be used, each with the name of an activation; None: all of `codecs`, for any."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """The tiers that may be used."""
    labels: Collection[str] | None = None
    """Those of candidates that are asked for, or of those nearest to them; None: any."""
    exact: bool = True
    """Whether backward must read exactly the bits that forward made."""

    def admits(self, value: str, codec: str) -> bool:
        """Return whether an activation may be kept in a lossy codec."""
        return self.admitted is None or (value, codec) in self.admitted


@dataclass(frozen=True, slots=True)
class Decision:
    """The fate of one activation in a finished plan: what it comes to, and why."""

    fate: Fate
    why: str
    seconds: float = 0.0
    held: int = 0
    """Bytes of memory between forward and backward."""
    whole: tuple[int, tuple[int, ...]] | None = None
    """Bytes and shape if it were kept, where the step has it in another shape."""


class Writer(Protocol):
    """Adds operators to a step: `encore.schedule.carry_out`."""

    graph: Graph
    """The step as it was."""

    @property
    def values(self) -> Sequence[Value]:
        """Values of the step as it is now."""

    def once(self, fate: Fate, make: Callable[[], int]) -> int:
        """The value that `make` adds, at the first call for this fate; afterwards the same value."""

    def in_forward(
        self, value: int, name: str, target: Any, args: tuple[Any, ...], shape: Shape, dtype: torch.dtype, device: str
    ) -> int:
        """Add an operator to forward, after the last reader of `value` there; return its contiguous result."""

    def in_backward(self, value: int, how: str, target: Any, args: tuple[Any, ...], like: int) -> int:
        """Add an operator to backward, on behalf of `value`; return its result, of the shape and layout of another
        value. `how` ends its name."""


class Fate:
    """What becomes of an activation from its last use in forward to its uses in backward.

    Kinds are frozen dataclasses whose first field is `value`. Prices are fields that do not count in comparisons.
    """

    __slots__ = ()
    kind: ClassVar[str]
    """Its name, in `methods=`, plan files and reports."""
    is_method: ClassVar[bool] = True
    """Whether users allow it by `methods=`."""
    in_place: ClassVar[bool] = False
    """Whether the operators that make the value and read it do the work. Otherwise backward reads a restored copy."""
    runs_again: ClassVar[bool] = False
    """Whether it is restored by copies of the operators that made it, and not by `restore`."""
    value: int

    # -- for the search ----------------------------------------------------------------------------------------------

    @classmethod
    def candidates(cls, graph: Graph, values: Collection[int], terms: Terms, found: Sequence[Fate]) -> Sequence[Fate]:
        """The fates of this kind that are worth trying; `found` are those of the kinds before it in the table."""
        return ()

    @property
    def label(self) -> str:
        """Candidates of one label are tried together for all values of a role."""
        return self.kind

    @property
    def held(self) -> int:
        """Bytes of memory in place of the value, between forward and backward."""
        return 0

    @property
    def shrinks(self) -> Sequence[tuple[int, int]]:
        """The values that it changes, with the bytes that each takes then."""
        return ((self.value, self.held),)

    @property
    def targets(self) -> tuple[int, ...]:
        """The values that it changes."""
        return (self.value,)

    @property
    def workspaces(self) -> Sequence[tuple[int, int]]:
        """Operators, with the bytes by which their workspaces grow."""
        return ()

    @property
    def encode_seconds(self) -> float:
        """What it adds to forward."""
        return 0.0

    @property
    def restore_seconds(self) -> float:
        """What each restored copy costs in backward."""
        return 0.0

    @property
    def seconds(self) -> float:
        """About what it adds to the step."""
        return self.encode_seconds + self.restore_seconds

    @property
    def restored_once(self) -> bool:
        """Whether a restored copy is kept until its last reader, even if that is much later."""
        return False

    @property
    def tier(self) -> str:
        """The tier that it, or its code, goes to."""
        return ""

    @property
    def moved(self) -> int:
        """Bytes that are offloaded and reloaded."""
        return 0

    @property
    def link(self) -> Link | None:
        """What the way to its tier takes."""
        return None

    @property
    def encoding(self) -> Encode | None:
        """The code that is made of the value."""
        return None

    # -- for the schedule --------------------------------------------------------------------------------------------

    @classmethod
    def change_operators(cls, graph: Graph, fates: Sequence[Any]) -> Graph:
        """The step whose operators carry out fates of this kind; for kinds that are `in_place`."""
        raise NotImplementedError(f"{cls.kind} changes no operators")

    def restore(self, writer: Writer) -> int:
        """Add the operators that keep the value, and those that restore it in backward; return the restored copy."""
        raise NotImplementedError(f"{self.kind} does not restore values")

    # -- for plans and reports ---------------------------------------------------------------------------------------

    @property
    def code(self) -> str:
        """The form in which it is kept, for reports."""
        return ""

    @property
    def lossless(self) -> bool:
        """Whether backward reads exactly the bits that forward made."""
        return True

    @property
    def why(self) -> str:
        return ""

    def decisions(self, before: Graph, after: Graph, ops: Sequence[Op], seconds: OpSeconds) -> Mapping[int, Decision]:
        """What a plan says of every value that it changes. `ops` are the operators added for it; without any, backward
        does not need the value."""
        if not ops:
            return {}
        return {self.value: Decision(self, self.why, sum(seconds(after, op) for op in ops), self.held)}

    def bytes_by_data(self, value: Value) -> tuple[int, float | None] | None:
        """Its bytes for the worst data and the density that it was planned for, if its bytes depend on the data."""
        return None

    # -- in plan files -----------------------------------------------------------------------------------------------

    fields: ClassVar[Mapping[str, type]] = {}
    """Names and types of an entry's fields, that of the value first, the others as here; none if an entry is the name
    of the value alone."""
    joins: ClassVar[frozenset[str]] = frozenset()
    """Other kinds that a plan file may give to the same value."""

    @property
    def also(self) -> Sequence[Fate]:
        """Fates of other kinds that a plan file lists next to it."""
        return ()

    @classmethod
    def allowed_values(cls, graph: Graph) -> Collection[int]:
        """The values that it can be given to."""
        return owned(graph)

    @classmethod
    def read(cls, graph: Graph, value: int, entry: Mapping[str, Any], given: Given) -> Fate:
        """The fate that an entry stands for; raises `PlanError` if it cannot be carried out."""
        raise NotImplementedError(f"{cls.kind} is not written to plan files")


@dataclass(frozen=True, slots=True)
class Given:
    """What a plan file is read with."""

    lossy: Collection[str] = ()
    """Lossy codecs that the user allows."""
    links: Mapping[str, Link] = field(default_factory=dict)
    before: Fate | None = None
    """What an earlier list of the file gives to the same value."""
