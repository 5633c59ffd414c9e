"""Words as numbers and back; a sentence as a row of a fixed number of steps."""

from collections.abc import Iterable, Sequence

PAD, BEGIN, END = 0, 1, 2
MARKERS = ["<pad>", "<begin>", "<end>"]
UNKNOWN = "<unknown>"


class Vocabulary:
    """The markers, and the words in their order; with `UNKNOWN` among them, it stands for every other word."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = [*MARKERS, *words]
        self._codes = {word: code for code, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Sequence[str]) -> list[int]:
        if UNKNOWN not in self._codes:
            return [self._codes[word] for word in words]
        return [self._codes.get(word, self._codes[UNKNOWN]) for word in words]

    def decode(self, codes: Iterable[int]) -> list[str]:
        """The words up to the first `END`, without padding."""
        words = []
        for code in codes:
            if code == END:
                break
            if code != PAD:
                words.append(self.words[code])
        return words
