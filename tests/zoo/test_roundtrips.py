"""Ours, to a file of every framework that we write, and back, bit for bit; recipes/all_roundtrips.py does it for all 59 variants."""

from __future__ import annotations

from pathlib import Path

import pytest
from roundtrips import COMBINATIONS, built, differences

from convert.formats import formats, read
from convert.network import layers
from convert.source import Convention
from zoo.converting import write_network

# the smallest of each family, and of each way in which two families differ
NETWORKS = (
    "ResNet18", "SEResNet18", "ResNet20", "SqueezeNet1_0", "SqueezeNet1_1", "DenseNet121", "DenseNet_BC_100_12",
    "MobileNetV1_025", "MobileNetV2_035", "MobileNetV3Small", "GoogLeNet", "InceptionV3", "Xception", "EfficientNetB0",
)  # fmt: skip
CASES = [(format, convention) for format, (_, conventions) in COMBINATIONS.items() for convention in conventions]


def test_every_writable_format_is_tried() -> None:
    assert COMBINATIONS.keys() == {name for name, module in formats().items() if module.WRITES}


SLOW = ("DenseNet121", "DenseNet_BC_100_12", "InceptionV3", "Xception", "GoogLeNet", "EfficientNetB0")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in NETWORKS])
def test_every_bit_comes_home(name: str, tmp_path: Path) -> None:
    network = built(name)
    wrong = {(format, convention): differences(network, format, convention, tmp_path) for format, convention in CASES}
    wrong["keras", "weights"] = differences(network, "keras", "correlation", tmp_path, ".weights.h5")
    assert {case: names for case, names in wrong.items() if names} == {}


def test_conventions_are_two(tmp_path: Path) -> None:
    """A file of true convolution holds other bytes than one of cross-correlation, and both come home."""
    network, made = built("SqueezeNet1_1"), {}
    conventions: tuple[Convention, ...] = ("correlation", "convolution")
    for convention in conventions:
        path = tmp_path / f"{convention}.npz"
        write_network(network, path, formats()["npz"], "torchvision", convention, {}, layers(network, (3, 224, 224)))
        with read(path) as source:
            assert source.conventions == {convention}
            made[convention] = source.tensors["features.0.weight"].array().copy()
    assert (made["correlation"] == made["convolution"][:, :, ::-1, ::-1]).all()
    assert (made["correlation"] != made["convolution"]).any()
