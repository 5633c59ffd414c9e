"""What an operator would make of values of a graph: tried out on tensors that have shapes and no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from encore.graph import Op
from encore.graph.editor import Editor
from encore.graph.values import map_refs
from encore.rewrite.matmuls import device_of

Strides = Mapping[int, Sequence[int]]
AS_THEY_ARE: Strides = {}
NO_OPTIONS: Mapping[str, Any] = {}


class Trial:
    """Adds operators to a graph under change, with results as the operators themselves describe them."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.mode = FakeTensorMode()

    def strides(self, target: Any, args: Sequence[Any], laid_out: Strides = AS_THEY_ARE) -> tuple[int, ...]:
        """The strides of what an operator would make, if some operands were laid out otherwise."""
        return tuple(self.made(target, args, laid_out=laid_out).stride())

    def copying_into(self, lying: torch.Tensor, strides: tuple[int, ...]) -> torch.memory_format | None:
        """How a tensor like this one is cloned so that it has these strides; `None` where no clone has."""
        formats = [torch.preserve_format, torch.contiguous_format, *([torch.channels_last] if lying.dim() == 4 else [])]
        with self.mode:
            made = ((format_, lying.clone(memory_format=format_)) for format_ in formats)
            return next((format_ for format_, copy in made if tuple(copy.stride()) == strides), None)

    def after(self, neighbour: Op, name: str, target: Any, args: Sequence[Any], **kwargs: Any) -> int:
        """What a new operator makes that runs right after another one."""
        return self._result(self.editor.op_after(neighbour, name, target, args, kwargs))

    def before(self, neighbour: Op, name: str, target: Any, args: Sequence[Any], **kwargs: Any) -> int:
        """What a new operator makes that runs right before another one."""
        return self._result(self.editor.op_before(neighbour, name, target, args, kwargs))

    def _result(self, op: Op) -> int:
        made = self.made(op.target, op.args, op.kwargs)
        number = self.editor.result(op, made.shape, made.dtype, str(made.device))
        self.editor.graph.values[number].stride = tuple(made.stride())
        return number

    def made(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] = NO_OPTIONS,
        *,
        laid_out: Strides = AS_THEY_ARE,
    ) -> Any:
        """What an operator would make: one tensor without memory, or several."""

        def fake(number: int) -> torch.Tensor:
            value, device = self.editor.graph.values[number], device_of(self.editor.graph, number)
            strides = laid_out.get(number, value.stride)
            return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=device)

        with self.mode, torch.no_grad():
            operands, options = map_refs((tuple(args), dict(kwargs)), fake)
            return target(*operands, **options)
