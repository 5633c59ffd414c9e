"""Drawn pictures: classes that differ, pictures of a class that differ too."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads import build
from benchmarks.workloads.data.pictures import COMBINATIONS, MOST_CLASSES, SHAPES, TEXTURES, class_name, shapes
from encore.errors import OptionError


def test_classes_are_all_combinations_and_then_hues() -> None:
    assert len({class_name(label) for label in range(COMBINATIONS)}) == COMBINATIONS == len(SHAPES) * len(TEXTURES)
    assert len({class_name(label) for label in range(MOST_CLASSES)}) == MOST_CLASSES
    assert class_name(0) == "plain disc"
    assert class_name(41) == "striped square, hue 1"


def test_pictures_depend_on_label_and_generator_alone() -> None:
    labels = torch.arange(COMBINATIONS)
    first, again = (shapes(labels, COMBINATIONS, 48, torch.Generator().manual_seed(1)) for _ in range(2))
    other = shapes(labels, COMBINATIONS, 48, torch.Generator().manual_seed(2))
    assert torch.equal(first, again)
    assert first.shape == (COMBINATIONS, 3, 48, 48)
    assert not torch.equal(first, other)
    means = first.mean(dim=1).flatten(1)
    assert torch.cdist(means, means).fill_diagonal_(100).min() > 1


def test_a_shape_fills_a_fair_share_of_its_picture() -> None:
    for index, field in enumerate(SHAPES.values()):
        labels = torch.tensor([index * 5 * 5 % COMBINATIONS])  # a plain one of each shape
        assert class_name(int(labels)).startswith("plain")
        y, x = torch.meshgrid(*[torch.linspace(-1, 1, 100)] * 2, indexing="ij")
        assert 0.1 < field(x, y).float().mean() < 0.8


def test_too_many_classes_and_too_small_pictures_are_refused() -> None:
    with pytest.raises(OptionError, match="classes=1001 is out of range: 1 to 1000"):
        build("vgg16", size="tiny", classes=1001).batch(0)
    for name, smallest in (("alexnet", 63), ("nin", 67), ("overfeat", 71), ("vgg16", 32)):
        with pytest.raises(OptionError, match=f"resolution={smallest - 1} is too small .*: {smallest} at least"):
            build(name, size="tiny", resolution=smallest - 1)
        build(name, size="tiny", resolution=smallest)
