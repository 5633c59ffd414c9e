"""Hugging Face's Trainer with `EncoreCallback`: what people train with there, compared with the Trainer alone."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import encore
from encore.errors import BudgetError, OptionError
from support.host_loops import host_warnings, losses_of, trainer
from support.host_models import build

transformers = pytest.importorskip("transformers")

from encore.integrations.transformers import EncoreCallback  # noqa: E402

EAGER = {"lowering": "eager", "overhead": 0.2}


def train(folder: Path, callbacks: list[Any], *, model: nn.Module | None = None, **arguments: Any) -> Any:
    built, batches = build("llama")
    torch.manual_seed(0)
    made = trainer(model or built, batches, callbacks, str(folder), **{"max_steps": 4, **arguments})
    with host_warnings():
        made.train()
    return made


def test_a_run_with_everything(tmp_path: Path) -> None:
    """Autocast to bfloat16, accumulated gradients, clipping, evaluation, and generation afterwards."""
    settings: Any = {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "eval_steps": 2,
                "eval_strategy": "steps"}  # fmt: skip
    callback = EncoreCallback(**EAGER)
    plain, planned = train(tmp_path / "a", [], **settings), train(tmp_path / "b", [callback], **settings)
    forms = callback.planned.forms
    assert forms == 2  # two lengths
    for wanted, found in zip(plain.state.log_history, planned.state.log_history, strict=True):
        for name in ("loss", "eval_loss", "grad_norm"):
            if name in wanted:  # eager adds the gradients of a weight that is cast twice in bfloat16 (docs/limits.md)
                assert found[name] == pytest.approx(wanted[name], rel=1e-2)
    assert plain.model.state_dict().keys() == planned.model.state_dict().keys()
    prompt = torch.tensor([[5, 6, 7]])
    planned.model.load_state_dict(plain.model.state_dict())
    with torch.no_grad(), host_warnings():
        words = [
            made.model.eval().generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False
            )
            for made in (plain, planned)
        ]
    assert torch.equal(*words)
    assert callback.planned.forms == forms


def test_peaks_are_logged(tmp_path: Path) -> None:
    callback = EncoreCallback(**EAGER)
    _, batches = build("llama")
    made = trainer(build("llama")[0], batches[:1], [callback], str(tmp_path), max_steps=7, optim="adamw_torch")
    with host_warnings():
        made.train()
    peaks = [
        {name: size for name, size in entry.items() if name.startswith("encore")} for entry in made.state.log_history
    ]
    predicted, measured = callback.planned.predicted, callback.planned.measured
    assert predicted is not None
    assert measured is not None
    assert peaks[0] == {"encore_predicted_peak": predicted}
    assert peaks[4] == {"encore_predicted_peak": predicted, "encore_measured_peak": measured}
    assert measured <= predicted
    assert encore.report(made.model).beside == 2 * sum(p.nbytes + 2 for p in made.model.parameters())


def test_options_are_checked_where_the_callback_is_made() -> None:
    with pytest.raises(OptionError, match="unknown option 'bugdet'"):
        EncoreCallback(bugdet="1GiB")


def test_a_budget_that_cannot_be_met_is_rejected_before_the_first_step(tmp_path: Path) -> None:
    model, before = build("llama")[0], build("llama")[0]
    with pytest.raises(BudgetError, match="what helps: raise the budget") as caught:
        train(tmp_path, [EncoreCallback(budget=10_000, lowering="eager")], model=model)
    assert caught.value.floor > 10_000
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), before.parameters(), strict=True))


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of one length."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(2, 32, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
def test_the_batch_size_that_fits_is_found(tmp_path: Path) -> None:
    def run(batch_size: int, **arguments: Any) -> Any:
        callback = EncoreCallback(lowering="eager", **arguments.pop("options"))
        made = trainer(
            build("llama")[0], [], [callback], str(tmp_path), max_steps=2, per_device_train_batch_size=batch_size,
            **arguments,
        )  # fmt: skip
        made.train_dataset, made.data_collator = Rows(), transformers.default_data_collator
        with host_warnings():
            made.train()
        return made, callback

    _, callback = run(5, options={"budget": "min"})
    made, _ = run(8, options={"budget": callback.planned.predicted}, auto_find_batch_size=True)
    assert made._train_batch_size == 5


class KillAt(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Kills the process right after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_killed(rank: int, folder: str) -> None:
    train(Path(folder), [EncoreCallback(**EAGER), KillAt(5)], max_steps=8, save_strategy="steps", save_steps=4)


@pytest.mark.slow
def test_a_killed_run_is_resumed_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__)
    path = [str(here.parent), str(here.parents[1]), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    whole = train(tmp_path / "whole", [], max_steps=8)
    with pytest.raises(mp.ProcessExitedException):  # type: ignore[attr-defined]
        mp.spawn(run_killed, (str(tmp_path / "killed"),))  # type: ignore[attr-defined]
    model, batches = build("llama")
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    made = trainer(model, batches, [EncoreCallback(**EAGER)], str(tmp_path / "killed"), **settings)
    with host_warnings():
        made.train(resume_from_checkpoint=True)
    assert losses_of(made) == losses_of(whole)


@pytest.mark.slow
def test_low_rank_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
        with host_warnings():
            return peft.get_peft_model(build("llama")[0], config)

    plain = train(tmp_path / "a", [], model=adapted())
    planned = train(tmp_path / "b", [EncoreCallback(**EAGER)], model=adapted())
    assert losses_of(plain) == losses_of(planned)
    assert plain.model.state_dict().keys() == planned.model.state_dict().keys()


@pytest.mark.slow
def test_a_moving_average_of_the_weights(tmp_path: Path) -> None:
    class Average(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        model: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.model is None:
                self.model = torch.optim.swa_utils.AveragedModel(given["model"])
            self.model.update_parameters(given["model"])

    theirs, ours = Average(), Average()
    train(tmp_path / "a", [theirs])
    train(tmp_path / "b", [EncoreCallback(**EAGER), ours])
    for name, average in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], average), name
    copy.deepcopy(ours.model)
