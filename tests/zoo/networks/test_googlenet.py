"""GoogLeNet computes what torchvision's does, with and without its auxiliary heads."""

from __future__ import annotations

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torchvision import models

from zoo import GoogLeNet
from zoo.networks.googlenet import GoogLeNetOutputs


@pytest.mark.reference
@pytest.mark.parametrize("aux_logits", [False, True])
@pytest.mark.parametrize("transform_input", [False, True])
def test_logits_and_gradients_equal_torchvisions(aux_logits: bool, transform_input: bool) -> None:
    options = {"aux_logits": aux_logits, "transform_input": transform_input}
    assert_equal(lambda: GoogLeNet(**options), lambda: models.googlenet(init_weights=False, **options), size=64)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(GoogLeNet(aux_logits=True), models.googlenet(init_weights=True))


def test_auxiliary_heads_answer_in_train_mode_only() -> None:
    network = GoogLeNet(num_classes=4, aux_logits=True)
    images = torch.randn(2, 3, 64, 64)
    outputs = network(images)
    assert isinstance(outputs, GoogLeNetOutputs)
    assert [output.shape for output in outputs] == [(2, 4)] * 3
    assert network.eval()(images).shape == (2, 4)
    assert GoogLeNet(num_classes=4)(images).shape == (2, 4)


def test_auxiliary_heads_refuse_what_the_network_refuses() -> None:
    with pytest.raises(ValueError, match="at least 15x15"):
        GoogLeNet(aux_logits=True)(torch.randn(2, 3, 14, 14))
