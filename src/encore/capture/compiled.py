"""What stands in for a user's callable: plain where no gradient is wanted, planned where one is."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from encore.capture import torch_private
from encore.capture.backend import GraphCompiler
from encore.capture.recurrent import running
from encore.capture.session import Session


class CompiledCall:
    """Calls a function through its plan, or as it is under `no_grad` and `inference_mode`."""

    def __init__(self, plain: Callable[..., Any], session: Session) -> None:
        functools.update_wrapper(self, plain, updated=())
        self.plain = plain
        self.session = session
        self._planned = self._compile()
        self._told_it_ran_plain = False

    def _compile(self) -> Callable[..., Any]:
        """Dynamo's callable. A new backend has no graphs yet, so everything is planned anew."""
        session = self.session
        return torch_private.dynamo_compile(self.plain, GraphCompiler(session), session.options.recompile_limit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        if self.session.plan_again:
            self.session.plan_again = False
            self._planned = self._compile()
        self.session.begin_call()
        forwards_before = self.session.forwards_run
        with torch_private.whole_graphs(), running(self.session.between):
            result = self._planned(*args, **kwargs)
        if self.session.forwards_run == forwards_before and not self._told_it_ran_plain:
            self._tell_if_it_ran_plain(result)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A compiled function in a class body is a method, like any other."""
        return self if instance is None else types.MethodType(self, instance)

    def _tell_if_it_ran_plain(self, result: Any) -> None:
        """A call that leads to gradients and ran no graph of ours was plain eager PyTorch: say so, and why."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.requires_grad for tensor in tensors):
            return
        limit = self.session.options.recompile_limit
        if len(self.session.graphs) >= limit:
            why = (
                f"has been planned for {limit} variants (shapes, modes) already; new ones run as plain eager PyTorch. "
                "Pad inputs to fewer shapes, or raise recompile_limit="
            )
        elif self.session.between is not None and self.session.between.calls:
            why = "has no graph to plan: packed layers ran by Encore's operators, all else as plain eager PyTorch"
        elif not self.session.plain:
            why = "ran as plain eager PyTorch: Dynamo captured nothing of it. TORCH_LOGS=graph_breaks tells why"
        else:
            return  # each part that runs plain has been told with its reason
        self._told_it_ran_plain = True
        warnings.warn(f"encore: {self.session.name} {why}", stacklevel=3)
