"""Convolutions want their channels last.

On CPU oneDNN computes in blocked layouts. A feature map stored with channels last (NHWC) goes in and out of them
without being reordered; one stored with channels first (NCHW) does not. Every two-dimensional convolution is given its
input with channels last: that costs a copy at the first of them, while the others find theirs so already, since
normalisations, activations and additions keep a layout. How layouts spread is found out by running the graph on
tensors without memory. What leaves the graph, and a view that asks for channels first, get a copy in the old layout; so
does a draw, which would fill another layout in another order, `as_strided`, which names places in memory, and every
operator that is not known to take any layout. A view of a copy is in the copy's storage, and so are its own views.
"""

from __future__ import annotations

from typing import Any

import torch

from encore.graph import Graph, Op, OpClass, Value
from encore.graph.editor import Editor
from encore.graph.ops import SIDE_EFFECTS, takes_any_layout
from encore.graph.sized_ops import SIZE, SIZED, STRIDE
from encore.graph.torch_private import FakeTensorMode
from encore.graph.values import Ref, is_contiguous, map_refs
from encore.rewrite.judge import ConvolutionShape, Judge
from encore.rewrite.queries import device_of

aten = torch.ops.aten
MAPS = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
"""Where convolutions take feature maps."""
NAMES_PLACES = frozenset({aten.as_strided.default, aten.as_strided_scatter.default, aten._reshape_alias.default})
"""Operators that find elements by where they are in memory: in another layout they would find others."""

GROUP_NORM_BACKWARD = aten.native_group_norm_backward.default


def apply(graph: Graph, judge: Judge) -> Graph:
    """The graph with channels last, where that pays and nothing stands against it."""
    shapes = [_shape(graph, op) for op in graph.ops if op.target is aten.convolution.default]
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) < len(shapes) or not judge.channels_last_pays(known):
        return graph
    try:
        return _Spreading(graph).run()
    except _StandsAgainstError:
        return graph


class _StandsAgainstError(Exception):
    """Something in the graph needs the layout it has."""


class _Spreading:
    def __init__(self, graph: Graph) -> None:
        self.editor = Editor(graph)
        self.graph = self.editor.graph
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake: dict[int, Any] = {}
        self.copies: dict[tuple[int, bool, torch.memory_format], int] = {}

    def run(self) -> Graph:
        for value in self.graph.values:
            if value.role is not None and value.dtype is not None:
                with self.mode:
                    device = device_of(self.graph, value.id)
                    self.fake[value.id] = torch.empty_strided(
                        value.shape, value.stride, dtype=value.dtype, device=device
                    )
        for op in list(self.graph.ops):
            for position in MAPS.get(op.target, ()):
                self._lay_out(op, op.args[position].value, torch.channels_last)
            if op.target in SIZED.values():
                self._follow(op)
            if op.target is GROUP_NORM_BACKWARD:
                self._lay_out_alike(op, *(operand.value for operand in op.args[:2]))
            self._spread(op)
        self._put_back()
        return self.editor.finish()

    def _follow(self, op: Op) -> None:
        """A gradient whose strides are arguments is laid out as its positions are, or else its gradient."""
        *_, source = op.reads
        shape = tuple(op.args[SIZE])
        if len(shape) == 4 and self._changed(source):
            op.args = (*op.args[:STRIDE], list(channels_last_strides(shape)), *op.args[STRIDE + 1 :])

    def _spread(self, op: Op) -> None:
        results = self._call(op)
        for number, result in zip(op.writes, results, strict=True):
            if number is None:
                continue
            value = self.graph.values[number]
            self.fake[number] = result
            if tuple(result.shape) != value.shape or result.dtype != value.dtype:
                raise _StandsAgainstError
            if tuple(result.stride()) != value.stride:
                if op.kind is OpClass.RANDOM:
                    raise _StandsAgainstError
                value.stride = tuple(result.stride())
            value.offset = int(result.storage_offset())
            if op.kind is OpClass.VIEW:
                self._file(op, number)

    def _file(self, op: Op, number: int) -> None:
        """A view is in the storage of the operand whose memory it looks at."""
        if self.graph.values[number].storage is None:
            return
        memory = self.fake[number].untyped_storage()._cdata
        for operand in op.reads:
            storage = self.graph.values[operand].storage
            if storage is not None and self.fake[operand].untyped_storage()._cdata == memory:
                self.editor.file_under(number, storage)
                return
        if any(self.graph.values[operand].storage is not None for operand in op.reads):
            raise _StandsAgainstError

    def _call(self, op: Op) -> list[Any]:
        def run() -> list[Any]:
            args, kwargs = map_refs((op.args, op.kwargs), self.fake.__getitem__)
            with self.mode, torch.no_grad():
                made = op.target(*args, **kwargs)
            return list(made) if op.returns_tuple else [made]

        if op.kind in SIDE_EFFECTS or op.target in NAMES_PLACES:
            self._as_before(op)
        elif not takes_any_layout(op.target) and op.target is not GROUP_NORM_BACKWARD:
            for value in filter(self._changed, op.reads):
                self._lay_out(op, value, torch.contiguous_format)
        try:
            return run()
        except (RuntimeError, ValueError) as error:
            if op.kind is not OpClass.VIEW:
                raise _StandsAgainstError from error
        for value in op.reads:
            self._lay_out(op, value, torch.contiguous_format)
        try:
            return run()
        except (RuntimeError, ValueError) as error:
            raise _StandsAgainstError from error

    def _lay_out_alike(self, op: Op, gradient: int, source: int) -> None:
        """Its kernel reads the gradient as its input is laid out."""
        last = self.fake[source].dim() == 4 and self.fake[source].is_contiguous(memory_format=torch.channels_last)
        for operand in (gradient, source):
            self._lay_out(op, operand, torch.channels_last if last else torch.contiguous_format)

    def _as_before(self, op: Op) -> None:
        """Let an operator see operands laid out as they were."""
        for value in op.reads:
            if self._changed(value):
                if op.kind is OpClass.MUTATING or not is_contiguous(self.editor.original.values[value]):
                    raise _StandsAgainstError
                self._lay_out(op, value, torch.contiguous_format)

    def _changed(self, value: int) -> bool:
        return bool(self.graph.values[value].stride != self.editor.original.values[value].stride)

    def _lay_out(self, op: Op, number: int, layout: torch.memory_format) -> None:
        """Have an operator read a value in a layout: as it is, or a copy."""
        if self.fake[number].is_contiguous(memory_format=layout):
            return
        key = (number, op.forward, layout)
        if key not in self.copies:
            self.copies[key] = self._copy(op, number, layout)
        self.editor.read_instead(op, number, self.copies[key])

    def _copy(self, op: Op, number: int, layout: torch.memory_format) -> int:
        value = self.graph.values[number]
        assert value.dtype is not None
        copy = self.editor.op_before(
            op, f"{value.name}_copy", aten.clone.default, (Ref(number),), {"memory_format": layout}
        )
        made = self.editor.result(copy, value.shape, value.dtype, device_of(self.graph, number))
        with self.mode:
            self.fake[made] = self.fake[number].clone(memory_format=layout)
        self.graph.values[made].stride = tuple(self.fake[made].stride())
        return made

    def _put_back(self) -> None:
        """Outputs and gradients leave as they did before."""
        for leaving in (self.graph.outputs, self.graph.gradients):
            for position, number in enumerate(leaving):
                if number is None or not self._changed(number):
                    continue
                value, maker = self.graph.values[number], self.graph.producer(number)
                if maker is None or not is_contiguous(self.editor.original.values[number]):
                    raise _StandsAgainstError
                assert value.dtype is not None
                dense = {"memory_format": torch.contiguous_format}
                copy = self.editor.op_after(maker, f"{value.name}_back", aten.clone.default, (Ref(number),), dense)
                made = self.editor.result(copy, value.shape, value.dtype, device_of(self.graph, number))
                leaving[position] = made
                self.graph.returned = [made if held == number else held for held in self.graph.returned]


def _shape(graph: Graph, op: Op) -> ConvolutionShape | None:
    """What a convolution's time depends on; None for those that this pass does not change."""
    source, weight, _, stride, padding, dilation, transposed, _, groups = op.args
    source, weight = graph.values[source.value], graph.values[weight.value]
    if transposed or len(source.shape) != 4 or device_of(graph, source.id) != "cpu" or source.dtype is None:
        return None
    settings = (tuple(stride), tuple(padding), tuple(dilation))
    return ConvolutionShape(source.shape, weight.shape, *settings, groups, source.dtype)


def has_channels_last(value: Value) -> bool:
    """Return whether a value is stored so, and not also as a contiguous tensor would be."""
    if len(value.shape) != 4 or is_contiguous(value):
        return False
    return value.stride == channels_last_strides(value.shape)


def channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, channels, height, width = shape
    return (height * width * channels, 1, width * channels, channels)
