"""The base class: class keywords, the guard on inputs, and what every network inherits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

import zoo
from zoo import CATALOGUE, Model, ResNet18, ResNet20
from zoo.networks.vgg import VGG


@pytest.fixture(scope="module")
def network() -> Model:
    torch.manual_seed(0)
    return ResNet20().eval()


def test_a_mistyped_class_keyword_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(TypeError, match="VGG99: VGG has no class keyword 'batchnorm'; did you mean batch_norm"):
        type("VGG99", (VGG,), {}, blocks=(1, 1, 1, 1, 1), batchnorm=True, params=1)
    with pytest.raises(TypeError, match=r"no class keyword 'zzz'; it declares .*batch_norm, blocks"):
        type("VGG99", (VGG,), {}, zzz=1)
    assert "VGG99" not in CATALOGUE


def test_a_constructor_argument_is_no_class_keyword() -> None:
    with pytest.raises(TypeError, match="no class keyword 'num_classes'"):
        type("VGG99", (VGG,), {}, num_classes=1)


def test_only_a_class_with_a_published_count_joins_the_catalogue() -> None:
    type("Unpublished", (VGG,), {}, blocks=(1, 1, 1, 1, 1))
    assert "Unpublished" not in CATALOGUE


def test_a_class_derived_from_a_variant_is_that_variant() -> None:
    mine = type("Mine", (ResNet18,), {})
    assert mine.variant() is ResNet18
    assert mine.family() is ResNet18.family() is zoo.networks.resnet.ResNet
    assert VGG.variant() is VGG


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 32, 32), r"takes \(batch, 3, height, width\), got shape \(3, 32, 32\)\. Add the batch axis with x\.unsqueeze\(0\)"),
        (torch.zeros(32, 32), r"takes \(batch, 3, height, width\), got shape \(32, 32\)\.$"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), r"normalised floating-point images, got torch\.uint8; model\.preprocess"),
        (torch.zeros(2, 32, 32, 3), r"takes 3 channels, got shape \(2, 32, 32, 3\); move the channels first with x\.permute\(0, 3, 1, 2\)"),
        (torch.zeros(2, 1, 32, 32), r"takes 3 channels, got shape \(2, 1, 32, 32\); build it with ResNet20\(in_channels=1\)"),
        (torch.zeros(2, 3, 0, 32), r"at least 1x1 pixels, got 0x32; resize them"),
    ],
)
def test_what_is_no_batch_of_images_is_explained(network: Model, images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match="^ResNet20 .*" + message):
        network(images)


def test_forward_is_head_of_body(network: Model) -> None:
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(network(images), network.forward_head(network.forward_body(images)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floating_point_types_pass(network: Model, dtype: torch.dtype) -> None:
    assert copy.deepcopy(network).to(dtype)(torch.zeros(1, 3, 32, 32, dtype=dtype)).dtype == dtype


def test_channels_last_memory_passes(network: Model) -> None:
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(network(images.to(memory_format=torch.channels_last)), network(images), rtol=1e-4, atol=1e-5)


def test_pickled_and_copied_networks_compute_the_same(network: Model) -> None:
    images = torch.randn(2, 3, 32, 32)
    for other in (pickle.loads(pickle.dumps(network)), copy.deepcopy(network)):
        assert type(other) is ResNet20
        assert torch.equal(other(images), network(images))


def test_an_untrained_network_has_no_preprocessing(network: Model) -> None:
    assert network.checkpoint is None
    with pytest.raises(ValueError, match=r"this ResNet20 is untrained.*use trained\(ResNet20\)"):
        network.preprocess("cat.jpg")


def test_building_on_meta_draws_nothing() -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in ResNet18().parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_draws_the_same_network() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(ResNet20().state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_constructors_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    ResNet20()
    assert capfd.readouterr() == ("", "")
