"""Output strides: every n-th pixel of the dilated map is the old map, and torchvision's dilated ResNet is ours."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from parity import randomised
from safetensors.torch import save_file
from torch import Tensor, nn

import zoo
from zoo import CATALOGUE, Model, trained
from zoo.extraction.dilation import dilate
from zoo.extraction.features import body, features, pyramid
from zoo.networks.efficientnet_v2 import BASE, EfficientNetV2
from zoo.networks.nasnet import NASNetA


def on_meta(make: Any) -> Model:
    with torch.device("meta"):
        return make().eval()


def alive(make: Any) -> Model:
    network = on_meta(make)
    network.load_state_dict(randomised(network), assign=True)
    return network


class ThinVGG(zoo.VGG, blocks=(1, 1, 2, 2, 2), channels=(4, 4, 4, 4, 4)): ...


class ThinDenseNet(zoo.DenseNet, blocks=(3, 3, 2, 2), growth_rate=8, stem_channels=16): ...


class ThinEfficientNet(zoo.EfficientNet, width=0.25, depth=0.4, dropout=0.2): ...


class ThinEfficientNetV2(EfficientNetV2, table=BASE, stem=32, width=0.25, depth=0.4, dropout=0.2): ...


class ThinRes2Net(zoo.Res2Net50D.family(), blocks=(2, 1, 1, 1), base_width=8, scale=4, v1b=True): ...  # pyright: ignore[reportGeneralTypeIssues]


class ThinRegNet(zoo.RegNet, depth=6, w0=8, wa=8.0, wm=2.0, group_width=8, squeeze_excite=True): ...


class ThinConvNeXt(zoo.ConvNeXt, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1)): ...


class ThinConvNeXtV2(zoo.ConvNeXtV2, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1)): ...


class ThinPoolFormer(zoo.PoolFormer, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1), stochastic_depth=0.2): ...


class ThinConvFormer(zoo.ConvFormer, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1), stochastic_depth=0.2): ...


class ThinNASNet(NASNetA, repeats=1, penultimate=96, stem_channels=8): ...


class ThinCIFARDenseNet(zoo.CIFARDenseNet, blocks=(2, 2, 2), growth_rate=4, stem_channels=8): ...


# Sides at which no map in the dilated part has a pixel too many
SUBJECTS: dict[str, tuple[Any, int, int]] = {
    "VGG": (ThinVGG, 64, 8),
    "ResNet18": (zoo.ResNet18, 64, 8),
    "ResNet50": (zoo.ResNet50, 64, 8),
    "ResNet50-1x1": (partial(zoo.ResNet50, stride_on="1x1"), 64, 16),
    "ResNet18-same": (partial(zoo.ResNet18, padding="same"), 64, 4),
    "ResNet18-ceil": (partial(zoo.ResNet18, ceil_mode=True), 64, 2),
    "SEResNet18": (zoo.SEResNet18, 64, 16),
    "ResNet10T": (zoo.ResNet10T, 64, 8),
    "ResNet14T": (zoo.ResNet14T, 64, 4),
    "ResNetAA50": (zoo.ResNetAA50, 64, 8),
    "ResNet20": (zoo.ResNet20, 32, 1),
    "ResNet20-B": (partial(zoo.ResNet20, shortcut="B"), 32, 2),
    "AlexNet": (zoo.AlexNet, 195, 8),
    "SqueezeNet1_0": (zoo.SqueezeNet1_0, 69, 8),
    "SqueezeNet1_1": (zoo.SqueezeNet1_1, 65, 4),
    "ShuffleNetV2": (zoo.ShuffleNetV2_x0_5, 64, 8),
    "DenseNet": (ThinDenseNet, 64, 8),
    "DenseNet-ceil": (partial(ThinDenseNet, ceil_mode=True), 64, 16),
    "CIFARDenseNet": (ThinCIFARDenseNet, 32, 1),
    "MobileNetV1": (zoo.MobileNetV1_025, 64, 8),
    "MobileNetV1-same": (partial(zoo.MobileNetV1_025, padding="same"), 64, 8),
    "MobileNetV1-even": (partial(zoo.MobileNetV1_025, padding="even"), 64, 8),
    "MobileNetV2": (zoo.MobileNetV2_035, 64, 8),
    "MobileNetV3Small": (zoo.MobileNetV3Small, 64, 8),
    "GoogLeNet": (zoo.GoogLeNet, 64, 8),
    "InceptionV3": (zoo.InceptionV3, 107, 8),
    "InceptionV3-same": (partial(zoo.InceptionV3, padding="same"), 107, 16),
    "InceptionV4": (zoo.InceptionV4, 107, 8),
    "InceptionResNetV2": (zoo.InceptionResNetV2, 107, 8),
    "NASNetA": (ThinNASNet, 69, 8),
    "NASNetA-zero": (partial(ThinNASNet, padding="zero"), 69, 8),
    "GhostNet_050": (zoo.GhostNet_050, 64, 8),
    "Xception": (zoo.Xception, 69, 8),
    "Xception-same": (partial(zoo.Xception, padding="same"), 69, 8),
    "EfficientNet": (ThinEfficientNet, 64, 8),
    "EfficientNet-same": (partial(ThinEfficientNet, padding="same"), 64, 16),
    "MobileNetV4": (zoo.MobileNetV4_Conv_Small_035, 64, 8),
    "EfficientNetV2": (ThinEfficientNetV2, 64, 8),
    "EfficientNetV2-same": (partial(ThinEfficientNetV2, padding="same"), 64, 16),
    "Res2Net": (ThinRes2Net, 64, 8),
    "ResNet50V2": (zoo.ResNet50V2, 64, 8),  # not BiT: its norms see all pixels, so more pixels make other norms
    "ResNet50V2-2": (zoo.ResNet50V2, 64, 2),
    "RegNet": (ThinRegNet, 64, 4),
    "MNASNet0_5": (zoo.MNASNet0_5, 64, 8),
    "ConvNeXt": (ThinConvNeXt, 64, 8),
    "ConvNeXtV2": (ThinConvNeXtV2, 64, 8),
    "PoolFormer": (ThinPoolFormer, 64, 8),
    "ConvFormer": (ThinConvFormer, 64, 8),
}


def maps(network: Model, side: int) -> Tensor:
    """The last map of images, with every gate open: gates see means, which no dilation keeps."""
    for name, layer in list(network.named_modules()):
        if type(layer).__name__ in ("SqueezeExcitation", "ResponseNorm", "GroupNorm"):
            network.set_submodule(name, nn.Identity())
    x = torch.randn(1, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return network.double().forward_body(x)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_nth_pixel_of_a_dilated_map_is_the_old_map(subject: str) -> None:
    make, side, output_stride = SUBJECTS[subject]
    network = alive(make)
    old = maps(network, side)
    own = features(network, "body").strides["body"]
    assert own is not None
    dilate(network, output_stride)
    new = maps(network, side)
    step = own // output_stride
    assert step > 1
    assert old.shape[2] > 1
    assert new.shape[2] > (old.shape[2] - 1) * step
    torch.testing.assert_close(new[:, :, ::step, ::step], old, rtol=1e-9, atol=1e-9)


ALONE = (zoo.VGG11, zoo.ResNet18, zoo.AlexNet, zoo.InceptionV3, zoo.InceptionV4, zoo.InceptionResNetV2, zoo.Xception,
         zoo.EfficientNetV2_B0, zoo.ResNet50V2, zoo.ResNetV2_50x1_BiT, zoo.Res2Net50_14w_8s,
         zoo.PoolFormer_S12, zoo.PoolFormerV2_S12, zoo.ConvFormer_S18, zoo.CAFormer_S18)  # fmt: skip
TOKENS = {cls.family() for cls in CATALOGUE.values() if cls.fixed_size}
UNDILATED = {zoo.Swin, zoo.SwinV2, zoo.MaxViT, zoo.ConvMixer, *TOKENS}
"""Families whose windows no dilation spreads, of tokens, and one whose only stride is that of its patches."""
LIGHT = [
    cls
    for cls in CATALOGUE.values()
    if (cls.params < 6_000_000 or cls in ALONE or cls is zoo.DenseNet121 or cls is zoo.GoogLeNet) and cls.family() not in UNDILATED
]


def test_the_light_ones_are_of_every_family() -> None:
    assert {cls.family() for cls in LIGHT} == {cls.family() for cls in CATALOGUE.values()} - UNDILATED


@pytest.mark.parametrize(
    ("cls", "attention"), [(zoo.Swin_T, "features.7.0.attn"), (zoo.MaxViT_T, "blocks.3.layers.0.layers.window_attention")]
)
def test_a_network_of_windows_says_that_it_can_not_be_dilated(cls: type[Model], attention: str) -> None:
    with pytest.raises(ValueError, match=f"^{cls.__name__} can't have output_stride=16: {attention} can't be looked into"):
        dilate(on_meta(cls), 16)


LIGHTEST = {cls.family(): cls for cls in sorted(LIGHT, key=lambda cls: -cls.params)}.values()


@pytest.mark.parametrize(
    "cls", [cls if cls in LIGHTEST else pytest.param(cls, marks=pytest.mark.long) for cls in LIGHT], ids=[cls.__name__ for cls in LIGHT]
)
def test_every_family_can_have_it_and_keeps_parameters_and_fields(cls: type[Model]) -> None:
    network = on_meta(cls)
    before = features(network, "body").taps["body"]
    assert before.stride is not None
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    parameters = {name: id(parameter) for name, parameter in network.named_parameters()}
    wanted = min(8, before.stride // 2)
    dilate(network, wanted)
    after = features(network, "body").taps["body"]
    assert after == type(after)("body", "body", before.channels, wanted, before.receptive_field)
    assert {name: tensor.shape for name, tensor in network.state_dict().items()} == shapes
    assert {name: id(parameter) for name, parameter in network.named_parameters()} == parameters
    side = 128
    got = network.forward_body(torch.empty(1, 3, side, side, device="meta"))
    assert side / wanted - 5 * before.stride / wanted <= got.shape[2] <= side / wanted
    assert network.forward_head(got).shape == (1, network.num_classes)


@pytest.mark.parametrize(("output_stride", "replaced"), [(16, [False, False, True]), (8, [False, True, True])])
@pytest.mark.parametrize("name", ["resnet50", "resnext50_32x4d"])
def test_resnets_are_torchvisions_to_the_bit(name: str, output_stride: int, replaced: list[bool]) -> None:
    ours = alive({"resnet50": zoo.ResNet50, "resnext50_32x4d": zoo.ResNeXt50_32x4d}[name])
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)(replace_stride_with_dilation=replaced).eval()
    theirs.load_state_dict(ours.state_dict(), assign=True)
    dilate(ours, output_stride)
    x = torch.randn(1, 3, 70, 64)
    with torch.inference_mode():
        assert torch.equal(ours(x), theirs(x))


def test_mobilenet_v3_is_torchvisions_but_for_the_layer_that_loses_its_stride() -> None:
    """Theirs dilates that layer too, which shifts what it sees against the weights' training; ours keeps the dilation so far."""
    ours = alive(zoo.MobileNetV3Large)
    theirs = torchvision.models.mobilenet_v3_large(dilated=True).eval()
    theirs.load_state_dict(ours.state_dict())
    dilate(ours, 16)
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(ours.features[:13](x), theirs.features[:13](x))
        assert not torch.equal(ours.forward_body(x), theirs.features(x))
        depthwise: Any = theirs.features[13].block[1][0]  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
        assert (depthwise.dilation, depthwise.padding) == ((2, 2), (4, 4))
        depthwise.dilation, depthwise.padding = (1, 1), (2, 2)
        assert torch.equal(ours(x), theirs(x))


def test_trained_takes_it_and_forgets_the_metrics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(zoo.ResNet18().state_dict(), tmp_path / "w.safetensors")
    network = trained(zoo.ResNet18, tmp_path / "w.safetensors", output_stride=8)
    assert not network.training
    assert not any(layer.training for layer in network.modules())
    assert network.forward_body(torch.randn(1, 3, 64, 64)).shape == (1, 512, 8, 8)
    small = trained(zoo.ResNet20, output_stride=2)
    assert small.checkpoint is not None
    assert (dict(small.checkpoint.metrics), small.checkpoint.metrics_data) == ({}, None)
    same = trained(zoo.ResNet20, output_stride=4)
    assert same.checkpoint is not None
    assert same.checkpoint.metrics["top1"] > 80


def test_features_and_pyramid_leave_the_model_as_it_is() -> None:
    network = alive(zoo.ResNet18)
    shown = repr(network)
    for taken in (features(network, "body", output_stride=8), pyramid(network, 8), body(network, 8)):
        assert len(list(taken.parameters())) == 60
        assert {id(p) for p in taken.parameters()} <= {id(p) for p in network.parameters()}
    assert repr(network) == shown
    levels = pyramid(network, output_stride=16)
    assert levels.strides == {"C2": 4, "C3": 8, "C4": 16, "C5": 16}
    assert levels(torch.randn(1, 3, 64, 64))["C5"].shape == (1, 512, 4, 4)
    assert features(network, "stride/8", output_stride=8).taps["stride/8"].module == "layer4"


def test_what_stays_is_the_same_object() -> None:
    network = alive(zoo.ResNet18)
    early, late = network.layer2[0].conv1, network.layer4[0].conv1
    dilate(network, 16)
    assert network.layer2[0].conv1 is early
    assert network.layer4[0].conv1 is not late
    assert network.layer4[0].conv1.weight is late.weight


def test_a_dilated_network_trains() -> None:
    network = alive(zoo.MobileNetV1_025).train()
    dilate(network, 8)
    network(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("wrong", [0, 3, -8, True, 8.0, "8"])
def test_an_output_stride_is_a_power_of_two(wrong: Any) -> None:
    with pytest.raises(ValueError, match="output_stride is a power of two, 8 or 16, got"):
        dilate(on_meta(zoo.ResNet18), wrong)


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="output_stride=8 is more than there is: the last map of ResNet20 has stride 4 already"):
        trained(zoo.ResNet20, output_stride=8)
    with pytest.raises(ValueError, match="the last map of SqueezeNet1_1 has stride 16 already"):
        features(on_meta(zoo.SqueezeNet1_1), "body", output_stride=32)


def test_a_stride_inside_a_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"AlexNet can't have output_stride=2: the stride of features\.0 leads from 1 to 4"):
        dilate(on_meta(zoo.AlexNet), 2)
