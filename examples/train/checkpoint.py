"""Checkpoints that survive a kill at any moment: a file is there whole, and checked, or it is not there.

A checkpoint is what `torch.save` writes: a zip file, in which every record has a CRC-32. It is written next to its
place, flushed to the disk, and renamed; the newest two are kept, so that if a disk has damaged one, the older one can
replace it. It is read with `weights_only=True`: a checkpoint from a stranger runs no code.
"""

from __future__ import annotations

import fcntl
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from encore.whole_files import PARTIAL, replacing
from examples.train.errors import CheckpointError

FORMAT = 2
KEPT = 2
NAME = re.compile(r"step-(\d+)\.checkpoint")
DAMAGED = ".damaged"


class DamagedError(CheckpointError):
    """A file that is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read: the step after which it was written, and the state."""

    step: int
    state: dict[str, Any]
    path: Path


class Checkpoints:
    """The checkpoints of one run in one directory, which no other run may use at the same time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = -1

    def __enter__(self) -> Checkpoints:
        """Lock the directory, check that it can be written, and remove what a kill left half done."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise _cannot_write(self.directory, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CheckpointError(
                f"another run is writing checkpoints to {self.directory}; wait for it, or name another directory"
            ) from None
        try:
            for left in self.directory.glob(f"*{PARTIAL}"):
                left.unlink()
            trial = self.directory / f"trial{PARTIAL}"
            trial.write_bytes(b"?")
            trial.unlink()
        except OSError as error:
            os.close(self._lock)
            raise _cannot_write(self.directory, error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._lock)

    def found(self) -> list[Path]:
        """Newest first."""
        return sorted((path for path in self.directory.iterdir() if NAME.fullmatch(path.name)), key=_step, reverse=True)

    def write(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the state after a step; older ones are removed only when it is safe on the disk."""
        path = self.directory / f"step-{step:08d}.checkpoint"
        try:
            with replacing(path) as file:
                write_state(file, state)
            for older in self.found()[KEPT:]:
                older.unlink()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.directory}: {error.strerror or error}; "
                f"{_what_is_left(self.found())}"
            ) from error
        return path

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole. Damaged ones are renamed, with a warning; if all are damaged, that is an
        error: starting over would be a silent loss."""
        found = self.found()
        damages: list[str] = []
        for path in found:
            try:
                checkpoint = Checkpoint(_step(path), read_state(path), path)
            except DamagedError as error:
                damages.append(str(error))
                continue
            for reason, damaged in zip(damages, found, strict=False):
                renamed = damaged.rename(damaged.with_name(damaged.name + DAMAGED))
                warnings.warn(
                    f"encore: {reason}; it is renamed to {renamed.name}, and the run goes on from {path.name}",
                    stacklevel=2,
                )
            return checkpoint
        if damages:
            raise CheckpointError(f"{'; '.join(damages)}; bring one back from elsewhere, or name another directory")
        return None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").removesuffix(".checkpoint"))


def _cannot_write(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"checkpoints cannot be written to {directory}: {error.strerror}; name another directory")


def _what_is_left(found: list[Path]) -> str:
    return f"{found[0].name} is untouched: make room, and the same command goes on from it" if found else "make room"


def write_state(file: BinaryIO, state: Mapping[str, Any]) -> None:
    try:
        torch.save({"format": FORMAT, "state": dict(state)}, file)
    except RuntimeError as error:
        reason = error.__context__
        if isinstance(reason, OSError):  # the RuntimeError does not say what the system has reported
            raise OSError(reason.errno, reason.strerror) from error
        raise


def read_state(path: Path) -> dict[str, Any]:
    """The state in a file, if its checksums are right: `torch.load` does not compare them."""
    try:
        with zipfile.ZipFile(path) as records:
            damaged = records.testzip()
        saved = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except zipfile.BadZipFile as error:
        raise DamagedError(f"{path} is truncated: its end is missing or damaged") from error
    except Exception as error:  # zipfile and torch.load raise many kinds for bytes that are not what was written
        raise DamagedError(f"{path} does not hold a state: {(str(error) or repr(error)).splitlines()[0]}") from error
    if damaged:
        raise DamagedError(f"{path} is damaged: its checksum is wrong")
    if not isinstance(saved, dict) or "format" not in saved:
        raise DamagedError(f"{path} does not hold a state, but a {type(saved).__name__}")
    if saved["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {saved['format']}, and this Encore reads format {FORMAT}; use the Encore that wrote it"
        )
    state: dict[str, Any] = saved["state"]
    return state
