"""Neural machine translation: LSTM encoder and decoder with additive attention (Bahdanau, Cho, Bengio 2015).

The task is to translate written-out numbers from English to German, whose units come before the tens
("twenty one" is "ein und zwanzig"), so attention has a word order to learn. At each decoder step the scorer
makes feature maps as large as the whole encoded source, from one small state and keys that all steps share:
the O shape that Echo recomputes (Zheng, Vijaykumar, Pekhimenko 2020).
"""

import torch
from torch import nn
from torch.nn import functional as F

from encore.workloads.cell import LSTMStack
from encore.workloads.workload import Batch, Workload, batch_generator

PAD, BEGIN, END = 0, 1, 2
MARKERS = ["<pad>", "<begin>", "<end>"]

ENGLISH_SMALL, GERMAN_SMALL = zip(
    ("zero", "null"),
    ("one", "ein"),
    ("two", "zwei"),
    ("three", "drei"),
    ("four", "vier"),
    ("five", "fünf"),
    ("six", "sechs"),
    ("seven", "sieben"),
    ("eight", "acht"),
    ("nine", "neun"),
    ("ten", "zehn"),
    ("eleven", "elf"),
    ("twelve", "zwölf"),
    ("thirteen", "dreizehn"),
    ("fourteen", "vierzehn"),
    ("fifteen", "fünfzehn"),
    ("sixteen", "sechzehn"),
    ("seventeen", "siebzehn"),
    ("eighteen", "achtzehn"),
    ("nineteen", "neunzehn"),
    strict=True,
)
ENGLISH_TENS, GERMAN_TENS = zip(
    ("zero", "null"),
    ("ten", "zehn"),
    ("twenty", "zwanzig"),
    ("thirty", "dreißig"),
    ("forty", "vierzig"),
    ("fifty", "fünfzig"),
    ("sixty", "sechzig"),
    ("seventy", "siebzig"),
    ("eighty", "achtzig"),
    ("ninety", "neunzig"),
    strict=True,
)
ENGLISH_SCALES, GERMAN_SCALES, GERMAN_PLURALS = zip(
    ("", "", ""),
    ("thousand", "tausend", "tausend"),
    ("million", "Million", "Millionen"),
    ("billion", "Milliarde", "Milliarden"),
    ("trillion", "Billion", "Billionen"),
    ("quadrillion", "Billiarde", "Billiarden"),
    strict=True,
)

ENGLISH = [*MARKERS, *ENGLISH_SMALL, *ENGLISH_TENS[2:], "hundred", *ENGLISH_SCALES[1:]]
GERMAN = [*MARKERS, *GERMAN_SMALL, *GERMAN_TENS[2:], "eins", "eine", "und", "hundert"]
GERMAN += [*GERMAN_SCALES[1:], *GERMAN_PLURALS[2:]]

LONGEST_GROUP = 6
"""Words in "neun hundert neun und neunzig Millionen", the most that three digits ever take."""


class AdditiveAttention(nn.Module):
    """Scores every source position against the decoder's state with a one-hidden-layer perceptron."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.from_state = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(
        self, state: torch.Tensor, keys: torch.Tensor, encoded: torch.Tensor, is_padding: torch.Tensor
    ) -> torch.Tensor:
        """The mean of `encoded` under the weights that `state` gives to the source positions."""
        scores = self.score(torch.tanh(keys + self.from_state(state).unsqueeze(1))).squeeze(-1)
        weights = scores.masked_fill(is_padding, float("-inf")).softmax(dim=-1)
        return torch.bmm(weights.unsqueeze(1), encoded).squeeze(1)


class Translator(nn.Module):
    """Encoder, attention and decoder with teacher forcing; returns the mean cross entropy of a word."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(len(ENGLISH), hidden, padding_idx=PAD)
        self.target_embedding = nn.Embedding(len(GERMAN), hidden, padding_idx=PAD)
        self.encoder = LSTMStack(hidden, hidden, layers)
        self.decoder = LSTMStack(2 * hidden, hidden, layers)
        self.keys = nn.Linear(hidden, hidden, bias=False)
        self.attention = AdditiveAttention(hidden)
        self.readout = nn.Linear(2 * hidden, hidden)
        self.projection = nn.Linear(hidden, len(GERMAN))

    def forward(self, source: torch.Tensor, previous: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        embedded = self.source_embedding(source)
        states = self.encoder.initial_states(embedded)
        outputs = []
        for x in embedded.unbind(1):
            states = self.encoder(x, states)
            outputs.append(states[-1][0])
        encoded = torch.stack(outputs, dim=1)

        keys, is_padding = self.keys(encoded), source == PAD
        readouts = []
        for x in self.target_embedding(previous).unbind(1):
            context = self.attention(states[-1][0], keys, encoded, is_padding)
            states = self.decoder(torch.cat([x, context], dim=-1), states)
            readouts.append(torch.tanh(self.readout(torch.cat([states[-1][0], context], dim=-1))))
        logits = self.projection(torch.stack(readouts, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)


def english(groups: list[int]) -> list[str]:
    """A number in English words, given as groups of three digits, the most significant first."""
    words: list[str] = []
    for value, power in zip(groups, reversed(range(len(groups))), strict=True):
        hundreds, rest = divmod(value, 100)
        words += [ENGLISH_SMALL[hundreds], "hundred"] if hundreds else []
        if rest >= 20:
            words += [ENGLISH_TENS[rest // 10]]
            rest %= 10
        words += [ENGLISH_SMALL[rest]] if rest else []
        words += [ENGLISH_SCALES[power]] if power and value else []
    return words


def german(groups: list[int]) -> list[str]:
    """A number in German words, with its compounds ("einundzwanzigtausend") written apart."""
    words: list[str] = []
    for value, power in zip(groups, reversed(range(len(groups))), strict=True):
        hundreds, rest = divmod(value, 100)
        words += [GERMAN_SMALL[hundreds], "hundert"] if hundreds else []
        if rest == 1:  # eins; ein tausend; eine Million
            words += ["eins" if power == 0 else "ein" if power == 1 else "eine"]
        elif rest >= 20:
            words += [GERMAN_SMALL[rest % 10], "und"] if rest % 10 else []
            words += [GERMAN_TENS[rest // 10]]
        elif rest:
            words += [GERMAN_SMALL[rest]]
        words += [(GERMAN_SCALES if value == 1 else GERMAN_PLURALS)[power]] if power and value else []
    return words


def random_number(most_groups: int, generator: torch.Generator) -> list[int]:
    """One to `most_groups` groups of three digits, the first not zero."""
    count = int(torch.randint(1, most_groups + 1, (), generator=generator))
    leading = int(torch.randint(1, 1000, (), generator=generator))
    return [leading, *torch.randint(1000, (count - 1,), generator=generator).tolist()]


def workload(*, batch_size: int = 128, hidden: int = 256, layers: int = 2, steps: int = 24) -> Workload:
    """Sentences padded to `steps` words; a batch is the source, the previous target words, and the target."""
    most_groups = min(steps // LONGEST_GROUP, len(ENGLISH_SCALES))
    if most_groups < 1:
        raise ValueError(f"steps={steps} is too short for a written-out number: {LONGEST_GROUP} at least")
    english_code = {word: code for code, word in enumerate(ENGLISH)}
    german_code = {word: code for code, word in enumerate(GERMAN)}

    def batch(index: int) -> Batch:
        generator = batch_generator(index)
        sources, previous, targets = [], [], []
        for _ in range(batch_size):
            number = random_number(most_groups, generator)
            source = [english_code[word] for word in english(number)]
            target = [german_code[word] for word in german(number)]
            # Padding stands before the source, so that the encoder ends on a word and not on padding.
            sources.append([PAD] * (steps - len(source)) + source)
            padding = [PAD] * (steps - len(target) - 1)
            previous.append([BEGIN, *target, *padding])
            targets.append([*target, END, *padding])
        return torch.tensor(sources), torch.tensor(previous), torch.tensor(targets)

    return Workload("nmt", Translator(hidden, layers), batch)
