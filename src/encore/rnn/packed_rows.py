"""What `data` and `batch_sizes` of a `PackedSequence` are inside a captured graph: tensors whose shapes are known.

`pack_padded_sequence` in a captured model makes a `PackedSequence` of these two (`capture/packing.py`). `torch.nn`'s
layers and `pad_packed_sequence` meet them through `__torch_function__` and stay in the graph. Everything else that
reads them gets the tensors that PyTorch would have given it: the number of rows depends on data, so that the graph ends
there, as it does at `pack_padded_sequence` itself without Encore.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from encore.errors import OperandError
from encore.rnn.torch_private import layer_function, pytree

LAYERS = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
"""PyTorch's functions for recurrent layers, and how many states they have."""
DEPENDS_ON_DATA = "encore: packed rows are read directly, and their number depends on data"


def _run_outside(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_outside = _run_outside


def end_graphs_at_reads() -> None:
    """Have Dynamo end its graph where `_outside` is called, and trace nothing that runs inside. This imports Dynamo:
    `capture/packing.py` calls it, without which no rows are made."""
    global _outside
    _outside = torch.compiler.disable(_run_outside, reason=DEPENDS_ON_DATA)


def _sizes_reached(numbers: Tensor) -> Tensor:
    return numbers[numbers > 0]


def _rows_there(rows: PackedRows) -> Tensor:
    """The tensor of the rows, the same for every reader, so that hooks and in-place writes on it last."""
    _check_not_a_constant(rows)
    if rows.read is not None:
        return rows.read
    with torch.enable_grad():  # the first reader may have disabled gradients that a later one needs
        found = rows.block[: int(rows.numbers.sum())]
    if not torch.is_inference_mode_enabled():
        rows.read = found
    return found


def _check_not_a_constant(rows: PackedRows) -> None:
    """Raise an error inside a `torch.autograd.Function` that was given the rows: it takes what is no `torch.Tensor` for
    a constant."""
    frame = inspect.currentframe()
    while frame is not None:
        if any(argument is rows for argument in _arguments(frame)) and frame.f_code in _codes_of_functions():
            raise OperandError(
                "a torch.autograd.Function was given the rows of a PackedSequence, taken out by unpacking or by index: "
                "in a compiled model they are no torch.Tensor there, and would get no gradient; pass packed.data"
            )
        frame = frame.f_back


def _arguments(frame: FrameType) -> list[Any]:
    """The arguments that a frame was called with, and the elements of those that are tuples."""
    found = inspect.getargvalues(frame)
    named = (found.locals.get(name) for name in (*found.args, found.varargs or ""))
    return [one for argument in named for one in (argument if type(argument) is tuple else (argument,))]


def _codes_of_functions() -> set[Any]:
    """The code of every subclass of `torch.autograd.Function` that runs when it is applied."""
    found, kinds = set(), [torch.autograd.Function]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found |= {getattr(method, "__code__", None) for method in (kind.forward, kind.setup_context)}
    return found


def _run_on_tensors(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*[_tensor(argument) for argument in args], **{key: _tensor(each) for key, each in kwargs.items()})


class BatchSizes:
    """How many sequences have a row at each step: `steps` numbers, of which the last ones may be 0."""

    def __init__(self, numbers: Tensor, batch: int) -> None:
        self.numbers = numbers
        self.batch = batch

    def tensor(self) -> Tensor:
        """As PyTorch has it: steps that no sequence reaches left out."""
        return _outside(_sizes_reached, self.numbers)

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int) and place == 0:  # all sequences have a first step
            return self.batch
        return self.tensor()[place]

    def __len__(self) -> int:
        return len(self.tensor())

    def __iter__(self) -> Any:
        return iter(self.tensor())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_rows(function, args, kwargs or {})


class PackedRows:
    """The rows of a packed batch in a block with room for all steps of all sequences; zero behind the last row.

    A batch that was packed between two graphs comes as it was, padded, and is packed in the graph that reads it.
    """

    def __init__(
        self, source: Tensor, numbers: Tensor, padded: bool = False, batch_first: bool = False, order: Any = None
    ) -> None:
        self.source = source
        self.numbers = numbers
        self.padded = padded
        """Whether the source is a padded batch, not yet in the given order."""
        self.batch_first = batch_first
        self.order = order
        self.read: Tensor | None = None
        """The rows as a tensor, once they were read as one between graphs."""

    @property
    def block(self) -> Tensor:
        if self.read is not None:
            steps = self.numbers.shape[0]
            batch = self.source.shape[0 if self.batch_first else 1] if self.padded else self.source.shape[0] // steps
            rows_in_block: Any = torch.ops.encore.rows_in_block
            return rows_in_block(self.read, self.numbers, batch)
        if not self.padded:
            return self.source
        source = self.source
        if self.order is not None:
            source = source.index_select(0 if self.batch_first else 1, self.order)
        block: Tensor = torch.ops.encore.pack_rows(source, self.numbers, self.batch_first)
        return block

    def tensor(self) -> Tensor:
        """As PyTorch has it: the rows that are there."""
        return _outside(_rows_there, self)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        return self.source.device

    def dim(self) -> int:
        return self.source.dim() - (1 if self.padded else 0)

    def size(self, dimension: int | None = None) -> Any:
        count = self.dim()
        if dimension is not None and (dimension > 0 or -count < dimension < 0):
            return self.source.size(dimension % count - count)
        return self.tensor().size() if dimension is None else self.tensor().size(dimension)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_rows(function, args, kwargs or {})


class CapturedSequence(PackedSequence):
    """A `PackedSequence` of rows in a block. Layers and `pad_packed_sequence` take it apart; what reads its `data` gets
    a tensor, as from any other."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        rows: Any = self[0]
        return rows.tensor() if isinstance(rows, PackedRows) else rows


def run_on_rows(function: Any, args: Any, kwargs: Any) -> Any:
    """What a function of PyTorch's gives for these: captured recurrent layers read rows in a block, and everything else
    the rows alone."""
    if torch.compiler.is_compiling():
        for name in LAYERS:
            if function is layer_function(name) and _are_in_a_block(args):
                return _run_layers(name, *args)
    return _outside(_run_on_tensors, function, args, kwargs)


def _are_in_a_block(args: Any) -> bool:
    rows, sizes = args[:2]
    if isinstance(sizes, BatchSizes):
        return isinstance(rows, (PackedRows, Tensor))
    return False


def _run_layers(name: str, rows: Any, sizes: Any, hx: Any, params: Any, *options: Any) -> Any:
    states = list(hx) if LAYERS[name] > 1 else [hx]
    output, *last = torch.ops.encore.packed_layers(
        block_of(rows, sizes), sizes.numbers, states, list(params), name, *options
    )
    return (PackedRows(output, sizes.numbers), *last)


def block_of(rows: Any, sizes: Any) -> Tensor:
    """Rows in a block, which they may be already."""
    if isinstance(rows, PackedRows):
        return rows.block
    block: Tensor = torch.ops.encore.rows_in_block(rows, sizes.numbers, sizes.batch)
    return block


def _tensor(argument: Any) -> Any:
    if isinstance(argument, (PackedRows, BatchSizes)):
        return argument.tensor()
    if isinstance(argument, (list, tuple)):
        return type(argument)([_tensor(each) for each in argument])
    return argument


def as_tensors(result: Any) -> Any:
    """A result of a captured function as PyTorch would have given it."""

    def plain(found: Any) -> Any:
        if isinstance(found, PackedRows | BatchSizes):
            return found.tensor()
        return PackedSequence(*map(plain, found)) if isinstance(found, PackedSequence) else found

    def is_captured(found: Any) -> bool:
        return isinstance(found, PackedSequence | PackedRows | BatchSizes)

    if not any(is_captured(leaf) for leaf in pytree.tree_leaves(result, is_leaf=is_captured)):
        return result
    return pytree.tree_map(plain, result, is_leaf=is_captured)


def _delegated(name: str) -> Any:
    def run(self: PackedRows | BatchSizes, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*[_tensor(argument) for argument in args])

    return run


OF_CLASSES = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "pow", "rpow",
    "matmul", "rmatmul", "neg", "abs", "invert", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge",
)  # fmt: skip
"""Python looks for these on classes alone."""
for _name in OF_CLASSES:
    for _class in (PackedRows, BatchSizes):
        setattr(_class, f"__{_name}__", _delegated(f"__{_name}__"))
for _name in ("getitem", "len", "iter", "bool", "float", "int"):
    setattr(PackedRows, f"__{_name}__", _delegated(f"__{_name}__"))
