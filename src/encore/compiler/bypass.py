"""A warning for compiled modules that are trained without a plan.

Only calls of a compiled module run its plans. Its parameters receive gradients without a plan if its other methods are
called, or if `torch.compile` or `encore.compile` traces a function around it: Dynamo then inlines its `forward`.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class BypassWatch:
    """Hooks on the parameters of a compiled module until its first planned call, which warn of the first gradient
    before it."""

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self.model = weakref.ref(model)
        self.warned = False
        self.handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._received_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad and not is_lazy(parameter)
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        if not self.handles:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        model = self.model()
        parameters: Any = model.parameters() if model is not None else ()
        for parameter in parameters:
            if parameter._post_accumulate_grad_hooks is not None and not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None

    def _received_gradient(self, _: Tensor) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"encore: parameters of {self.name} received gradients, but no plan of it has run: only calls of the "
                "module are planned. Another method of it was called, or a compiled function around it traced through "
                "it. Compile the function that computes the loss: step = encore.compile(step)",
                stacklevel=2,
            )
