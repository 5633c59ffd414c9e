"""How well a model does, as numbers people know: BLEU, exact match, label error rate, accuracy, perplexity."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch.nn import functional as F

LONGEST_NGRAM = 4

Words = Sequence[object]


def bleu(candidates: Sequence[Words], references: Sequence[Words]) -> float:
    """Corpus BLEU in percent (Papineni et al. 2002), one reference a candidate, not smoothed.

    The geometric mean of the shares of 1- to 4-grams that stand in the reference (each as often as it stands there),
    times a penalty for a corpus shorter than its references. Lengths of n-gram that no candidate and no reference has
    are left out of the mean, or a corpus of short sentences would score nothing however good it is.
    """
    logs = []
    for length in range(1, LONGEST_NGRAM + 1):
        matched = proposed = wanted = 0
        for candidate, reference in zip(candidates, references, strict=True):
            have, want = ngrams(candidate, length), ngrams(reference, length)
            matched += (have & want).total()
            proposed += have.total()
            wanted += want.total()
        if proposed == wanted == 0:
            continue
        if matched == 0:
            return 0.0
        logs.append(math.log(matched / proposed))
    words, wanted = (sum(map(len, side)) for side in (candidates, references))
    brevity = min(0.0, 1 - wanted / words) if words else 0.0
    return 100 * math.exp(brevity + sum(logs) / len(logs)) if logs else 0.0


def ngrams(words: Words, length: int) -> Counter[tuple[object, ...]]:
    return Counter(tuple(words[at : at + length]) for at in range(len(words) - length + 1))


def exact_match(candidates: Sequence[Words], references: Sequence[Words]) -> float:
    """The share of candidates that are their reference, word for word."""
    pairs = list(zip(candidates, references, strict=True))
    return sum(list(candidate) == list(reference) for candidate, reference in pairs) / len(pairs)


def edit_distance(candidate: Words, reference: Words) -> int:
    """The fewest insertions, deletions and substitutions that make one the other (Levenshtein 1966)."""
    row = list(range(len(reference) + 1))
    for above, have in enumerate(candidate):
        diagonal, row[0] = row[0], above + 1
        for at, want in enumerate(reference, start=1):
            diagonal, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, diagonal + (have != want))
    return row[-1]


def label_error_rate(candidates: Sequence[Words], references: Sequence[Words]) -> float:
    """Edits a label of the references; zero is perfect, and a babbler may get above one."""
    edits = sum(edit_distance(*pair) for pair in zip(candidates, references, strict=True))
    return edits / sum(map(len, references))


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of rows `[..., class]` whose largest entry is the label's."""
    return (logits.argmax(dim=-1) == labels).float().mean().item()


def perplexity(logits: torch.Tensor, following: torch.Tensor) -> float:
    """The number of equally likely symbols among which guessing would be as hard."""
    return math.exp(F.cross_entropy(logits.flatten(0, -2), following.flatten()).item())
