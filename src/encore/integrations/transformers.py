"""`EncoreCallback` for the Trainer of Hugging Face's transformers.

>>> trainer = Trainer(model, args, train_dataset=data, callbacks=[EncoreCallback(budget="8GiB")])
"""

from __future__ import annotations

from typing import Any

from encore.errors import MissingPackageError
from encore.integrations.planned_training import PlannedTraining

try:
    from transformers import TrainerCallback
    from transformers.utils import logging
except ImportError as error:
    raise MissingPackageError(
        "encore.integrations.transformers needs the package transformers: pip install 'encore-torch[hosts]'"
    ) from error

log = logging.get_logger("transformers.encore")


class EncoreTrainerCallback(TrainerCallback):
    """Plans the steps of a Trainer. The model is compiled in place before the first step, with the optimizer's state
    counted; options are those of `encore.compile`. The peaks of one step, predicted and measured, go to the logger of
    transformers and into the Trainer's next log entry."""

    def __init__(self, **options: Any) -> None:
        self.planned = PlannedTraining(options)
        self._peaks: dict[str, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.planned.begin(given["model"], [given["optimizer"]], accumulates=args.gradient_accumulation_steps > 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.planned.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if peaks := self.planned.end_step():
            self._peaks = peaks
            log.info(self.planned.summary)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any) -> None:
        if self._peaks is not None and logs is not None:
            logs |= self._peaks
            state.log_history[-1] |= self._peaks
            self._peaks = None


EncoreCallback = EncoreTrainerCallback
