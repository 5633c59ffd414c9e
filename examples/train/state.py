"""A model in training, and all of it that a checkpoint carries, so that what goes on goes on bit for bit.

Beside weights, buffers, optimizer and generators that is the plan: another plan rounds elsewhere. It is made from
times that are measured, and a second process would measure others. The same holds for what the fused lowering's
passes found to pay.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import encore
from benchmarks.workloads import Batch
from encore.errors import EncoreError
from encore.measurements import machine_key
from encore.plan import SavedPlan
from encore.reports.report import Report
from encore.rewrite.judge import judgements, remember_judgements
from examples.train.checkpoint import Checkpoint
from examples.train.errors import CheckpointError
from examples.train.settings import Settings, differences


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took: forward, backward and the update. The batch was there before."""

    seconds: float
    peak: int | None
    """Bytes above what was alive before, where the allocator was asked."""


class Training:
    """Model, optimizer and what became of the loss. Step `i` trains on batch `i - 1` and nothing else."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint | None = None) -> None:
        if checkpoint is not None:
            check_same_run(settings, checkpoint)
        self.settings = settings
        self.workload = settings.build()
        self.model = self.workload.model
        rate = settings.learning_rate
        self.learning_rate = self.workload.learning_rate if rate is None else rate
        # The fused update works in place: between two steps nothing is allocated that the plan does not know of.
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.learning_rate, fused=True)
        self.losses: list[float] = []
        self.scores: dict[int, dict[str, float]] = {}
        """Metrics by the number of steps done when they were taken."""
        self.plan: SavedPlan | None = None
        torch.manual_seed(settings.seed)
        if checkpoint is not None:
            self._restore(checkpoint)
        if not settings.eager:
            self._compile()

    @property
    def steps_done(self) -> int:
        return len(self.losses)

    def _compile(self) -> None:
        options = self.settings.compile_options
        if self.plan is not None:
            options = {"plan": self.plan, "tiers": options["tiers"]}
        encore.compile(self.model, optimizer=self.optimizer, **options)

    def step(self, *, measured: bool = False) -> Step:
        """One training step. Asking the allocator for its peak takes time itself, so that is not done by default."""
        batch = self.workload.batch(self.steps_done)
        self.optimizer.zero_grad(set_to_none=True)
        started = time.perf_counter()
        if measured:
            found = encore.measure(lambda: self._update(batch))
            loss, peak = found.result, found.step_peak
        else:
            loss, peak = self._update(batch), None
        seconds = time.perf_counter() - started
        self.losses.append(loss)
        if self.plan is None and not self.settings.eager:
            self.plan = self.report().plan
        return Step(seconds, peak)

    def _update(self, batch: Batch) -> float:
        loss = self.model(*batch)
        loss.backward()
        value: float = loss.item()
        if not math.isfinite(value):
            raise EncoreError(
                f"the loss of step {self.steps_done + 1} is {value}: training has diverged; "
                "start anew with a lower --learning-rate"
            )
        self.optimizer.step()
        return value

    def report(self) -> Report:
        return encore.report(self.model)

    # -- what a checkpoint carries -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, in types that can be read without running code."""
        weights = self.model.state_dict()
        return {
            "run": self.settings.facts(),
            "made_with": made_with(),
            "model": weights,
            "other_buffers": {name: buffer for name, buffer in self.model.named_buffers() if name not in weights},
            "optimizer": self.optimizer.state_dict(),
            "cpu_generator": torch.get_rng_state(),
            "cuda_generators": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "scores": self.scores,
            "plan": None if self.plan is None else self.plan.to_json(),
            "judgements": {} if self.settings.eager else judgements(),
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        try:
            self._warn_of_another_machine(state["made_with"])
            self.model.load_state_dict(state["model"])
            buffers = dict(self.model.named_buffers())
            with torch.no_grad():
                for name, value in state["other_buffers"].items():
                    buffers[name].copy_(value)
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["cpu_generator"])
            if state["cuda_generators"]:
                torch.cuda.set_rng_state_all(state["cuda_generators"])
            self.losses = state["losses"].tolist()
            self.scores = {int(step): dict(score) for step, score in state["scores"].items()}
            if state["plan"] is not None:
                self.plan = SavedPlan.parse(json.loads(state["plan"]), str(checkpoint.path))
            if state["made_with"] == made_with():
                remember_judgements(state["judgements"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            why = str(error).splitlines()[0]
            raise CheckpointError(
                f"{checkpoint.path} does not fit the model ({type(error).__name__}: {why}); name another directory"
            ) from error

    def _warn_of_another_machine(self, then: Mapping[str, Any]) -> None:
        now = made_with()
        changed = [f"{name} was {then.get(name)} and is {now[name]}" for name in now if then.get(name) != now[name]]
        if changed:
            warnings.warn(
                f"encore: the checkpoint was written elsewhere ({', '.join(changed)}); the run goes on, "
                "but not with the same last bits",
                stacklevel=4,
            )


def made_with() -> dict[str, str | int]:
    """What the last bits of a sum depend on, besides the run itself."""
    return {
        "Encore": encore.__version__,
        "PyTorch": str(torch.__version__),
        "the number of threads": torch.get_num_threads(),
        "the machine": machine_key(),
    }


def check_same_run(settings: Settings, checkpoint: Checkpoint) -> None:
    """Refuse to go on with a run that is another one."""
    then, now = checkpoint.state.get("run"), settings.facts()
    if not isinstance(then, Mapping):
        raise CheckpointError(f"{checkpoint.path} does not tell which run it belongs to; name another directory")
    if then.get("workload") != now["workload"]:
        raise CheckpointError(
            f"{checkpoint.path} is of the workload {then.get('workload')!r}, not {now['workload']!r}; "
            "name another directory"
        )
    changed = differences(then, now)
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} is of a run with other options: {', '.join(changed)}; "
            "give the same ones, or name another directory"
        )
