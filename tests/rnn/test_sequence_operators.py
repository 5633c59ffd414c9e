"""The whole-sequence operators: PyTorch's own checks, derivatives, and what they keep and take aside, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses import FakeTensorMode

import encore
from encore.rnn import WORKSPACES, native, plain
from support.recurrent_pairs import KINDS, Workspace, assert_as_torch, both_kernels, everything, kernels, pair
from support.rounding import assert_close

pytestmark = pytest.mark.usefixtures("own_layers")

PACKED = torch.tensor([4, 4, 3, 1, 1])


def operands(kind: str, *, packed: bool, dtype: torch.dtype = torch.float64, projected: bool = False) -> list[Any]:
    """Tensors of a small layer: input, states, weights, biases, and batch_sizes."""
    gates = {"lstm": 4, "gru": 3, "elman": 1}[kind]
    hidden, width = 5, 3 if projected else 5

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype).div_(2).requires_grad_()

    x = some(13, 3) if packed else some(5, 4, 3)
    states = [some(4, width), some(4, hidden)] if kind == "lstm" else [some(4, hidden)]
    weights = [some(gates * hidden, 3), some(gates * hidden, width), some(gates * hidden), some(gates * hidden)]
    projection = [some(width, hidden) if projected else None] if kind == "lstm" else []
    return [x, *states, *weights, *projection, PACKED if packed else None]


def calls() -> list[Any]:
    """Every operator in every mode: name, tensors' options, last arguments."""
    found = []
    for packed in (False, True):
        for reverse in (False, True):
            for keep in (0, 2):
                found.append(("lstm", {"packed": packed}, (reverse, keep)))
                found.append(("gru", {"packed": packed}, (reverse, keep)))
            found.append(("elman", {"packed": packed}, (reverse, reverse)))
    return [*found, *(("lstm", {"packed": False, "projected": True}, (False, keep)) for keep in (0, 2))]


def forward(kind: str) -> Any:
    return getattr(torch.ops.encore, f"{kind}_forward").default


every_call = pytest.mark.parametrize(("kind", "options", "last"), calls())


@pytest.mark.parametrize(("kind", "options", "last"), calls()[::3])
def test_opcheck(kind: str, options: dict[str, Any], last: tuple[Any, ...]) -> None:
    torch.library.opcheck(forward(kind), (*operands(kind, **options), *last))


@pytest.mark.parametrize(("kind", "options", "last"), calls()[::4])
def test_opcheck_backward(kind: str, options: dict[str, Any], last: tuple[Any, ...]) -> None:
    tensors = [tensor.detach() if isinstance(tensor, Tensor) else None for tensor in operands(kind, **options)]
    output, *states = forward(kind)(*tensors, *last)
    count = 3 if kind == "lstm" else 2
    grads = [torch.randn_like(result) for result in (output, *states)[:count]]
    kept = [output, *states[count - 1 :]]
    backward = getattr(torch.ops.encore, f"{kind}_backward").default
    torch.library.opcheck(backward, (*grads, *tensors, *last, *kept, True, True))


@both_kernels
@every_call
def test_derivative(kind: str, options: dict[str, Any], last: tuple[Any, ...], steps: ModuleType) -> None:
    tensors = operands(kind, **options)
    count = 3 if kind == "lstm" else 2
    with kernels(steps):
        assert torch.autograd.gradcheck(lambda *given: forward(kind)(*given, *last)[:count], tensors, fast_mode=True)


@every_call
def test_second_derivative(kind: str, options: dict[str, Any], last: tuple[Any, ...]) -> None:
    tensors = operands(kind, **options)
    if kind == "elman":
        last = last[0], False  # ReLU has kinks that finite differences stumble over
    count = 3 if kind == "lstm" else 2
    assert torch.autograd.gradgradcheck(
        lambda *given: forward(kind)(*given, *last)[:count], tensors, fast_mode=True, check_undefined_grad=False
    )


def test_third_derivative() -> None:
    tensors = operands("gru", packed=False)
    x = tensors[0]
    y = forward("gru")(*tensors, False, 0)[0].sin().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.square().sum(), x)
    step = 1e-5 * torch.randn_like(x)

    def second_at(point: Tensor) -> Tensor:
        point = point.detach().requires_grad_()
        value = forward("gru")(point, *tensors[1:], False, 0)[0].sin().sum()
        (gradient,) = torch.autograd.grad(value, point, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), point)[0].square().sum()

    change = (second_at(x + step) - second_at(x - step)) / 2
    torch.testing.assert_close((third * step).sum(), change, rtol=1e-5, atol=0)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def saved_bytes(run: Callable[[], Any]) -> dict[int, int]:
    """Storages that autograd keeps, by address."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    del result
    return kept


@pytest.mark.parametrize(
    ("kind", "stash", "per_unit"),
    [
        ("LSTM", "fast", 24.0),
        ("LSTM", 1, 8 - 4 / 40),
        ("LSTM", 8, 4 + 4 * 4 / 40),
        ("LSTM", 40, 4.0),
        ("LSTM", 99, 4.0),
        ("GRU", "fast", 20.0),
        ("GRU", "lean", 4.0),
        ("RNN", "fast", 4.0),
    ],
)
def test_what_is_kept(kind: str, stash: str | int, per_unit: float) -> None:
    """Bytes a unit and step, beside what was there before: input, states and weights."""
    steps, batch, hidden = 40, 8, 24
    module = getattr(encore.nn, kind)(5, hidden, stash=stash)
    x = torch.randn(steps, batch, 5)
    zeros = torch.zeros(1, batch, hidden)
    states = (zeros, zeros) if kind == "LSTM" else zeros
    before = {tensor.untyped_storage().data_ptr() for tensor in (x, zeros, *module.parameters())}
    kept = saved_bytes(lambda: module(x, states))
    assert sum(size for storage, size in kept.items() if storage not in before) == per_unit * steps * batch * hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stash", ["fast", 4])
@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), ("LSTM", {"proj_size": 8})])
def test_workspace_to_the_byte(kind: str, options: dict[str, Any], stash: str | int, dtype: torch.dtype) -> None:
    module = getattr(encore.nn, kind)(20, 40, stash=stash, batch_first=True, bidirectional=True, **options).to(dtype)
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.randn(7, 30, 20, dtype=dtype),
        torch.tensor([30, 2, 9, 9, 4, 1, 17]),
        batch_first=True,
        enforce_sorted=False,
    )
    for x in (torch.randn(7, 30, 20, dtype=dtype, requires_grad=True), packed):
        with Workspace() as workspace:
            output = module(x)[0]
            output = output.data if x is packed else output
            output.backward(torch.randn_like(output))
            module(x)[1][0].sum().backward()
        assert len(workspace.seen) == 8
        for func, told, measured in workspace.seen:
            assert measured == told, func


def test_plain_steps_stay_within_their_bound() -> None:
    with kernels(plain):
        for kind in KINDS:
            module = getattr(encore.nn, kind)(20, 40, stash=4)
            with Workspace() as workspace:
                module(torch.randn(30, 7, 20))[0].sum().backward()
            assert all(measured <= told for _, told, measured in workspace.seen)
            assert len(workspace.seen) == 2


def test_workspace_without_data() -> None:
    """A prediction has shapes and no numbers."""
    tensors = operands("lstm", packed=False, dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(tensor) if isinstance(tensor, Tensor) else None for tensor in tensors]
        told = WORKSPACES[forward("lstm")](*fakes, False, 2)
    assert told == WORKSPACES[forward("lstm")](*tensors, False, 2) > 0


def test_workspace_does_not_grow_with_length() -> None:
    def told(steps: int, keep: int) -> int:
        x, h, w = torch.empty(steps, 64, 32), torch.empty(64, 32), torch.empty(128, 32)
        return WORKSPACES[forward("lstm")](x, h, h, w, w, None, None, None, None, False, keep)

    assert told(10_000, 8) == told(100, 8)
    assert told(10_000, 0) == told(100, 0) < told(100, 8)


# ---- compilers, kernels, mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stash", ["fast", "lean"])
@torch._dynamo.config.patch(allow_rnn=True)  # Dynamo breaks at every subclass of torch.nn's recurrent modules otherwise
def test_compiles_as_one_graph(kind: str, stash: str) -> None:
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.1}
    _, ours = pair(kind, 4, 9, stash=stash, **options)
    x = torch.randn(3, 6, 4, requires_grad=True)
    compiled: Any = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_as_torch(everything(compiled, x, wanted=[x]), ours, x, wanted=[x])
    for size in (2, 5):  # other batches
        assert compiled(torch.randn(size, 6, 4))[0].shape == (size, 6, 18)


@pytest.mark.parametrize("keep", [0, 2])
def test_compiles_packed_sequences(keep: int) -> None:
    """The operator is in the graph, with sizes that nobody has looked at; `pack_padded_sequence` never is."""
    tensors = operands("lstm", packed=True)
    seen: list[Any] = []

    def noting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return aot_eager(graph, inputs)

    def loss(*given: Any) -> Tensor:
        return forward("lstm")(*given, True, keep)[0].square().sum()

    wanted = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]
    compiled = torch.compile(loss, backend=noting, fullgraph=True)
    for found, expected in zip(
        torch.autograd.grad(compiled(*tensors), wanted), torch.autograd.grad(loss(*tensors), wanted), strict=True
    ):
        assert_close(found, expected)
    assert seen.count(forward("lstm")) == 1


def test_threads_agree() -> None:
    theirs, ours = pair("LSTM", 40, 96, stash=4)
    x = torch.randn(9, 24, 40, requires_grad=True)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(everything(ours, x, wanted=[x]))
    finally:
        torch.set_num_threads(before)
    for one in found:
        assert_as_torch(one, theirs, x, wanted=[x])


def test_packed_weights_are_as_large_as_told() -> None:
    lanes = native.vector_lanes(torch.float32)
    assert native.packed_numel(4, lanes + 1, 3, torch.float32) == 4 * 2 * lanes * 3
    assert native.packed_numel(1, 1, 3, torch.float32) == lanes * 3


def test_mistakes_are_named() -> None:
    x, h, w, b = torch.zeros(5, 2, 3), torch.zeros(2, 4), torch.zeros(16, 4), torch.zeros(16)
    w_ih = torch.zeros(16, 3)
    call: Any = torch.ops.encore.lstm_forward

    def fails(text: str, *args: Any) -> None:
        with pytest.raises(encore.OptionError, match=text):
            call(*args)

    fails("T, B, input", x[0], h, h, w_ih, w, b, b, None, None, False, 0)
    fails("batch of 2, the initial state one of 3", x, torch.zeros(3, 4), h, w_ih, w, b, b, None, None, False, 0)
    fails("c0 of encore::lstm_forward must have the shape", x, h, h[:, :3], w_ih, w, b, b, None, None, False, 0)
    fails("b_hh", x, h, h, w_ih, w, b, b[:3], None, None, False, 0)
    fails("w_hh is torch.float64", x, h, h, w_ih, w.double(), b, b, None, None, False, 0)
    fails("keep must be", x, h, h, w_ih, w, b, b, None, None, False, -1)
    fails("compute in", x.to(torch.int64), h, h, w_ih, w, b, b, None, None, False, 0)
    rows = x.view(10, 3)
    for sizes in ([2, 3, 3, 2], [2, 2, 2], [2, 2, 2, 2, 2, 0]):
        fails("batch_sizes must fall", rows, h, h, w_ih, w, b, b, None, torch.tensor(sizes), False, 0)
