"""torch.nn's recurrent layers, unchanged, in the fused lowering: Encore's operators in the graph, and the same step."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encore
from encore.capture import recurrent
from encore.graph import Graph, OpClass
from encore.kernels import BuildError
from encore.rnn import native
from support.captured_graphs import captured, train_step
from support.compare_with_eager import assert_matches_eager, assert_same, gradients, run_step

FORWARD = {"LSTM": "lstm_forward", "GRU": "gru_forward", "RNN": "elman_forward"}
LEFT_ALONE = ("mkldnn_rnn_layer", "sigmoid", "tanh", "unsafe_chunk", "unsafe_split")
"""What ATen makes of recurrent layers on the CPU."""

every_kind = pytest.mark.parametrize("kind", FORWARD)


class Tagger(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 5)
        self.layers = getattr(nn, kind)(5, 6, **options)
        width = (options.get("proj_size") or 6) * (2 if options.get("bidirectional") else 1)
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor, hx: Any = None) -> Tensor:
        return self.leave(self.layers(self.enter(x), hx)[0])


def packets(graph: Graph) -> Counter[str]:
    """How often each operator is called."""
    return Counter(op.target.overloadpacket.__name__ for op in graph.ops if hasattr(op.target, "overloadpacket"))


def lifted(model: Callable[..., Any], *args: Any, **options: Any) -> Graph:
    """The graph of a step in the fused lowering, without the time it takes to compile kernels."""
    skip = ("fuse", *options.pop("skip", ()))
    return captured(model, *args, lowering="fused", skip=skip, **options).unplanned.schedule.graph


def rewrites(model: Any) -> tuple[str, ...]:
    """The passes that changed the graph of a step."""
    (graph,) = encore.report(model).graphs
    return graph.rewrites


# ---- what is in the graph ------------------------------------------------------------------------------------------


@every_kind
def test_an_operator_a_layer_and_direction(kind: str) -> None:
    model = Tagger(kind, num_layers=3, bidirectional=True, batch_first=True, dropout=0.2)
    graph = lifted(model, torch.randn(2, 7, 4))
    found = packets(graph)
    assert found[FORWARD[kind]] == found[FORWARD[kind].replace("forward", "backward")] == 6
    assert found["dropout_noise"] == 2
    assert not any(found[packet] for packet in LEFT_ALONE)
    layers = [op for op in graph.ops if op.target.namespace == "encore" and op.kind is OpClass.HEAVY]
    assert len(layers) == 12
    assert {op.module for op in layers} == {"layers"}
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "self.layers(self" in text)
    assert {op.source for op in layers if op.forward} == {f"{Path(__file__).name}:{line}"}


def test_the_report_says_so() -> None:
    model = encore.compile(Tagger("GRU"), skip="fuse")
    train_step(model, torch.randn(7, 2, 4))
    assert rewrites(model) == ("recurrent",)
    assert {row.module for row in encore.report(model).decisions} == {"enter", "layers"}


@every_kind
@pytest.mark.parametrize("how", [{"lowering": "eager"}, {"lowering": "fused", "skip": ("recurrent", "fuse")}], ids=str)
def test_not_where_it_is_not_wanted(kind: str, how: dict[str, Any]) -> None:
    graph = captured(Tagger(kind), torch.randn(7, 2, 4), **how).unplanned.schedule.graph
    found = packets(graph)
    assert not found[FORWARD[kind]]
    assert any(found[packet] for packet in LEFT_ALONE)


@every_kind
def test_an_estimate_has_the_same_operators(kind: str) -> None:
    model, x = Tagger(kind, num_layers=2), torch.randn(7, 2, 4)
    graph = lifted(model, x)
    assert packets(graph)[FORWARD[kind]] == 2
    assert encore.estimate(model, x).unplanned == encore.report(model).unplanned


def test_what_needs_no_gradient_keeps_nothing() -> None:
    model = Tagger("LSTM")
    for parameter in (*model.enter.parameters(), *model.layers.parameters()):
        parameter.requires_grad_(False)
    (op,) = [op for op in lifted(model, torch.randn(7, 2, 4)).ops if "lstm_forward" in op.name]
    assert op.args[-1] > 0


def test_a_layer_under_no_grad_keeps_nothing() -> None:
    class Frozen(Tagger):
        def forward(self, x: Tensor, hx: Any = None) -> Tensor:
            with torch.no_grad():
                x = self.layers(self.enter(x), hx)[0]
            return self.leave(x)

    graph = lifted(Frozen("LSTM"), torch.randn(7, 2, 4))
    assert packets(graph)["lstm_backward"] == 0
    (op,) = [op for op in graph.ops if "lstm_forward" in op.name]
    assert op.args[-1] > 0


# ---- the numbers ---------------------------------------------------------------------------------------------------


@every_kind
def test_verified(kind: str) -> None:
    model = encore.compile(Tagger(kind, num_layers=2, bidirectional=True, dropout=0.5), skip="fuse")
    found = encore.verify(model, torch.randn(7, 2, 4))
    assert found.compared >= 20
    assert not found.bit_equal, "these are Encore's operators"


CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM": ("LSTM", {"num_layers": 2}),
    "LSTM with projections": ("LSTM", {"proj_size": 3, "bias": False}),
    "GRU": ("GRU", {"bidirectional": True}),
    "RNN": ("RNN", {}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("narrow_input", [True, False], ids=["narrow input", "wide input"])
@pytest.mark.parametrize("cell", CELLS)
def test_autocast(cell: str, narrow_input: bool) -> None:
    """Same types as eager's, and its numbers as far as bfloat16 carries them."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = getattr(nn, CELLS[cell][0])(4, 6, **CELLS[cell][1])

        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return self.layers(x)

    x = torch.randn(5, 2, 4, dtype=torch.bfloat16 if narrow_input else torch.float32)
    model = Cast()
    expected = run_step(model, (x,))
    planned = encore.compile(copy.deepcopy(model), skip="fuse")
    assert_same(run_step(planned, (x,)), expected, "fused", narrow=torch.bfloat16)
    assert "recurrent" in rewrites(planned)


@every_kind
def test_a_state_that_is_carried_on(kind: str) -> None:
    """Truncated backpropagation: the last state of a chunk is the first of the next, without its gradient."""
    plain = getattr(nn, kind)(4, 6, num_layers=2)
    planned = encore.compile(copy.deepcopy(plain), skip="fuse")
    chunks = torch.randn(3, 5, 2, 4)

    def train(model: nn.Module) -> dict[str, Tensor]:
        state: Any = None
        for chunk in chunks:
            output, state = model(chunk, state)
            output.square().sum().backward()
            state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
        return gradients(model)

    assert_same(train(planned), train(plain), "fused")


@every_kind
def test_checkpoints_by_hand(kind: str) -> None:
    class Checkpointed(Tagger):
        def forward(self, x: Tensor, hx: Any = None) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, hx, use_reentrant=False)

    assert_matches_eager(Checkpointed(kind), torch.randn(7, 2, 4, requires_grad=True), lowering="fused", steps=1)


@every_kind
def test_a_plan_may_run_a_layer_again(kind: str) -> None:
    """The lowest peak by recomputation alone: the layer runs once more in backward, and gradients stay."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(getattr(nn, kind)(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)[0]
            return x.square().mean()

    plain, x = Deep(), torch.randn(40, 8, 16)
    want = run_step(plain, (x,))
    planned = encore.compile(copy.deepcopy(plain), budget="min", skip="fuse", methods="recompute")
    assert_same(run_step(planned, (x,)), want, "fused")
    report = encore.report(planned)
    if kind != "RNN":  # which keeps little else than what the next layer reads
        assert report.planned.step_peak < report.unplanned.step_peak
        assert "recompute" in {row.action for row in report.decisions}
    planned.zero_grad(set_to_none=True)
    assert encore.measure(lambda: planned(x).backward()).step_peak == report.planned.step_peak


def test_a_loop_that_calls_a_layer_step_by_step() -> None:
    """Long enough for its distinct calls to be traced once and pasted."""

    class Decoder(Tagger):
        def forward(self, x: Tensor, hx: Any = None) -> Tensor:
            outputs = []
            for step in x.unbind(0):
                output, hx = self.layers(self.enter(step).tanh().unsqueeze(0), hx)
                outputs.append(self.leave(output[0]))
            return torch.stack(outputs)

    plain, x = Decoder("LSTM"), torch.randn(50, 2, 4)
    want = run_step(plain, (x,))
    planned = encore.compile(copy.deepcopy(plain), skip="fuse")
    assert_same(run_step(planned, (x,)), want, "fused")
    (graph,) = encore.report(planned).graphs
    assert "recurrent" in graph.rewrites
    assert "capture of repeats" in graph.seconds


# ---- the bytes -----------------------------------------------------------------------------------------------------

SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all at once": {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.3},
    "no bias": {"bias": False, "num_layers": 2},
}


@every_kind
@pytest.mark.parametrize("options", SIZES)
def test_predicted_to_the_byte(kind: str, options: str) -> None:
    class Loss(Tagger):
        def forward(self, x: Tensor, hx: Any = None) -> Tensor:
            return super().forward(x, hx).square().mean()

    model, x = Loss(kind, **SIZES[options]), torch.randn(9, 7, 4)
    encore.compile(model, overhead=0.0, skip="fuse")
    model(x).backward()
    model.zero_grad(set_to_none=True)
    assert encore.measure(lambda: model(x).backward()).step_peak == encore.report(model).planned.step_peak


# ---- what stays ATen's ---------------------------------------------------------------------------------------------


def test_inside_function_transforms() -> None:
    class Sensitivity(Tagger):
        def forward(self, x: Tensor, hx: Any = None) -> Tensor:
            slopes = torch.func.grad(lambda given: self.layers(given)[0].square().sum())(self.enter(x))
            return self.leave(slopes.tanh().repeat(1, 1, 2)[..., :6])

    plain, x = Sensitivity("GRU"), torch.randn(3, 2, 4)
    want = run_step(plain, (x,))
    planned = encore.compile(copy.deepcopy(plain), skip="fuse")
    assert_same(run_step(planned, (x,)), want, "fused")
    assert "recurrent" not in rewrites(planned)


def test_mixed_types_are_refused_as_in_eager() -> None:
    model = nn.GRU(4, 6)
    message = "dtype"
    with pytest.raises(ValueError, match=message):
        model(torch.randn(3, 2, 4).double())
    with pytest.raises(ValueError, match=message):
        encore.compile(model, skip="fuse")(torch.randn(3, 2, 4).double())


def test_an_empty_batch() -> None:
    assert_matches_eager(nn.GRU(4, 6), torch.randn(3, 0, 4, requires_grad=True), lowering="fused", steps=1)


# ---- torch.compile -------------------------------------------------------------------------------------------------


@every_kind
def test_through_torch_compile(kind: str) -> None:
    plain, x = Tagger(kind), torch.randn(7, 2, 4)
    want = run_step(plain, (x,))
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(plain, backend="encore", options={"skip": "fuse"}, fullgraph=True)
        found = {name.replace("_orig_mod.", ""): tensor for name, tensor in run_step(compiled, (x,)).items()}
    assert_same(found, want, "fused")
    assert "recurrent" in rewrites(compiled)


@pytest.mark.slow  # a process of its own
def test_torch_compile_that_passes_over_the_layers_says_what_to_do() -> None:
    program = """
        import torch
        from torch import nn

        import encore

        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.LSTM(4, 6)

            def forward(self, x):
                return self.layers(x)[0].sum()

        model = torch.compile(Tagger(), backend="encore")
        for _ in range(2):
            model(torch.randn(3, 2, 4)).backward()
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(run, capture_output=True, text=True, check=True)
    assert ended.stderr.count("torch._dynamo.config.allow_rnn = True before the first step") == 1
    strict = [sys.executable, "-W", "error:encore", *run[1:]]  # Dynamo has to survive it
    ended = subprocess.run(strict, capture_output=True, text=True, check=True)
    assert ended.stderr.count("torch._dynamo.config.allow_rnn = True before the first step") == 1


@pytest.mark.slow
def test_layers_that_were_passed_over_for_another_backend_are_not_warned_of() -> None:
    program = """
        import torch
        from torch import nn

        layer = nn.LSTM(4, 6)
        torch.compile(lambda x: layer(x)[0].sum(), backend="eager")(torch.randn(3, 2, 4))
        torch.compile(nn.Linear(4, 4), backend="encore")(torch.randn(2, 4)).sum().backward()
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    assert "allow_rnn" not in subprocess.run(run, capture_output=True, text=True, check=True).stderr


# ---- without a compiler --------------------------------------------------------------------------------------------


@every_kind
def test_without_a_compiler_pytorch_computes_and_one_warning_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise BuildError("there is no C++ compiler (sold)")

    monkeypatch.setattr(native, "recurrent_library", refuse)
    recurrent._steps_are_compiled.cache_clear()
    model, args = Tagger(kind, num_layers=2), (torch.randn(7, 2, 4),)
    plain = copy.deepcopy(model)
    planned = encore.compile(model, skip="fuse")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert_same(run_step(planned, args), run_step(plain, args), "fused")
    finally:
        recurrent._steps_are_compiled.cache_clear()
    (warning,) = [str(entry.message) for entry in caught if "encore" in str(entry.message)]
    assert "recurrent layers run as PyTorch's own operators" in warning
    assert "there is no C++ compiler (sold)" in warning
    assert "recurrent" not in rewrites(planned)
