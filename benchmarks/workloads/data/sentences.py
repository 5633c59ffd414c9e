"""Sentences of a small English grammar. A verb agrees with a subject that may stand several words before it."""

import torch

from benchmarks.workloads.data.split import draw

GRAMMAR: dict[str, tuple[str, ...]] = {
    "SENTENCE": ("SINGULAR SLEEPS .", "PLURAL SLEEP .", "SINGULAR SEES OBJECT .", "PLURAL SEE OBJECT ."),
    "SINGULAR": ("the ONE", "a ONE", "the ONE near OBJECT", "a ONE that SEES OBJECT"),
    "PLURAL": ("the MANY", "two MANY", "the MANY near OBJECT", "two MANY that SEE OBJECT"),
    "OBJECT": ("SINGULAR", "the ONE", "the MANY", "some MANY"),
    "ONE": ("cat", "bird", "child", "grey fox", "small horse"),
    "MANY": ("cats", "birds", "children", "grey foxes", "small horses"),
    "SLEEPS": ("sleeps", "sings", "waits in the garden"),
    "SLEEP": ("sleep", "sing", "wait in the garden"),
    "SEES": ("sees", "follows", "likes"),
    "SEE": ("see", "follow", "like"),
}
"""Each capitalised symbol with the texts it may become; whatever is not a symbol is a word."""

ALPHABET = " .abcdefghijklmnopqrstuvwxyz"
WORDS = sorted({part for texts in GRAMMAR.values() for text in texts for part in text.split()} - set(GRAMMAR))


def expand(symbol: str, generator: torch.Generator) -> list[str]:
    """A random derivation of `symbol`, as words."""
    if symbol not in GRAMMAR:
        return [symbol]
    choices = GRAMMAR[symbol]
    chosen = choices[int(torch.randint(len(choices), (), generator=generator))]
    return [word for part in chosen.split() for word in expand(part, generator)]


def sentence(generator: torch.Generator, *, held_out: bool) -> list[str]:
    """A random sentence, as words, that is trained on or that is not."""
    return draw(lambda generator: expand("SENTENCE", generator), " ".join, generator, held_out=held_out)


def characters(length: int, generator: torch.Generator, *, held_out: bool) -> str:
    """The first `length` characters of a run of random sentences."""
    written = ""
    while len(written) < length:
        written += " ".join(sentence(generator, held_out=held_out)) + " "
    return written[:length]


def words(length: int, generator: torch.Generator, *, held_out: bool) -> list[str]:
    """The first `length` words of a run of random sentences."""
    written: list[str] = []
    while len(written) < length:
        written += sentence(generator, held_out=held_out)
    return written[:length]
