"""Plan files that were changed: accepted, with right gradients, or rejected with a `PlanError`; nothing else."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import encore


class Drawn(nn.Module):
    """Everything that a plan must be careful with: a draw, a buffer that is written, a view, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.dropout(torch.tanh(self.first(x)), 0.5, True)
        x = torch.relu(self.last(self.norm(x))).view(-1, 4)
        return x.square().sum(), x


X = torch.linspace(-1, 1, 256 * 16).view(256, 16)


def step(model: Any) -> list[Tensor]:
    """One step from the same seed: loss, gradients and buffers."""
    torch.manual_seed(3)
    loss, _ = model(X)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]


@functools.cache
def eager_step() -> tuple[Drawn, list[Tensor]]:
    torch.manual_seed(0)
    model = Drawn()
    return copy.deepcopy(model), step(model)


@functools.cache
def saved() -> str:
    """A plan that fits, as JSON."""
    torch._dynamo.reset()
    model = encore.compile(copy.deepcopy(eager_step()[0]), budget="min", lowering="eager")
    step(model)
    plan = encore.report(model).plan
    assert plan.graphs[0].fates["recompute"]
    assert plan.graphs[0].gradients_of is not None
    return plan.to_json()


def check_plan(plan: Any) -> bool:
    """Is it accepted? If so, its step is eager's, bit for bit."""
    fresh, want = eager_step()
    torch._dynamo.reset()
    model = copy.deepcopy(fresh)
    said = ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="encore: the code of")  # a plan may promise too small a code
            found = step(encore.compile(model, plan=plan))
    except encore.PlanError as error:
        said = str(error)
    if said:
        assert "plan anew" in said.lower() or "save one with" in said
        return False
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)
    return True


def check_text(text: str | bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return check_plan(path)


def changed(**fields: Any) -> encore.SavedPlan:
    told = json.loads(saved())
    told["graphs"][0].update(fields)
    return encore.SavedPlan.parse(told, "here")


def names() -> list[str]:
    told = json.loads(saved())["graphs"][0]
    return [line.partition(" = ")[0] for line in told["operators"]]


def test_the_plan_itself_is_accepted() -> None:
    assert check_text(saved())


@pytest.mark.parametrize("name", ["t", "tanh_backward", "mm", "sum_1", "view", "nonsense"])
def test_what_cannot_be_recomputed_is_named(name: str) -> None:
    assert name in names() or name == "nonsense"
    torch._dynamo.reset()
    model = encore.compile(copy.deepcopy(eager_step()[0]), plan=changed(recompute=["tanh", name], encode=[]))
    with pytest.raises(encore.PlanError, match=f"{name}'.* in 'recompute'"):
        step(model)


def test_a_plan_that_recomputes_everything_is_rejected() -> None:
    assert not check_plan(changed(recompute=names()))


@pytest.mark.slow
def test_whatever_may_be_recomputed_may_be_recomputed_together() -> None:
    accepted = [name for name in names() if check_plan(changed(recompute=[name], encode=[]))]
    assert {"tanh", "addmm"} <= set(accepted)
    assert check_plan(changed(recompute=accepted, encode=[]))


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute": ["nonsense"]},
        {"encode": [{"value": "nonsense", "codec": "sparse", "bytes": 8}]},
        {"encode": [{"value": "tanh", "codec": "nonsense", "bytes": 8}], "recompute": []},
        {"encode": [{"value": "tanh", "codec": "fp8_e4m3", "bytes": 8}], "recompute": []},
        {"encode": [{"value": "tanh", "codec": "sparse", "bytes": 10**15}], "recompute": []},
        {
            "encode": [
                {"value": "tanh", "codec": "sparse", "bytes": 8},
                {"value": "tanh", "codec": "sparse", "bytes": 9},
            ],
            "recompute": [],
        },
        {"encode": [{"value": "tanh", "codec": "sparse", "bytes": 8}], "recompute": ["tanh"]},
        {"encode": [{"value": "t", "codec": "sparse", "bytes": 8}]},
        {"encode": [{"value": "tanh_backward", "codec": "sparse", "bytes": 8}]},
        {"stash": [{"operator": "tanh", "every": 3}]},
        {"offload": [{"value": "tanh", "tier": "disk"}], "recompute": []},
        {"offload": [{"value": "tanh", "tier": "moon"}], "recompute": []},
        {"slices": 3},
        {"gradients_of": ["nonsense"]},
        {"operators": []},
    ],
)
def test_decisions_that_cannot_be_carried_out(fields: dict[str, Any]) -> None:
    assert not check_plan(changed(**fields))


# -- files -----------------------------------------------------------------------------------------------------------


def rejected(path: Any) -> str:
    with pytest.raises(encore.PlanError) as error:
        encore.SavedPlan.load(path)
    return str(error.value)


def test_what_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for content in (b"", b"\x00\xff\xfe", b"{", b"plan", os.urandom(4096), saved().encode()[:-3], b"\x80" * 10):
        path.write_bytes(content)
        assert str(path) in rejected(path)
    assert "directory" in rejected(tmp_path)
    assert "No such file" in rejected(tmp_path / "missing")
    assert "null byte" in rejected("plan\0.json")
    assert "too many levels" in rejected(_looped(tmp_path)).lower()


def _looped(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


@pytest.mark.parametrize("opened", ["[", '{"graphs":', '{"encore_plan": 3, "lowering": "eager", "graphs": [['])
def test_nested_too_deeply(tmp_path: Path, opened: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(opened + "[" * 200_000)
    assert "nested too deeply" in rejected(path)


def test_a_field_that_stands_twice(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(saved().replace('"recompute"', '"slices": 1, "recompute"', 1))
    assert "'slices' stands twice" in rejected(path)


NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1",
    "0",
    "1.5",
    "true",
    "null",
    '"4"',
    "[4]",
    "9" * 30,
    "9" * 5000,
]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("field", ["slices", "every", "bytes", "encore_plan"])
def test_numbers_that_are_none(tmp_path: Path, field: str, number: str) -> None:
    told = json.loads(saved())
    graph = told["graphs"][0]
    graph["encode"] = [{"value": "tanh", "codec": "sparse", "bytes": 1}]
    graph["stash"] = [{"operator": "tanh", "every": 1}]
    place = {"slices": graph, "every": graph["stash"][0], "bytes": graph["encode"][0], "encore_plan": told}[field]
    place[field] = "HERE"
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(told).replace('"HERE"', number))
    said = rejected(path)
    assert str(path) in said
    assert len(said) < 500
    assert "\n" not in said


@pytest.mark.parametrize("field", ["operators", "recompute", "encode", "stash", "offload", "gradients_of"])
@pytest.mark.parametrize("value", [1, 1.5, "text", {}, {"a": 1}, [1], [None], [[]], [{}], [math.pi], True])
def test_lists_that_are_none(tmp_path: Path, field: str, value: Any) -> None:
    told = json.loads(saved())
    told["graphs"][0][field] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(told))
    said = rejected(path)
    assert f"graphs[0].{field}" in said or ("graphs[0]" in said and repr(field) in said)


@pytest.mark.parametrize("value", [0, 1, None, "true", [], {}])
def test_a_lean_form_that_is_neither_true_nor_false(tmp_path: Path, value: Any) -> None:
    told = json.loads(saved())
    told["graphs"][0]["lean"] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(told))
    assert "'lean'" in rejected(path)


@pytest.mark.parametrize("lowering", ["", "Fused", "nonsense", 3, None, ["eager"]])
def test_a_lowering_that_does_not_exist(tmp_path: Path, lowering: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(saved()), "lowering": lowering}))
    assert "lowering" in rejected(path)


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    told = json.loads(saved())
    told["graphs"][0]["recomputes"] = []
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(told))
    assert "unknown fields ['recomputes']" in rejected(path)


# -- any change ------------------------------------------------------------------------------------------------------

STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.builds(list), st.builds(dict),
    st.lists(st.text(max_size=3), max_size=2), st.just(2**70), st.builds(lambda: [[[[]]]]),
)  # fmt: skip
"""Lists and objects are made anew for every draw: later changes write into them."""


def places(told: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    return [path, *(place for key, one in items for place in places(one, (*path, key)))]


def mutated(data: st.DataObject) -> str:
    """The plan, with a few places replaced, removed, doubled or exchanged; now and then with bytes changed, too."""
    told = json.loads(saved())
    told["graphs"][0].setdefault("encode", [])
    for _ in range(data.draw(st.integers(1, 3))):
        keys = data.draw(st.sampled_from([place for place in places(told) if place]))
        holder = functools.reduce(lambda one, key: one[key], keys[:-1], told)
        known = st.sampled_from([*names(), "disk", "sparse", "bits", "eager", "fused"])
        match data.draw(st.sampled_from(["replace", "name", "remove", "double", "decide"])):
            case "replace":
                holder[keys[-1]] = data.draw(STRANGE)
            case "name":
                holder[keys[-1]] = data.draw(known)
            case "remove":
                del holder[keys[-1]]
            case "double" if isinstance(holder, list):
                holder.append(holder[keys[-1]])
            case _:
                graph = told["graphs"][0] if told.get("graphs") and isinstance(told["graphs"], list) else None
                if isinstance(graph, dict) and isinstance(graph.get("recompute"), list):
                    graph["recompute"].append(data.draw(known))
    return json.dumps(told)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_is_read_or_rejected(data: st.DataObject) -> None:
    text = mutated(data)
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, len(text)))
        text = text[:cut] + data.draw(st.text(max_size=3)) + text[cut + data.draw(st.integers(0, 3)) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(text.encode(errors="surrogatepass"))
        try:
            plan = encore.SavedPlan.load(path)
        except encore.PlanError:
            return
    assert encore.SavedPlan.parse(json.loads(plan.to_json()), "again") == plan


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_is_rejected_or_gives_right_gradients(data: st.DataObject) -> None:
    check_text(mutated(data))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_changes_are_rejected_or_give_right_gradients(data: st.DataObject) -> None:
    check_text(mutated(data))
