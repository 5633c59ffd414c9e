"""What a scan did: counted, next to the predictions, and drawn."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from encore.bptt.actions import Action, Advance, FreeState, LoadState, Reverse, StoreState, Tape
from encore.bptt.replayer import Counts
from encore.errors import MissingPackageError, NeverRunError
from encore.tiers import Parcel, Transfers
from encore.units import bytes_text
from encore.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVENTS = 20_000
"""Actions that are noted with their times; further ones are only counted, and the title of the picture says so."""
COLOURS = {
    "Advance": "#9aa7b5", "Tape": "#e8a317", "Reverse": "#17996b",
    "Store memory": "#4f9fd6", "Load memory": "#7768c9", "Store tier": "#d1603d", "Load tier": "#b05fa5",
}  # fmt: skip
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>encore.scan</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 110ch; padding: 0 1rem; }}
svg {{ max-width: 100%; height: auto; background: white; }}
</style>
<h1>encore.scan: {title}</h1>
<pre>{text}</pre>
{picture}
</html>
"""


@dataclass(frozen=True, slots=True)
class Event:
    """One action. Seconds since the scan began; of a state that goes to a tier or comes from it, the seconds of its
    transfer, if the tier measures them."""

    action: str
    start: int
    stop: int
    began: float
    ended: float


@dataclass(slots=True)
class ScanReport:
    """Give one to `encore.scan(report=...)`; it is filled in by forward, and again by backward."""

    schedule: str = ""
    steps: int = 0
    slots: int = 0
    block: int = 0
    interval: int | None = None
    """Steps between states in the tier, as planned; they are stored later if the tier is busy."""
    state_bytes: int = 0
    tape_bytes: int = 0
    """Of one step."""
    predicted_bytes: int = 0
    """The peak of states, tapes and work, without inputs, results and gradients of parameters."""
    predicted_forwards: int | None = None
    late_stores: int = 0
    """States that went to the tier at another step than was planned, since the tier was busy or steps and stores took
    other times than before. Without any, as many steps are run as were predicted, exactly."""
    counts: Counts = field(default_factory=Counts)
    transfers: Transfers = field(default_factory=Transfers)
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    """The first of them, in order."""
    actions: int = 0
    """Number of all actions."""

    @property
    def recompute(self) -> float:
        """Runs of a step, over steps: 1 for a plain loop."""
        return self.counts.forwards / self.steps if self.steps else 0.0

    def begin(self, **known: Any) -> None:
        """Forget an earlier scan; set the fields that are known before the first step."""
        fresh = ScanReport(**known)
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def to_dict(self) -> dict[str, Any]:
        return {"encore_scan": 1, **dataclasses.asdict(self), "recompute": self.recompute}

    def to_json(self) -> str:
        """Everything as JSON; `encore_scan` is the version of its layout."""
        found = self.to_dict()
        if not found["transfers"]["stores"]:
            found["transfers"]["fastest_store"] = None
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        if not self.schedule:
            return "encore.scan: nothing has run yet"
        counts, moved = self.counts, self.transfers
        predicted = "" if self.predicted_forwards is None else f" ({self.predicted_forwards:,} predicted)"
        lines = [
            f"encore.scan: {self.schedule}, {self.steps:,} steps, {self.slots} slots, {self.block} steps a tape",
            f"  a state takes {bytes_text(self.state_bytes)}, a step's tape {bytes_text(self.tape_bytes)}; "
            f"{bytes_text(self.predicted_bytes)} at most",
            f"  forwards: {counts.forwards:,}{predicted}, {self.recompute:.2f} a step; {counts.taped:,} with a tape",
            f"  in memory: {counts.memory_stores:,} stores, {counts.memory_loads:,} loads, {counts.most_slots} at once",
        ]
        if counts.tier_stores:
            interval = "" if self.interval is None else f", one in {self.interval} steps"
            interval += f", {self.late_stores:,} of them elsewhere than planned" if self.late_stores else ""
            lines.append(
                f"  in the tier: {counts.tier_stores:,} stores{interval}, {counts.tier_loads:,} loads, "
                f"{bytes_text(moved.bytes_stored)} out, {bytes_text(moved.bytes_loaded)} back, "
                f"{moved.waited_seconds:.3f} s waited"
            )
        lines.append(f"  {self.forward_seconds:.3f} s forward, {self.backward_seconds:.3f} s backward")
        return "\n".join(lines)

    def to_png(self, path: str | os.PathLike[str]) -> Path:
        """The schedule as a picture: time across, where things happen down."""
        buffer = io.BytesIO()
        self._figure().savefig(buffer, format="png", dpi=120)
        return write_whole(path, buffer.getvalue())

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """The same with the counts, on a page of its own."""
        buffer = io.BytesIO()
        self._figure().savefig(buffer, format="svg", metadata={"Creator": None, "Date": None})
        picture = buffer.getvalue().decode()
        page = PAGE.format(
            title=html.escape(self.schedule), text=html.escape(str(self)), picture=picture[picture.index("<svg") :]
        )
        return write_whole(path, page.encode())

    def _title(self) -> str:
        title = f"{self.schedule}: {self.steps:,} steps, {self.recompute:.2f} forwards a step"
        drawn = len(self.events)
        return title if drawn >= self.actions else f"{title}; the first {drawn:,} of {self.actions:,} actions"

    def _figure(self) -> Figure:
        if not self.events:
            raise NeverRunError("there is no schedule to draw before the scan has run; draw it after backward")
        try:
            from matplotlib.collections import LineCollection
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPackageError(
                "schedules are drawn with matplotlib, which is not installed; pip install 'encore-torch[plots]'"
            ) from error
        figure = Figure(figsize=(12, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        levels = {"compute": ("Advance", "Tape", "Reverse"), "memory": ("Store memory", "Load memory")}
        levels["tier"] = ("Store tier", "Load tier")
        heights = {name: row for row, names in enumerate(levels.values()) for name in names}
        for name, colour in COLOURS.items():
            found = [event for event in self.events if event.action == name]
            if not found:
                continue
            runs = [[(event.began, event.start), (event.ended, event.stop)] for event in found]
            if name == "Reverse":
                runs = [[(event.began, event.stop), (event.ended, event.start)] for event in found]
            if name in levels["compute"]:
                above.add_collection(LineCollection(runs, colors=colour, linewidths=1.4, label=name))
            else:
                above.plot(
                    [event.began for event in found], [event.start for event in found],
                    "v" if name.startswith("Store") else "^", color=colour, markersize=3, linestyle="none", label=name,
                )  # fmt: skip
            shown = max(0.0, self.events[-1].ended / 2000)
            bars = [(event.began, max(event.ended - event.began, shown)) for event in found]
            below.broken_barh(bars, (heights[name] - 0.4, 0.8), facecolors=colour, linewidth=0)
        above.set(ylabel="step", title=self._title())
        above.autoscale_view()
        above.legend(loc="upper right", frameon=False, fontsize=8)
        below.set(xlabel="seconds", yticks=range(len(levels)), yticklabels=list(levels))
        below.invert_yaxis()
        return figure


class EventLog:
    """Notes the actions of one scan in its report."""

    def __init__(self, report: ScanReport) -> None:
        self.report = report
        self._events = report.events  # the report may be another scan's before this one has ended
        self._leaving: dict[int, int] = {}
        """By the step of a state in a tier: the place of its store among the events."""
        self._began = time.perf_counter()

    def note(self, action: Action, began: float, parcel: Parcel | None) -> None:
        """Note an action that ends now. `parcel` is that of a state in a tier."""
        ended = time.perf_counter()
        self.report.actions += 1
        if isinstance(action, FreeState) and parcel is not None:
            self._end_store(action.step, parcel)
        if len(self._events) >= EVENTS:
            return
        name = type(action).__name__.removesuffix("State")
        if isinstance(action, Advance | Tape | Reverse):
            start, stop = action.start, action.stop
        else:
            start = stop = action.step
        if isinstance(action, StoreState | LoadState):
            name = f"{name} {action.level}"
        if isinstance(action, StoreState) and parcel is not None:
            self._leaving[start] = len(self._events)
        elif isinstance(action, LoadState) and parcel is not None and parcel.times.fetched is not None:
            began, ended = parcel.times.fetched
        self._events.append(Event(name, start, stop, began - self._began, ended - self._began))

    def _end_store(self, step: int, parcel: Parcel) -> None:
        """The end of a store is known by the time the state is freed."""
        place = self._leaving.pop(step, None)
        if place is not None and parcel.times.stored is not None:
            event = self._events[place]
            ended = max(event.ended, parcel.times.stored - self._began)
            self._events[place] = dataclasses.replace(event, ended=ended)
