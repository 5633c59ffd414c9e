"""GPT-2, T5 and Whisper of Hugging Face's transformers, from small configurations: weights are drawn here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.workloads.workload import Batch, CutWorkload, batch_generator

FIRST = 3
"""Words below are markers: padding, begin and end."""


def forward(model: nn.Module, read: torch.Tensor, written: torch.Tensor | None = None) -> Any:
    """One step of training, up to its loss; a language model reads what it is to write."""
    torch.manual_seed(0)
    name = "input_features" if read.is_floating_point() else "input_ids"
    return model(**{name: read}, labels=read if written is None else written)


def gpt2(
    *, batch_size: int = 8, width: int = 128, layers: int = 4, heads: int = 4, steps: int = 96, words: int = 2000
) -> CutWorkload:
    """A decoder of so many layers on random words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=words, n_positions=steps, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=1, eos_token_id=2,
        use_cache=False,
    )  # fmt: skip

    def batch(index: int) -> Batch:
        return (_words(batch_generator(index), words, batch_size, steps),)

    return CutWorkload("gpt2", GPT2LMHeadModel(config), batch, forward, ("GPT2Block",))


def t5(
    *, batch_size: int = 8, width: int = 128, layers: int = 3, heads: int = 4, steps: int = 96, words: int = 2000
) -> CutWorkload:
    """An encoder and a decoder of so many layers on random words."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 4 * width,
        "num_heads": heads,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    config = T5Config(vocab_size=words, num_layers=layers, use_cache=False, **sizes)

    def batch(index: int) -> Batch:
        generator = batch_generator(index)
        return _words(generator, words, batch_size, steps), _words(generator, words, batch_size, steps // 2)

    return CutWorkload("t5", T5ForConditionalGeneration(config), batch, forward, ("T5Block",))


def whisper(
    *, batch_size: int = 8, width: int = 128, layers: int = 3, heads: int = 4, frames: int = 200, words: int = 2000
) -> CutWorkload:
    """A speech recogniser on random features of 40 bins."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": 4 * width}
    config = WhisperConfig(
        vocab_size=words, num_mel_bins=40, d_model=width, max_source_positions=frames // 2, max_target_positions=frames,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None, use_cache=False, **sides,
    )  # fmt: skip

    def batch(index: int) -> Batch:
        generator = batch_generator(index)
        features = torch.randn(batch_size, 40, frames, generator=generator)
        return features, _words(generator, words, batch_size, frames // 4)

    classes = ("WhisperEncoderLayer", "WhisperDecoderLayer")
    return CutWorkload("whisper", WhisperForConditionalGeneration(config), batch, forward, classes)


def _words(generator: torch.Generator, words: int, batch_size: int, steps: int) -> torch.Tensor:
    return torch.randint(FIRST, words, (batch_size, steps), generator=generator)
