"""Rows of the checkpoints that pytorchcv publishes, from the tables of its installed package; `recipes/registry_rows.py` writes them.

`model_metainfos.csv` has the SHA-1, release and image size of each file, and the package's description its errors. Both are read where
pytorchcv is installed; nothing of it is imported. A file is a pickle in a zip of its own.
"""

from __future__ import annotations

import csv
import importlib.metadata
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Options = dict[str, Any]

STRIDE: Options = {"stride_on": "1x1"}
TF: Options = {"padding": "same", "norm_eps": 0.001}
SAME: Options = {"padding": "same"}
RELEASES = "https://github.com/osmr/imgclsmob/releases/download"
DATA = "ImageNet-1k validation"

FILES: dict[str, dict[str, Options]] = {
    "AlexNet": {"alexnetb": {}},
    **{f"VGG{depth}": {f"vgg{depth}": {}} for depth in (11, 13, 16, 19)},
    **{f"VGG{depth}_BN": {f"bn_vgg{depth}b": {}, f"bn_vgg{depth}": {"bias": False}} for depth in (11, 13, 16, 19)},
    **{f"ResNet{depth}": {f"resnet{depth}": {}} for depth in (18, 34)},
    "ResNet26": {"resnetbc26b": {}},
    **{f"ResNet{depth}": {f"resnet{depth}b": {}, f"resnet{depth}": STRIDE} for depth in (50, 101, 152)},
    **{f"ResNeXt{name}": {f"resnext{name}": {}} for name in ("50_32x4d", "101_32x4d", "101_64x4d")},
    "SEResNet18": {"seresnet18": {}},
    **{f"SEResNet{depth}": {f"seresnet{depth}b": {}, f"seresnet{depth}": STRIDE} for depth in (50, 101)},
    "SEResNet152": {"seresnet152": STRIDE},
    **{f"SEResNeXt{name}": {f"seresnext{name}": {}} for name in ("50_32x4d", "101_32x4d", "101_64x4d")},
    **{f"DenseNet{depth}": {f"densenet{depth}": {}} for depth in (121, 161, 169, 201)},
    **{f"SqueezeNet1_{minor}": {f"squeezenet_v1_{minor}": {}} for minor in (0, 1)},
    **{
        f"MobileNetV1{ours}": {f"mobilenet_{theirs}": {}}
        for ours, theirs in (("", "w1"), ("_075", "w3d4"), ("_050", "wd2"), ("_025", "wd4"))
    },
    "MobileNetV2": {"mobilenetv2b_w1": {}},
    "MobileNetV3Large": {"mobilenetv3_large_w1": {"norm_eps": 1e-05}},
    "Xception": {"xception": {}},
    "InceptionV3": {"inceptionv3": {}},
    "InceptionV4": {"inceptionv4": {}},
    "InceptionResNetV2": {"inceptionresnetv2": {}},
    "SENet154": {"senet154": {}},
    **{
        f"EfficientNetB{size}": ({f"efficientnet_b{size}": {}} if size < 2 else {})
        | {f"efficientnet_b{size}{kind}": TF if size < 5 else SAME for kind in "bc"}
        for size in range(8)
    },
}
"""Our networks, pytorchcv's names of them, and the options that each needs. Tests compare tensors and outputs of all of them."""

LEFT_OUT: dict[str, str] = {
    r"alexnet": "another AlexNet: the paper's, with local response normalisation and 62.4 M parameters",
    r"wrn50_2": "has biases where our WideResNet has BatchNorms",
    r"mobilenetb_.*": "has no BatchNorm between its depthwise and pointwise convolutions",
    r"mobilenetv2_.*": "its first block widens, and ours does not",
    r"mobilenetv2b_.*": "rounds the widths of its layers otherwise than the paper, and so ours",
    r"squeezeresnet_.*": "has shortcuts that our SqueezeNet has not",
    r"mobilenetv3_small_.*": "another MobileNetV3Small: 1280 hidden channels",
    r"(se)?preresnet.*": "a network that is not here: our ResNetV2s are Keras's and BiT's",
    r"nasnet_.*|shufflenetv2b?_.*|mnasnet_.*|regnet[xy].*": ("convert's naming of pytorchcv's layers does not know this network"),
}
"""Files of networks that we have, or nearly have, by patterns of their names, each with the reason why it has no row."""
UNKNOWN = "a network that is not here"


@dataclass(frozen=True)
class File:
    """A checkpoint that pytorchcv publishes.

    Attributes:
        name: of the network.
        sha1: of the pickle, 40 hex digits.
        release: whose asset it is.
        stem: of the file's name.
        side: of the images that it was measured with, in pixels.
        scale: of the resized image that is cropped.
        unusual: whether it wants another preprocessing than all the others, as an asterisk says.
    """

    name: str
    sha1: str
    release: str
    stem: str
    side: int
    scale: float
    unusual: bool


@cache
def files() -> dict[str, File]:
    """List the files of networks for ImageNet-1k by the names of their networks."""
    path = importlib.metadata.distribution("pytorchcv").locate_file("pytorchcv/models/common/model_metainfos.csv")
    found: dict[str, File] = {}
    with Path(str(path)).open(encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            if row["test_dataset"] == "in1k" and re.fullmatch(r"[0-9a-f]{40}", row["checksum"]):
                name, sha1 = row["model_name"], row["checksum"]
                known = row["img_size"] != "NA"
                side, scale = (int(row["img_size"]), float(row["img_scale"])) if known else (224, 0.875)
                stem = f"{name}-{row['error_value']}-{sha1[:8]}"
                found[name] = File(name, sha1, row["repo_release_tag"], stem, side, scale, row["remark"].endswith("*"))
    return found


@cache
def errors() -> dict[str, tuple[float, float]]:
    """Read top-1 and top-5 errors in percent by the stem of the file's name, from the table that the package's description has."""
    text = importlib.metadata.distribution("pytorchcv").read_text("METADATA") or ""
    rows = re.findall(r"^\|[^|]*\|\s*([\d.]+)\s*\|\s*([\d.]+)\s*\|.*?/releases/download/[^/]+/([\w.-]+)\.pth\.log", text, re.MULTILINE)
    return {stem: (float(top1), float(top5)) for top1, top5, stem in rows}


def rows(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Make the rows of a network of ours: pytorchcv's name of it, and the row's keys."""
    for name, options in FILES.get(model, {}).items():
        if (file := files().get(name)) is not None:
            yield name, _row(file, options)


def left_out() -> dict[str, str]:
    """List the files that have no row, by their names, each with the reason."""
    taken = {name for known in FILES.values() for name in known}
    return {f"{file.stem}.pth": _reason(name) for name, file in files().items() if name not in taken}


def _reason(name: str) -> str:
    return next((reason for pattern, reason in LEFT_OUT.items() if re.fullmatch(pattern, name)), UNKNOWN)


def _row(file: File, options: Options) -> dict[str, Any]:
    pickle = f"{file.stem}.pth"
    table: dict[str, Any] = {
        "sources": [f"{RELEASES}/{file.release}/{pickle}.zip#{pickle}"], "format": "pytorch", "names": "pytorchcv",
        "digest": f"sha1:{file.sha1}", "num_classes": 1000, "labels": "imagenet1k",
    }  # fmt: skip
    error = errors().get(file.stem)
    if error is not None and not file.unusual:
        table |= {"metrics": {"top1": round(100 - error[0], 2), "top5": round(100 - error[1], 2)}, "metrics_data": DATA}
    table["license"] = "unstated"
    steps: dict[str, Any] = {"resize": math.ceil(file.side / file.scale), "crop": file.side}
    if file.unusual:
        table["preprocessing"] = steps | {"interpolation": "bicubic", "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
        told = "mean, std and interpolation: of timm's checkpoint that it was ported from, pytorchcv says only that they are unusual"
    else:
        table["preprocessing"] = steps | {"interpolation": "bilinear", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
        told = "metrics: 100 - the errors of its description"
    if options:
        table["options"] = options
    version = importlib.metadata.version("pytorchcv")
    table["provenance"] = f"pytorchcv {version}: model_metainfos.csv; {told}; it states no licence per file, the package's own is MIT"
    return table
