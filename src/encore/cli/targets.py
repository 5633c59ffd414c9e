"""Targets as users write them, `package.module:factory`: from the text to a model and its arguments."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from encore.errors import EncoreError, listed

TARGET = "package.module:factory; the factory returns (model, args) or (model, args, kwargs), on any device"


class TargetError(EncoreError):
    """`package.module:factory` does not lead to a model."""


BATCHES = "package.module:factory; the factory returns (model, make_batch), and make_batch(size) the model's arguments"


def load_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The model and arguments that `package.module:factory` makes."""
    match _made(target):
        case (model, tuple() | list() as args) if callable(model):
            return model, tuple(args), {}
        case (model, tuple() | list() as args, dict() as kwargs) if callable(model):
            return model, tuple(args), kwargs
        case made:
            raise TargetError(f"{target} must return (model, args) or (model, args, kwargs), not {type(made).__name__}")


def load_batches(target: str) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    """The model that `package.module:factory` makes, and what makes its batches of any size."""
    match _made(target):
        case (model, make_batch) if callable(model) and callable(make_batch):
            return model, make_batch
        case made:
            raise TargetError(f"{target} must return (model, make_batch), not {type(made).__name__}")


def _made(target: str) -> Any:
    """What the factory returns."""
    path, colon, name = target.partition(":")
    if not (path and colon and name):
        raise TargetError(f"{target!r} is not a target; write package.module:factory")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules of the current folder can be named
    module = _users(f"cannot import {path!r}", lambda: importlib.import_module(path))
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [known for known, thing in vars(module).items() if callable(thing) and not known.startswith("_")]
        raise TargetError(f"{path!r} has no factory {name!r}; it has {listed(known) or 'no callable at all'}")
    return _users(f"{target} failed", factory)


def _users(what: str, call: Callable[[], Any]) -> Any:
    """Run the user's code; where it fails, say how and where in a line, without our own frames."""
    try:
        return call()
    except Exception as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__ and not frame.filename.startswith("<") and "importlib" not in frame.filename
        ]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = " ".join(str(error).split())
        raise TargetError(f"{what}: {type(error).__name__}: {text}{where}") from None
