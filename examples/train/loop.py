"""The training loop: steps, checkpoints, and how far it is."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

from encore.errors import OptionError
from encore.options import optimizer_bytes
from encore.terminal import progress
from examples.train.checkpoint import Checkpoints
from examples.train.errors import StoppedError
from examples.train.history import History, Score
from examples.train.outcome import Memory, Outcome, score_text
from examples.train.settings import Settings
from examples.train.signals import StopRequest, stop_requests
from examples.train.state import Step, Training

IS_MEASURED = 1
"""Of the steps that a process takes, number 0 compiles and this one is measured: neither is timed."""


def train(settings: Settings, steps: int, directory: Path | None = None) -> Outcome:
    """Train up to `steps` steps; with a directory, from its newest checkpoint on."""
    if steps < 1:
        raise OptionError(f"--steps {steps} is not accepted; give a count of at least 1")
    started = time.perf_counter()
    with contextlib.ExitStack() as held:
        checkpoints = None if directory is None else held.enter_context(Checkpoints(directory))
        found = None if checkpoints is None else checkpoints.newest()
        if found is not None and found.step > steps:
            raise OptionError(f"{found.path} is at step {found.step} already; give --steps of at least that many")
        stop = held.enter_context(stop_requests())
        training = Training(settings, found)
        history = None if directory is None else held.enter_context(_history(directory, training))
        run = _Run(training, checkpoints, history)
        run.to(steps, stop)
        return run.outcome(time.perf_counter() - started)


def _history(directory: Path, training: Training) -> History:
    return History(directory, training.losses, training.scores)


class _Run:
    """The part of a training that one process does."""

    def __init__(self, training: Training, checkpoints: Checkpoints | None, history: History | None) -> None:
        self.training = training
        self.checkpoints = checkpoints
        self.history = history
        self.began_at = training.steps_done
        self.taken: list[Step] = []
        self.score: Score | None = None
        """The newest metrics, for the progress bar."""

    def to(self, steps: int, stop: StopRequest) -> None:
        """Take the steps that are left. A request to stop ends it after one of them, with a checkpoint."""
        training = self.training
        with progress(training.settings.workload, steps, done=self.began_at) as tell:
            while training.steps_done < steps:
                self.taken.append(training.step(measured=len(self.taken) == IS_MEASURED))
                is_due, is_last = training.steps_done % training.settings.every == 0, training.steps_done == steps
                if is_due:
                    self.score = training.scores[training.steps_done] = training.workload.score(training.model)
                if self.history is not None:
                    self.history.add(training.steps_done, training.losses[-1], self.score if is_due else None)
                stops = stop.signal is not None and not is_last
                if self.checkpoints is not None and (is_due or is_last or stops):
                    self.checkpoints.write(training.steps_done, training.state())
                tell(self._note())
                if stops:
                    raise StoppedError(self._goodbye(stop, steps))

    @property
    def timed(self) -> list[float]:
        """Seconds of the steps that were like all others."""
        return [step.seconds for step in self.taken[IS_MEASURED + 1 :]]

    @property
    def examples_per_second(self) -> float | None:
        return self.training.settings.batch_size / statistics.median(self.timed) if self.timed else None

    def _note(self) -> str:
        parts = [f"loss {self.training.losses[-1]:.4f}"]
        if self.score is not None:
            parts.append(score_text(dict(list(self.score.items())[:1])))  # a bar has room for one
        if self.examples_per_second is not None:
            parts.append(f"{self.examples_per_second:.4g} examples/s")
        return "  ".join(parts)

    def _goodbye(self, stop: StopRequest, steps: int) -> str:
        assert stop.signal is not None
        kept = "nothing is kept: --checkpoint DIR would"
        if self.checkpoints is not None:
            kept = f"its checkpoint is in {self.checkpoints.directory}, and the same command goes on from it"
        return f"stopped by {stop.signal.name} after step {self.training.steps_done} of {steps}; {kept}"

    def outcome(self, seconds: float) -> Outcome:
        """What came of it, with the metrics of the last step."""
        training = self.training
        due = training.scores.get(training.steps_done)
        return Outcome(
            workload=training.workload.name,
            sizes=training.settings.all_sizes,
            learning_rate=training.learning_rate,
            seed=training.settings.seed,
            eager=training.settings.eager,
            began_at=self.began_at,
            losses=tuple(training.losses),
            score=training.workload.score(training.model) if due is None else due,
            sample=None if training.workload.sample is None else training.workload.sample(training.model),
            batch_size=training.settings.batch_size,
            examples_per_second=self.examples_per_second,
            step_seconds=statistics.median(self.timed) if self.timed else None,
            first_step_seconds=self.taken[0].seconds if self.taken else None,
            memory=self._memory(),
            directory=None if self.checkpoints is None else str(self.checkpoints.directory),
            seconds=seconds,
        )

    def _memory(self) -> Memory | None:
        """Nothing is known where no step was taken: the run was done before."""
        if not self.taken:
            return None
        training = self.training
        measured = self.taken[IS_MEASURED].peak if len(self.taken) > IS_MEASURED else None
        if training.settings.eager:
            return Memory(resident=_resident(training), measured=measured)
        report = training.report()
        return Memory(
            resident=report.resident,
            measured=measured,
            predicted=report.planned.step_peak,
            unplanned=report.unplanned.step_peak,
            overhead=report.planned.overhead,
            budget=training.settings.budget,
        )


def _resident(training: Training) -> int:
    """What lives beside a plain step, counted as Encore counts it: parameters, buffers, inputs, optimizer state."""
    held = [*training.model.parameters(), *training.model.buffers(), *training.workload.batch(0)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values()) + optimizer_bytes(training.optimizer)
