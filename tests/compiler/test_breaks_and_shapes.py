"""Graph breaks, new shapes, the limit on them, and `torch.compile(backend="encore")`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import encore
from support.compare_with_eager import assert_matches_eager, assert_same, run_step, session_of

pytestmark = pytest.mark.mostly_eager

HERE = Path(__file__).name


class Stack(nn.Module):
    """Two layers with something between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)).tanh())

    def between(self, x: Tensor) -> Tensor:
        return x


class Breaking(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        torch._dynamo.graph_break()  # the line of the break
        return self.second(x).tanh()


class Branching(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        if x.sum().item() > 0:  # the line of the break
            return self.second(x)
        return -x


class Printing(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        print("between the layers", x.isnan().any())  # the line of the break
        return self.second(x).tanh()


def line_of(text: str, nth: int = 0) -> int:
    lines = Path(__file__).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line][nth]


# -- breaks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Breaking, "graph_break"), (Branching, "item"), (Printing, "print")],
    ids=lambda value: str(value),
)
def test_a_break_gives_two_graphs_with_reason_and_line(
    kind: type[Stack], reason: str, capsys: pytest.CaptureFixture[str], lowering: str
) -> None:
    torch.manual_seed(0)
    model = assert_matches_eager(kind(), torch.randn(3, 8, requires_grad=True), graphs=2, lowering=lowering)
    first, second = encore.report(model).graphs
    assert reason in first.break_reason.lower()
    nth = [Breaking, Branching, Printing].index(kind)
    assert first.break_line == f"{HERE}:{line_of('# the line of the break', nth)}"
    assert (second.break_reason, second.break_line) == ("", "")
    assert first.break_line in str(encore.report(model))
    printed = capsys.readouterr().out
    runs = 3 if lowering == "fused" else 2  # through Encore, in eager, in float64
    assert printed.count("between the layers") == (2 * runs if kind is Printing else 0)


def test_the_report_lists_the_graphs_of_the_step_that_ran(lowering: str) -> None:
    model = encore.compile(Breaking(), lowering=lowering)
    for rows in (3, 5, 3):
        model(torch.randn(rows, 8)).sum().backward()
        rep = encore.report(model)
        assert len(rep.graphs) == 2
        assert rep.planned.step_peak > 0
    assert len(session_of(model).graphs) == 4


def test_both_sides_of_a_branch(lowering: str) -> None:
    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x) if x.sum().item() > 0 else x.exp()

    eager = Model()
    model, x = encore.compile(Model(), lowering=lowering), torch.randn(3, 8)
    model.load_state_dict(eager.state_dict())
    with torch.no_grad():
        eager.first.bias.fill_(5.0)
        model.first.bias.fill_(5.0)
    assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)
    with torch.no_grad():
        eager.first.bias.fill_(-5.0)
        model.first.bias.fill_(-5.0)
    assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)
    assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)


def test_a_break_in_a_loop_leaves_the_model_to_eager_and_says_so(lowering: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = nn.functional.dropout(self.norm(layer(x)), 0.3)
                torch._dynamo.graph_break()
            return x

    with pytest.warns(UserWarning, match="ran as plain eager PyTorch"):
        assert_matches_eager(Model(), torch.randn(5, 6), graphs=None, lowering=lowering)


def test_a_break_inside_a_submodule(lowering: str) -> None:
    model = nn.Sequential(Breaking(), nn.ReLU(), Breaking())
    assert_matches_eager(model, torch.randn(3, 8), graphs=None, lowering=lowering)


def test_what_dynamo_cannot_trace_runs_as_it_is(lowering: str) -> None:
    class Model(Stack):
        def between(self, x: Tensor) -> Tensor:
            return x * float(x.detach().numpy().mean())

    assert_matches_eager(Model(), torch.randn(3, 8), graphs=None, lowering=lowering)


def test_numbers_read_off_a_tensor(lowering: str) -> None:
    class Model(Stack):
        def between(self, x: Tensor) -> Tensor:
            return x[x > 0] @ x[x > 0] * x

    assert_matches_eager(Model(), torch.randn(3, 8), graphs=None, lowering=lowering)


# -- shapes ----------------------------------------------------------------------------------------------------------


def test_each_shape_gets_a_plan_of_its_own(lowering: str) -> None:
    eager, peaks = Stack(), []
    model = encore.compile(Stack(), lowering=lowering)
    model.load_state_dict(eager.state_dict())
    for rows in (2, 3, 64, 1):
        x = torch.randn(rows, 8)
        assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)
        peaks.append(encore.report(model).planned.step_peak)
    assert len(session_of(model).graphs) == 4
    assert len(set(peaks)) == 4
    assert peaks[2] == max(peaks)
    x = torch.randn(3, 8)
    assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)
    assert len(session_of(model).graphs) == 4, "a shape seen before is not planned again"
    assert encore.report(model).planned.step_peak == peaks[1]


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (2, 1, 8), (8,)])
def test_odd_shapes(shape: tuple[int, ...], lowering: str) -> None:
    assert_matches_eager(Stack(), torch.randn(shape), lowering=lowering)


def test_strides_and_types_are_variants_too(lowering: str) -> None:
    eager = Stack()
    model = encore.compile(Stack(), lowering=lowering)
    model.load_state_dict(eager.state_dict())
    for x in (torch.randn(8, 8), torch.randn(8, 8).t(), torch.randn(16, 8)[::2], torch.randn(8, 8, requires_grad=True)):
        assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)


def test_over_the_limit_it_warns_once_and_runs_plain(lowering: str) -> None:
    eager = Stack()
    model = encore.compile(Stack(), recompile_limit=2, lowering=lowering)
    model.load_state_dict(eager.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (2, 3, 4, 5, 4, 2):
            x = torch.randn(rows, 8)
            assert_same(run_step(model, (x,)), run_step(eager, (x,)), lowering)
    (warning,) = [entry for entry in caught if "encore" in str(entry.message)]
    assert warning.category is UserWarning
    assert "recompile_limit" in str(warning.message)
    assert "2" in str(warning.message)
    assert len(session_of(model).graphs) == 2
    session = session_of(model)
    before = session.forwards_run
    run_step(model, (torch.randn(2, 8),))
    assert session.forwards_run == before + 1, "planned shapes stay planned"


def test_the_limit_is_counted_for_each_model_alone(lowering: str) -> None:
    first, second = (
        encore.compile(Stack(), recompile_limit=1, lowering=lowering),
        encore.compile(Stack(), recompile_limit=1, lowering=lowering),
    )
    for model, rows in ((first, 2), (second, 3), (first, 2), (second, 3)):
        model(torch.randn(rows, 8)).sum().backward()
    assert [len(session_of(model).graphs) for model in (first, second)] == [1, 1]
    assert [session_of(model).forwards_run for model in (first, second)] == [2, 2]


def test_many_models_of_one_class(lowering: str) -> None:
    for _ in range(10):  # Dynamo's own limit is 8
        model = encore.compile(Stack(), lowering=lowering)
        model(torch.randn(2, 8)).sum().backward()
        assert len(session_of(model).graphs) == 1


# -- PyTorch's way ---------------------------------------------------------------------------------------------------


def test_the_backend_by_name_with_two_batch_sizes(lowering: str) -> None:
    eager, inner = Stack(), Stack()
    inner.load_state_dict(eager.state_dict())
    model = torch.compile(inner, backend="encore", options={"budget": "1GiB", "lowering": lowering})
    for rows in (2, 5, 7, 2):
        x = torch.randn(rows, 8)
        have, want = run_step(model, (x,)), run_step(eager, (x,))
        assert_same({name.replace("_orig_mod.", ""): tensor for name, tensor in have.items()}, want, lowering)
    assert encore.report(model).graphs
    assert encore.report(inner).planned.step_peak > 0


def test_the_backend_with_dynamic_shapes_asked_for(lowering: str) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).tanh() * x.shape[0]

    planned = torch.compile(function, backend="encore", dynamic=True, options={"lowering": lowering})
    for rows in (2, 5, 7):
        x, y = torch.randn(rows, 4, requires_grad=True), torch.randn(4, rows, requires_grad=True)
        assert_same(run_step(planned, (x, y)), run_step(function, (x, y)), lowering)


def test_the_backend_refuses_a_budget_that_cannot_be_met() -> None:
    model = torch.compile(Stack(), backend="encore", options={"budget": 16})
    with pytest.raises(encore.BudgetError, match="lowest reachable peak"):
        model(torch.randn(2, 8))


def test_the_backend_under_no_grad(lowering: str) -> None:
    model, x = Stack(), torch.randn(2, 8)
    planned = torch.compile(model, backend="encore", options={"lowering": lowering})
    with torch.no_grad():
        assert_same({"output": planned(x)}, {"output": model(x)}, lowering)
    with torch.inference_mode():
        assert_same({"output": planned(x)}, {"output": model(x)}, lowering)


def test_the_entry_point_in_a_fresh_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            import torch

            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
            planned = torch.compile(model, backend="encore", options={"budget": "1GiB", "lowering": "eager"})
            for rows in (2, 3):
                x = torch.randn(rows, 4)
                planned(x).sum().backward()
                have = [parameter.grad for parameter in model.parameters()]
                model.zero_grad()
                model(x).sum().backward()
                assert all(torch.equal(a, p.grad) for a, p in zip(have, model.parameters(), strict=True))
                model.zero_grad()
            assert "encore" in sys.modules
            print("peak", sys.modules["encore"].report(model).planned.step_peak)
        """)
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("peak ")
