"""The shipped network, once."""

from __future__ import annotations

import pytest

from zoo import ResNet20, trained
from zoo.networks.model import Model


@pytest.fixture(scope="package")
def network() -> Model:
    return trained(ResNet20)
