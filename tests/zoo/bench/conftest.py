"""What the benchmark's tests share."""

from __future__ import annotations

import pytest
import torch

import zoo
from zoo.bench.subject import Subject, subject


@pytest.fixture(scope="session")
def small() -> Subject:
    """A ResNet20 for two images on a CPU, in float32; not changed."""
    return subject(zoo.ResNet20, 2, torch.device("cpu"), torch.float32)
