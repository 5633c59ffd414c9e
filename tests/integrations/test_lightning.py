"""Lightning's Trainer with `EncoreCallback`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import encore
from encore.errors import BudgetError
from support.host_loops import fit, lightning_module
from support.host_models import build
from support.lightning_loop import import_lightning

lightning = import_lightning()

from encore.integrations.lightning import EncoreCallback  # noqa: E402

EAGER = {"lowering": "eager", "overhead": 0.2}


def train(callbacks: list[Any], name: str = "tagger", count: int | None = None, **arguments: Any) -> Any:
    model, batches = build(name)
    module = lightning_module(lightning, model)
    torch.manual_seed(0)
    module.trained = fit(
        lightning,
        module,
        batches[:count],
        **{"max_steps": 4, "num_sanity_val_steps": 0, **arguments},
        callbacks=callbacks,
    )
    return module


def test_accumulated_clipped_and_evaluated(tmp_path: Path) -> None:
    """Peaks go to the logger; `training_step` is one graph with its loss."""
    settings: Any = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "limit_val_batches": 2, "max_steps": 8}
    loggers = lightning.loggers.CSVLogger(str(tmp_path))
    callback = EncoreCallback(**EAGER)
    plain = train([], count=2, **settings)
    planned = train([callback], count=2, logger=loggers, log_every_n_steps=1, **settings)
    assert planned.losses == plain.losses
    assert planned.trained.callback_metrics["val_loss"] == plain.trained.callback_metrics["val_loss"]
    assert planned.state_dict().keys() == plain.state_dict().keys()
    names = {name for entry in loggers.experiment.metrics for name in entry}
    text = (Path(loggers.log_dir) / "metrics.csv").read_text()
    assert "encore_measured_peak" in names | set(text.splitlines()[0].split(","))
    assert callback.planned.measured is not None
    assert callback.planned.predicted is not None
    assert callback.planned.measured <= callback.planned.predicted + 64  # Lightning's own scalars
    trainable = sum(parameter.nbytes for parameter in planned.parameters())
    moments = 2 * trainable + 4 * len(list(planned.parameters()))
    assert encore.report(planned).beside == moments + trainable  # with the gradients that are accumulated


def test_a_budget_that_cannot_be_met_is_rejected() -> None:
    with pytest.raises(BudgetError, match="what helps"):
        train([EncoreCallback(budget=10_000, lowering="eager")])


@pytest.mark.slow
def test_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    whole = train([], max_steps=6)
    saving: Any = {"enable_checkpointing": True, "default_root_dir": str(tmp_path)}
    first = train([EncoreCallback(**EAGER), lightning.callbacks.ModelCheckpoint(str(tmp_path), every_n_train_steps=4)],
                  max_steps=4, **saving)  # fmt: skip
    (saved,) = tmp_path.glob("*.ckpt")
    torch.manual_seed(0)
    module = lightning_module(lightning, build("tagger")[0])
    rest = fit(
        lightning, module, build("tagger")[1], max_steps=6, callbacks=[EncoreCallback(**EAGER)], ckpt_path=str(saved)
    )
    assert rest.global_step == 6
    assert first.losses == whole.losses[:4]
    assert module.losses == whole.losses[4:]


@pytest.mark.slow
def test_mixed_precision() -> None:
    plain, planned = (
        train([], name="resnet", precision="bf16-mixed"),
        train([EncoreCallback(**EAGER)], name="resnet", precision="bf16-mixed"),
    )
    assert planned.losses == pytest.approx(plain.losses, rel=1e-2)
