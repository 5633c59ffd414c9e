"""The training loops of other packages, run on the batches of `host_models`: each returns the losses of its steps."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import encore
from support.host_models import Batch, endless
from support.lightning_loop import import_lightning

Options = dict[str, Any]


def trainer(model: nn.Module, batches: list[Batch], callbacks: Sequence[Any], folder: str, **arguments: Any) -> Any:
    """Hugging Face's Trainer; each of its rows is a whole batch, so that lengths differ as a collator leaves them."""
    transformers = pytest.importorskip("transformers")
    given = {
        "per_device_train_batch_size": 1, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "learning_rate": 1e-2, "log_level": "error", **arguments,
    }  # fmt: skip
    made = transformers.Trainer(
        model, transformers.TrainingArguments(folder, **given), train_dataset=batches, eval_dataset=batches[:2],
        data_collator=lambda rows: rows[0], callbacks=list(callbacks),
    )  # fmt: skip
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses_of(made: Any) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def by_transformers(model: nn.Module, batches: list[Batch], steps: int, options: Options | None) -> list[float]:
    callbacks = []
    if options is not None:
        from encore.integrations.transformers import EncoreCallback

        callbacks = [EncoreCallback(**options)]
    with tempfile.TemporaryDirectory() as folder, host_warnings():
        made = trainer(model, batches, callbacks, folder, max_steps=steps)
        made.train()
    assert all(callback.planned.predicted for callback in callbacks)
    return losses_of(made)


def lightning_module(lightning: Any, model: nn.Module) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.losses: list[float] = []

        def training_step(self, batch: Batch, index: int) -> Any:
            loss = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Batch, index: int) -> None:
            self.log("val_loss", self.net(**batch)["loss"])

        def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
            self.losses.append(outputs["loss"].item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Module()


def fit(lightning: Any, module: Any, batches: list[Batch], **arguments: Any) -> Any:
    given = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
        "enable_model_summary": False, **arguments,
    }  # fmt: skip
    checkpoint = given.pop("ckpt_path", None)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    with host_warnings():
        made = lightning.Trainer(**given)
        made.fit(module, loader, val_dataloaders=loader if "limit_val_batches" in given else None, ckpt_path=checkpoint)
    return made


def by_lightning(model: nn.Module, batches: list[Batch], steps: int, options: Options | None) -> list[float]:
    lightning = import_lightning()
    callbacks = []
    if options is not None:
        from encore.integrations.lightning import EncoreCallback

        callbacks = [EncoreCallback(**options)]
    module = lightning_module(lightning, model)
    fit(lightning, module, batches, max_steps=steps, callbacks=callbacks)
    assert all(callback.planned.predicted for callback in callbacks)
    return module.losses


def by_accelerate(model: nn.Module, batches: list[Batch], steps: int, options: Options | None) -> list[float]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if options is not None:
        encore.compile(model, optimizer=optimizer, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    with host_warnings():
        for _, batch in zip(range(steps), endless(batches), strict=False):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert options is None or encore.report(model).graphs
    return losses


class host_warnings(warnings.catch_warnings):  # noqa: N801 - a context manager, like the one that it extends
    """Ignore warnings of the hosts about themselves and their data; all of Encore's stay errors."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        for module in ("transformers", "accelerate", "lightning", "torch._dynamo", "torch.utils.data", "peft"):
            warnings.filterwarnings("ignore", module=module)
        warnings.filterwarnings("ignore", message=".*(LeafSpec|isinstance.treespec|pytree|lru_cache).*")
        return found


LOOPS: dict[str, Callable[[nn.Module, list[Batch], int, Options | None], list[float]]] = {
    "transformers": by_transformers, "lightning": by_lightning, "accelerate": by_accelerate,
}  # fmt: skip
