"""`EncoreCallback` for Lightning's Trainer.

>>> trainer = Trainer(max_epochs=3, callbacks=[EncoreCallback(budget="8GiB")])
"""

from __future__ import annotations

from typing import Any

from encore.errors import MissingPackageError
from encore.integrations.planned_training import PlannedTraining

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import rank_zero_info
except ImportError as error:
    raise MissingPackageError(
        "encore.integrations.lightning needs the package lightning: pip install 'encore-torch[hosts]'"
    ) from error


class EncoreLightningCallback(Callback):
    """Plans `training_step`, its loss included. The module is compiled in place before the first step, with the state
    of its optimizers counted; options are those of `encore.compile`. The peaks of one step, predicted and measured, go
    to Lightning's loggers."""

    def __init__(self, **options: Any) -> None:
        self.planned = PlannedTraining(options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.planned.begin(pl_module, trainer.optimizers, accumulates=trainer.accumulate_grad_batches > 1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.planned.begin_step()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if peaks := self.planned.end_step():
            rank_zero_info(self.planned.summary)
            for logger in trainer.loggers:
                logger.log_metrics(peaks, step=trainer.global_step)


EncoreCallback = EncoreLightningCallback
