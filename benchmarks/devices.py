"""The suite `devices`: estimates for GPUs that are not here, next to peaks that others measured on them.

The models are torchvision's and transformers', built from their constructors without weights; rows whose package is not
installed are left out. Nothing runs.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import encore
from benchmarks.schema import Layout, Written
from encore.machine import Machine, this_machine
from encore.terminal import progress

MEASURED = Path(__file__).parent / "measured" / "gpu_peaks.csv"
IMAGE, TOKENS = 86, 128
QUICK_ROWS = 3


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One published measurement."""

    model: str
    gpu: str
    optimizer: str
    batch: int
    measured: int
    """Bytes."""
    others: int
    """The estimate of xMem, the best published estimator, in bytes."""
    images: bool


@dataclass(frozen=True, slots=True)
class EstimatedRow:
    """A measurement with Encore's estimate."""

    row: MeasuredRow
    reserved: int
    allocated: int
    fits: bool
    """Whether the estimate says that it fits, with the margin. All rows ran."""

    @property
    def error(self) -> float:
        """How far the estimate is above the measurement, as a fraction."""
        return self.reserved / self.row.measured - 1


@dataclass(frozen=True, slots=True)
class DevicesSuite(Written):
    """One run of the suite."""

    layout = Layout("encore_devices", 1)

    machine: Machine
    quick: bool
    rows: tuple[EstimatedRow, ...]
    left_out: tuple[str, ...]
    """Models whose package is not installed, or too new."""
    packages: tuple[str, ...]
    """With versions."""
    seconds: float = 0.0


def run_devices(*, quick: bool = False) -> DevicesSuite:
    """Estimate every row, reporting progress on stderr."""
    rows = measured_rows()
    chosen = [row for row in rows if "gpt2" in row.model][:QUICK_ROWS] if quick else rows
    found, left_out = [], dict[str, None]()
    with progress("estimates", len(chosen)) as advance:
        for row in chosen:
            try:
                found.append(estimate_row(row))
            except ImportError:
                left_out[row.model] = None
            advance(row.model)
    return DevicesSuite(this_machine(), quick, tuple(found), tuple(left_out), _packages())


def measured_rows() -> list[MeasuredRow]:
    """All published measurements."""
    with MEASURED.open(newline="") as file:
        return [
            MeasuredRow(
                model=row["torchvision_or_hf"],
                gpu=row["gpu"].partition(" (")[0],
                optimizer=row["optimizer"],
                batch=int(row["batch"]),
                measured=int(row["measured_peak_bytes"]),
                others=int(row["xmem_estimate_bytes"]),
                images=row["family"] == "CNN",
            )
            for row in csv.DictReader(file)
        ]


def estimate_row(row: MeasuredRow) -> EstimatedRow:
    """Encore's estimate for one measurement."""
    with torch.device("meta"):
        model = _classifier(row.model) if row.images else _language_model(row.model)
        if row.images:
            batch = {"images": torch.empty(row.batch, 3, IMAGE, IMAGE), "classes": torch.empty(row.batch).long()}
        else:
            ids = torch.empty(row.batch, TOKENS, dtype=torch.long)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    found = encore.estimate(model, device=row.gpu, optimizer=row.optimizer, **batch)
    return EstimatedRow(row, found.reserved, found.allocated, found.fits())


def quantiles(errors: list[float]) -> tuple[float, float]:
    """The median and the 90th percentile of absolute errors."""
    sizes = sorted(map(abs, errors))
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]


def offsets(rows: tuple[EstimatedRow, ...]) -> dict[str, int]:
    """For each GPU, the bytes by which measurements are above estimates, in the median."""
    gpus = {found.row.gpu for found in rows}
    return {
        gpu: int(statistics.median(found.row.measured - found.reserved for found in rows if found.row.gpu == gpu))
        for gpu in sorted(gpus)
    }


class _Classifier(nn.Module):
    """A network with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(images), classes)


CLASSES = {
    "MNASNet(alpha=1.0;num_classes=10)": ("mnasnet1_0", 10),
    "MobileNetV3(large settings; last_channel=1280;num_classes=10)": ("mobilenet_v3_large", 10),
    "MobileNetV3(small settings; last_channel=1024;num_classes=10)": ("mobilenet_v3_small", 10),
}
"""Names of torchvision's constructors, and classes, of models that are published under other names."""


def _classifier(model: str) -> nn.Module:
    from torchvision import models  # type: ignore[import-not-found]

    name, classes = CLASSES.get(model, (model, 1000))
    with torch.device("cpu"):  # stochastic depth reads its probabilities off a tensor
        return _Classifier(getattr(models, name)(num_classes=classes))


def _language_model(model: str) -> nn.Module:
    import transformers as hf  # type: ignore[import-not-found]

    return _LANGUAGE_MODELS[model](hf)


def _gpt2(**settings: Any) -> Callable[[Any], nn.Module]:
    return lambda hf: hf.GPT2LMHeadModel(hf.GPT2Config(**settings))


def _from_config(kind: str, config: str, **settings: Any) -> Callable[[Any], nn.Module]:
    return lambda hf: getattr(hf, kind)(getattr(hf, config)(**settings))


_LANGUAGE_MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "openai-community/gpt2": _gpt2(),
    "distilbert/distilgpt2": _gpt2(n_layer=6),
    "cerebras/Cerebras-GPT-111M": _gpt2(n_layer=10, n_inner=3072, activation_function="gelu", n_positions=2048),
    "EleutherAI/gpt-neo-125M": _from_config(
        "GPTNeoForCausalLM", "GPTNeoConfig", hidden_size=768, num_layers=12, num_heads=12,
        attention_types=[[["global", "local"], 6]],
    ),
    "facebook/opt-125m": _from_config("OPTForCausalLM", "OPTConfig"),
    "facebook/opt-350m": _from_config(
        "OPTForCausalLM", "OPTConfig", hidden_size=1024, num_hidden_layers=24, ffn_dim=4096, num_attention_heads=16,
        word_embed_proj_dim=512, do_layer_norm_before=False,
    ),
    "T5-small": _from_config(
        "T5ForConditionalGeneration", "T5Config", vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6,
        num_heads=8, decoder_start_token_id=0, pad_token_id=0,
    ),
    "Qwen/Qwen3-4B": _from_config(
        "Qwen3ForCausalLM", "Qwen3Config", vocab_size=151936, hidden_size=2560, intermediate_size=9728,
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _from_config(
        "Qwen2ForCausalLM", "Qwen2Config", vocab_size=151936, hidden_size=1536, intermediate_size=8960,
        num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=False,
    ),
    "google/gemma-2-2b-it": _from_config("Gemma2ForCausalLM", "Gemma2Config"),
    "meta-llama/Llama-3.2-3B-Instruct": _from_config(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=128256, hidden_size=3072, intermediate_size=8192,
        num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""From the published configurations."""


def _packages() -> tuple[str, ...]:
    """The packages that models come from."""
    found = []
    for name in ("torchvision", "transformers"):
        try:
            found.append(f"{name} {__import__(name).__version__}")
        except ImportError:
            found.append(f"no {name}")
    return tuple(found)
