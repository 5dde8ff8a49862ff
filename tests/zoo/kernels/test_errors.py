"""What messages call a network: by the name that its user knows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zoo
from zoo.embedding.extracting import extractor
from zoo.kernels.errors import called


def test_a_part_is_called_as_the_network_that_it_was_taken_from() -> None:
    vectors = extractor(zoo.ResNet20().eval(), "embedding")
    assert called(vectors) == "ResNet20"
    assert called(nn.Linear(1, 1)) == "Linear"
    own = nn.Linear(1, 1)
    own.network_name = 3  # pyright: ignore[reportArgumentType]
    assert called(own) == "Linear"
    with pytest.raises(ValueError, match="ResNet20 has no checkpoint"):
        zoo.fast(vectors, "cpu", "int8", calibration=["a.png"] * 100, example=torch.zeros(1, 3, 32, 32))
