"""Small models of several kinds, and batches of several lengths, that every host's loop trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Tensor]
LENGTHS = (9, 12)
ROWS = 4
WORDS = 32


def build(name: str) -> tuple[nn.Module, list[Batch]]:
    """A model and the batches of an epoch, the same at every call; their lengths differ."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    return model, [batch(length, generator) for length in LENGTHS * 4]


Built = tuple[nn.Module, Callable[[int, torch.Generator], Batch]]


def words(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, WORDS, (rows, length), generator=generator)


def padded_words(length: int, generator: torch.Generator) -> Batch:
    """Word numbers, the last row shorter than the others, as a collator pads it."""
    ids = words(ROWS, length, generator)
    mask = torch.ones_like(ids)
    mask[-1, length - 3 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def llama() -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, attention_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), padded_words


def t5() -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), padded_words


def wav2vec2() -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip

    def batch(length: int, generator: torch.Generator) -> Batch:
        waves = torch.randn(ROWS, 40 * length, generator=generator)
        return {"input_values": waves, "labels": words(ROWS, 3, generator)}

    return transformers.Wav2Vec2ForCTC(config), batch


class Tagger(nn.Module):
    """A bidirectional LSTM that tags words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 12, bidirectional=True, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(24, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Batch:
        scores = self.head(self.drop(self.lstm(self.embedding(input_ids))[0]))
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def tagger() -> Built:
    def batch(length: int, generator: torch.Generator) -> Batch:
        ids = words(ROWS, length, generator)
        return {"input_ids": ids, "labels": ids % 5}

    return Tagger(), batch


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) + x).relu()


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(ResidualBlock(8), ResidualBlock(8))
        self.head = nn.Linear(8, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Batch:
        scores = self.head(self.blocks(self.stem(pixel_values)).mean((2, 3)))
        return {"loss": functional.cross_entropy(scores, labels), "logits": scores}


def resnet() -> Built:
    def batch(length: int, generator: torch.Generator) -> Batch:
        pictures = torch.randn(ROWS, 3, 2 * length, 2 * length, generator=generator)
        return {"pixel_values": pictures, "labels": torch.randint(5, (ROWS,), generator=generator)}

    return SmallResNet(), batch


MODELS: dict[str, Callable[[], Built]] = {
    "llama": llama, "t5": t5, "wav2vec2": wav2vec2, "tagger": tagger, "resnet": resnet,
}  # fmt: skip


def endless(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
