"""Kernels with symbols: compiled once for a structure, checked and bound for every later size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from encore.cached_files import read_record, write_record
from encore.cost.allocations import measure_cpu
from encore.graph.torch_private import FakeTensorMode
from encore.graph.values import Ref, map_refs
from encore.lower import kernels as lower_kernels
from encore.lower import torch_private
from encore.lower.extension import LoweringError
from encore.lower.kernels import Compilation, KernelStore
from encore.lower.structures import AT_ONCE, MOST_SAMPLES, MOST_SYMBOLIC
from encore.schedule.kernel import Kernel, KernelCall, Operand, each_result
from support.rounding import assert_as_accurate

aten = torch.ops.aten


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    empty = tmp_path / "kernels"
    empty.mkdir(0o700)
    return empty


class Program:
    """A kernel that is written down operator by operator; results of operators that nothing reads are its outputs."""

    def __init__(self, *shapes: Sequence[int], **types: torch.dtype) -> None:
        mode = FakeTensorMode()
        with mode:
            self.values = [torch.empty(tuple(shape), dtype=types.get(f"x{n}")) for n, shape in enumerate(shapes)]
        self.count = len(shapes)
        self.calls: list[KernelCall] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Ref:
        found = target(*map_refs(args, self.values.__getitem__), **kwargs)
        self.calls.append(KernelCall(target, args, tuple(sorted(kwargs.items())), (True,), False))
        self.values.append(found)
        return Ref(len(self.values) - 1)

    def kernel(self, *outputs: Ref, over: tuple[tuple[int, int], ...] = ()) -> Kernel:
        made = [self.values[output.value] for output in outputs]
        return Kernel(
            operands=tuple(
                Operand(tuple(one.shape), one.stride(), one.dtype, "cpu", True) for one in self.values[: self.count]
            ),
            calls=tuple(self.calls),
            outputs=tuple(output.value for output in outputs),
            shapes=tuple(tuple(one.shape) for one in made),
            layouts=tuple(one.stride() for one in made),
            over=over,
        )


# -- groups of several kinds -----------------------------------------------------------------------------------------


def pointwise(b: int, t: int) -> Kernel:
    make = Program((b, t, 6), (6,))
    return make.kernel(make(aten.sin.default, make(aten.add.Tensor, make(aten.mul.Tensor, Ref(0), Ref(1)), 1)))


def softmax(b: int, t: int) -> Kernel:
    make = Program((b, t, t), (t, t), x1=torch.bool)
    filled = make(aten.masked_fill.Scalar, make(aten.div.Tensor, Ref(0), 8), Ref(1), -1e9)
    shares = make(aten._softmax.default, filled, -1, False)
    return make.kernel(shares, over=((0, 0),))


def mean_of_rows(b: int, t: int) -> Kernel:
    """A division by a size, in both ways that graphs have it."""
    make = Program((b * t, 5))
    rows = make(aten.view.default, Ref(0), [b, t, 5])
    total = make(aten.sum.dim_IntList, make(aten.exp.default, rows), [1])
    spread = make(aten.expand.default, make(aten.unsqueeze.default, make(aten.div.Tensor, total, t), 1), [b, t, 5])
    return make.kernel(make(aten.mul.Tensor, make(aten.mul.Tensor, spread, 1 / t), rows))


def gates(b: int, t: int) -> Kernel:
    make = Program((b, 4 * t), (b, t))
    first, second = (make(aten.slice.Tensor, Ref(0), 1, start * t, (start + 1) * t) for start in (1, 2))
    cell = make(aten.mul.Tensor, make(aten.sigmoid.default, first), Ref(1))
    return make.kernel(cell, make(aten.mul.Tensor, make(aten.tanh.default, cell), make(aten.sigmoid.default, second)))


def all_but_the_last(b: int, t: int) -> Kernel:
    make = Program((b, t))
    early, late = make(aten.slice.Tensor, Ref(0), 1, 0, t - 1), make(aten.slice.Tensor, Ref(0), 1, 1, 2**63 - 1)
    return make.kernel(make(aten.exp.default, make(aten.sub.Tensor, late, early)))


def joined(b: int, t: int) -> Kernel:
    """A workspace: the joined tensor is read by two loops that are not one."""
    make = Program((b, t), (b, t))
    both = make(aten.cat.default, [make(aten.mul.Tensor, Ref(0), 2), make(aten.exp.default, Ref(1))], 1)
    return make.kernel(make(aten._softmax.default, both, 1, False), make(aten.sum.dim_IntList, both, [0]))


def causal_mask(b: int, t: int) -> Kernel:
    make = Program()
    ones = make(aten.ones.default, [t, t], device=torch.device("cpu"), dtype=torch.bool, pin_memory=False)
    return make.kernel(make(aten.triu.default, ones, 1))


def transposed(b: int, t: int) -> Kernel:
    make = Program((b, t, 3))
    turned = make(aten.clone.default, make(aten.transpose.int, Ref(0), 0, 1), memory_format=torch.contiguous_format)
    return make.kernel(make(aten.add.Tensor, turned, 1))


def long_sum(b: int, t: int) -> Kernel:
    make = Program((64 * b, t))
    return make.kernel(make(aten.sum.dim_IntList, make(aten.mul.Tensor, Ref(0), Ref(0)), [0]))


GROUPS: tuple[Callable[[int, int], Kernel], ...] = (
    pointwise, softmax, mean_of_rows, gates, all_but_the_last, joined, causal_mask, transposed, long_sum,
)  # fmt: skip


def operands_of(kernel: Kernel) -> list[Tensor]:
    made = []
    for operand in kernel.operands:
        numbers = torch.empty_strided(operand.shape, operand.stride, dtype=operand.dtype)
        made.append(numbers.random_(0, 2) if operand.dtype == torch.bool else numbers.normal_())
    return made


def one_by_one(kernel: Kernel, operands: Sequence[Tensor]) -> list[Tensor]:
    values = list(operands)
    for call in kernel.calls:
        args, kwargs = map_refs((call.args, dict(call.kwargs)), values.__getitem__)
        values += each_result(call, call.target(*args, **kwargs))
    return [values[number] for number in kernel.outputs]


def check(made: Compilation, kernel: Kernel) -> None:
    """It is as accurate as PyTorch, laid out as in the graph, and allocates what is predicted."""
    assert not made.failed
    compiled, operands = made.compiled[kernel.key], operands_of(kernel)
    doubled = [one.double() if one.is_floating_point() else one.clone() for one in operands]
    eager = one_by_one(kernel, [one.clone() for one in operands])
    exact = one_by_one(kernel, doubled)
    returned: list[Tensor] = []
    measured = measure_cpu(lambda: returned.extend(compiled.call(list(operands))))
    kept = sum(one.untyped_storage().nbytes() for one in returned)
    assert measured.step_peak == kept + compiled.workspace
    over = dict(kernel.over)
    found = [operands[over[place]] if place in over else returned.pop(0) for place in range(len(kernel.outputs))]
    for have, want, right, layout in zip(found, eager, exact, kernel.layouts, strict=True):
        assert (have.shape, have.stride()) == (want.shape, layout)
        if have.is_floating_point():
            assert_as_accurate(have, want, right)
        else:
            assert torch.equal(have, want)


def is_symbolic(store: KernelStore, kernel: Kernel) -> bool:
    return "_bound" in store._ready[kernel.key].call.__qualname__


# -- a third size compiles nothing -----------------------------------------------------------------------------------


def test_the_second_sizes_make_a_kernel_that_later_ones_share(folder: Path) -> None:
    store = KernelStore(folder)
    for count, (b, t) in enumerate(((3, 7), (5, 9), (4, 11), (11, 4), (5, 8), (6, 30))):
        kernels = [group(b, t) for group in GROUPS]
        made = store.compile(kernels)
        assert made.fresh == (0 if count > 1 else len(GROUPS)), (b, t)
        for kernel in kernels:
            check(made, kernel)
            assert is_symbolic(store, kernel) is (count > 0)
    other = KernelStore(folder)
    kernels = [group(7, 12) for group in GROUPS]
    assert [other.workspace(kernel) for kernel in kernels] == [store.workspace(kernel) for kernel in kernels]
    made = other.compile(kernels)
    assert made.fresh == 0, "another process finds them on disk"
    for kernel in kernels:
        check(made, kernel)
