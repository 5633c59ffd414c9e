"""The null device is what PyTorch's CUDA build believes it to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nullcuda.null_device import counted, device_with, late_fill

MIB = 1 << 20


def test_copies_are_real() -> None:
    x = torch.arange(100_000.0)
    there = x.cuda()
    assert torch.equal(there.cpu(), x)
    assert torch.equal(there.to("cuda:1").cpu(), x)


def test_an_allocation_beyond_the_capacity_is_out_of_memory() -> None:
    with device_with(capacity=512 * MIB):
        whole = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(400 * MIB, dtype=torch.uint8, device="cuda:1")  # a device of its own
        del whole


def test_a_training_step_is_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).cuda()
    x = torch.randn(4, 3, 8, 8, device="cuda")
    found = counted(lambda: model(x).sum().backward())
    assert found.launches >= 10
    assert found.syncs == 0
    assert found.triton_launches == 0


def test_recurrent_layers_have_weights_in_one_buffer() -> None:
    layer = nn.LSTM(8, 16, num_layers=2, bidirectional=True, proj_size=4).cuda()
    output, _ = layer(torch.randn(5, 3, 8, device="cuda"))
    output.sum().backward()
    storages = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    assert len(storages) == 1


def test_a_late_copy_is_seen_by_what_waits_for_it_alone() -> None:
    pinned = torch.ones(1000).pin_memory()
    with device_with(streams=1, copy_us=50_000):
        side = torch.cuda.Stream()
        there = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            there.copy_(pinned, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        early = torch.empty(1000).pin_memory()
        early.copy_(there, non_blocking=True)  # the current stream does not wait
        torch.cuda.current_stream().wait_event(arrived)
        late = torch.empty(1000).pin_memory()
        late.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
    assert torch.equal(late, torch.ones(1000))


def test_a_read_on_another_stream_comes_too_early() -> None:
    with device_with(streams=1):
        x = torch.zeros(1000, dtype=torch.uint8, device="cuda")
        found = torch.empty(1000, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize()
        late_fill(x, 7, 100_000)
        with torch.cuda.stream(torch.cuda.Stream()):
            found.copy_(x, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        assert not (found == 7).any()
        torch.cuda.synchronize()
        assert bool((x.cpu() == 7).all())


def test_products_of_float32_matrices_have_numbers_if_they_are_asked_for() -> None:
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    there = [a.cuda(), b.cuda()]
    with device_with(products=1):
        found = [there[0] @ there[1].t(), there[1] @ there[0].t(), there[0].t() @ (there[0] @ there[1].t())]
    expected = [a @ b.t(), b @ a.t(), a.t() @ (a @ b.t())]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
