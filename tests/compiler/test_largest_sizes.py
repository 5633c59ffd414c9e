"""`largest=` as sizes: the batch that is made of them, what it answers before the training, and unusable sizes."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import encore
from encore.compiler.largest_sizes import LargestSizes
from support.compare_with_eager import assert_same, run_step, session_of


class Tagger(nn.Module):
    """A tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.tags = nn.Linear(16, 5)

    def forward(self, words: Tensor, tags: Tensor, scale: float = 1.0, weight: Tensor | None = None) -> Tensor:
        x = self.embedding(words)
        x = x + self.down(torch.sigmoid(self.up(x)).square())
        return F.cross_entropy(self.tags(x).flatten(0, 1), tags.flatten(), weight) * scale


def sentences(length: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (rows, length)), torch.randint(5, (rows, length))


LARGEST = (
    {"words": (3, 200), "tags": (3, 200)},
    {"words": [None, 200], "tags": {1: 200}},
    {1: 200},
    {-1: 200},
    {-1: 7, "words": torch.Size([3, 200]), "tags": {-1: 200}},
)
"""Ways to say the same."""


@pytest.mark.parametrize("largest", LARGEST)
def test_ways_to_give_the_same_sizes(largest: Any) -> None:
    sizes = LargestSizes.read(largest)
    assert sizes is not None
    args, kwargs, shapes = sizes.batch(Tagger(), sentences(20), {})
    assert ([one.shape for one in args], kwargs) == ([(3, 200), (3, 200)], {})
    assert {one.dtype for one in args} == {torch.int64}
    assert shapes == "words [3, 200], tags [3, 200]"


@pytest.mark.parametrize(
    "example", [sentences(3), {"words": torch.zeros(3), "sizes": (3, 4)}, torch.zeros(3), {}, None]
)
def test_a_batch_is_not_sizes(example: Any) -> None:
    assert LargestSizes.read(example) is None


def test_an_estimate_with_sizes_is_that_of_an_example() -> None:
    model = Tagger()
    example = encore.estimate(model, *sentences(200))
    sized = encore.estimate(model, *sentences(20), largest={1: 200})
    assert sized.largest is not None
    assert sized.largest.floor == example.floor > sized.floor
    assert sized.largest.pareto == example.pareto
    last = str(sized).splitlines()[-1]
    assert re.fullmatch(r"the largest batch needs at least [\d.]+ KiB, and [\d.]+ KiB with everything kept", last)


def test_sizes_of_both_dimensions_and_of_keyword_arguments() -> None:
    model = Tagger()
    words, tags = sentences(20)
    sized = encore.estimate(model, words, tags=tags, largest={0: 5, 1: 90})
    assert sized.largest is not None
    assert sized.largest.floor == encore.estimate(model, *sentences(90, rows=5)).floor


def test_the_first_batch_is_checked_before_its_step(caplog: pytest.LogCaptureFixture) -> None:
    plain, batch = Tagger(), sentences(20)
    long = encore.estimate(plain, *sentences(200))
    planned = encore.compile(copy.deepcopy(plain), lowering="eager", budget=long.taken_unplanned, largest={1: 200})
    with caplog.at_level(logging.INFO, "encore"):
        assert_same(run_step(planned, batch), run_step(plain, batch), "eager")
    (line,) = [record.getMessage() for record in caplog.records if "the largest batch" in record.getMessage()]
    assert line.startswith("the largest batch of Tagger (words [3, 200], tags [3, 200]) needs ")
    assert session_of(planned).on_first_batch is None  # the second batch is not checked


def test_a_largest_batch_that_cannot_fit_is_an_error_at_every_call() -> None:
    model = Tagger()
    long = encore.estimate(model, *sentences(200))
    encore.compile(model, budget=long.floor - 1, largest={1: 200})
    for one in (model, model, copy.deepcopy(model)):
        with pytest.raises(encore.BudgetError, match=r"largest batch of Tagger \(words \[3, 200\], tags .*") as raised:
            one(*sentences(20))
        assert raised.value.floor == long.floor
        assert not session_of(one).graphs


@pytest.mark.parametrize("kind", ["module", "function", "method"])
def test_percentages_are_of_a_batch_of_these_sizes(kind: str) -> None:
    model = Tagger()
    unplanned = encore.estimate(model, *sentences(200)).taken_unplanned
    calls: dict[str, Any] = {
        "module": model,
        "function": lambda words, tags: model(words, tags),
        "method": model.forward,
    }
    planned = encore.compile(calls[kind], lowering="eager", budget="110%", largest={1: 200})
    planned(*sentences(20)).backward()
    assert encore.report(planned).budget == int(1.1 * unplanned)


def test_parts_of_a_batch_are_named_as_in_the_advice_on_padding() -> None:
    model = Tagger()

    def step(batch: dict[str, Tensor], more: list[Tensor]) -> Tensor:
        return model(batch["words"], more[0])

    (words, tags), long = sentences(20), encore.estimate(model, *sentences(200))
    for largest in ({"batch['words']": (3, 200), "more[0]": (3, 200)}, {1: 200}):
        sized = encore.estimate(step, {"words": words}, [tags], largest=largest)
        assert sized.largest is not None
        assert sized.largest.floor == long.floor


def test_a_batch_has_the_dtypes_and_layouts_of_the_first() -> None:
    def function(images: Tensor, mask: Tensor, name: str) -> Tensor:
        return images

    images = torch.randn(2, 3, 8, 8, requires_grad=True).to(memory_format=torch.channels_last)
    sizes = LargestSizes.read({0: 4, "images": {3: 16}})
    assert sizes is not None
    args, kwargs, shapes = sizes.batch(function, (images,), {"mask": torch.ones(2, dtype=torch.bool), "name": "a"})
    made = args[0]
    assert (shapes, kwargs["name"]) == ("images [4, 3, 8, 16], mask [4]", "a")
    assert (made.shape, made.dtype, made.device) == ((4, 3, 8, 16), torch.float32, torch.device("cpu"))
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert made.requires_grad
    assert (kwargs["mask"].shape, kwargs["mask"].dtype) == ((4,), torch.bool)


@pytest.mark.parametrize(
    ("largest", "message"),
    [
        ({"word": (3, 9)}, "names 'word', which is no parameter; the model has 'scale', 'tags', 'weight', 'words'"),
        ({"words": 9}, "has 9 for 'words', which is neither a tensor nor sizes of one; give sizes such as"),
        ({"words": ()}, r"has \(\) for 'words'"),
        ({"words": (3, 0)}, "the size 0 for 'words'; give a number of at least 1"),
        ({"words": {1: True}}, "the size True for 'words'"),
        ({1: "9"}, "the size '9' for 1"),
        ({1.5: 9}, "has the key 1.5; give names"),
    ],
)
def test_sizes_that_are_none(largest: Any, message: str) -> None:
    with pytest.raises(encore.OptionError, match=message):
        encore.compile(Tagger(), budget="1GiB", largest=largest)


@pytest.mark.parametrize(
    ("largest", "message"),
    [
        ({"words": (3, 9, 9)}, r"has 3 sizes for 'words', which has 2 dimensions: \[3, 4\] in this batch"),
        ({"words": {2: 9}}, "has dimensions '2' for 'words', which has 2 dimensions"),
        ({"scale": (3,)}, r"'scale' is a float in this batch, not a tensor; name tensors \('tags', 'words'\)"),
        ({"weight": (5,)}, "'weight', which this batch does not have, so that its dtype is not known"),
        ({2: 9}, r"has dimension 2, and no tensor of the batch has it: words \[3, 4\], tags \[3, 4\]"),
        ({"words": (3, 9)}, r"with words \[3, 9\], tags \[3, 4\]: Tagger cannot be called with .* stay as they are"),
    ],
)
def test_sizes_that_a_batch_cannot_have(largest: Any, message: str) -> None:
    model = encore.compile(Tagger(), budget="1GiB", largest=largest)
    for call in (
        lambda: model(*sentences(4), 1.0),
        lambda: encore.estimate(model, *sentences(4), 1.0, largest=largest),
    ):
        with pytest.raises(encore.OptionError, match=message):
            call()


def test_sizes_of_a_packed_batch() -> None:
    layer = encore.compile(nn.GRU(2, 2), budget="1GiB", largest={0: 9})
    with pytest.raises(encore.OptionError, match=r"the batch has a PackedSequence; give an example of the largest"):
        layer(pack_sequence([torch.randn(3, 2)]))
