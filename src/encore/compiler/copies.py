"""Copies and pickles of compiled modules."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn


class CompiledMark:
    """An attribute of a compiled module that is copied and pickled with it, as the compiled call of `torch.nn.Module`
    is not. A deep copy is compiled with the same options. A pickle has the plain module, which loads without Encore; a
    warning is given once."""

    NAME = "_encore_compiled"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledMark:
        copied = memo.get(id(self.model))
        if not isinstance(copied, nn.Module):
            return self
        copied.__dict__["_compiled_call_impl"] = copy.deepcopy(self.model._compiled_call_impl, memo)
        return CompiledMark(copied)

    @classmethod
    def remove(cls, model: nn.Module) -> None:
        """Make a module and its submodules plain ones."""
        for module in model.modules():
            if module.__dict__.pop(cls.NAME, None) is not None:
                module.__dict__.pop("_compiled_call_impl", None)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"encore: a pickle of {type(self.model).__name__} has the plain module, without its plans; call "
                "encore.compile again once it is loaded",
                stacklevel=2,
            )
        return (type(None), ())
