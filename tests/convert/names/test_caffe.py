"""The names of Caffe's model zoo, against files that have them: whole ones for small networks, files with holes for large ones."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from convert import names
from convert.core import KINDS
from convert.formats import caffe
from convert.names import caffe as naming
from weights import Preprocessing
from zoo.images.preprocess import preprocess
from zoo.networks.model import Model
from zoo.variants import shapes

FAMILIES = ("VGG", "ResNet", "SEResNet", "SEResNeXt", "AlexNet", "SqueezeNet", "DenseNet1", "DenseNet2", "MobileNetV1", "MobileNetV2")
NOBODY = ("ResNet20", "ResNet32", "ResNet44", "ResNet56", "ResNet110", "SEResNet18", "ResNeXt", "SEResNeXt26", "ResNetV2", "ResNetRS")
LATER = re.compile(r"ResNe.*(\d[CDST](_|$)|V2$|AA)")
PUBLISHED = [
    name
    for name in zoo.CATALOGUE
    if name.startswith((*FAMILIES, "GoogLeNet", "InceptionV3")) and not name.startswith(NOBODY) and not LATER.match(name.removeprefix("SE"))
]
NOBODY_PUBLISHED = [name for name in zoo.CATALOGUE if name not in PUBLISHED]

# Layers of the published descriptions with the shapes that follow from them
KNOWN: dict[str, dict[str, tuple[int, ...]]] = {
    "VGG16": {
        "conv1_2": (64, 64, 3, 3),
        "conv3_3": (256, 256, 3, 3),
        "conv5_3": (512, 512, 3, 3),
        "fc6": (4096, 25088),
        "fc8": (1000, 4096),
    },
    "VGG19": {"conv3_4": (256, 256, 3, 3), "conv4_1": (512, 256, 3, 3), "conv5_4": (512, 512, 3, 3)},
    "ResNet50": {
        "conv1": (64, 3, 7, 7),
        "res2a_branch1": (256, 64, 1, 1),
        "res3d_branch2b": (128, 128, 3, 3),
        "bn4f_branch2c": (1024,),
        "res5a_branch1": (2048, 1024, 1, 1),
        "fc1000": (1000, 2048),
        "bn_conv1": (64,),
    },
    "ResNet101": {
        "res3b3_branch2a": (128, 512, 1, 1),
        "res4b22_branch2c": (1024, 256, 1, 1),
        "res2c_branch2a": (64, 256, 1, 1),
        "bn5c_branch2a": (512,),
    },
    "ResNet152": {"res3b7_branch2a": (128, 512, 1, 1), "res4b35_branch2b": (256, 256, 3, 3), "res5b_branch2c": (2048, 512, 1, 1)},
    "SEResNet50": {
        "conv1/7x7_s2": (64, 3, 7, 7),
        "conv2_1_1x1_down": (16, 256, 1, 1),
        "conv3_1_1x1_proj": (512, 256, 1, 1),
        "conv3_1_1x1_up": (512, 32, 1, 1),
        "conv4_6_1x1_increase/bn": (1024,),
        "classifier": (1000, 2048),
    },
    "SEResNeXt50_32x4d": {"conv2_1_3x3": (128, 4, 3, 3), "conv5_3_1x1_increase": (2048, 1024, 1, 1)},
    "SqueezeNet1_0": {
        "conv1": (96, 3, 7, 7),
        "fire2/squeeze1x1": (16, 96, 1, 1),
        "fire9/expand3x3": (256, 64, 3, 3),
        "conv10": (1000, 512, 1, 1),
    },
    "SqueezeNet1_1": {"conv1": (64, 3, 3, 3), "fire4/squeeze1x1": (32, 128, 1, 1)},
    "MobileNetV1": {
        "conv1": (32, 3, 3, 3),
        "conv2_1/dw": (32, 1, 3, 3),
        "conv2_1/sep": (64, 32, 1, 1),
        "conv4_2/sep": (512, 256, 1, 1),
        "conv5_6/sep": (1024, 512, 1, 1),
        "conv6/dw": (1024, 1, 3, 3),
        "conv6/sep/bn": (1024,),
        "fc7": (1000, 1024, 1, 1),
    },
    "MobileNetV2": {
        "conv2_1/dwise": (32, 1, 3, 3),
        "conv2_1/linear": (16, 32, 1, 1),
        "conv2_2/expand": (96, 16, 1, 1),
        "conv3_2/linear": (32, 144, 1, 1),
        "conv4_3/linear": (64, 192, 1, 1),
        "conv4_7/linear": (96, 384, 1, 1),
        "conv5_3/linear": (160, 576, 1, 1),
        "conv6_3/linear/bn": (320,),
        "conv6_4": (1280, 320, 1, 1),
        "fc7": (1000, 1280, 1, 1),
    },
    "DenseNet121": {
        "conv1": (64, 3, 7, 7),
        "conv2_1/x1": (128, 64, 1, 1),
        "conv2_6/x2": (32, 128, 3, 3),
        "conv2_blk": (128, 256, 1, 1),
        "conv4_24/x1/bn": (992,),
        "conv5_16/x2": (32, 128, 3, 3),
        "conv5_blk/bn": (1024,),
        "fc6": (1000, 1024, 1, 1),
    },
    "DenseNet161": {"conv1": (96, 3, 7, 7), "conv2_1/x2": (48, 192, 3, 3), "conv5_24/x1/bn": (2160,), "fc6": (1000, 2208, 1, 1)},
    "GoogLeNet": {
        "conv2/3x3": (192, 64, 3, 3),
        "inception_3a/5x5_reduce": (16, 192, 1, 1),
        "inception_4e/pool_proj": (128, 528, 1, 1),
        "inception_5b/3x3": (384, 192, 3, 3),
        "loss3/classifier": (1000, 1024),
    },
    "InceptionV3": {
        "conv4_3x3_reduce": (80, 64, 1, 1),
        "inception_a1_5x5": (64, 48, 5, 5),
        "inception_a3_3x3_2": (96, 96, 3, 3),
        "reduction_a_3x3_3": (96, 96, 3, 3),
        "inception_b1_1x7": (128, 128, 1, 7),
        "inception_b4_7x1_3": (192, 192, 7, 1),
        "reduction_b_3x3_2": (192, 192, 3, 3),
        "inception_c1_1x3_2": (384, 384, 1, 3),
        "inception_c2_3x1": (384, 384, 3, 1),
        "inception_c2_1x1": (192, 2048, 1, 1),
        "inception_b1_1x1_2_bn": (192,),
        "classifier": (1000, 2048),
    },
}


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def chunk(number: int, *pieces: bytes | int) -> list[bytes | int]:
    """Make a field of bytes, some of which are holes of so many bytes."""
    size = sum(piece if isinstance(piece, int) else len(piece) for piece in pieces)
    return [varint(number << 3 | 2) + varint(size), *pieces]


def blob(shape: tuple[int, ...], value: bytes = b"") -> list[bytes | int]:
    count = int(np.prod(shape))
    return chunk(7, *chunk(5, value or 4 * count), *chunk(7, *chunk(1, b"".join(map(varint, shape)))))


def layer(name: str, kind: str, bottom: str, top: str, *blobs: list[bytes | int]) -> list[bytes | int]:
    head = [piece for number, text in enumerate((name, kind, bottom, top), start=1) for piece in chunk(number, text.encode())]
    return chunk(100, *head, *(piece for each in blobs for piece in each))


@cache
def table() -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of all networks, which `test_catalogue` holds the networks to: building them takes ten seconds."""
    return shapes(list(zoo.CATALOGUE))


def shapes_of(cls: type[Model]) -> dict[str, tuple[int, ...]]:
    return table()[cls.__name__]


def published(cls: type[Model], path: Path) -> None:
    """Write a file of the published names with our shapes, BatchNorm and Scale apart, as Caffe saves it."""
    known = shapes_of(cls)
    pieces: list[bytes | int] = []
    for row in names.rows("caffe", cls, known):
        if row.kind == "norm":
            vector = known[f"{row.ours}.running_mean"]
            one = np.ones(1, "<f4").tobytes()
            pieces += layer(row.theirs, "BatchNorm", row.theirs, row.theirs, blob(vector), blob(vector), blob((1,), one))
            pieces += layer(row.theirs + "/scale", "Scale", row.theirs, row.theirs, blob(vector), blob(vector))
            continue
        weight = known[f"{row.ours}.weight"]
        kind = "InnerProduct" if row.kind == "linear" else "Convolution"
        raw = (*weight, 1, 1) if row.kind == "linear_from_conv" else weight
        biases = [blob(weight[:1])] if f"{row.ours}.bias" in known else []
        pieces += layer(row.theirs, kind, "x", row.theirs, blob(raw), *biases)
    with path.open("wb") as file:
        for piece in pieces:
            if isinstance(piece, int):
                file.seek(piece, 1)
            else:
                file.write(piece)
        file.truncate()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_module_of_a_published_network_has_its_row(tmp_path: Path, name: str) -> None:
    cls = zoo.CATALOGUE[name]
    path = tmp_path / "net.caffemodel"
    published(cls, path)
    source = caffe.read(path)
    known = shapes_of(cls)
    carried, report, _ = names.carry("caffe", source.tensors, names.rows("caffe", cls, known), known)
    assert report.ok, report
    assert {tensor: stored.shape for tensor, stored in carried.items()} == {
        tensor: shape for tensor, shape in known.items() if not tensor.endswith("num_batches_tracked")
    }


def test_networks_that_nobody_published_have_no_names() -> None:
    assert NOBODY_PUBLISHED
    assert not [name for name in NOBODY_PUBLISHED if names.rows("caffe", zoo.CATALOGUE[name], shapes_of(zoo.CATALOGUE[name]))]


@pytest.mark.parametrize("name", KNOWN)
def test_known_layers_have_the_shapes_that_their_descriptions_say(name: str) -> None:
    cls = zoo.CATALOGUE[name]
    known = shapes_of(cls)
    rows = {row.theirs: row for row in names.rows("caffe", cls, known)}
    for theirs, shape in KNOWN[name].items():
        row = rows[theirs]
        ours = known[f"{row.ours}.weight"]
        assert (ours if len(ours) == len(shape) else (*ours, 1, 1)) == shape
        assert (len(ours) == len(shape)) or row.kind == "linear_from_conv"
        assert row.kind in KINDS


def test_googlenet_differs_in_its_kernels_and_has_no_batchnorm() -> None:
    rows = {row.theirs: row for row in names.rows("caffe", zoo.GoogLeNet, shapes_of(zoo.GoogLeNet))}
    assert rows["inception_3a/5x5"].ours == "inception3a.branch3.1.conv"  # 5x5 there, 3x3 here: the shapes will not fit
    assert rows["inception_3a/5x5"].adds == ("bias",)
    assert rows["inception_3a/5x5/bn"].lacks == ("weight", "bias", "running_mean", "running_var")


def test_the_compressed_file_is_named_like_the_trained_one() -> None:
    mended = [naming.mend(name) for name in ("fire2/conv1x1_1.weight", "fire2/conv1x1_2.bias", "fire9/conv3x3_2.weight", "conv_final.bias")]
    assert mended == ["fire2/squeeze1x1.weight", "fire2/expand1x1.bias", "fire9/expand3x3.weight", "conv10.bias"]
    assert naming.mend("conv1.weight") == "conv1.weight"


def test_options_are_keywords_of_the_constructor() -> None:
    told = {name: names.fact("caffe", "options", cls) for name, cls in zoo.CATALOGUE.items()}
    strided = ("ResNet50", "ResNet101", "ResNet152", "SEResNet50", "SEResNet101", "SEResNet152", "WideResNet50_2", "WideResNet101_2")
    assert {name for name, options in told.items() if options.get("stride_on") == "1x1"} == {*strided}
    families = zoo.ResNet50.family() | zoo.DenseNet121.family()  # Caffe keeps a partial last window
    pooled = {name for name, cls in zoo.CATALOGUE.items() if issubclass(cls, families)} - {"DenseNet_BC_100_12"}
    assert {name for name, options in told.items() if options.get("ceil_mode", False)} == pooled
    each = {(zoo.CATALOGUE[name].family(), *options.items()): name for name, options in told.items() if options}
    assert each
    with torch.device("meta"):
        for name in each.values():  # a family's constructor is one
            zoo.CATALOGUE[name](**told[name])


@pytest.mark.parametrize(
    ("name", "mean", "scale"),
    [
        ("ResNet50", (104, 117, 123), 1),
        ("SqueezeNet1_0", (104, 117, 123), 1),
        ("VGG16", (103.939, 116.779, 123.68), 1),
        ("MobileNetV1", (103.94, 116.78, 123.68), 0.017),
    ],
)
def test_images_are_bgr_less_the_mean(name: str, mean: tuple[float, ...], scale: float) -> None:
    facts = names.fact("caffe", "preprocessing", zoo.CATALOGUE[name])
    how = Preprocessing(**facts)
    image = np.random.default_rng(0).integers(0, 256, (how.crop, how.crop, 3), dtype=np.uint8)
    got = preprocess(image, Preprocessing(**{**facts, "resize": None, "crop": None}))
    expected = (image[:, :, ::-1].astype("f8") - mean) * scale
    np.testing.assert_allclose(got[0].numpy().transpose(1, 2, 0), expected, atol=1e-4)
