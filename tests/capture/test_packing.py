"""Packed sequences in captured models: one graph for all lengths, eager's numbers, predicted peaks, kept budgets."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import encore
from support.compare_with_eager import assert_matches_eager, assert_same, run_step, session_of
from support.lowerings import both_lowerings
from support.rounding import assert_close

# Dynamo looks at `.grad` of what crosses a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]

KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
OPERATORS = {"LSTM": "lstm_forward", "GRU": "gru_forward", "RNN": "elman_forward"}
LENGTHS = torch.tensor([5, 2, 4])
every_kind = pytest.mark.parametrize("kind", KINDS)


class Reader(nn.Module):
    """Something to capture on both sides of a packed layer."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.enter, self.layer = nn.Linear(4, 4), KINDS[kind](4, 3, **options)
        directions = 2 if options.get("bidirectional") else 1
        self.leave = nn.Linear(directions * (options.get("proj_size") or 3), 2)

    def forward(self, x: Tensor, lengths: Any, hx: Any = None) -> tuple[Tensor, Any]:
        first = self.layer.batch_first
        packed = pack_padded_sequence(self.enter(x).tanh(), lengths, batch_first=first, enforce_sorted=False)
        output, last = self.read(packed, hx)
        return self.leave(pad_packed_sequence(output, batch_first=first)[0]).square(), last

    def read(self, packed: PackedSequence, hx: Any) -> Any:
        return self.layer(packed, hx)


class Tagger(nn.Module):
    """An embedding, packed layers and a head, with the loss inside."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 24), nn.Linear(32, 10)
        self.layer = KINDS[kind](24, 32, num_layers=2, batch_first=True, **options)

    def forward(self, words: Tensor, lengths: Any, tags: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        scores = self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())


def words_and_tags(lengths: Any, steps: int = 30) -> tuple[Tensor, Any, Tensor]:
    return torch.randint(50, (len(lengths), steps)), lengths, torch.randint(10, (len(lengths), steps))


def operators(model: Any) -> list[str]:
    """Forward operators of the graphs of the last step."""
    graphs = [captured.plan.schedule.graph for captured in session_of(model).last_step]
    return [op.target.overloadpacket.__name__ for graph in graphs for op in graph.ops if op.forward]


def peaks(model: Any, *given: Any) -> tuple[int, int]:
    """Of a step: measured and predicted."""
    model(*given).backward()
    model.zero_grad(set_to_none=True)
    measured = encore.measure(lambda: model(*given).backward()).step_peak
    model.zero_grad(set_to_none=True)
    return measured, encore.report(model).planned.step_peak


@every_kind
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"num_layers": 2, "bidirectional": True, "dropout": 0.4, "batch_first": True},
        {"bias": False},
    ],
    ids=["one layer", "all at once", "no bias"],
)
@both_lowerings
def test_a_packed_layer(kind: str, options: dict[str, Any], lowering: str) -> None:
    x = torch.randn(*((3, 5) if options.get("batch_first") else (5, 3)), 4, requires_grad=True)
    planned = assert_matches_eager(Reader(kind, **options), x, LENGTHS, lowering=lowering, graphs=1)
    layers = 4 if options.get("num_layers") else 1
    if lowering == "fused":
        assert operators(planned).count(OPERATORS[kind]) == layers
    else:
        assert operators(planned).count("packed_aten_forward") == max(1, layers // 2)


def test_a_projection_with_states(lowering: str) -> None:
    h, c = torch.randn(1, 3, 2, requires_grad=True), torch.randn(1, 3, 3, requires_grad=True)
    model = Reader("LSTM", proj_size=2)
    assert_matches_eager(model, torch.randn(5, 3, 4), LENGTHS, (h, c), lowering=lowering, graphs=1)


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
@pytest.mark.parametrize("given", [torch.tensor, list], ids=["a tensor", "a list"])
def test_lengths_may_change(kind: str, given: Callable[[list[int]], Any]) -> None:
    """Other lengths, the same longest one: no graph is traced anew. A list ends the graph, with all layers in the next
    one."""
    plain = Reader(kind)
    planned = encore.compile(copy.deepcopy(plain), skip="fuse")
    for lengths in ([5, 2, 4], [1, 5, 1], [5, 5, 5]):
        args = (torch.randn(5, 3, 4, requires_grad=True), given(lengths))
        assert_same(run_step(planned, args), run_step(plain, args), "fused")
        assert OPERATORS[kind] in operators(planned)
    assert len(session_of(planned).graphs) == (1 if given is torch.tensor else 2)


def test_a_longest_sequence_that_is_shorter_than_the_batch(lowering: str) -> None:
    """`pad_packed_sequence` gives fewer steps then: the model is captured once more, and nothing is drawn twice."""

    plain = Reader("GRU", num_layers=2, dropout=0.5)
    planned = encore.compile(copy.deepcopy(plain), skip="fuse" if lowering == "fused" else (), lowering=lowering)
    for lengths in ([5, 2, 4], [3, 2, 1], [5, 1, 1], [2, 2, 2]):
        args = (torch.randn(5, 3, 4, requires_grad=True), torch.tensor(lengths))
        assert_same(run_step(planned, args), run_step(plain, args), lowering)
    reasons = [graph.break_reason for graph in encore.report(planned).graphs]
    assert reasons == ["pad_packed_sequence: the number of steps that it returns depends on data", ""]


def test_a_total_length_and_padding() -> None:
    class Padded(Reader):
        def forward(self, x: Tensor, lengths: Tensor, hx: Any = None) -> Any:
            packed = pack_padded_sequence(x, lengths, enforce_sorted=True)
            padded, found = pad_packed_sequence(self.layer(packed)[0], total_length=7, padding_value=-1.5)
            return self.leave(padded), found

    for lengths in ([5, 4, 2], [3, 3, 1]):
        x = torch.randn(5, 3, 4, requires_grad=True)
        assert_matches_eager(Padded("LSTM"), x, torch.tensor(lengths), lowering="eager", graphs=1)


@pytest.mark.parametrize("lengths", [[5, 0, 4], [2, 5, 4], [5, 4], [6, 4, 1]], ids=str)
@pytest.mark.parametrize("given", [torch.tensor, list], ids=["a tensor", "a list"])
def test_wrong_lengths_are_rejected(lengths: list[int], given: Callable[[list[int]], Any]) -> None:
    class Sorted(Reader):
        def forward(self, x: Tensor, lengths: Any, hx: Any = None) -> Any:
            return self.layer(pack_padded_sequence(self.enter(x), lengths))[1]

    plain = Sorted("GRU")
    planned = encore.compile(copy.deepcopy(plain), lowering="eager")
    with pytest.raises(RuntimeError) as expected:
        plain(torch.randn(5, 3, 4), given(lengths))
    with pytest.raises((RuntimeError, encore.EncoreError)) as found:
        planned(torch.randn(5, 3, 4), given(lengths))
    if max(lengths) <= 5:  # PyTorch's message for a longer one is about sizes inside the layer
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_model_that_is_given_packed_sequences(kind: str, lowering: str) -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.leave = KINDS[kind](4, 3), nn.Linear(3, 2)

        def forward(self, packed: PackedSequence) -> Any:
            output, _ = self.layer(packed)
            return self.leave(pad_packed_sequence(output)[0]).tanh(), output

    packed = pack_sequence([torch.randn(length, 4) for length in (3, 5, 1)], enforce_sorted=False)
    planned = assert_matches_eager(Leaves(), packed, lowering=lowering, graphs=1)
    assert isinstance(planned(packed)[1], PackedSequence)
    assert type(planned(packed)[1].data) is Tensor


class Doubled(torch.autograd.Function):
    """Takes what is no tensor for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_rows_that_are_read_directly(lowering: str) -> None:
    """Their number depends on data: the graph ends, and the layers are in one all the same."""

    class Direct(Reader):
        def read(self, packed: PackedSequence, hx: Any) -> Any:
            assert isinstance(packed, PackedSequence)
            rows = packed.data * packed.data.mean() + len(packed.batch_sizes)
            rows = (2 * rows[:, :2]).repeat(1, 2) / packed.data.shape[0] + Doubled.apply(packed.data)
            return self.layer(PackedSequence(rows, *packed[1:]), hx)

    planned = assert_matches_eager(Direct("LSTM"), torch.randn(5, 3, 4), LENGTHS, lowering=lowering, graphs=None)
    assert "packed rows are read directly" in encore.report(planned).graphs[0].break_reason
    assert {"packed_aten_forward", "lstm_forward"} & {*operators(planned)}


def double(grad: Tensor) -> Tensor:
    return 2 * grad


def scale(rows: Any) -> None:
    rows.mul_(3.0)


def double_gradient(rows: Any) -> None:
    rows.register_hook(double)


class Touched(Reader):
    """Does something to the rows that a layer reads, or to those it gives."""

    def __init__(self, touch: Callable[[Any], None], unpacks: bool, after: bool) -> None:
        super().__init__("LSTM")
        self.touch, self.unpacks, self.after = touch, unpacks, after

    def read(self, packed: PackedSequence, hx: Any) -> Any:
        output, last = self.layer(packed, hx) if self.after else (packed, None)
        self.touch(output[0] if self.unpacks else output.data)
        return (output, last) if self.after else self.layer(packed, hx)


@pytest.mark.parametrize("touch", [scale, double_gradient])
@pytest.mark.parametrize("unpacks", [False, True], ids=["data", "unpacked"])
@pytest.mark.parametrize("after", [False, True], ids=["before the layer", "after it"])
@pytest.mark.parametrize("given", [torch.tensor, list], ids=["a tensor", "a list"])
def test_writes_and_hooks_belong_to_the_rows(
    touch: Callable[[Any], None], unpacks: bool, after: bool, given: Callable[[list[int]], Any]
) -> None:
    """Whoever reads the rows next meets the same tensor, as in eager."""
    x = torch.randn(5, 3, 4, requires_grad=True)
    assert_matches_eager(Touched(touch, unpacks, after), x, given([5, 2, 4]), lowering="eager", graphs=None)


def test_rows_that_are_first_read_without_gradients() -> None:
    class Measured(Reader):
        def read(self, packed: PackedSequence, hx: Any) -> Any:
            with torch.no_grad():
                scale = packed.data.norm()
            return self.layer(packed, (scale.expand(1, 3, 3).contiguous(), torch.zeros(1, 3, 3)))

    assert_matches_eager(Measured("LSTM"), torch.randn(5, 3, 4), LENGTHS, lowering="eager", graphs=None)


@pytest.mark.parametrize("given", [torch.tensor, list], ids=["a tensor", "a list"])
def test_functions_that_would_take_rows_for_a_constant_are_rejected(given: Callable[[list[int]], Any]) -> None:
    class Unpacked(Reader):
        def read(self, packed: PackedSequence, hx: Any) -> Any:
            rows, *rest = packed
            return self.layer(PackedSequence(Doubled.apply(rows), *rest), hx)

    planned = encore.compile(Unpacked("LSTM"), lowering="eager")
    with pytest.raises(encore.EncoreError, match=r"pass packed\.data"):
        planned(torch.randn(5, 3, 4), given([5, 2, 4]))


def test_a_packed_sequence_from_sizes_in_a_tensor(lowering: str) -> None:
    """How many sequences there are is known between graphs; the layers are in the second one."""

    class Constructed(Reader):
        def forward(self, rows: Tensor, sizes: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
            output, last = self.layer(PackedSequence(self.enter(rows).tanh(), sizes))
            return self.leave(pad_packed_sequence(output)[0]), last

    rows = torch.randn(11, 4, requires_grad=True)
    model = Constructed("LSTM", num_layers=2)
    planned = assert_matches_eager(model, rows, torch.tensor([3, 3, 2, 2, 1]), lowering=lowering, graphs=2)
    assert {"packed_aten_forward", "lstm_forward"} & {*operators(planned)}
    assert "the number of its sequences depends on data" in encore.report(planned).graphs[0].break_reason


def test_packed_from_a_list_of_sequences(lowering: str) -> None:
    class Listed(Reader):
        def forward(self, sequences: Any) -> Any:  # type: ignore[override]
            return self.layer(pack_sequence([self.enter(one) for one in sequences], enforce_sorted=False))

    sequences = [torch.randn(length, 4) for length in (3, 5, 1)]
    assert_matches_eager(Listed("GRU"), sequences, lowering=lowering, graphs=1)


def test_encores_own_layers() -> None:
    class Own(Reader):
        def __init__(self) -> None:
            super().__init__("GRU")
            self.layer = encore.nn.GRU(4, 3, num_layers=2, dropout=0.5)

    planned = assert_matches_eager(Own(), torch.randn(5, 3, 4), LENGTHS, lowering="eager", graphs=1)
    assert operators(planned).count("gru_forward") == 2


def test_under_autocast_types_are_eagers(lowering: str) -> None:
    for kind in ("LSTM", "GRU"):
        plain = Reader(kind)
        planned = encore.compile(copy.deepcopy(plain), skip="fuse" if lowering == "fused" else (), lowering=lowering)
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(5, 3, 4, requires_grad=True)
            want, have = plain(x, LENGTHS), planned(x, LENGTHS)
        types = [[each.dtype for each in torch.utils._pytree.tree_leaves(result)] for result in (want, have)]
        assert types[0] == types[1]
        assert_close(have[0], want[0], narrow=torch.bfloat16)
        have[0].float().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_the_layer(reentrant: bool) -> None:
    class Checkpointed(Reader):
        def read(self, packed: PackedSequence, hx: Any) -> Any:
            def rows(data: Tensor) -> Tensor:
                return self.layer(PackedSequence(data, *packed[1:]))[0].data

            return PackedSequence(checkpoint(rows, packed.data, use_reentrant=reentrant), *packed[1:]), None

    plain, given = Checkpointed("LSTM"), (torch.randn(5, 3, 4, requires_grad=True), LENGTHS)
    want = run_step(plain, given)
    assert_same(run_step(encore.compile(copy.deepcopy(plain), skip="fuse"), given), want, "fused")


def test_other_compilers_meet_pytorchs_own_functions() -> None:
    """What Dynamo traces for packing is Encore's only while a model of Encore's is captured."""
    plain, given = Reader("GRU"), (torch.randn(5, 3, 4, requires_grad=True), LENGTHS)
    want = plain(*given)[0]
    run_step(encore.compile(copy.deepcopy(plain), lowering="eager"), given)
    seen: list[Any] = []

    def note(module: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in module.graph.nodes)
        return module

    with torch._dynamo.config.patch(allow_rnn=True):
        assert_close(torch.compile(plain, backend=note)(*given)[0], want)
    assert seen
    assert not any("encore" in str(target) for target in seen)
    assert torch.equal(plain(*given)[0], want)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LSTM", pytest.param("GRU", marks=pytest.mark.slow), "RNN"])
def test_predicted_peaks(kind: str, lowering: str) -> None:
    """Within a percent by Encore's operators, whatever the lengths are. ATen's keep what the lengths ask for: their
    prediction is that of full ones."""
    model = encore.compile(Tagger(kind, dropout=0.1), lowering=lowering, overhead=0.0)
    for lengths in ([30] * 4, [30, 4, 17, 1]):
        measured, predicted = peaks(model, *words_and_tags(torch.tensor(lengths)))
        assert measured <= predicted
        if lowering == "fused" or min(lengths) == 30:
            assert predicted <= 1.01 * measured
    assert len(session_of(model).graphs) == 1


def test_predicted_peaks_with_the_loss_outside(lowering: str) -> None:
    class Scores(Tagger):
        def forward(self, words: Tensor, lengths: Any, tags: Tensor) -> Tensor:
            packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])

    model = encore.compile(Scores("LSTM"), lowering=lowering, overhead=0.0)
    given = words_and_tags(torch.tensor([30, 30, 30, 30]))

    def step() -> None:
        scores = model(*given)
        scores.backward(torch.ones_like(scores))

    step()
    model.zero_grad(set_to_none=True)
    measured, predicted = encore.measure(step).step_peak, encore.report(model).planned.step_peak
    assert measured <= predicted <= 1.01 * measured


@pytest.mark.parametrize(
    "given", [torch.tensor, pytest.param(list, marks=pytest.mark.slow)], ids=["a tensor", "a list"]
)
def test_budgets_are_kept(given: Callable[[list[int]], Any]) -> None:
    """A budget that holds half of what everything kept takes; the lowest one; and one that is too low."""
    plain = Tagger("LSTM")
    batch = words_and_tags(given([30, 30, 12, 3]))
    compiled = functools.partial(encore.compile, skip="fuse")
    free = compiled(copy.deepcopy(plain), overhead=0.0)
    want = run_step(free, batch)
    resident = encore.report(free).resident
    everything = encore.report(free).planned.step_peak
    floor = compiled(copy.deepcopy(plain), budget="min")
    measured, lowest = peaks(floor, *batch)
    outside = 8 * (30 + 3 * 4)  # what packing makes of a list between two graphs is resident
    assert measured <= lowest + outside
    assert lowest < 0.7 * everything
    half = compiled(copy.deepcopy(plain), budget=resident + (lowest + everything) // 2)
    measured, predicted = peaks(half, *batch)
    assert resident + measured <= resident + (lowest + everything) // 2
    assert predicted < everything
    for planned in (floor, half):
        assert_same(run_step(planned, batch), want, "fused")
    with pytest.raises(encore.BudgetError):
        compiled(copy.deepcopy(plain), budget=resident + lowest // 2)(*batch)


def test_an_estimate_has_packed_layers() -> None:
    model, batch = Tagger("GRU"), words_and_tags(torch.tensor([30, 30, 12, 3]))
    estimated = encore.estimate(model, *batch).report.unplanned.step_peak
    compiled = encore.compile(copy.deepcopy(model), lowering="fused", overhead=0.0, skip="fuse")
    compiled(*batch)
    assert estimated == encore.report(compiled).unplanned.step_peak
