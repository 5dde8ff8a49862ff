"""InceptionV4 and InceptionResNetV2 compute what timm's do, and Keras's InceptionResNetV2 computes the same."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn

from zoo import InceptionResNetV2, InceptionV4

THEIRS = {InceptionV4: "inception_v4", InceptionResNetV2: "inception_resnet_v2"}


@pytest.mark.reference
@pytest.mark.parametrize(
    ("cls", "size"),
    [
        pytest.param(InceptionV4, 107, id="V4-107"),
        pytest.param(InceptionV4, 139, id="V4-139", marks=pytest.mark.long),
        pytest.param(InceptionResNetV2, 107, id="ResNetV2-107", marks=pytest.mark.long),
        pytest.param(InceptionResNetV2, 139, id="ResNetV2-139", marks=pytest.mark.long),
    ],
)
def test_logits_and_gradients_equal_timms(cls: type, size: int) -> None:
    assert_equal(cls, partial(timm.create_model, THEIRS[cls], drop_rate=0.2), size)


@pytest.mark.reference
@pytest.mark.parametrize("cls", THEIRS, ids=lambda cls: cls.__name__)
def test_fresh_parameters_are_distributed_as_timms(cls: type[nn.Module]) -> None:
    assert_same_initialisation(cls(), timm.create_model(THEIRS[cls]))


@pytest.mark.parametrize("cls", THEIRS, ids=lambda cls: cls.__name__)
def test_an_image_of_74_pixels_is_too_small(cls: type[nn.Module]) -> None:
    with torch.device("meta"):
        network = cls(num_classes=2)
        assert network(torch.empty(2, 3, 75, 75)).shape == (2, 2)
        with pytest.raises(ValueError, match="at least 75x75"):
            network(torch.empty(2, 3, 74, 75))
