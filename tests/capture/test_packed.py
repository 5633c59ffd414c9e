"""Packed sequences in torch.nn's layers, unchanged: Encore's operators between two graphs, eager's numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import encore
from against_eager import assert_matches_eager, assert_same, run_step, session_of
from lowerings import both_lowerings
from rounding import assert_close

# Dynamo looks at `.grad` of what crosses a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]

KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
OPERATORS = {"LSTM": "lstm", "GRU": "gru", "RNN": "elman"}
LENGTHS = torch.tensor([5, 2, 4])
every_kind = pytest.mark.parametrize("kind", KINDS)


class Reader(nn.Module):
    """Something to capture on both sides of a packed layer."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.enter, self.layer = nn.Linear(4, 4), KINDS[kind](4, 3, **options)
        directions = 2 if options.get("bidirectional") else 1
        self.leave = nn.Linear(directions * (options.get("proj_size") or 3), 2)

    def forward(self, x: Tensor, lengths: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        first = self.layer.batch_first
        packed = pack_padded_sequence(self.enter(x).tanh(), lengths, batch_first=first, enforce_sorted=False)
        output, last = self.read(packed, hx)
        return self.leave(pad_packed_sequence(output, batch_first=first)[0]).square(), last

    def read(self, packed: PackedSequence, hx: Any) -> Any:
        return self.layer(packed, hx)


def name_of(node: Any) -> str:
    return getattr(getattr(type(node), "_forward_cls", None), "__name__", "")


def encores(result: Any) -> list[Any]:
    """The nodes of Encore's operators that gradients of a result go back through."""
    seen: set[Any] = set()
    ahead: list[Any] = [each.grad_fn for each in torch.utils._pytree.tree_leaves(result) if each.grad_fn is not None]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions if before is not None]
    return [node for node in seen if "encore" in name_of(node)]


def test_names_of_nodes() -> None:
    layer = encore.nn.GRU(4, 3, num_layers=2)
    assert [name_of(node) for node in encores(layer(torch.randn(5, 2, 4))[0])] == 2 * [
        "Backward of encore.gru_forward.default"
    ]
    assert encores(nn.GRU(4, 3)(torch.randn(5, 2, 4))[0]) == []


@every_kind
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.4, "batch_first": True}, {"bias": False}],
    ids=["one layer", "all at once", "no bias"],
)
@both_lowerings
def test_a_packed_layer(kind: str, options: dict[str, Any], lowering: str) -> None:
    x = torch.randn(*((3, 5) if options.get("batch_first") else (5, 3)), 4, requires_grad=True)
    planned = assert_matches_eager(Reader(kind, **options), x, LENGTHS, lowering=lowering, graphs=2)
    nodes = encores(planned(x, LENGTHS))
    names = [name_of(node) for node in nodes]
    layers = (4 if options.get("num_layers") else 1) if lowering == "fused" else 0
    assert names == layers * [f"Backward of encore.{OPERATORS[kind]}_forward.default"]
    between = session_of(planned).between
    assert (between.calls if between else 0) == (3 if lowering == "fused" else 0)


def test_a_projection_with_states() -> None:
    h, c = torch.randn(1, 3, 2, requires_grad=True), torch.randn(1, 3, 3, requires_grad=True)
    model = Reader("LSTM", proj_size=2)
    planned = assert_matches_eager(model, torch.randn(5, 3, 4), LENGTHS, (h, c), lowering="fused", graphs=2)
    assert session_of(planned).between.calls == 2  # type: ignore[union-attr]


@every_kind
def test_a_model_that_is_given_packed_sequences(kind: str) -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.leave = KINDS[kind](4, 3), nn.Linear(3, 2)

        def forward(self, packed: PackedSequence) -> Tensor:
            return self.leave(self.layer(packed)[0].data).tanh()

    packed = pack_sequence([torch.randn(length, 4) for length in (3, 5, 1)], enforce_sorted=False)
    planned = assert_matches_eager(Leaves(), packed, lowering="fused", graphs=None)
    assert session_of(planned).between.calls == 2  # type: ignore[union-attr]
    assert len(session_of(planned).graphs) == 1


@every_kind
def test_lengths_may_change(kind: str) -> None:
    """Other sums of lengths, the same longest one: no graph is traced anew, and the layer stays Encore's."""
    plain = Reader(kind)
    planned = encore.compile(copy.deepcopy(plain), skip="fuse")
    for lengths in ([5, 2, 4], [1, 5, 1], [5, 5, 5]):
        x = torch.randn(5, 3, 4, requires_grad=True)
        given = (x, torch.tensor(lengths))
        assert_same(run_step(planned, given), run_step(plain, given), "fused")
    assert len(session_of(planned).graphs) == 2
    assert session_of(planned).between.calls == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_under_a_budget_gates_are_built_again(kind: str) -> None:
    plain, given = Reader(kind), (torch.randn(5, 3, 4, requires_grad=True), LENGTHS)
    want, kept = run_step(plain, given), dict[str, int]()
    asked: list[dict[str, Any]] = [{"overhead": 1.0}, {"budget": "1GiB"}]
    for options in asked:
        planned = encore.compile(copy.deepcopy(plain), skip="fuse", **options)
        assert_same(run_step(planned, given), want, "fused")
        (node,) = encores(planned(*given))
        kept[next(iter(options))] = sum(tensor.nbytes for tensor in node.saved_tensors if tensor is not None)
    rows, gates = int(LENGTHS.sum()), 4
    extra = (gates + 1) * 3 if kind == "LSTM" else gates * 3
    assert kept["overhead"] - kept["budget"] == 4 * rows * extra


def test_under_autocast_types_are_eagers() -> None:
    for kind in KINDS:
        plain = Reader(kind)
        planned = encore.compile(copy.deepcopy(plain), skip="fuse")
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(5, 3, 4, requires_grad=True)
            want, have = plain(x, LENGTHS), planned(x, LENGTHS)
        types = [[each.dtype for each in torch.utils._pytree.tree_leaves(result)] for result in (want, have)]
        assert types[0] == types[1]
        assert len(encores(have)) == 1
        assert_close(have[0], want[0], narrow=torch.bfloat16)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_the_layer_see_one_layer(reentrant: bool) -> None:
    """Backward runs it again when no compiled model runs: it must be the same one both times."""

    class Checkpointed(Reader):
        def read(self, packed: PackedSequence, hx: Any) -> Any:
            def rows(data: Tensor) -> Tensor:
                return self.layer(PackedSequence(data, *packed[1:]))[0].data

            return PackedSequence(checkpoint(rows, packed.data, use_reentrant=reentrant), *packed[1:]), None

    plain, given = Checkpointed("LSTM"), (torch.randn(5, 3, 4, requires_grad=True), LENGTHS)
    want = run_step(plain, given)
    assert_same(run_step(encore.compile(copy.deepcopy(plain), skip="fuse"), given), want, "fused")


def test_second_derivatives() -> None:
    """The layer is between two graphs, not in one."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(pack_padded_sequence(x, LENGTHS, enforce_sorted=False))[0].data

    plain, x = Alone(), torch.randn(5, 3, 4, requires_grad=True)
    planned = encore.compile(copy.deepcopy(plain), skip="fuse")

    def slopes(model: nn.Module) -> Tensor:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with pytest.warns(UserWarning, match=r"has no graph to plan: packed layers ran by Encore's operators"):
        have = slopes(planned)
    assert_close(have, slopes(plain))


def test_layers_outside_of_compiled_models_stay_torch_nns() -> None:
    plain, given = Reader("GRU"), (torch.randn(5, 3, 4, requires_grad=True), LENGTHS)
    want = run_step(plain, given)
    planned = encore.compile(copy.deepcopy(plain), skip="fuse")
    run_step(planned, given)
    assert_same(run_step(plain, given), want, "eager")
    assert encores(plain(*given)) == []
    with torch.no_grad():
        planned(*given)
    assert session_of(planned).between.calls == 1  # type: ignore[union-attr]
    skips = encore.compile(copy.deepcopy(plain), skip=("fuse", "recurrent"))
    assert encores(skips(*given)) == []


def test_the_report_tells_what_packed_layers_ran_as() -> None:
    reasons = {}
    for lowering in ("fused", "eager"):
        model = encore.compile(Reader("LSTM"), lowering=lowering, skip="fuse")
        run_step(model, (torch.randn(5, 3, 4), LENGTHS))
        reasons[lowering] = encore.report(model).graphs[0].break_reason
    said = "pack_padded_sequence: packed sizes depend on data, so the layer runs between two graphs, "
    assert reasons["fused"] == said + "by Encore's operators; what it keeps is in no prediction"
    assert reasons["eager"] == said + "as torch.nn's; encore.nn's LSTM, GRU and RNN keep less there"
