"""What stands in for a user's callable: plain where no gradient is wanted, planned where one is."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from encore.capture import torch_private
from encore.capture.backend import GraphCompiler
from encore.capture.session import Session
from encore.errors import EncoreError


class CompiledCall:
    """Calls a function through its plan, or as it is under `no_grad` and `inference_mode`."""

    def __init__(self, plain: Callable[..., Any], session: Session) -> None:
        functools.update_wrapper(self, plain, updated=())
        self.plain = plain
        self.session = session
        self._planned = torch_private.dynamo_compile(plain, GraphCompiler(session), session.options.recompile_limit)
        self._told_about_limit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        forwards_before = self.session.forwards_run
        try:
            with torch_private.recurrent_layers_allowed():
                result = self._planned(*args, **kwargs)
        except torch_private.BackendFailed as failure:
            error = torch_private.original_error(failure)
            if isinstance(error, EncoreError):
                raise error from None
            raise
        if self.session.forwards_run == forwards_before:
            self._tell_if_at_limit()
        return result

    def _tell_if_at_limit(self) -> None:
        limit = self.session.options.recompile_limit
        if len(self.session.graphs) < limit or self._told_about_limit:
            return
        self._told_about_limit = True
        warnings.warn(
            f"encore: {self.session.name} has been planned for {limit} variants (shapes, modes) already; new ones run "
            "as plain eager PyTorch. Pad inputs to fewer shapes, or raise recompile_limit=.",
            stacklevel=3,
        )
