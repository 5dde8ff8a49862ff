"""Ours, to a file of every framework that we write, and back, bit for bit; recipes/all_roundtrips.py does it for all 59 variants."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import randomised
from roundtrips import COMBINATIONS, built, differences, written

from convert.formats import formats, read
from convert.network import layers
from convert.source import Convention
from weights import ConvertError
from zoo.conversion.export import write_network
from zoo.networks.metaformer import CAFormer, PoolFormer
from zoo.networks.model import Model
from zoo.networks.resnet import CIFARResNet

# the smallest of each family, and of each way in which two families differ
NETWORKS = (
    "ResNet18", "SEResNet18", "ResNet20", "SqueezeNet1_0", "SqueezeNet1_1", "DenseNet121", "DenseNet_BC_100_12",
    "MobileNetV1_025", "MobileNetV2_035", "MobileNetV3Small", "GoogLeNet", "InceptionV3", "Xception", "EfficientNetB0",
    "RegNetY_400MF", "MNASNet0_5", "ConvNeXt_Atto", "ConvNeXtV2_Atto",
)  # fmt: skip
HOMELESS = {"ConvNeXt_Atto": ("darknet", "theano"), "ConvNeXtV2_Atto": ("darknet", "theano", "keras")}
"""Formats whose frameworks have not all of a network's layers."""
CASES = [(format, convention) for format, (_, conventions) in COMBINATIONS.items() for convention in conventions]


def test_every_writable_format_is_tried() -> None:
    """But TFLite, into which BatchNorms are folded, so that other numbers come back: tests of its writer compare what is computed."""
    assert COMBINATIONS.keys() == {name for name, module in formats().items() if module.WRITES} - {"tflite"}


SLOW = (
    *("ResNet18", "SqueezeNet1_0", "MobileNetV2_035", "DenseNet121", "DenseNet_BC_100_12"),
    *("InceptionV3", "Xception", "GoogLeNet", "EfficientNetB0", "RegNetY_400MF", "MNASNet0_5", "ConvNeXtV2_Atto"),
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in NETWORKS])
def test_every_bit_comes_home(name: str, tmp_path: Path) -> None:
    network = built(name)
    cases = [(format, convention) for format, convention in CASES if format not in HOMELESS.get(name, ())]
    wrong = {(format, convention): differences(network, format, convention, tmp_path) for format, convention in cases}
    if "keras" not in HOMELESS.get(name, ()):
        wrong["keras", "weights"] = differences(network, "keras", "correlation", tmp_path, ".weights.h5")
    assert {case: names for case, names in wrong.items() if names} == {}


class ThinPool(PoolFormer, widths=(8, 16, 24, 32), blocks=(1, 1, 1, 1), stochastic_depth=0.0, input_size=64): ...


class ThinAttention(CAFormer, widths=(8, 16, 32, 64), blocks=(1, 1, 1, 1), stochastic_depth=0.0, input_size=64): ...


@pytest.mark.parametrize(("cls", "unread"), [(ThinPool, {"openvino"}), (ThinAttention, set[str]())])
def test_tensors_that_modules_hold_beside_their_layers_come_home_or_are_refused(cls: type[Model], unread: set[str], tmp_path: Path) -> None:
    """Layer scales and StarReLU's numbers are called as some frameworks call weights of their own."""
    network = cls(num_classes=10)
    network.load_state_dict(randomised(network))
    wrong: dict[tuple[str, Convention], list[str]] = {}
    refused: dict[str, str] = {}
    for format, convention in CASES:
        try:
            wrong[format, convention] = differences(network.eval(), format, convention, tmp_path)
        except ConvertError as error:
            refused[format] = str(error)
    assert {case: names for case, names in wrong.items() if names} == {}
    assert refused.keys() == {"keras", "theano", "darknet"} | unread
    assert "is none of these; write another format" in refused["theano"]


class ResNet8(CIFARResNet, n=1):
    """Small enough to be written ten thousand times."""


def drawn(seed: int) -> ResNet8:
    """Make a network of random bits: huge and tiny numbers, those below the smallest normal one, both zeros; variances are above 0."""
    draw, network = np.random.default_rng(seed), ResNet8()
    for name, value in network.state_dict().items():
        if name.endswith("running_var"):
            value.copy_(torch.from_numpy(draw.uniform(1e-3, 10, value.shape)))
        elif value.is_floating_point():
            bits = draw.integers(0, 2**32, value.shape, np.uint32)
            bits[bits & 0x7F800000 == 0x7F800000] &= 0x807FFFFF  # no infinity, and nothing that is no number
            value.copy_(torch.from_numpy(bits.view(np.float32)))
    return network.eval()


@pytest.mark.parametrize("count", [1, pytest.param(1000, marks=pytest.mark.long)])
def test_random_bits_come_home_from_every_format(count: int, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    wrong = {}
    for seed in range(count):
        network = drawn(seed)
        for format, convention in CASES:
            if lost := differences(network, format, convention, tmp_path):
                wrong[seed, format, convention] = lost
            if seed % 100 == 0:  # and the same network gives the same bytes
                places = [tmp_path / f"{turn}{COMBINATIONS[format][0]}" for turn in range(2)]
                hashes = {hashlib.sha256(written(network, format, convention, place).read_bytes()).hexdigest() for place in places}
                assert len(hashes) == 1, format
    record_property("files", count * len(CASES))
    assert wrong == {}


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
