from __future__ import annotations

import pytest
import torch
from explained import CIFAR, HALVES, Bright, lively, record
from torch import Tensor

from zoo import ResNet20
from zoo.networks.model import Model


@pytest.fixture
def bright() -> Model:
    network = Bright().eval()
    network.checkpoint = record(HALVES, classes=3)
    return network


@pytest.fixture
def small() -> Model:
    torch.manual_seed(0)
    network = ResNet20().eval()
    lively(network)
    network.checkpoint = record(CIFAR, "cifar10")
    return network


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) / 2
