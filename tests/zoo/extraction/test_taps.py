"""Taps: what each kind means in each family, and what is said where there is none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from parity import randomised
from torch import Tensor, nn

from zoo import CATALOGUE, VGG11, VGG16, VGG19_BN, AlexNet, DenseNet121, GoogLeNet, Model, ResNet18, ResNet20, ResNet50, SqueezeNet1_1
from zoo.extraction.features import features
from zoo.extraction.taps import Places, UnknownTap, trace


def on_meta(make: Any, **options: Any) -> Model:
    with torch.device("meta"):
        return make(**options).eval()


def alive(make: Any, **options: Any) -> Model:
    network = on_meta(make, **options)
    network.load_state_dict(randomised(network), assign=True)
    return network


def smallest_of_each_family() -> list[type[Model]]:
    smallest: dict[type[Model], type[Model]] = {}
    for cls in sorted(CATALOGUE.values(), key=lambda cls: cls.params):
        smallest.setdefault(cls.family(), cls)
    return list(smallest.values())


def places(network: Model) -> Places:
    return Places(network, trace(network))


def modules(network: Model, *taps: str) -> list[str]:
    return [tap.module for tap in features(network, taps).taps.values()]


def test_every_module_that_runs_is_a_tap_and_comes_in_the_order_of_execution() -> None:
    network = on_meta(ResNet20)
    finished: list[str] = []
    for name, layer in network.named_modules():
        layer.register_forward_hook(lambda *_, name=name: finished.append(name))
    network(torch.empty(1, 3, 32, 32, device="meta"))
    ran = [name for name in finished if name]
    assert [name for name in places(network).trace.outputs if name != "body"] == ran


@pytest.mark.parametrize("cls", smallest_of_each_family(), ids=lambda cls: cls.__name__)
def test_modes_compute_the_same_graph(cls: type[Model]) -> None:
    network = on_meta(cls)
    shown = [str(trace(network.train(mode)).graph) for mode in (False, True)]
    assert shown[0] == shown[1]


def test_auxiliary_heads_are_no_part_of_the_way() -> None:
    network = on_meta(GoogLeNet, aux_logits=True).train()
    assert not [name for name in places(network).trace.outputs if name.startswith("aux")]
    with pytest.raises(UnknownTap, match=r"aux1 of GoogLeNet is no part of the way from the images to the logits"):
        features(network, "aux1")


def test_a_glob_takes_one_level() -> None:
    network = on_meta(ResNet50)
    assert list(features(network, "layer2.*").taps) == ["layer2.0", "layer2.1", "layer2.2", "layer2.3"]
    assert list(features(network, "layer[34]").taps) == ["layer3", "layer4"]
    assert list(features(network, ["layer?.0", "fc"]).taps) == ["layer1.0", "layer2.0", "layer3.0", "layer4.0", "fc"]
    assert list(features(on_meta(VGG11), "relu3_*").taps) == ["relu3_1", "relu3_2"]


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (ResNet50, {2: "relu", 4: "layer1", 8: "layer2", 16: "layer3", 32: "layer4"}),
        (DenseNet121, {4: "features.denseblock1", 8: "features.denseblock2", 16: "features.denseblock3", 32: "features"}),
        (VGG16, {1: "features.3", 2: "features.8", 4: "features.15", 8: "features.22", 16: "features.29", 32: "features"}),
        (CATALOGUE["MobileNetV3Large"], {4: "features.3", 8: "features.6", 16: "features.12", 32: "features"}),
        (SqueezeNet1_1, {8: "features.7", 16: "features"}),
        (GoogLeNet, {8: "inception3b", 16: "inception4e", 32: "inception5b"}),
        (ResNet20, {1: "layer1", 2: "layer2", 4: "layer3"}),
    ],
)
def test_a_stride_means_the_last_blocks_map(cls: type[Model], expected: dict[int, str]) -> None:
    found = places(on_meta(cls)).strides
    assert {stride: found[stride] for stride in expected} == expected


def test_vgg_has_the_papers_names() -> None:
    plain, normed = on_meta(VGG16), on_meta(VGG19_BN)
    assert modules(plain, "conv1_1", "relu1_2", "relu4_2", "relu5_3", "pool5") == [f"features.{i}" for i in (0, 3, 20, 29, 30)]
    assert modules(normed, "conv4_2", "bn4_2", "relu4_2", "pool5") == [f"features.{i}" for i in (30, 31, 32, 52)]
    assert modules(plain, "fc6", "relu7", "fc8") == ["classifier.0", "classifier.4", "classifier.6"]
    assert features(plain, ["conv3_1", "fc6", "fc8"]).channels == {"conv3_1": 256, "fc6": 4096, "fc8": 1000}
    convolutions = [name for name in plain.paper_names() if name.startswith("conv")]
    assert convolutions[:4] + convolutions[-1:] == ["conv1_1", "conv1_2", "conv2_1", "conv2_2", "conv5_3"]


@pytest.mark.parametrize("cls", [VGG11, VGG19_BN, AlexNet, SqueezeNet1_1, CATALOGUE["SqueezeNet1_0"]])
def test_the_papers_names_name_layers_of_their_kind(cls: type[Model]) -> None:
    network = on_meta(cls)
    kinds = {"conv": nn.Conv2d, "bn": nn.BatchNorm2d, "relu": nn.ReLU, "pool": nn.MaxPool2d, "fc": nn.Linear, "drop": nn.Dropout}
    for name, module in network.paper_names().items():
        layer = network.get_submodule(module)
        kind = re.sub(r"[\d_]+$", "", name)
        assert isinstance(layer, kinds[kind]) if kind in kinds else type(layer).__name__ == "Fire", name


def test_fire_modules_are_numbered_as_in_the_table() -> None:
    named = on_meta(SqueezeNet1_1).paper_names()
    assert [name for name in named if name.startswith("fire")] == [f"fire{i}" for i in range(2, 10)]
    assert (named["pool1"], named["fire2"], named["fire9"]) == ("features.2", "features.3", "features.12")


@pytest.mark.parametrize("cls", [ResNet20, VGG11, AlexNet, GoogLeNet])
def test_the_embedding_is_what_the_classifier_reads(cls: type[Model]) -> None:
    network = alive(cls)
    seen: list[Tensor] = []
    network.get_submodule(cls.classifiers[0]).register_forward_hook(lambda layer, args, output: seen.append(args[0]))
    x = torch.randn(2, 3, max(cls.min_size, 32), max(cls.min_size, 32))
    with torch.inference_mode():
        network(x)
        taken = features(network, "embedding")(x)["embedding"]
    assert taken.dim() == 2
    assert torch.equal(taken, seen[0])


def test_the_embedding_before_a_convolution_is_the_maps_mean() -> None:
    network = alive(SqueezeNet1_1)
    taken = features(network, ["embedding", "body"])
    with torch.inference_mode():
        got = taken(torch.randn(2, 3, 64, 64))
    assert taken.channels == {"embedding": 512, "body": 512}
    torch.testing.assert_close(got["embedding"], got["body"].mean((2, 3)))


def test_the_embedding_has_no_dropout_in_train_mode() -> None:
    network = alive(VGG11, num_classes=3).train()
    taken = features(network, "embedding")
    x = torch.randn(1, 3, 32, 32)
    torch.manual_seed(0)
    first = taken(x)["embedding"]
    torch.manual_seed(0)
    assert torch.equal(first, features(network, "relu7")(x)["relu7"])
    assert "classifier.5" not in dict(taken.named_modules())


def test_an_unknown_tap_names_the_nearest_and_the_kinds() -> None:
    with pytest.raises(UnknownTap) as caught:
        features(on_meta(ResNet18), ["layer1", "layer5"])
    text = str(caught.value)
    assert text.startswith("ResNet18 has no tap 'layer5'.\nNearest: layer")
    kinds = (
        "layer4",
        'modules (layer1, layer2, …); globs ("layer1.*")',
        "stride/2, stride/4, stride/8, stride/16, stride/32",
        '"embedding", "body", "logits"',
    )
    for part in kinds:
        assert part in text
    assert "the paper's names" not in text
    with pytest.raises(UnknownTap, match=r"Nearest: relu4_2[\s\S]*the paper's names \(conv1_1 to fc8\)"):
        features(on_meta(VGG19_BN), "relu42")
    with pytest.raises(UnknownTap, match=r"Nearest: features\.denseblock2"):
        features(on_meta(DenseNet121), "denseblok2")


@pytest.mark.parametrize("tap", ["stride/64", "stride/three", "stride/"])
def test_a_stride_that_is_not_there_says_which_are(tap: str) -> None:
    with pytest.raises(UnknownTap, match=rf"ResNet20 has no map at '{tap}'; it has stride/1, stride/2, stride/4\."):
        features(on_meta(ResNet20), tap)


def test_a_glob_that_matches_nothing_is_an_unknown_tap() -> None:
    with pytest.raises(UnknownTap, match="has no tap 'layer9"):
        features(on_meta(ResNet20), "layer9.*")


class Choosing(ResNet20):
    def forward_body(self, x: Tensor) -> Tensor:
        return super().forward_body(x) if x.sum() > 0 else super().forward_body(-x)


def test_a_network_that_looks_at_values_is_refused() -> None:
    with pytest.raises(ValueError, match="Choosing has no one graph"):
        features(on_meta(Choosing), "layer1")
