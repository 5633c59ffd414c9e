"""Steps that hold codes in the place of values: legal, exact, decoded late, freed early."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from encore.codecs import CODECS
from encore.fates import Encode, Fate, Recompute, code_bytes, owned, recomputable
from encore.graph import Graph, OpClass, verify_graph
from encore.lower import lower
from encore.schedule import Fused, Kind, Run, carry_out, fuse, replay, schedule_step, simulate
from support.captured_graphs import captured, operators
from support.mask_models import Gated, Pictures

encode_bits, decode_bits = torch.ops.encore.encode_bits, torch.ops.encore.decode_bits


def codes_on_offer(graph: Graph) -> list[Encode]:
    """Every lossless code that some value of the graph could be held as."""
    found = []
    for value in sorted(owned(graph)):
        for codec in CODECS.values():
            size = code_bytes(graph, value, codec) if codec.lossless else None
            if size is not None:
                found.append(Encode(value, codec.name, size))
    return found


def gradients_of(graph: Graph, primals: Sequence[Any], tangents: Sequence[Any]) -> list[torch.Tensor | None]:
    lowered = lower(schedule_step(graph))
    torch.manual_seed(7)
    outputs = lowered.forward([primal.detach() for primal in primals])
    saved = list(outputs[len(graph.outputs) :])
    return list(lowered.backward([*saved, *tangents]))


def primals_of(graph: Graph) -> list[torch.Tensor]:
    made = []
    for number in graph.primals:
        value = graph.values[number]
        shaped = torch.rand(value.shape) if value.dtype is not torch.int64 else torch.zeros(value.shape).long()
        made.append(shaped)
    return made


@pytest.mark.parametrize("model", [Gated(2, 16), Pictures(4)], ids=["gated", "pictures"])
@pytest.mark.parametrize("seed", range(6))
def test_any_choice_gives_a_legal_step_with_the_same_gradients(model: nn.Module, seed: int) -> None:
    x = torch.randn(32, 16) if isinstance(model, Gated) else torch.randn(2, 3, 16, 16)
    graph = captured(model, x).unplanned.schedule.graph
    draw = random.Random(seed)
    offered = codes_on_offer(graph)
    encode = {one.value: one for one in draw.sample(offered, k=max(1, len(offered) * (seed % 3 + 1) // 3))}
    others = sorted(recomputable(graph) - set(encode))
    again = draw.sample(others, k=len(others) * (seed % 4) // 4)
    fates: list[Fate] = [*map(Recompute, again), *encode.values()]
    changed = carry_out(graph, fates, exact=True)
    verify_graph(changed)
    schedule = schedule_step(changed)
    gone = {changed.values[value].storage for value in (*encode, *again)}
    assert not gone.intersection(changed.values[value].storage for value in schedule.saved)
    assert replay(schedule) == max(moment.peak for moment in simulate(schedule).moments if moment.phase != "end")
    primals = primals_of(graph)
    tangents = [torch.ones(graph.values[value].shape) for value in graph.tangents]
    found, wanted = (gradients_of(one, primals, tangents) for one in (changed, graph))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None)


def one_mask_encoded() -> tuple[Graph, int]:
    graph = captured(Gated(), torch.randn(128, 64)).unplanned.schedule.graph
    first = next(code for code in codes_on_offer(graph) if code.codec == "bits")
    return carry_out(graph, [first], exact=True), first.value


def test_a_code_is_made_after_the_last_reader_and_decoded_right_before_the_first() -> None:
    graph, mask = one_mask_encoded()
    (encoder,), (decoder,) = operators(graph, encode_bits), operators(graph, decode_bits)
    assert encoder.forward
    assert decoder.again
    readers = [reader for reader in graph.values[mask].readers if graph.ops[reader].forward]
    assert readers[-1] == encoder.id
    lines = schedule_step(graph).describe().splitlines()
    made = next(number for number, line in enumerate(lines) if f"run {decoder.name}(" in line)
    restored = graph.values[decoder.writes[0] or 0].name
    assert lines[made + 1] == f"  free {graph.values[encoder.writes[0] or 0].name}"
    assert f"({restored}, " in lines[made + 2]
    assert any(line == f"  free {restored}" for line in lines[made + 3 :])


def test_the_bytes_of_a_code_and_of_what_is_decoded_are_in_the_simulated_step() -> None:
    graph, mask = one_mask_encoded()
    size = graph.values[mask].bytes
    moments = {
        graph.ops[moment.action.op].name: moment
        for moment in simulate(schedule_step(graph)).moments
        if isinstance(moment.action, Run)
    }
    (encoder,), (decoder,) = operators(graph, encode_bits), operators(graph, decode_bits)
    assert graph.bytes_of(encoder.writes[0] or 0) == -(-size // 8)
    before = list(moments)[list(moments).index(decoder.name) - 1]
    recomputed = tuple(Kind).index(Kind.RECOMPUTED)
    assert moments[decoder.name].by_kind[recomputed] == moments[before].by_kind[recomputed] + size


def test_in_the_fused_step_an_encoder_waits_for_the_kernel_that_makes_its_operand() -> None:
    graph, mask = one_mask_encoded()
    schedule = fuse(schedule_step(graph))
    (encoder,) = operators(graph, encode_bits)
    kernels = [action for action in schedule.forward if isinstance(action, Fused)]
    assert any(mask in kernel.writes for kernel in kernels)
    assert len(kernels) == len([a for a in fuse(schedule_step(kept())).forward if isinstance(a, Fused)])
    positions = [number for number, action in enumerate(schedule.forward) if mask in getattr(action, "writes", ())]
    (position,) = [n for n, action in enumerate(schedule.forward) if action == Run(encoder.id)]
    assert positions[0] < position
    replay(schedule)


def kept() -> Graph:
    return captured(Gated(), torch.randn(128, 64)).unplanned.schedule.graph


def test_a_value_that_is_read_again_much_later_is_decoded_again() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mask = x @ weight > 0
        first = torch.where(mask, x, x.sin())
        deep = first
        for _ in range(4):
            deep = torch.tanh(deep @ weight)
        return torch.where(mask, deep, deep.cos()).sum()

    x, weight = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    graph = captured(step, x, weight).unplanned.schedule.graph
    (mask,) = [one for one in codes_on_offer(graph) if graph.values[one.value].dtype is torch.bool]
    changed = carry_out(graph, [mask], exact=True)
    assert len(operators(changed, encode_bits)) == 1
    assert len(operators(changed, decode_bits)) == 2
    assert all(op.kind is OpClass.CHEAP for op in operators(changed, decode_bits))
