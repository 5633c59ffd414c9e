"""Every workload is a loss with gradients, fed by reproducible data that can be learnt."""

from statistics import mean

import pytest
import torch

from encore.workloads import TINY_SIZES, WORKLOADS, build, resnet, tiny
from encore.workloads.data.numerals import ENGLISH, GERMAN, LONGEST_GROUP, english, german

every_workload = pytest.mark.parametrize("name", sorted(WORKLOADS))
captured_whole = pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"speech"}))


@every_workload
def test_forward_is_a_finite_scalar_loss_and_every_parameter_gets_a_gradient(name: str) -> None:
    workload = tiny(name)
    loss = workload.model(*workload.batch(0))
    assert workload.name == name
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    for parameter_name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


@every_workload
def test_a_batch_depends_on_its_index_alone(name: str) -> None:
    first = tiny(name).batch(7)
    torch.rand(3)
    again = tiny(name, seed=1).batch(7)
    other = tiny(name).batch(8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(first, other, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@every_workload
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    first, again, other = (list(tiny(name, seed=seed).model.parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@every_workload
def test_the_global_generator_is_left_alone(name: str) -> None:
    before = torch.get_rng_state()
    tiny(name).batch(0)
    assert torch.equal(torch.get_rng_state(), before)


@every_workload
def test_a_short_training_run_brings_the_loss_down(name: str) -> None:
    workload = tiny(name)
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=5e-3)
    losses = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for index in range(40):
            loss = workload.model(*workload.batch(index))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert mean(losses[-5:]) < 0.8 * mean(losses[:5])


@captured_whole
def test_forward_is_captured_as_one_graph(name: str) -> None:
    workload = tiny(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        captured = torch.compile(workload.model, backend="eager", fullgraph=True)(*workload.batch(0))
        torch.manual_seed(0)
        assert torch.equal(captured, tiny(name).model(*workload.batch(0)))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    for make in (build, tiny):
        with pytest.raises(ValueError, match=r"'gpt'.*known workloads: lm, nmt, resnet, speech, transformer"):
            make("gpt")


def test_every_workload_has_a_tiny_size() -> None:
    assert TINY_SIZES.keys() == WORKLOADS.keys()


@pytest.mark.parametrize(("depth", "parameters"), [(50, 25_557_032), (152, 60_192_808)])
def test_resnet_has_as_many_parameters_as_torchvision_counts(depth: int, parameters: int) -> None:
    with torch.device("meta"):
        model = resnet.ResNet(resnet.BLOCKS[depth], width=64, classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_resnet_of_an_unknown_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth 18; known depths: 50, 101, 152"):
        build("resnet", depth=18)


@pytest.mark.parametrize(
    ("groups", "in_english", "in_german"),
    [
        ([1], "one", "eins"),
        ([21], "twenty one", "ein und zwanzig"),
        ([316], "three hundred sixteen", "drei hundert sechzehn"),
        ([1, 1], "one thousand one", "ein tausend eins"),
        ([1, 0, 60], "one million sixty", "eine Million sechzig"),
        ([2, 0, 0, 0], "two billion", "zwei Milliarden"),
    ],
)
def test_numbers_are_spelt_in_both_languages(groups: list[int], in_english: str, in_german: str) -> None:
    assert " ".join(english(groups)) == in_english
    assert " ".join(german(groups)) == in_german


def test_every_number_fits_its_steps_and_its_vocabulary() -> None:
    for value in range(1, 1000):
        groups = [value] * 6
        assert set(english(groups)) <= set(ENGLISH)
        assert set(german(groups)) <= set(GERMAN)
        assert max(len(english(groups)), len(german(groups))) < LONGEST_GROUP * len(groups)


def test_too_few_steps_for_a_number_are_refused() -> None:
    with pytest.raises(ValueError, match="steps=5 is too short"):
        build("nmt", steps=5)
