"""Every workload is a loss with gradients, fed by reproducible data that can be learnt."""

import pytest
import torch

from benchmarks.workloads import NAMED_SIZES, TINY_SIZES, WORKLOADS, build, resnet, tiny
from encore.errors import OptionError
from support.compare_with_eager import assert_matches_eager
from support.workload_cases import FIVE

every_workload = pytest.mark.parametrize("name", sorted(WORKLOADS))
captured_whole = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIVE else pytest.mark.slow)
        for name in sorted(set(WORKLOADS) - {"deepspeech2", "speech"})
    ],
)


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
        with pytest.raises(ValueError, match=r"'gpt'.*known workloads: alexnet, .*, lm, .*, nmt, .*, vgg16"):
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


PARAMETERS = {
    "alexnet": 61_100_840,
    "inception": 6_998_552,
    "nin": 7_595_176,
    "overfeat": 145_920_872,
    "vgg16": 138_357_544,
}
"""At the published resolution with a thousand classes; of NiN and OverFeat, what the published layers add up to."""


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_classifiers_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    resolution = 231 if name == "overfeat" else 224
    with torch.device("meta"):
        model = build(name, resolution=resolution, classes=1000).model
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, sizes in NAMED_SIZES.items() for size in sizes], ids="-".join
)
def test_named_sizes_are_those_of_the_factory(name: str, size: str) -> None:
    with torch.device("meta"):
        workload = build(name, size=size)
    assert workload.name == name
    assert all(parameter.is_meta for parameter in workload.model.parameters())


def test_a_named_size_may_be_changed_in_part() -> None:
    source, _, _ = build("nmt", size="ecornn", batch_size=3, hidden=8).batch(0)
    assert source.shape == (3, 100)
    words, _ = build("lm", size="ecornn", hidden=8).batch(0)
    assert words.shape == (32, 35)


def test_unknown_sizes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"nmt has no size called 'huge'; known names: 'ecornn', .*'tiny'"):
        build("nmt", size="huge")
    with pytest.raises(OptionError, match=r"vgg16 has no size 'steps'; it has 'batch_size', .*'width'"):
        build("vgg16", steps=3)
    with pytest.raises(OptionError, match="level 'sentence'; known levels: 'character', 'word'"):
        build("lm", level="sentence")
    with pytest.raises(OptionError, match="lstm='gru'; there are 'layer', 'loop'"):
        build("lm", lstm="gru")
    with pytest.raises(OptionError, match="frames=3 is too short for a vowel: 4 at least"):
        build("deepspeech2", frames=3)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("deepspeech2", "vgg16") else pytest.mark.slow)
        for name in sorted(set(WORKLOADS) - set(FIVE))
    ],
)
def test_a_compiled_step_has_eagers_gradients(name: str) -> None:
    """The other five are looked at more closely in test_promises.py."""
    workload = tiny(name)
    assert_matches_eager(workload.model, *workload.batch(0), lowering="eager", steps=1)


@pytest.mark.parametrize(
    ("layers", "decoder_layers"), [(1, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, 4), (3, 1)))]
)
def test_a_compiled_step_of_deeper_translators_has_eagers_gradients(layers: int, decoder_layers: int) -> None:
    workload = build("nmt", size="tiny", hidden=8, layers=layers, decoder_layers=decoder_layers)
    assert_matches_eager(workload.model, *workload.batch(0), lowering="eager", steps=1)
