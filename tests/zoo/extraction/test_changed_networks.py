"""Features of networks that somebody changed: adapters, parametrisations, other heads. A place is found by its module."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from zoo import MobileNetV1_025, Model, ResNet20, SqueezeNet1_1, body, features, head
from zoo.networks.vgg import VGG


class ThinVGG(VGG, blocks=(1, 1, 1, 1, 1), channels=(4, 4, 4, 4, 4)): ...


class Adapter(nn.Module):
    """A low-rank branch beside a layer, with a parameter of its own."""

    def __init__(self, layer: nn.Conv2d | nn.Linear) -> None:
        super().__init__()
        if isinstance(layer, nn.Conv2d):
            self.down: nn.Module = nn.Conv2d(layer.in_channels, 2, layer.kernel_size, layer.stride, layer.padding)  # pyright: ignore[reportArgumentType]
            self.up: nn.Module = nn.Conv2d(2, layer.out_channels, 1)
        else:
            self.down, self.up = nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)
        self.base, self.gain = layer, nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.gain * self.scale * self.up(self.down(x))


class Cosine(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=1) @ nn.functional.normalize(self.weight, dim=1).t()


class Undecided(nn.Module):
    """Its flow depends on values, so that no graph holds it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.detach().sum()) > -1e30 else x


NETWORKS: dict[str, Callable[[], Model]] = {
    "ResNet20": ResNet20,
    "VGG": lambda: ThinVGG(num_classes=7),
    "MobileNetV1": lambda: MobileNetV1_025(num_classes=7),
    "SqueezeNet": lambda: SqueezeNet1_1(num_classes=7),
}


def swap(network: Model, name: str, change: Callable[[nn.Module], nn.Module]) -> None:
    network.set_submodule(name, change(network.get_submodule(name)))


def adapted(network: Model) -> None:
    swap(network, network.first_layer, Adapter)  # pyright: ignore[reportArgumentType]


def normalised(network: Model) -> None:
    parametrizations.weight_norm(network.get_submodule(network.first_layer))


def spectral(network: Model) -> None:
    parametrizations.spectral_norm(network.get_submodule(network.first_layer))


def orthogonal(network: Model) -> None:
    parametrizations.orthogonal(network.get_submodule(network.classifiers[0]))


def normalised_as_before(network: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(network.get_submodule(network.first_layer))


def pruned(network: Model) -> None:
    prune.random_unstructured(network.get_submodule(network.first_layer), "weight", 0.5)


def several(network: Model) -> None:
    for name in (network.first_layer, network.classifiers[0]):
        swap(network, name, Adapter)  # pyright: ignore[reportArgumentType]


def undecided(network: Model) -> None:
    swap(network, network.first_layer, Undecided)


CHANGES = [adapted, normalised, spectral, orthogonal, normalised_as_before, pruned, several, undecided]


def made(name: str, change: Callable[[Model], None]) -> Model:
    torch.manual_seed(0)
    network = NETWORKS[name]()
    change(network)
    return network.eval()


def images(network: Model) -> Tensor:
    return torch.randn(2, 3, max(32, network.min_size), max(32, network.min_size), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["ResNet20", "SqueezeNet"])
def test_logits_body_and_head_are_the_networks_own(name: str, change: Callable[[Model], None]) -> None:
    if name == "SqueezeNet" and change is orthogonal:
        change = spectral  # of a matrix only
    network = made(name, change)
    x = images(network)
    with torch.no_grad():
        wanted = network(x)
        assert torch.equal(features(network, "logits")(x)["logits"], wanted)
        assert torch.equal(head(network)(body(network)(x)), wanted)
        taken = features(network, ["embedding", "logits"])
        for twin in (copy.deepcopy(taken), pickle.loads(pickle.dumps(taken))) if change is adapted else (taken,):
            assert torch.equal(twin(x)["logits"], wanted)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_embedding_is_what_enters_the_classifier_whatever_that_is(name: str) -> None:
    network = made(name, lambda _: None)
    x = images(network)
    with torch.no_grad():
        wanted = features(network, "embedding")(x)["embedding"]
        classifier = network.classifiers[0]
        old = network.get_submodule(classifier)
        linear = isinstance(old, nn.Linear)
        width = wanted.shape[1]
        wrappers: list[nn.Module] = [Adapter(old), nn.Sequential(nn.Dropout(), old), nn.Identity()]  # pyright: ignore[reportArgumentType]
        if linear:
            wrappers += [nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, 3)), Cosine(width, 3)]
        for wrapper in wrappers:
            network.set_submodule(classifier, wrapper.eval())
            found = features(network, ["embedding", "logits"])
            assert torch.equal(found(x)["embedding"], wanted), type(wrapper)
            assert torch.equal(found(x)["logits"], network(x)), type(wrapper)
            assert found.channels["embedding"] == width


def test_a_classifier_that_was_replaced_with_what_held_it_has_an_embedding_too() -> None:
    network = made("VGG", lambda _: None)
    network.classifier = nn.Sequential(nn.Linear(4 * 49, 3))
    x = images(network)
    with torch.no_grad():
        found = features(network, ["embedding", "logits"])(x)
        assert found["embedding"].shape == (2, 4 * 49)
        assert torch.equal(found["logits"], network(x))


def test_a_quantised_head_is_one_operation() -> None:
    network = made("ResNet20", lambda _: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network.fc = torch.ao.nn.quantized.dynamic.Linear.from_float(_configured(network.fc))
    x = images(network)
    with torch.no_grad():
        found = features(network, ["embedding", "logits"])(x)
        assert found["embedding"].shape == (2, 64)
        assert torch.equal(found["logits"], network(x))


def _configured(layer: nn.Module) -> nn.Module:
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig  # pyright: ignore[reportArgumentType]
    return layer


def test_parameters_are_shared_and_unneeded_ones_left_out() -> None:
    network = made("ResNet20", adapted).train()
    network.unused = nn.Parameter(torch.zeros(3))
    taken = features(network, "layer1")
    assert "unused" not in taken.state_dict()
    assert taken.get_parameter("conv1.gain") is network.get_parameter("conv1.gain")
    taken(images(network))["layer1"].sum().backward()
    assert network.get_parameter("conv1.gain").grad is not None
    before = taken(images(network))["layer1"].detach()
    with torch.no_grad():
        network.get_parameter("conv1.gain").fill_(3.0)
    assert not torch.equal(taken(images(network))["layer1"], before)


def test_a_parametrised_layer_follows_its_parameters() -> None:
    network = made("ResNet20", normalised)
    taken, x = features(network, "layer1"), images(network)
    before = taken(x)["layer1"].detach()
    with torch.no_grad():
        network.conv1.parametrizations.weight.original0.mul_(2.0)
    assert torch.equal(taken(x)["layer1"], features(network, "layer1")(x)["layer1"])
    assert not torch.equal(taken(x)["layer1"], before)


def test_a_place_inside_of_a_module_that_cannot_be_looked_into_is_an_error_that_names_it() -> None:
    network = made("ResNet20", undecided)
    with pytest.raises(ValueError, match=r"conv1\.layer lies in conv1 of ResNet20, which can't be looked into"):
        features(network, "conv1.layer")
