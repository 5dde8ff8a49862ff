"""The floor: what a network has to compute and to move at least."""

from __future__ import annotations

import pytest

import zoo
from zoo.bench import floor


def test_the_floor_counts_multiply_adds_and_each_map_once() -> None:
    found = floor.work(zoo.CATALOGUE["ResNet50"], 4)
    assert sum(w.flop for w in found) / 8e9 == pytest.approx(4.089, abs=0.001)  # torchvision's published 4.09 GMAC
    assert found[0].elements == 4 * 3 * 224 * 224 + 64 * 3 * 7 * 7 + 4 * 64 * 112 * 112


def test_a_shortcut_is_read_once_more() -> None:
    found = floor.work(zoo.ResNet20, 1)
    second = found[2]  # the second convolution of the first block
    assert second.elements == 2 * 16 * 32 * 32 + 16 * 16 * 3 * 3 + 16 * 32 * 32
