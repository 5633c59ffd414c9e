"""Checkpoints that survive a kill at any moment: a file is there whole, and checked, or it is not there.

A checkpoint is one line of text (format, SHA-256, bytes) and then what `torch.save` writes. It is written beside its
place, flushed to the disk, and renamed; the newest two are kept, so that one which a disk has damaged has an elder to
fall back on. It is read with `weights_only=True`: a checkpoint from a stranger runs no code.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from encore.whole_files import PARTIAL, replacing
from examples.train.errors import CheckpointError

FORMAT = 1
KEPT = 2
HEADER = "encore checkpoint {format:4d} {digest:64} {size:20d}\n"
HEADER_PATTERN = re.compile(r"encore checkpoint +(\d+) ([0-9a-f]{64}) +(\d+)\n")
HEADER_BYTES = len(HEADER.format(format=FORMAT, digest="", size=0))
NAME = re.compile(r"step-(\d+)\.checkpoint")
DAMAGED = ".damaged"
CHUNK = 1 << 20


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
        """Take hold of the directory, make sure that it can be written, and clear away what a kill left half done."""
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
        """Put down the state after a step; only when it is safe on the disk are elder ones let go."""
        path = self.directory / f"step-{step:08d}.checkpoint"
        try:
            with replacing(path) as file:
                write_state(file, state)
            for elder in self.found()[KEPT:]:
                elder.unlink()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.directory}: {error.strerror or error}; "
                f"{_what_is_left(self.found())}"
            ) from error
        return path

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole. Damaged ones are told of and set aside; where all are, that is an
        error: starting over would be a silent loss."""
        found = self.found()
        refused: list[str] = []
        for path in found:
            try:
                checkpoint = Checkpoint(_step(path), read_state(path), path)
            except DamagedError as error:
                refused.append(str(error))
                continue
            for reason, damaged in zip(refused, found, strict=False):
                aside = damaged.rename(damaged.with_name(damaged.name + DAMAGED))
                warnings.warn(
                    f"encore: {reason}; it is set aside as {aside.name}, and the run goes on from {path.name}",
                    stacklevel=2,
                )
            return checkpoint
        if refused:
            raise CheckpointError(f"{'; '.join(refused)}; bring one back from elsewhere, or name another directory")
        return None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").removesuffix(".checkpoint"))


def _cannot_write(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"checkpoints cannot be written to {directory}: {error.strerror}; name another directory")


def _what_is_left(found: list[Path]) -> str:
    return f"{found[0].name} is untouched: make room, and the same command goes on from it" if found else "make room"


class _Hashed:
    """What `torch.save` writes into: passes everything on, in order, and keeps the sum of it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sum = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:  # torch.save turns it into a RuntimeError that does not say why
            self.error = error
            raise
        self.sum.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def write_state(file: BinaryIO, state: Mapping[str, Any]) -> None:
    """Header and state. The header is known last and stands first, so it is written twice."""
    file.write(HEADER.format(format=FORMAT, digest="", size=0).encode())
    hashed = _Hashed(file)
    try:
        torch.save(dict(state), hashed)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise (hashed.error or error) from error
    file.seek(0)
    file.write(HEADER.format(format=FORMAT, digest=hashed.sum.hexdigest(), size=hashed.size).encode())


def read_state(path: Path) -> dict[str, Any]:
    """The state in a file, once its sum is right."""
    try:
        with path.open("rb") as file:
            digest, size = _read_header(file.read(HEADER_BYTES), path)
            found = os.fstat(file.fileno()).st_size - HEADER_BYTES
            if found != size:
                raise DamagedError(f"{path} is truncated: {max(found, 0)} of {size} bytes are there")
            total = hashlib.sha256()
            while chunk := file.read(CHUNK):
                total.update(chunk)
            if total.hexdigest() != digest:
                raise DamagedError(f"{path} is damaged: its checksum is wrong")
            file.seek(HEADER_BYTES)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise DamagedError(f"{path} does not hold a state: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{path} does not hold a state, but a {type(state).__name__}")
    return state


def _read_header(header: bytes, path: Path) -> tuple[str, int]:
    match = HEADER_PATTERN.fullmatch(header.decode("ascii", errors="replace"))
    if match is None:
        raise DamagedError(f"{path} is damaged: it does not begin like a checkpoint")
    version, digest, size = int(match[1]), match[2], int(match[3])
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, and this Encore reads format {FORMAT}; use the Encore that wrote it"
        )
    return digest, size
