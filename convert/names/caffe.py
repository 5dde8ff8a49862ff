"""The names of Caffe's model zoo: Oxford's VGG, MSRA's ResNets, SqueezeNet, GoogLeNet, and what others trained in their manner.

A BatchNorm here is Caffe's BatchNorm with its Scale, under the BatchNorm's name.

Source: the .prototxt of KaimingHe/deep-residual-networks, forresti/SqueezeNet, songhan/SqueezeNet-Deep-Compression,
shicai/MobileNet-Caffe, shicai/DenseNet-Caffe, hujie-frank/SENet, soeaver/caffe-model, BVLC/caffe (models), and Simonyan's VGG.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convert.core import Row, Shape, modules
from convert.names._stages import plain_resnet, stages

FORMATS = ("caffe", "deepcompression")
BY_NAME = ("npz",)
IGNORED = ("loss1/", "loss2/")
"""GoogLeNet's two auxiliary heads, which only training needs and files carry along."""

# Blocks of each stage, MobileNet's as its authors number them: conv2_1 is the first
V1_BLOCKS = (2, 2, 2, 6, 1)
V2_BLOCKS = (2, 2, 7, 3, 3)
# The sides of a Mixed module of ours, as the three grids name them
GRIDS = {
    "a": {
        "1x1": "1x1", "5x5_1": "5x5_reduce", "5x5_2": "5x5", "3x3dbl_1": "3x3_reduce", "3x3dbl_2": "3x3_1", "3x3dbl_3": "3x3_2",
        "_pool": "pool_proj",
    },
    "b": {
        "1x1": "1x1_2", "7x7_1": "1x7_reduce", "7x7_2": "1x7", "7x7_3": "7x1", "7x7dbl_1": "7x1_reduce", "7x7dbl_2": "7x1_2",
        "7x7dbl_3": "1x7_2", "7x7dbl_4": "7x1_3", "7x7dbl_5": "1x7_3", "_pool": "1x1",
    },
    "c": {
        "1x1": "1x1_2", "3x3_1": "1x3_reduce", "3x3_2a": "1x3", "3x3_2b": "3x1", "3x3dbl_1": "3x3_reduce", "3x3dbl_2": "3x3",
        "3x3dbl_3a": "1x3_2", "3x3dbl_3b": "3x1_2", "_pool": "1x1",
    },
    "reduction_a": {
        "3x3": "3x3", "3x3dbl_1": "3x3_2_reduce", "3x3dbl_2": "3x3_2", "3x3dbl_3": "3x3_3",
    },
    "reduction_b": {
        "3x3_1": "3x3_reduce", "3x3_2": "3x3", "7x7x3_1": "1x7_reduce", "7x7x3_2": "1x7", "7x7x3_3": "7x1", "7x7x3_4": "3x3_2",
    },
}  # fmt: skip
MIXED = {
    **{f"Mixed_5{letter}": (f"inception_a{number}_", "a") for number, letter in enumerate("bcd", start=1)},
    "Mixed_6a": ("reduction_a_", "reduction_a"),
    **{f"Mixed_6{letter}": (f"inception_b{number}_", "b") for number, letter in enumerate("bcde", start=1)},
    "Mixed_7a": ("reduction_b_", "reduction_b"),
    **{f"Mixed_7{letter}": (f"inception_c{number}_", "c") for number, letter in enumerate("bc", start=1)},
}
INCEPTION_STEM = {
    "Conv2d_1a_3x3": "conv1_3x3_s2",
    "Conv2d_2a_3x3": "conv2_3x3_s1",
    "Conv2d_2b_3x3": "conv3_3x3_s1",
    "Conv2d_3b_1x1": "conv4_3x3_reduce",
    "Conv2d_4a_3x3": "conv4_3x3",
}
GOOGLENET = {
    "conv1": "conv1/7x7_s2",
    "conv2": "conv2/3x3_reduce",
    "conv3": "conv2/3x3",
    "branch1": "1x1",
    "branch2.0": "3x3_reduce",
    "branch2.1": "3x3",
    "branch3.0": "5x5_reduce",
    "branch3.1": "5x5",
    "branch4.1": "pool_proj",
    "fc": "loss3/classifier",
}
ALEXNET = {
    **{f"features.{index}": f"conv{number}" for number, index in enumerate((0, 3, 6, 8, 10), start=1)},
    **{"classifier.1": "fc6", "classifier.4": "fc7", "classifier.6": "fc8"},
}
"""The published ones have other widths and two groups, which the shapes will show."""
DENSE = {"classifier.0": "fc6", "classifier.3": "fc7", "classifier.6": "fc8"}
COMPRESSED = {"conv1x1_1": "squeeze1x1", "conv1x1_2": "expand1x1", "conv3x3_2": "expand3x3"}
LATER = re.compile(r"ResNe(t|Xt)(RS|AA|\d+[CDST])|^(ECA|Legacy_)")
"""Names of ResNets that came after these files, and compute something else."""
NORMS = ("weight", "bias", "running_mean", "running_var")

# mean of ImageNet's photographs in BGR on 0..255, as most authors and as shicai subtract it
MEAN = (104.0, 117.0, 123.0)
OXFORD = (103.939, 116.779, 123.68)
SHICAI = (103.94, 116.78, 123.68)


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; `family` is the class's name and its bases'. Networks that no one published have none."""
    name = next((name for name in FAMILIES if name in family), None)
    if name is None:
        return []
    found = modules(ours)
    theirs = FAMILIES[name](family, found)
    return [_row(name, theirs[module], module, kind) for module, kind in found.items() if module in theirs]


def mend(name: str) -> str:
    """Write the names of SqueezeNet's compressed file, fire2/conv1x1_1 and conv_final, as those of the trained one."""
    name = re.sub(r"(?<=/)(conv1x1_[12]|conv3x3_2)(?=\.)", lambda match: COMPRESSED[match[0]], name)
    return re.sub(r"^conv_final(?=\.)", "conv10", name)


def options(family: Sequence[str]) -> dict[str, Any]:
    """List the constructor keywords with which ours computes what these networks do."""
    if "DenseNet" in family and "CIFARDenseNet" not in family:
        return {"ceil_mode": True}
    if "ResNet" not in family:
        return {}
    return {"ceil_mode": True} | ({"stride_on": "1x1"} if _bottlenecks(family) and "ResNeXt" not in family[0] else {})


def preprocessing(family: Sequence[str]) -> dict[str, Any]:
    """Tell how their images are prepared: BGR on 0..255 less the mean, which is a deviation of 1/255 on 0..1."""
    mean, scale, crop = MEAN, 1.0, 224
    if "VGG" in family:
        mean = OXFORD
    elif "MobileNetV1" in family or "MobileNetV2" in family or "DenseNet" in family:
        mean, scale = SHICAI, 0.017
    elif "SqueezeNet" in family or "AlexNet" in family:
        crop = 227
    elif not any(name in family for name in ("ResNet", "GoogLeNet")):
        return {}
    return {
        "resize": 256,
        "crop": crop,
        "interpolation": "bilinear",
        "mean": tuple(value / 255 for value in mean),
        "std": (1 / (255 * scale),) * 3,
        "channel_order": "bgr",
    }


def _row(family: str, theirs: str, ours: str, kind: str) -> Row:
    if family == "GoogLeNet" and kind == "norm":
        return Row(theirs, ours, kind, lacks=NORMS)
    if family == "GoogLeNet" and kind == "conv":
        return Row(theirs, ours, kind, adds=("bias",))
    if kind == "linear" and family in ("MobileNetV1", "MobileNetV2", "DenseNet"):  # 1x1 convolutions there
        return Row(theirs, ours, "linear_from_conv")
    return Row(theirs, ours, kind)


def vgg(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    """Name VGG's layers: conv1_1 to fc8."""
    del family
    norms = {"conv": "", "norm": "/bn"}
    return DENSE | {module: f"conv{stage}_{place}{norms[found[module]]}" for module, (stage, place) in stages(found).items()}


def _resnet(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    if family[0].startswith(("ResNeXt", "Wide")) or LATER.search(family[0]) or not plain_resnet(found):
        return {}
    if any(".se." in module for module in found):
        return _seresnet(found) if _bottlenecks(family) else {}
    counts = {stage: len({m.split(".")[1] for m in found if m.startswith(f"layer{stage}.")}) for stage in range(1, 5)}
    deep = max(counts.values()) > 6  # 101 and 152 layers have more blocks than they would find letters for
    theirs = {"conv1": "conv1", "bn1": "bn_conv1", "fc": "fc1000"}
    for module, kind in found.items():
        if (match := re.fullmatch(r"layer(\d)\.(\d+)\.(.+)", module)) is None:
            continue
        stage, index, inner = int(match[1]), int(match[2]), match[3]
        letter = "a" if index == 0 else f"b{index}" if deep and counts[stage] > 3 else "abcdef"[index]
        branch = "1" if inner.startswith("downsample") else "2" + "abc"[int(inner[-1]) - 1]
        theirs[module] = f"{'bn' if kind == 'norm' else 'res'}{stage + 1}{letter}_branch{branch}"
    return theirs


def _seresnet(found: Mapping[str, str]) -> dict[str, str]:
    inside = {"conv1": "1x1_reduce", "conv2": "3x3", "conv3": "1x1_increase", "se.fc1": "1x1_down", "se.fc2": "1x1_up"}
    inside |= {f"bn{number}": inside[f"conv{number}"] + "/bn" for number in (1, 2, 3)}
    inside |= {"downsample.0": "1x1_proj", "downsample.1": "1x1_proj/bn"}
    theirs = {"conv1": "conv1/7x7_s2", "bn1": "conv1/7x7_s2/bn", "fc": "classifier"}
    for module in found:
        if match := re.fullmatch(r"layer(\d)\.(\d+)\.(.+)", module):
            theirs[module] = f"conv{int(match[1]) + 1}_{int(match[2]) + 1}_{inside[match[3]]}"
    return theirs


def squeezenet(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    """Name SqueezeNet's layers; its modules with branches are fire2, fire3 and so on."""
    del family
    fires = list(dict.fromkeys(module.rpartition(".")[0] for module in found if module.endswith("squeeze")))
    inside = {"squeeze": "squeeze1x1", "expand1x1": "expand1x1", "expand3x3": "expand3x3"}
    theirs = {f"{fire}.{ours}": f"fire{number}/{name}" for number, fire in enumerate(fires, start=2) for ours, name in inside.items()}
    return {"features.0": "conv1", "classifier.1": "conv10", **theirs}


def _mobilenet1(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    del family, found
    names = [
        f"conv{stage}_{block}" if size > 1 else f"conv{stage}" for stage, size in enumerate(V1_BLOCKS, 2) for block in range(1, size + 1)
    ]
    theirs = {"features.0.0": "conv1", "features.0.1": "conv1/bn", "classifier.1": "fc7"}
    for index, name in enumerate(names, start=1):
        for place, half in enumerate(("dw", "sep")):
            theirs |= {f"features.{index}.{place}.0": f"{name}/{half}", f"features.{index}.{place}.1": f"{name}/{half}/bn"}
    return theirs


def _mobilenet2(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    """Name what both have; theirs has an expansion in the first block too, and ReLU where ours has ReLU6."""
    del family
    names = [f"conv{stage}_{block}" for stage, size in enumerate(V2_BLOCKS, 2) for block in range(1, size + 1)]
    theirs = {"features.0.0": "conv1", "features.0.1": "conv1/bn", "classifier.1": "fc7"}
    theirs |= {"features.18.0": "conv6_4", "features.18.1": "conv6_4/bn"}
    for index, name in enumerate(names, start=1):
        inner = sorted(module for module in found if module.startswith(f"features.{index}.conv."))
        steps = ("expand", "dwise", "linear")[3 - len(inner) // 2 :]
        for step, (convolution, norm) in zip(steps, zip(inner[::2], inner[1::2], strict=True), strict=True):
            theirs |= {convolution: f"{name}/{step}", norm: f"{name}/{step}/bn"}
    return theirs


def densenet(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    """Name the layers of ImageNet's DenseNets, those of CIFAR's not at all."""
    if "CIFARDenseNet" in family:
        return {}
    theirs = {"features.conv0": "conv1", "features.norm0": "conv1/bn", "features.norm5": "conv5_blk/bn", "classifier": "fc6"}
    for module in found:
        if match := re.fullmatch(r"features\.denseblock(\d)\.denselayer(\d+)\.(conv|norm)([12])", module):
            theirs[module] = f"conv{int(match[1]) + 1}_{match[2]}/x{match[4]}" + ("/bn" if match[3] == "norm" else "")
        elif match := re.fullmatch(r"features\.transition(\d)\.(conv|norm)", module):
            theirs[module] = f"conv{int(match[1]) + 1}_blk" + ("/bn" if match[2] == "norm" else "")
    return theirs


def _googlenet(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    """Name what both have; theirs has no BatchNorm, and 5x5 kernels where ours, like every file since, has 3x3."""
    del family
    theirs: dict[str, str] = {}
    for module, kind in found.items():
        outer, _, inner = module.partition(".") if module.startswith("inception") else ("", "", module)
        if (name := GOOGLENET.get(re.sub(r"\.(conv|bn)$", "", inner))) is None:
            continue
        theirs[module] = (f"inception_{outer.removeprefix('inception')}/" if outer else "") + name + ("/bn" if kind == "norm" else "")
    return theirs


def _inception(family: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    del family
    theirs = {"fc": "classifier"}
    for module, kind in found.items():
        outer, _, inner = module.partition(".")
        if outer in INCEPTION_STEM:
            name = INCEPTION_STEM[outer]
        elif outer in MIXED:
            prefix, grid = MIXED[outer]
            name = prefix + GRIDS[grid][inner.partition(".")[0].removeprefix("branch")]
        else:
            continue
        theirs[module] = name + ("_bn" if kind == "norm" else "")
    return theirs


def _bottlenecks(family: Sequence[str]) -> bool:
    return any(depth in family[0] for depth in ("50", "101", "152")) and not LATER.search(family[0])


FAMILIES: dict[str, Callable[[Sequence[str], Mapping[str, str]], dict[str, str]]] = {
    "VGG": vgg,
    "ResNet": _resnet,
    "SqueezeNet": squeezenet,
    "MobileNetV1": _mobilenet1,
    "MobileNetV2": _mobilenet2,
    "DenseNet": densenet,
    "GoogLeNet": _googlenet,
    "InceptionV3": _inception,
    "AlexNet": lambda family, found: ALEXNET,
}
