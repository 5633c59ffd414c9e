"""What came of a run, for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from encore.units import bytes_text, seconds_text
from examples.train.history import NAME, Score, finite
from examples.train.settings import Size


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a training step. A budget bounds `resident` and the peak together."""

    resident: int
    """Parameters, buffers, inputs and the optimizer's state."""
    measured: int | None
    """The most that a step held above them, told by the allocator; None where no step was there to be measured."""
    predicted: int | None = None
    """The same before it ran; plain PyTorch is not predicted."""
    unplanned: int | None = None
    """The same with everything kept."""
    overhead: float = 0.0
    """Predicted extra time over keeping everything, as a fraction."""
    budget: str | None = None

    def lines(self) -> list[str]:
        told = [] if self.measured is None else [f"measured {bytes_text(self.measured)}"]
        if self.predicted is not None:
            apart = "" if self.measured is None else f" ({self.predicted / self.measured - 1:+.2%})"
            told.append(f"predicted {bytes_text(self.predicted)}{apart}")
        if self.unplanned is not None:
            told.append(f"with everything kept {bytes_text(self.unplanned)}")
        lines = [f"  step peak       {', '.join(told) or 'not measured: the first step compiles'}"]
        peak = self.predicted if self.measured is None else self.measured
        whole = "" if peak is None else f"; with the step {bytes_text(self.resident + peak)}"
        limit = "" if self.budget is None else f" of a budget of {self.budget}"
        lines.append(
            f"  resident        {bytes_text(self.resident)}: parameters, buffers, inputs, optimizer state{whole}{limit}"
        )
        if self.overhead:
            lines.append(f"  overhead        {self.overhead:.1%} extra time predicted")
        return lines


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that has reached its last step."""

    workload: str
    sizes: Mapping[str, Size]
    batch_size: int
    learning_rate: float
    seed: int
    eager: bool
    began_at: int
    """Steps that were done before, by earlier processes."""
    losses: tuple[float, ...] = field(repr=False)
    """Of every step, earlier processes' included."""
    score: Score
    sample: str | None
    examples_per_second: float | None
    step_seconds: float | None
    """Forward, backward and update: the median of this process's steps, but for the first two."""
    first_step_seconds: float | None
    memory: Memory | None
    directory: str | None
    seconds: float
    """Of this process, from reading the checkpoint to the last step."""

    def to_json(self) -> str:
        """The numbers as JSON; `encore_train` is the version of its layout. Losses step by step are in the history."""
        told: dict[str, Any] = {"encore_train": 1, **dataclasses.asdict(self)}
        del told["losses"]
        told |= {"steps": len(self.losses), "first_loss": self.losses[0], "loss": self.losses[-1]}
        return json.dumps(told | {"score": finite(self.score)}, indent=2)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items() if size is not None)
        by = "plain PyTorch" if self.eager else "Encore"
        steps = len(self.losses)
        lines = [
            f"{self.workload} ({sizes}), {steps} steps through {by}, Adam at {self.learning_rate:g}, seed {self.seed}",
            f"  loss            {self.losses[0]:.4f} at step 1, {self.losses[-1]:.4f} at step {steps}",
            f"  held out        {score_text(self.score)}",
        ]
        if self.examples_per_second is not None and self.step_seconds is not None:
            lines.append(
                f"  throughput      {self.examples_per_second:.4g} examples/s: "
                f"{seconds_text(self.step_seconds)} for a step of {self.batch_size}"
            )
        if self.memory is not None:
            lines += self.memory.lines()
        lines.append(f"  this process    {self._process()}")
        if self.directory is not None:
            lines.append(f"  checkpoint      in {self.directory}, next to the losses in {NAME}")
        if self.sample is not None:
            lines += ["", "held-out data, as the model sees it:", *(f"  {line}" for line in self.sample.splitlines())]
        return "\n".join(lines)

    def _process(self) -> str:
        if self.first_step_seconds is None:
            return f"no step: all {self.began_at} were done before"
        went_on = f", went on after step {self.began_at}" if self.began_at else ""
        first = "" if self.eager else f"; its first step {seconds_text(self.first_step_seconds)}, compilation included"
        return f"{seconds_text(self.seconds)}{went_on}{first}"


def score_text(score: Score) -> str:
    """{'perplexity': 2.31} -> 'perplexity 2.31'."""
    return ", ".join(f"{name} {number:.4g}" for name, number in score.items())
