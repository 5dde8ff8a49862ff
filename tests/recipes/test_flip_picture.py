"""The picture in docs/convert.md shows what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flip_picture", ROOT / "recipes" / "flip_picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dot_becomes_the_kernel_under_convolution_and_the_flipped_one_under_correlation(recipe: ModuleType) -> None:
    image, kernel, turned, convolved, correlated, mended = (values for values, _, _ in recipe.panels())
    around = (slice(2, 7), slice(2, 7))
    assert image[4, 4] == 1
    assert image[around].sum() == 1
    assert np.allclose(convolved[around], kernel)
    assert np.allclose(correlated[around], turned)
    assert np.allclose(mended, convolved)
    assert not np.allclose(correlated, convolved)


def test_the_committed_picture_is_this_one_and_small(recipe: ModuleType) -> None:
    committed = ROOT / "docs" / "flip.png"
    assert committed.stat().st_size < 20_000
    drawn, kept = (np.asarray(image.convert("RGB"), np.float32) for image in (recipe.draw(), Image.open(committed)))
    assert drawn.shape == kept.shape
    for number in range(6):  # the captions' letters may differ with Pillow's version, the panels not
        left = recipe.MARGIN + recipe.GAP // 2 + number % 3 * (recipe.TILE + recipe.GAP)
        top = recipe.MARGIN + number // 3 * (recipe.TILE + recipe.CAPTION + recipe.GAP // 2)
        panel = (slice(top, top + recipe.TILE), slice(left, left + recipe.TILE))
        assert np.abs(drawn[panel] - kept[panel]).mean() < 4
