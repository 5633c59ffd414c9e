"""New operators for a graph under change, with results as the operators themselves describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from encore.graph import Op
from encore.graph.editor import Editor
from encore.graph.torch_private import FakeTensorMode
from encore.graph.values import map_refs
from encore.rewrite.queries import device_of, result_of

Strides = Mapping[int, Sequence[int]]
AS_THEY_ARE: Strides = {}
NO_OPTIONS: Mapping[str, Any] = {}


class OpBuilder:
    """Adds operators to a graph. What they return is found by calling them on tensors without memory."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.mode = FakeTensorMode()
        self.shared: dict[tuple[Any, ...], int] = {}
        """Results that several replacements read, by the call."""

    def after(self, neighbour: Op, name: str, target: Any, args: Sequence[Any], **kwargs: Any) -> int:
        """The result of a new operator that runs right after another one."""
        return self._result(self.editor.op_after(neighbour, name, target, args, kwargs))

    def before(self, neighbour: Op, name: str, target: Any, args: Sequence[Any], **kwargs: Any) -> int:
        """The result of a new operator that runs right before another one."""
        return self._result(self.editor.op_before(neighbour, name, target, args, kwargs))

    def replace(self, op: Op, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = NO_OPTIONS) -> None:
        """Have a new operator make the only result of another one, in its place."""
        self.editor.adopt(self.editor.op_after(op, op.name, target, args, dict(kwargs)), result_of(op))

    def described(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] = NO_OPTIONS,
        *,
        strides: Strides = AS_THEY_ARE,
    ) -> Any:
        """What an operator would return, one tensor without memory or several, were some operands laid out in other
        strides."""

        def fake(number: int) -> torch.Tensor:
            value, device = self.editor.graph.values[number], device_of(self.editor.graph, number)
            layout = strides.get(number, value.stride)
            return torch.empty_strided(value.shape, layout, dtype=value.dtype, device=device)

        with self.mode, torch.no_grad():
            operands, options = map_refs((tuple(args), dict(kwargs)), fake)
            return target(*operands, **options)

    def strides(self, target: Any, args: Sequence[Any], strides: Strides = AS_THEY_ARE) -> tuple[int, ...]:
        """The strides of what an operator would return."""
        return tuple(self.described(target, args, strides=strides).stride())

    def copying_into(self, source: torch.Tensor, strides: tuple[int, ...]) -> torch.memory_format | None:
        """The memory format in which a clone of a tensor has these strides; None if there is none."""
        formats = [torch.preserve_format, torch.contiguous_format]
        formats += [torch.channels_last] if source.dim() == 4 else []
        with self.mode:
            copies = ((format_, source.clone(memory_format=format_)) for format_ in formats)
            return next((format_ for format_, copy in copies if tuple(copy.stride()) == strides), None)

    def _result(self, op: Op) -> int:
        described = self.described(op.target, op.args, op.kwargs)
        number = self.editor.result(op, described.shape, described.dtype, str(described.device))
        self.editor.graph.values[number].stride = tuple(described.stride())
        return number
