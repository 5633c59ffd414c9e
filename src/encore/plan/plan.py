"""A plan: one decision for every feature map of a graph, with what it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from encore.fates import Decision, Encode, Fate, Keep
from encore.graph import Graph
from encore.schedule import Schedule, Timeline, schedule_step, simulate
from encore.schedule.simulator import Workspace

NOTHING_TO_GAIN = "nothing to gain: the step fits as it is"


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions by value, the schedule that carries them out, and its memory."""

    name: str
    decisions: Mapping[int, Decision]
    schedule: Schedule
    timeline: Timeline
    overhead: float = 0.0
    """Predicted extra time over keeping everything, as a fraction."""
    seconds: float = 0.0
    """Predicted time of the step; 0 if no costs were asked for."""
    slices: int = 1
    """Parts that large heads are taken in, so that only a slice of their scores is there at once."""
    lean: bool = False
    """Whether the graph is rewritten for memory alone, without the rewrites that pay by their time."""
    stall: float = 0.0
    """Seconds, of those predicted, that the step stands still for transfers from and to tiers."""
    moved: int = 0
    """Bytes that a step puts into tiers."""
    fates: frozenset[Fate] = frozenset()
    """What becomes of the values that are not kept as they are."""

    @property
    def encodings(self) -> list[Encode]:
        """The codes that it makes, those that move to a tier included."""
        return [one for fate in self.fates if (one := fate.encoding) is not None]

    @property
    def tiers(self) -> set[str]:
        """The tiers that it uses."""
        return {fate.tier for fate in self.fates if fate.tier}


def keep_everything(graph: Graph, workspace: Workspace, *, outputs_outlive: bool = True) -> Plan:
    """The plan that changes nothing: every feature map stays in memory."""
    schedule = schedule_step(graph)
    return Plan(
        name="keep everything",
        decisions={
            value: Decision(Keep(value), NOTHING_TO_GAIN, held=graph.bytes_of(value))
            for value in feature_maps(schedule)
        },
        schedule=schedule,
        timeline=simulate(schedule, workspace, outputs_outlive=outputs_outlive),
    )


def feature_maps(schedule: Schedule) -> list[int]:
    """What forward keeps for backward that was not there before the step."""
    external = schedule.graph.external
    return [value for value in schedule.saved if schedule.graph.values[value].storage not in external]
