"""DenseNet computes what torchvision's does; the CIFAR network is counted and shaped as its paper says."""

from __future__ import annotations

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torchvision import models

from zoo import CATALOGUE, DenseNet121, DenseNet264, DenseNet_BC_100_12


@pytest.mark.reference
@pytest.mark.parametrize(
    "name", ["DenseNet121", "DenseNet161", *(pytest.param(name, marks=pytest.mark.long) for name in ("DenseNet169", "DenseNet201"))]
)
def test_logits_and_gradients_equal_torchvisions(name: str) -> None:
    assert_equal(CATALOGUE[name], getattr(models, name.lower()), size=64)


@pytest.mark.reference
def test_dropout_equals_torchvisions() -> None:
    assert_equal(lambda: DenseNet121(dropout=0.2), lambda: models.densenet121(drop_rate=0.2), size=64)


@pytest.mark.long  # DenseNet121's blocks in a longer table, whose count is in test_catalogue.py
@pytest.mark.reference
def test_264_equals_torchvisions_blocks_in_its_table() -> None:
    assert_equal(DenseNet264, lambda: models.DenseNet(32, (6, 12, 64, 48), 64), size=64)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(DenseNet121(), models.densenet121())


def closed_form(layers: int, k: int, classes: int) -> int:
    """Count a DenseNet-BC for CIFAR by the paper's words alone, no network built."""
    width, total = 2 * k, 3 * 2 * k * 9
    for block in range(3):
        for _ in range(layers):
            total += 2 * width + width * 4 * k + 2 * 4 * k + 4 * k * k * 9
            width += k
        if block < 2:
            total += 2 * width + width * (width // 2)
            width //= 2
    return total + 2 * width + (width + 1) * classes


def test_cifar_network_has_the_papers_count() -> None:
    assert closed_form(layers=(100 - 4) // 6, k=12, classes=10) == DenseNet_BC_100_12.params == 769_162
    assert round(DenseNet_BC_100_12.params / 1e6, 1) == 0.8  # Table 2
    assert closed_form(layers=(250 - 4) // 6, k=24, classes=10) // 100_000 == 153  # its 15.3M, so the formula is the paper's


def test_cifar_network_is_100_layers_deep_and_ends_at_8x8() -> None:
    with torch.device("meta"):
        network = DenseNet_BC_100_12()
        assert network.forward_body(torch.empty(1, 3, 32, 32)).shape == (1, 342, 8, 8)
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in network.modules()) == 100
