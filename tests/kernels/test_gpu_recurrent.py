"""Recurrent layers with the GPU's kernels, in Triton's interpreter: against PyTorch's operators, and torch.nn."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from encore.kernels.gpu import has_gpu_kernels
from encore.rnn import WORKSPACES, layer, plain
from encore.rnn.sequence import dense_walk
from encore.rnn.steps import BackwardSteps, ForwardSteps, RebuiltGates
from support.gpu_kernels import interpreted, only_program, taken_aside
from support.recurrent_pairs import KINDS, assert_as_torch, everything, kernels, pair
from support.rounding import assert_close

pytestmark = pytest.mark.usefixtures("own_layers")

gpu = pytest.importorskip("encore.rnn.gpu")

SIZES = torch.tensor([3, 3, 2, 1])
"""Rows of each step of a packed sequence."""


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "recurrent", interpreted("recurrent"))
    monkeypatch.setattr(gpu, "recurrent_loops", interpreted("recurrent_loops"))


def operands(kind: str, packed: bool, projected: bool, dtype: torch.dtype) -> list[Any]:
    """Tensors of a small layer: input, states, weights, biases, and batch_sizes."""
    gates, hidden, width = {"lstm": 4, "gru": 3, "elman": 1}[kind], 5, 3 if projected else 5

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).mul_(0.7).to(dtype).requires_grad_()

    x = some(int(SIZES.sum()), 2) if packed else some(len(SIZES), 3, 2)
    states = [some(3, width), some(3, hidden)] if kind == "lstm" else [some(3, hidden)]
    weights = [some(gates * hidden, 2), some(gates * hidden, width), some(gates * hidden), some(gates * hidden)]
    projection = [some(width, hidden) if projected else None] if kind == "lstm" else []
    return [x, *states, *weights, *projection, SIZES if packed else None]


def results(kind: str, tensors: list[Any], last: tuple[Any, ...]) -> list[Tensor]:
    """All that the operator returns, what it keeps included, and gradients of all operands."""
    outputs = getattr(torch.ops.encore, f"{kind}_forward")(*tensors, *last)
    generator = torch.Generator().manual_seed(1)
    given = [out for out in outputs if out.requires_grad]
    grads = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in given]
    wanted = [each for each in tensors if isinstance(each, Tensor) and each.requires_grad]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(given, wanted, grads)]


@pytest.mark.parametrize(
    ("kind", "packed", "projected", "last", "dtype"),
    [
        ("lstm", False, False, (False, 0), torch.float64),
        ("lstm", True, False, (True, 0), torch.float32),
        ("lstm", True, False, (False, 2), torch.float64),
        ("lstm", True, False, (True, 2), torch.float16),
        ("lstm", False, True, (False, 0), torch.bfloat16),
        ("lstm", True, True, (True, 2), torch.float64),
        ("gru", False, False, (False, 0), torch.bfloat16),
        ("gru", True, False, (True, 0), torch.float64),
        ("gru", True, False, (False, 2), torch.float32),
        ("gru", True, False, (True, 2), torch.float16),
        ("elman", False, False, (False, True), torch.float16),
        ("elman", True, False, (True, False), torch.float64),
        ("elman", True, False, (False, False), torch.bfloat16),
    ],
)
def test_as_in_pytorchs_operators(
    kind: str, packed: bool, projected: bool, last: tuple[Any, ...], dtype: torch.dtype
) -> None:
    tensors = operands(kind, packed, projected, dtype)
    with kernels(plain):
        expected = results(kind, tensors, last)
    with kernels(gpu):
        found = results(kind, tensors, last)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stash", ["fast", 2])
def test_layers_as_in_torch_nn(kind: str, stash: str | int) -> None:
    theirs, ours = pair(kind, 3, 6, stash=stash, bidirectional=True, batch_first=True)
    x = torch.randn(2, 4, 3, requires_grad=True)
    with kernels(gpu):
        found = everything(ours, x, wanted=[x])
    assert_as_torch(found, theirs, x, wanted=[x])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that were launched."""
    names: list[str] = []

    def noted(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, grid, *args, **constants)

    launch = gpu.launch
    monkeypatch.setattr(gpu, "launch", noted)
    return names


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("LSTMCell", ["lstm_cell", "lstm_cell_again", "lstm_cell_backward", "column_sums"]),
        ("GRUCell", ["gru_cell", "gru_gates", "gru_cell_backward", "column_sums"]),
        ("RNNCell", ["elman_cell", "elman_cell_backward", "column_sums"]),
    ],
)
def test_single_steps(kind: str, names: list[str], launched: list[str]) -> None:
    theirs, ours = pair(kind, 3, 6, stash="lean")
    x = torch.randn(2, 3, requires_grad=True)
    with kernels(gpu):
        found = everything(ours, x, wanted=[x])
    assert_as_torch(found, theirs, x, wanted=[x])
    assert launched == names


def test_several_tiles() -> None:
    """A row is wider than a tile, and there are more rows than a tile has; both end in the middle of one."""
    rows, hidden = 6, 300
    products, bias, cell = torch.randn(rows, 4 * hidden), torch.randn(4 * hidden), torch.randn(rows, hidden)
    chunk = dense_walk(1, rows, False, 1).chunks[0]
    found = []
    for steps in (plain, gpu):
        c, output, after = cell.clone(), torch.empty(rows, hidden), torch.empty(rows, hidden)
        gates, cells = torch.empty(rows, 4 * hidden), torch.empty(rows, hidden)
        given = products.clone(), bias, None, torch.zeros(rows, hidden), after, output, gates
        steps.forward("lstm", ForwardSteps(chunk, *given, cell=c, cells=cells))
        sums = torch.ones(4 * hidden)
        steps.add_column_sums(gates, sums)
        found.append([c, output, after, gates, cells, sums])
    for one, other in zip(found[1], found[0], strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_and_sigmoid(dtype: torch.dtype) -> None:
    """Relative errors near zero, where a formula of exponentials would have lost its digits; and at all ends."""
    eps = torch.finfo(dtype).eps
    sizes = torch.cat((torch.logspace(-30, 3, 400, dtype=dtype), torch.tensor([0.0, 0.64, torch.inf], dtype=dtype)))
    x = torch.cat((sizes, -sizes, torch.tensor([torch.nan], dtype=dtype))).view(1, -1)
    chunk = dense_walk(1, 1, False, 1).chunks[0]
    y, width = torch.empty_like(x), x.shape[1]
    bias = torch.zeros(width, dtype=dtype)
    gpu.forward("elman", ForwardSteps(chunk, x.clone(), bias, None, y, torch.empty_like(x), y))
    torch.testing.assert_close(y, x.tanh(), rtol=4 * eps, atol=0, equal_nan=True)
    gates = x.repeat(1, 4)
    gates[:, 3 * width :] = 0  # is multiplied with them
    gpu.rebuild("gru", RebuiltGates(chunk, torch.zeros(4 * width, dtype=dtype), gates))
    torch.testing.assert_close(
        gates[:, width : 2 * width], x.sigmoid(), rtol=4 * eps, atol=torch.finfo(dtype).tiny, equal_nan=True
    )


def test_nan_passes_relu() -> None:
    x = torch.tensor([[1.0, -1.0, 0.0, torch.nan]])
    chunk = dense_walk(1, 1, False, 1).chunks[0]
    output, after, grad = torch.empty(1, 4), torch.empty(1, 4), torch.empty(1, 4)
    gpu.forward("elman", ForwardSteps(chunk, x.clone(), torch.zeros(4), None, after, after, output, relu=True))
    torch.testing.assert_close(output, x.relu(), rtol=0, atol=0, equal_nan=True)
    state = torch.ones(1, 4)
    gpu.backward("elman", BackwardSteps(chunk, x.dtype, None, None, grad, state, output=output, relu=True))
    assert grad.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_rows_beyond_32_bits() -> None:
    """A gradient whose third row begins at element 2^31 and more, in memory of which next to nothing is touched."""
    stride = (1 << 30) + 3
    far = torch.empty(2 * stride + 4, dtype=torch.float16).as_strided((3, 4), (stride, 1))
    near = torch.randn(3, 4).half()
    far.copy_(near)
    h = torch.rand(3, 4)
    found = []
    for grad_output in (near, far):
        grad_gates = torch.empty(3, 4)
        with only_program(0, 0):
            chunk, state = dense_walk(1, 3, False, 1).chunks[0], torch.zeros(3, 4)
            given = chunk, h.dtype, None, grad_output.unsqueeze(0), grad_gates, state
            gpu.backward("elman", BackwardSteps(*given, output=h))
        found.append(grad_gates)
    assert torch.equal(found[1], found[0])
    assert found[0].abs().sum() > 0


class Workspace(TorchDispatchMode):
    """What each of the operators allocated beyond what it returned, beside what was told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in WORKSPACES:
            return func(*args, **(kwargs or {}))
        told = WORKSPACES[func](*args)
        aside, result = taken_aside(lambda: func(*args))
        self.seen.append((told, aside))
        return result


@pytest.mark.parametrize("projected", [0, 3])
def test_memory_aside_is_as_told(projected: int) -> None:
    """To the byte, but for the one buffer that only going back through a projection takes."""
    _, ours = pair("LSTM", 3, 8, stash=2, proj_size=projected)
    with kernels(gpu), Workspace() as workspace:
        ours(torch.randn(2, 4, 3))[0].sum().backward()
    buffer = 4 * 8 * 4
    (told, forward), (told_back, backward) = workspace.seen
    assert forward == told - buffer
    assert backward == (told_back if projected else told_back - buffer)


def test_launched_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton itself would take the current GPU."""
    given: list[int | None] = []

    @contextlib.contextmanager
    def noted(index: int | None) -> Iterator[None]:
        given.append(index)
        yield

    monkeypatch.setattr(torch.accelerator, "device_index", noted)
    matrix, sums = torch.ones(2, 3), torch.zeros(3)
    gpu.add_column_sums(matrix, sums)
    assert sums.tolist() == [2.0, 2.0, 2.0]
    assert given == [None]  # the CPU, in the interpreter; an accelerator by its number


@pytest.fixture
def _ask_again() -> Iterator[None]:
    has_gpu_kernels.cache_clear()
    yield
    has_gpu_kernels.cache_clear()


@pytest.mark.usefixtures("_ask_again")
def test_chosen_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    assert layer.kernels_for(device) is gpu
    assert layer.kernels_for(torch.device("xpu")) is plain
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    has_gpu_kernels.cache_clear()
    with pytest.warns(UserWarning, match=r"capability 7\.5"):
        assert layer.kernels_for(device) is plain
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    has_gpu_kernels.cache_clear()
    assert layer.kernels_for(device) is gpu


@pytest.mark.usefixtures("_ask_again")
def test_without_triton_pytorch_runs_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        chosen = [layer.kernels_for(torch.device("cuda")) for _ in range(2)]
    assert chosen == [plain, plain]
    assert len(seen) == 1
    assert "Triton is not installed" in str(seen[0].message)
