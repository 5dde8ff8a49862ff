"""InceptionV3 computes what torchvision's does, with and without its auxiliary head."""

from __future__ import annotations

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torchvision import models

from zoo import InceptionV3
from zoo.networks.inception import AuxiliaryHead, InceptionV3Outputs


@pytest.mark.reference
@pytest.mark.parametrize("transform_input", [False, True])
def test_logits_and_gradients_equal_torchvisions(transform_input: bool) -> None:
    options = {"aux_logits": False, "transform_input": transform_input}
    assert_equal(lambda: InceptionV3(**options), lambda: models.inception_v3(init_weights=False, **options), size=107)


@pytest.mark.reference
def test_auxiliary_logits_equal_torchvisions() -> None:
    assert_equal(lambda: InceptionV3(aux_logits=True), lambda: models.inception_v3(init_weights=False), size=InceptionV3.aux_min_size)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(InceptionV3(), models.inception_v3(init_weights=True, aux_logits=False))


def test_the_auxiliary_head_has_the_published_count() -> None:
    with torch.device("meta"):
        network = InceptionV3(aux_logits=True)
    assert sum(parameter.numel() for parameter in network.parameters()) == 27_161_264


def test_the_auxiliary_head_answers_in_train_mode_only() -> None:
    with torch.device("meta"):
        network, images = InceptionV3(num_classes=4, aux_logits=True), torch.empty(2, 3, 299, 299)
    outputs = network(images)
    assert isinstance(outputs, InceptionV3Outputs)
    assert [output.shape for output in outputs] == [(2, 4)] * 2
    assert network.eval()(images).shape == (2, 4)


def test_the_auxiliary_head_says_when_images_are_too_small_to_train_it() -> None:
    with torch.device("meta"):
        network = InceptionV3(aux_logits=True)
        smallest = torch.empty(2, 3, network.aux_min_size, network.aux_min_size)
        network(smallest)
    head = AuxiliaryHead(768, 10)  # not on meta, where torch 2.11 convolves maps smaller than the kernel
    for smaller in (smallest[:, :, 1:], smallest[:, :, :, 1:]):
        with pytest.raises(ValueError, match=r"auxiliary head .* build the network with aux_logits=False"):
            network(smaller)
        with pytest.raises(RuntimeError, match="Kernel size"):  # the guard is not stricter than the arithmetic
            head(torch.zeros(network.lower(smaller).shape))
    network.eval()(smallest[:, :, 1:])


def test_the_auxiliary_head_draws_googles_deviations() -> None:
    head = InceptionV3(aux_logits=True).AuxLogits
    deviations = [layer.weight.std().item() for layer in (head.conv0.conv, head.conv1.conv, head.fc)]
    assert deviations == pytest.approx([0.1, 0.01, 0.001], rel=0.02)
