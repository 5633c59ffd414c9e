"""Kernels with symbols: compiled once for a structure, checked and bound for every later size."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import encore
from encore.cached_files import read_record, write_record
from encore.cost.allocations import measure_cpu
from encore.graph.torch_private import FakeTensorMode
from encore.graph.values import Ref, map_refs
from encore.lower import extension, torch_private
from encore.lower import kernels as lower_kernels
from encore.lower.arithmetic import evaluate_text
from encore.lower.extension import CppFunction, LoweringError
from encore.lower.fitting import fit
from encore.lower.kernels import Compilation, KernelStore
from encore.lower.records import StructureRecord
from encore.lower.structures import AT_ONCE, MOST_SAMPLES, MOST_SYMBOLIC, Structures
from encore.lower.symbolic import SymbolicSource, lower_symbolic
from encore.schedule.kernel import Kernel, KernelCall, Operand
from support.compare_with_eager import session_of
from support.eager_kernels import one_by_one
from support.rounding import assert_as_accurate, assert_gradients_as_accurate

aten = torch.ops.aten
QUICKLY: dict[str, Any] = {
    "deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}  # fmt: skip
"""Nothing is made smaller: a compiler takes too long for that."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """With several, a loop that Inductor splits among them is another kernel than one that it does not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    empty = tmp_path / "kernels"
    empty.mkdir(0o700)
    return empty


class Program:
    """A kernel that is written down operator by operator; results of operators that nothing reads are its outputs."""

    def __init__(self, *shapes: Sequence[int], **types: torch.dtype) -> None:
        self.mode = FakeTensorMode()
        with self.mode:
            self.values = [torch.empty(tuple(shape), dtype=types.get(f"x{n}")) for n, shape in enumerate(shapes)]
        self.count = len(shapes)
        self.calls: list[KernelCall] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Ref:
        with self.mode:
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
    return kernel.key in store._bound


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


def test_few_sizes_are_kept_ready(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_kernels, "MOST_BOUND", 2)
    store = KernelStore(compiled)
    several = [scaled(rows, rows) for rows in range(10, 15)]
    for again in range(2):
        made = store.compile(several)
        assert made.fresh == 0, again
        assert [*made.compiled] == [kernel.key for kernel in several]
        assert len(store._bound) == 2
    check(made, several[0])


def test_a_scalar_that_is_one_over_a_size_follows_it() -> None:
    first, second = mean_of_rows(3, 7), mean_of_rows(5, 9)
    assert first.structure == second.structure
    assert first.with_sizes(second.sizes).calls == second.calls


# -- sizes that a kernel is not right for ----------------------------------------------------------------------------


def scaled(rows: int, by: int, width: int = 6, row_stride: int | None = None) -> Kernel:
    """Rows times a number, which may or may not be their count."""
    make = Program((rows, width))
    kernel = make.kernel(make(aten.sin.default, make(aten.mul.Tensor, Ref(0), by)))
    if row_stride is not None:
        operand = Operand((rows, width), (row_stride, 1), torch.float32, "cpu", True)
        kernel = Kernel((operand,), kernel.calls, kernel.outputs, kernel.shapes, kernel.layouts, ())
    return kernel


def added(rows: int, others: int) -> Kernel:
    make = Program((rows, 6), (others, 6))
    return make.kernel(make(aten.exp.default, make(aten.add.Tensor, Ref(0), Ref(1))))


def test_sizes_that_break_a_rule_are_compiled_anew(folder: Path) -> None:
    store = KernelStore(folder)
    store.compile([scaled(5, 5), added(5, 5)])
    assert store.compile([scaled(7, 7), added(7, 7)]).fresh == 2
    cases = {
        "a literal that is another number": scaled(9, 8),
        "a dimension that was equal": scaled(9, 9, width=7),
        "rows that are not dense": scaled(9, 9, row_stride=8),
        "one row": scaled(1, 9),
        "a literal of one": scaled(9, 1),
        "one row instead of many": added(9, 1),
        "many rows for one": added(1, 9),
    }
    for name, kernel in cases.items():
        assert store.workspace(kernel) is None, name
    made = store.compile(cases.values())
    assert made.fresh == len(cases)
    for kernel in (*cases.values(), scaled(11, 11), added(11, 11)):
        check(store.compile([kernel]), kernel)
    assert store.compile([scaled(12, 12), added(12, 12)]).fresh == 0, "what is right still is"


@given(st.data())
@settings(max_examples=100, **QUICKLY)
def test_a_kernel_with_symbols_accepts_sizes_of_its_group_and_no_others(data: st.DataObject) -> None:
    group = data.draw(st.sampled_from((pointwise, softmax, mean_of_rows, gates, joined)))
    b, t = data.draw(st.lists(st.integers(3, 40), min_size=2, max_size=2, unique=True))
    source, kernel = _lowered(group), group(b, t)
    assert source.fits(kernel)
    sizes = list(kernel.sizes)
    place = data.draw(st.integers(0, len(sizes) - 1))
    sizes[place] += data.draw(st.sampled_from((-1, 1)))
    if source.fits(kernel.with_sizes(sizes)):
        others = [group(b + 1, t), group(b - 1, t), group(b, t + 1), group(b, t - 1)]
        assert tuple(sizes) in [other.sizes for other in others]


@functools.cache
def _lowered(group: Callable[[int, int], Kernel]) -> SymbolicSource:
    return lower_symbolic(group(5, 9), [group(3, 7).sizes, group(5, 9).sizes])


def test_a_kernel_without_room_for_its_symbols_is_rejected() -> None:
    kernel = pointwise(3, 4)
    with pytest.raises(LoweringError, match="sizes differ in 0 ways"):
        lower_symbolic(kernel, [kernel.sizes, kernel.sizes])


def test_loops_in_one_thread_do_not_stay_so_for_long_sequences() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        short = lower_symbolic(pointwise(5, 9), [pointwise(3, 7).sizes, pointwise(5, 9).sizes])
        long = lower_symbolic(pointwise(500, 90), [pointwise(3, 7).sizes, pointwise(500, 90).sizes])
    finally:
        torch.set_num_threads(threads)
    assert "omp parallel" not in short.text
    assert "omp parallel" in long.text
    assert short.fits(pointwise(6, 10))
    assert not short.fits(pointwise(500, 90))
    assert long.fits(pointwise(900, 50))
    assert not long.fits(pointwise(2, 9))


# -- random groups ---------------------------------------------------------------------------------------------------

ROWS = ("sin", "softmax", "sum", "mean", "transpose", "flatten", "cut", "scale", "join", "mask")


def random_group(steps: Sequence[str], b: int, t: int) -> Kernel:
    """Operators one after the other on a tensor with two sizes, of which some are sums, views and literals."""
    make = Program((b, t, 4))
    now = Ref(0)
    for step in steps:
        size = list(make.values[now.value].shape)
        if step == "softmax":
            now = make(aten._softmax.default, now, len(size) - 2, False)
        elif step in ("sum", "mean"):
            total = make(aten.sum.dim_IntList, make(aten.exp.default, now), [len(size) - 2], True)
            total = make(aten.div.Tensor, total, size[-2]) if step == "mean" else total
            now = make(aten.add.Tensor, now, make(aten.expand.default, total, size))
        elif step == "transpose":
            now = make(aten.transpose.int, now, 0, 1)
        elif step == "flatten" and len(size) == 3:
            dense = make(aten.clone.default, now, memory_format=torch.contiguous_format)
            now = make(aten.view.default, dense, [size[0] * size[1], size[2]])
        elif step == "cut":
            now = make(aten.slice.Tensor, now, 0, 0, size[0] - 1)
        elif step == "scale":
            now = make(aten.mul.Tensor, now, 1 / size[0])
        elif step == "join":
            now = make(aten.cat.default, [now, make(aten.neg.default, now)], len(size) - 1)
        elif step == "mask":
            ones = make(aten.ones.default, size[-2:], device=torch.device("cpu"), dtype=torch.bool, pin_memory=False)
            now = make(aten.masked_fill.Scalar, now, make(aten.tril.default, ones), -2.0)
        now = make(aten.sin.default, now)
    return make.kernel(make(aten.clone.default, now, memory_format=torch.contiguous_format))


@given(
    groups=st.lists(st.lists(st.sampled_from(ROWS), min_size=1, max_size=5), min_size=4, max_size=4),
    sizes=st.lists(st.tuples(st.integers(3, 12), st.integers(3, 12)), min_size=4, max_size=4, unique=True),
)
@settings(max_examples=2, **QUICKLY)
def test_random_groups_are_as_accurate_as_eager_at_all_sizes(
    groups: list[list[str]], sizes: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = KernelStore(Path(folder))
        for b, t in sizes:
            kernels = [random_group(steps, b, t) for steps in groups]
            made = store.compile(kernels)
            for kernel in kernels:
                check(made, kernel)


# -- on disk ---------------------------------------------------------------------------------------------------------


def symbolic_record(folder: Path) -> Path:
    (found,) = (path for path in folder.glob("*.json") if read_record(path)["rules"])
    return found


def with_rules(**changed: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        record = read_record(path)
        write_record(path, {**record, "rules": {**record["rules"], **changed}})

    return change


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no record": Path.unlink,
    "half a record": lambda path: os.truncate(path, 300),
    "no rules": lambda path: write_record(path, {**read_record(path), "rules": None}),
    "rules that are none": lambda path: write_record(path, {**read_record(path), "rules": [1]}),
    "an unknown rule": with_rules(more=1),
    "a symbol without a place": with_rules(symbols=[99]),
    "a symbol that is no number": with_rules(symbols=["0"]),
    "too few expressions": with_rules(expressions=["s0"]),
    "code in an expression": with_rules(expressions=["exit(3)", "6", "6"]),
    "code in a guard": with_rules(guards=["__import__('os').abort()"]),
    "a guard that divides by zero": with_rules(guards=["1 // (s0 - s0)"]),
    "no text": with_rules(guards=[None]),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sizes of a structure."""
    folder = tmp_path_factory.mktemp("compiled")
    store = KernelStore(folder)
    store.compile([scaled(5, 5)])
    store.compile([scaled(7, 7)])
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_not_used(tmp_path: Path, compiled: Path, damage: str) -> None:
    folder = shutil.copytree(compiled, tmp_path / "copy")
    assert KernelStore(folder).workspace(scaled(9, 9)) == 0
    DAMAGES[damage](symbolic_record(folder))
    assert KernelStore(folder).workspace(scaled(9, 9)) is None


def test_a_damaged_record_is_compiled_again(tmp_path: Path, compiled: Path) -> None:
    folder = shutil.copytree(compiled, tmp_path / "copy")
    DAMAGES["half a record"](symbolic_record(folder))
    store = KernelStore(folder)
    assert store.compile([scaled(5, 5)]).fresh == 0
    made = store.compile([scaled(9, 9)])
    assert made.fresh == 1
    check(made, scaled(9, 9))
    assert KernelStore(folder).compile([scaled(10, 10)]).fresh == 0


@pytest.mark.parametrize("content", ["", "[]", '{"structure": "elsewhere"}'])
def test_a_damaged_structure_is_unknown(folder: Path, content: str) -> None:
    structure = scaled(5, 5).structure
    (folder / f"{structure}.structure").write_text(content)
    assert Structures(folder)[structure] == StructureRecord(structure)


def test_a_structure_whose_kernel_with_symbols_fails_is_compiled_for_its_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fail(kernel: Kernel, *_: Any) -> Any:
        asked.append(kernel.sizes)
        raise LoweringError("no symbols today")

    monkeypatch.setattr(torch_private, "symbolic_module_source", fail)
    store = KernelStore(folder)
    for rows in (5, 7, 9, 11):
        made = store.compile([scaled(rows, rows)])
        assert made.fresh == 1
        check(made, scaled(rows, rows))
    assert asked == [(7, 6, 6, 7), (9, 6, 6, 9)], "twice is enough"


def test_a_kernel_with_symbols_that_the_compiler_rejects_is_compiled_for_its_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = extension.extension_source

    def extension_source(module: str, functions: Sequence[CppFunction]) -> str:
        spoilt = any("ks0" in function.source for function in functions)
        return right(module, functions) + ("\n#error no symbols today\n" if spoilt else "")

    monkeypatch.setattr(lower_kernels, "extension_source", extension_source)
    store = KernelStore(folder)
    store.compile([scaled(5, 5)])
    kernels = [scaled(7, 7), scaled(8, 8)]
    made = store.compile(kernels)
    assert made.fresh == 2
    for kernel in kernels:
        check(made, kernel)


# -- which sizes become symbols --------------------------------------------------------------------------------------


def test_sizes_that_come_together_are_compiled_for_themselves_up_to_a_few(tmp_path: Path) -> None:
    """Layers of several widths keep their own kernels; a loop over growing prefixes shares one."""
    structures = Structures(tmp_path)
    for rows in range(5, 5 + AT_ONCE):
        assert structures.samples(scaled(rows, rows)) == []
        structures.expect(scaled(rows, rows))
    later = scaled(20, 20)
    assert structures.samples(later) == [*(scaled(rows, rows).sizes for rows in range(5, 5 + AT_ONCE)), later.sizes]


def test_symbols_take_the_place_of_what_differs_from_the_nearest_sizes(tmp_path: Path) -> None:
    structures = Structures(tmp_path)
    for width in (64, 32):
        structures.see(scaled(5, 5, width))
    structures.begin()
    later = scaled(7, 7, 32)
    assert structures.samples(later) == [scaled(5, 5, 32).sizes, later.sizes]
    fitted = fit(later, structures.samples(later))
    assert fitted.expressions == ("s0", "32", "32", "s0")


def test_what_is_known_of_a_structure_is_bounded_and_joined_with_other_processes(tmp_path: Path) -> None:
    first, second = Structures(tmp_path), Structures(tmp_path)
    structure = scaled(5, 5).structure
    for rows in range(5, 5 + MOST_SAMPLES):
        first.add_sample(scaled(rows, rows))
    first.save()
    record = tmp_path / f"{scaled(5, 5).key}.json"
    record.write_text("compiled")
    assert second[structure].samples
    assert second.samples(scaled(90, 90)) == [], "the first sizes of a process"
    second.see(scaled(90, 90))
    second.begin()
    second.add_sample(scaled(90, 90))
    second.add_symbolic(structure, "0" * 24)
    second.save()
    assert not record.exists()
    found = Structures(tmp_path)[structure]
    assert [sizes[0] for _, sizes in found.samples] == [*range(6, 5 + MOST_SAMPLES), 90]
    assert found.symbolic == ("0" * 24,)
    for number in range(1, MOST_SYMBOLIC):
        assert second.samples(scaled(91, 91))
        second.add_symbolic(structure, f"{number:024}")
    assert second.samples(scaled(91, 91)) == []


def test_kernels_of_other_devices_keep_their_sizes(tmp_path: Path) -> None:
    kernel = scaled(5, 5)
    operand = Operand((5, 6), (6, 1), torch.float32, "cuda:0", True)
    there = [Kernel((operand,), one.calls, one.outputs, one.shapes, one.layouts, ()) for one in (kernel, scaled(7, 7))]
    structures = Structures(tmp_path)
    structures.see(there[0])
    structures.begin()
    assert structures.samples(there[1]) == []


# -- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0*s1 + 4", 25), ("-s0 // 2", -2), ("s1 % 4", 3), ("s0**2", 9), ("max(s0, s1, 2) - min(s0, s1)", 4),
        ("s0 < s1 <= 7", True), ("s0 == 3 and not s1 == 7", False), ("s0 != 3 or s1 >= 7", True), ("(s0)", 3),
    ],
)  # fmt: skip
def test_arithmetic(text: str, value: int) -> None:
    assert evaluate_text(text, {"s0": 3, "s1": 7}) == value


@pytest.mark.parametrize(
    "text",
    ["s2", "open('x')", "s0.real", "s0[0]", "[1]", "'text'", "1.5", "s0 / 2", "2**s0", "2**99", "lambda: 1", "max()",
     "max(s0, key=s0)", "s0 if s0 else 1", "(", "s0 // 0", "s0 in s0", "(s0 := 1)"],
)  # fmt: skip
def test_what_is_more_than_arithmetic_is_rejected(text: str) -> None:
    with pytest.raises(LoweringError):
        evaluate_text(text, {"s0": 3, "s1": 7})


# -- whole steps -----------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Attention over time, whose loss is a mean over all words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.tags = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x).tanh() * 2
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        shares = ((words @ words.transpose(1, 2)) / 3).masked_fill(hidden, -1e9).softmax(-1)
        scores = self.tags(self.norm(words + shares @ words))
        return functional.cross_entropy(scores.flatten(0, 1), (x[..., 0] > 0).flatten().long())


def _step(model: Any, x: Tensor) -> None:
    model(x).backward()


def test_later_lengths_of_a_step_compile_nothing_and_keep_its_prediction(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fresh = KernelStore(folder), []
    compile_kernels = store.compile

    def counted(kernels: Iterable[Kernel]) -> Compilation:
        made = compile_kernels(kernels)
        fresh.append(made.fresh)
        return made

    monkeypatch.setattr(store, "compile", counted)
    monkeypatch.setattr("encore.compiler.forms.kernel_store", lambda: store)
    torch.manual_seed(0)
    eager = Tagger()
    planned = encore.compile(copy.deepcopy(eager), lowering="fused", overhead=0.0, skip=("block_attention",))
    for count, length in enumerate((6, 7, 11)):
        fresh.clear()
        x = torch.randn(3, length, 6)
        step = functools.partial(_step, planned, x)
        measured = [encore.measure(step).step_peak for _ in range(2)][1]
        predicted = session_of(planned).graphs[-1].plan.timeline.step_peak
        assert measured <= predicted, length
        assert sum(fresh) == 0 or count < 2, length
        for model in (planned, eager):
            model.zero_grad()
            _step(model, x)
        assert_gradients_as_accurate(planned, eager, _step, x)
    assert store._bound
