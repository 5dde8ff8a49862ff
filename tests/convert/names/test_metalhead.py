"""Metalhead's trees against the order in which its code builds them, and the names of its files of 2018."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import zoo
from convert.names import metalhead, metalhead2018

SAME = [
    name
    for name in zoo.CATALOGUE
    if re.match(
        r"(VGG\d|ResNet(18|34|50|101|152)$|ResNeXt\d+_|WideResNet|SEResNet\d+$|SEResNeXt\d+_|MobileNetV[12]|AlexNet|InceptionV3|SqueezeNet1_1)",
        name,
    )
]
OTHER = ["DenseNet121", "GoogLeNet", "Xception", "MobileNetV3Large", "EfficientNetB0", "SqueezeNet1_0", "ResNet20"]


def network(name: str) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    family = getattr(zoo, name)
    with torch.device("meta"):
        return [base.__name__ for base in family.__mro__], {key: tuple(value.shape) for key, value in family().state_dict().items()}


def rows(naming: Any, name: str) -> dict[str, str]:
    return {row.ours: row.theirs for row in naming.rows(*network(name))}


@pytest.mark.parametrize("name", SAME)
def test_every_module_has_a_place_of_its_own(name: str) -> None:
    family, shapes = network(name)
    found = metalhead.rows(family, shapes)
    assert {row.ours for row in found} == {key.rpartition(".")[0] for key in shapes}
    assert len({row.theirs for row in found}) == len(found)
    assert all(re.fullmatch(r"layers\.\d+(\.layers(\.layers)?\.[1-9]\d*)+", row.theirs) for row in found)


@pytest.mark.parametrize("name", OTHER)
def test_networks_that_compute_something_else_there_have_no_rows(name: str) -> None:
    assert rows(metalhead, name) == {}


def test_resnets_blocks_have_the_shortcut_first() -> None:
    found = rows(metalhead, "ResNet50")
    assert found["layer2.0.conv1"] == "layers.1.layers.3.layers.1.layers.2.layers.1"
    assert found["layer2.0.conv3"] == "layers.1.layers.3.layers.1.layers.2.layers.6"  # a ReLU of its own is the fifth
    assert found["layer2.0.downsample.1"] == "layers.1.layers.3.layers.1.layers.1.layers.2"
    assert found["fc"] == "layers.2.layers.3"
    assert rows(metalhead, "ResNet18")["layer1.1.bn2"] == "layers.1.layers.2.layers.2.layers.2.layers.5"


def test_vggs_relus_are_not_counted_there() -> None:
    found = rows(metalhead, "VGG19")
    assert [found[f"features.{index}"].rpartition(".")[2] for index in (0, 2, 5, 7, 10, 34)] == ["1", "2", "4", "5", "7", "20"]
    assert [found[f"classifier.{index}"] for index in (0, 3, 6)] == ["layers.2.layers.2", "layers.2.layers.4", "layers.2.layers.6"]
    normed = rows(metalhead, "VGG11_BN")
    assert [normed[f"features.{index}"].rpartition(".")[2] for index in (0, 1, 4, 5, 8)] == ["1", "2", "4", "5", "7"]


def test_vggs_with_batch_norm_have_no_bias_there() -> None:
    found = metalhead.rows(*network("VGG11_BN"))
    assert {row.lacks for row in found if row.kind == "conv"} == {("bias",)}
    assert {row.lacks for row in found if row.kind != "conv"} == {()}


def test_a_fires_expansions_are_a_parallel() -> None:
    found = rows(metalhead, "SqueezeNet1_1")
    assert found["features.3.squeeze"] == "layers.1.layers.3.layers.1"
    assert found["features.3.expand3x3"] == "layers.1.layers.3.layers.2.layers.2"
    assert found["classifier.1"] == "layers.2.layers.2"


def test_inceptions_branches_are_in_torchvisions_order() -> None:
    found = rows(metalhead, "InceptionV3")
    assert found["Conv2d_3b_1x1.conv"] == "layers.1.layers.8"
    assert found["Mixed_5b.branch_pool.bn"] == "layers.1.layers.13.layers.4.layers.3"
    assert found["Mixed_6b.branch7x7dbl_5.conv"] == "layers.1.layers.17.layers.3.layers.9"
    assert found["Mixed_7c.branch3x3dbl_3b.bn"] == "layers.1.layers.23.layers.3.layers.2.layers.2.layers.2"


def test_shortcuts_of_mobile_networks_move_the_chain() -> None:
    found = rows(metalhead, "MobileNetV2")
    assert found["features.2.conv.0.0"] == "layers.1.layers.4.layers.1.layers.1"
    assert found["features.3.conv.0.0"] == "layers.1.layers.4.layers.2.layers.2.layers.1"
    assert found["features.18.0"] == "layers.1.layers.10"


def test_a_list_goes_through_the_shortcut_before_the_branch() -> None:
    found = metalhead.order(*network("ResNet18"))
    assert found[:2] == ["conv1", "bn1"]
    first = found.index("layer2.0.downsample.0")
    assert found[first : first + 4] == ["layer2.0.downsample.0", "layer2.0.downsample.1", "layer2.0.conv1", "layer2.0.bn1"]
    assert found[-1] == "fc"
    assert metalhead.order(*network("VGG11"))[-3:] == ["classifier.0", "classifier.3", "classifier.6"]


def test_the_struct_around_a_model_is_left_out() -> None:
    assert metalhead.mend("layers.layers.1.layers.2.weight") == "layers.1.layers.2.weight"
    assert metalhead.mend("layers.1.layers.layers.2.weight") == "layers.1.layers.layers.2.weight"


def test_the_files_of_2018_have_caffes_names() -> None:
    vgg = rows(metalhead2018, "VGG19")
    assert vgg["features.0"] == "conv1_1"
    assert vgg["features.34"] == "conv5_4"
    assert vgg["classifier.0"] == "fc6"
    resnet = rows(metalhead2018, "ResNet50")
    assert resnet["bn1"] == "res_conv1_bn"
    assert resnet["layer4.2.conv3"] == "res5_2_branch2c"
    assert resnet["fc"] == "pred"
    assert resnet["layer1.0.downsample.1"] == "res2_0_branch1_bn"
    dense = rows(metalhead2018, "DenseNet121")
    assert dense["features.denseblock2.denselayer3.norm2"] == "conv3_3/x2/bn"
    assert dense["features.norm5"] == "conv5_blk/bn"
    assert rows(metalhead2018, "SqueezeNet1_1")["features.12.expand3x3"] == "fire9/expand3x3"
    assert metalhead2018.mend("gpu_0/conv1.weight") == "conv1.weight"
    assert rows(metalhead2018, "InceptionV3") == {}


@pytest.mark.parametrize("name", ["VGG19", "ResNet50", "SqueezeNet1_0", "DenseNet121"])
def test_every_module_of_2018_has_a_name_of_its_own(name: str) -> None:
    family, shapes = network(name)
    found = metalhead2018.rows(family, shapes)
    assert {row.ours for row in found} == {key.rpartition(".")[0] for key in shapes}
    assert len({row.theirs for row in found}) == len(found)
