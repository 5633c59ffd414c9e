"""The losses of a run as JSON lines, one a step, for plots and for comparing runs bit by bit.

The checkpoint is the truth: a run that goes on writes the file anew up to the checkpoint's step, so that steps which a
kill undid do not stand in it twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from encore.whole_files import replacing
from examples.train.errors import CheckpointError

NAME = "history.jsonl"
Score = Mapping[str, float]


class History:
    """The file, open at its end."""

    def __init__(self, directory: Path, losses: Sequence[float], scores: Mapping[int, Score]) -> None:
        self.path = directory / NAME
        try:
            with replacing(self.path) as whole:
                for step, loss in enumerate(losses, start=1):
                    whole.write(_line(step, loss, scores.get(step)).encode())
            self._file: TextIO = self.path.open("a")
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> History:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, step: int, loss: float, score: Score | None) -> None:
        """One more step; whoever reads along sees it at once."""
        try:
            self._file.write(_line(step, loss, score))
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be written: {error.strerror}; the checkpoints beside it are untouched: "
            "make room, and the same command goes on"
        )


def _line(step: int, loss: float, score: Score | None) -> str:
    told: dict[str, Any] = {"step": step, "loss": loss}
    if score is not None:
        told["score"] = finite(score)
    return json.dumps(told) + "\n"


def finite(score: Score) -> dict[str, float | None]:
    """A score as JSON can hold it."""
    return {name: number if math.isfinite(number) else None for name, number in score.items()}
