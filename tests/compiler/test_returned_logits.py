"""Language models that return their logits next to the loss: never above plain PyTorch's peak, and as predicted."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import encore
from support.rounding import assert_close

WORDS = 32_000


class CausalModel(nn.Module):
    """A language model with the loss of Hugging Face's: labels padded and shifted, scores in float32, a number of items
    to divide by; it returns its scores and hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.mix = nn.Linear(16, 16)
        self.leave = nn.Linear(16, WORDS, bias=False)

    def forward(self, words: torch.Tensor, items: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.mix(self.embedding(words)))
        scores = self.leave(hidden)
        labels = F.pad(words, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        how = "mean" if items is None else "sum"
        loss = F.cross_entropy(scores.float().view(-1, WORDS), labels, ignore_index=-100, reduction=how)
        return {"loss": loss if items is None else loss / items, "logits": scores, "hidden": hidden}


def step(model: nn.Module, **given: Any) -> Any:
    """A step whose caller holds the outputs."""
    found = model(**given)
    found["loss"].backward()
    return found


def peak(model: nn.Module, **given: Any) -> int:
    model.zero_grad(set_to_none=True)
    return encore.measure(lambda: step(model, **given)).step_peak


def assert_lean(plain: nn.Module, **given: Any) -> int:
    """One step like eager's, no higher than eager's, and as predicted; returns its measured peak."""
    planned = encore.compile(copy.deepcopy(plain), budget="min", skip=("fuse",))
    for model in (plain, planned):
        model.zero_grad(set_to_none=True)
        step(model, **given)
    for (name, mine), its in zip(planned.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None), name
        if mine.grad is not None:
            assert its.grad is not None
            assert_close(mine.grad, its.grad, name)
    report = encore.report(planned)
    measured = peak(planned, **given)
    assert measured <= report.planned.step_peak <= 1.01 * measured
    assert measured <= peak(plain, **given)
    return measured


@pytest.mark.parametrize("counted", [False, True])
def test_a_causal_language_model(counted: bool) -> None:
    words = torch.randint(WORDS, (2, 16))
    items = {"items": torch.tensor(20)} if counted else {}
    scores, gradient = words.numel() * WORDS * 4, WORDS * 16 * 4
    measured = assert_lean(CausalModel(), words=words, **items)
    assert measured < 1.1 * (scores + 2 * gradient)  # eager holds three times the scores, besides


def test_the_first_step_holds_no_more_than_later_ones() -> None:
    model = encore.compile(CausalModel(), lowering="eager", budget="min")
    words = torch.randint(WORDS, (2, 16))
    step(model, words=words)
    (first,) = encore.report(model).graphs
    predicted = encore.report(model).planned.step_peak
    assert peak(model, words=words) <= predicted
    assert encore.report(model).graphs == (first,)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # a broken one would keep transformers from being imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library: Any = pytest.importorskip("transformers")
        make, settings = {
            "llama": lambda: (library.LlamaForCausalLM, library.LlamaConfig),
            "bert": lambda: (library.BertForMaskedLM, library.BertConfig),
        }[name]()
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    words = torch.randint(WORDS, (2, 16))
    given: dict[str, Any] = {"input_ids": words, "labels": words}
    if name == "llama":
        sizes["num_key_value_heads"] = 2
        given |= {"use_cache": False, "num_items_in_batch": torch.tensor(20)}
    model: nn.Module = make(settings(**sizes, num_attention_heads=2)).eval()
    assert_lean(model, **given)
