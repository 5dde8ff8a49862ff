"""Metalhead.jl's names since 2022: where a layer stands in Chains of Chains, counted from 1, "layers.1.layers.3.layers.1".

Only networks that compute there what torchvision's compute are listed. Of the others the trees are known too, but a DenseNet
there puts a block's new channels before the old ones, MobileNetV3 and EfficientNet have other activations in their gates,
GoogLeNet has no ReLU and Xception's separable convolutions have one inside: their tensors would fit here and be wrong.

Source: https://github.com/FluxML/Metalhead.jl, src/convnets and src/layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from convert.core import Row, Shape, modules

FORMATS = ("bson", "jld2")

BODY, HEAD = "layers.1.layers.", "layers.2.layers."
"""A model is Chain(body, head); the struct around it is not counted (`mend`)."""

RESNET_CHAIN = {
    # of a block's second branch: a BatchNorm before a ReLU of its own, then the gate
    "basic": {"conv1": "1", "bn1": "2", "conv2": "4", "bn2": "5", "se.fc1": "6.layers.layers.2", "se.fc2": "6.layers.layers.4"},
    "bottleneck": {
        "conv1": "1", "bn1": "2", "conv2": "3", "bn2": "4", "conv3": "6", "bn3": "7",
        "se.fc1": "8.layers.layers.2", "se.fc2": "8.layers.layers.4",
    },
}  # fmt: skip
SHORTCUT = {"downsample.0": "1.layers.1", "downsample.1": "1.layers.2"}
SQUEEZE = {"squeeze": "layers.1", "expand1x1": "layers.2.layers.1", "expand3x3": "layers.2.layers.2"}
ALEXNET = {
    "features.0": BODY + "1", "features.3": BODY + "3", "features.6": BODY + "5", "features.8": BODY + "6", "features.10": BODY + "7",
    "classifier.1": HEAD + "3", "classifier.4": HEAD + "5", "classifier.6": HEAD + "6",
}  # fmt: skip
MOBILE_STAGES = {"MobileNetV1": (1, 2, 2, 6, 2), "MobileNetV2": (1, 2, 3, 4, 3, 3, 1)}
INCEPTION_BODY = {
    "Conv2d_1a_3x3": 1, "Conv2d_2a_3x3": 3, "Conv2d_2b_3x3": 5, "Conv2d_3b_1x1": 8, "Conv2d_4a_3x3": 10,
    "Mixed_5b": 13, "Mixed_5c": 14, "Mixed_5d": 15, "Mixed_6a": 16, "Mixed_6b": 17, "Mixed_6c": 18, "Mixed_6d": 19, "Mixed_6e": 20,
    "Mixed_7a": 21, "Mixed_7b": 22, "Mixed_7c": 23,
}  # fmt: skip
"""A convolution and its BatchNorm take two places, a pool and a block one."""


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; none where Metalhead has no network that computes the same."""
    naming = next((NETWORKS[name] for name in family if name in NETWORKS), None)
    if naming is None:
        return []
    found = modules(ours)
    theirs = naming(found)
    if len(theirs) != len(found):
        return []
    batch_norm = "norm" in found.values()
    lacks = ("bias",) if "VGG" in family and batch_norm else ()
    return [Row(theirs[module], module, kind, lacks=lacks if kind == "conv" else ()) for module, kind in found.items()]


def order(family: Sequence[str], ours: Mapping[str, Shape]) -> list[str]:
    """List our modules as `Flux.params` goes through their tree."""
    places = {row.ours: [int(step) for step in re.findall(r"\d+", row.theirs)] for row in rows(family, ours)}
    return sorted(places, key=lambda module: places[module])


def mend(name: str) -> str:
    """Leave out the struct around the Chain: a state of a `ResNet` begins with layers.layers, one of its `layers` with layers."""
    return name.removeprefix("layers.") if name.startswith("layers.layers.") else name


def options(family: Sequence[str]) -> dict[str, Any]:
    """Name the constructor keywords with which ours computes what theirs does."""
    return {"activation": "relu6"} if "MobileNetV1" in family else {}


def _resnet(found: Mapping[str, str]) -> dict[str, str]:
    stem = {"conv1": BODY + "1.layers.1", "bn1": BODY + "1.layers.2", "fc": HEAD + "3"}
    chain = RESNET_CHAIN["bottleneck" if "layer1.0.conv3" in found else "basic"]
    named: dict[str, str] = {}
    for module in found:
        match = re.fullmatch(r"layer(\d+)\.(\d+)\.(.+)", module)
        if module in stem:
            named[module] = stem[module]
        elif match and (match[3] in chain or match[3] in SHORTCUT):
            branch = SHORTCUT.get(match[3]) or f"2.layers.{chain[match[3]]}"
            named[module] = f"{BODY}{int(match[1]) + 1}.layers.{int(match[2]) + 1}.layers.{branch}"
    return named


def _vgg(found: Mapping[str, str]) -> dict[str, str]:
    """Count without the ReLUs, which are inside the layers there: one after each convolution, or after its BatchNorm."""
    named = {"classifier.0": HEAD + "2", "classifier.3": HEAD + "4", "classifier.6": HEAD + "6"}
    before = -1  # ReLUs before this layer
    for module, kind in found.items():
        if module not in named:
            before += kind == "conv"
            named[module] = f"{BODY}{int(module.partition('.')[2]) - before + 1}"
    return named


def _squeezenet(found: Mapping[str, str]) -> dict[str, str]:
    if "features.12.squeeze" not in found or "features.5.squeeze" in found:  # version 1.0 has its pools elsewhere; Metalhead's is 1.1
        return {}
    named = {"features.0": BODY + "1", "classifier.1": HEAD + "2"}
    for module in found:
        if module not in named:
            _, index, layer = module.split(".")
            named[module] = f"{BODY}{index}.{SQUEEZE[layer]}"
    return named


def _mobile(version: str, found: Mapping[str, str]) -> dict[str, str]:
    stages = MOBILE_STAGES[version]
    places = [(stage, block) for stage, size in enumerate(stages, start=3) for block in range(1, size + 1)]
    named = {"features.0.0": BODY + "1", "features.0.1": BODY + "2", "classifier.1": f"{HEAD}{3 if version == 'MobileNetV1' else 4}"}
    last = 3 + len(stages)
    for index, (stage, block) in enumerate(places, start=1):
        inside = [module for module in found if module.startswith(f"features.{index}.")]
        # blocks after a stage's first have a shortcut: Parallel(+, identity, Chain)
        chain = f"{BODY}{stage}.layers.{block}.layers." + ("2.layers." if version == "MobileNetV2" and block > 1 else "")
        named |= {module: f"{chain}{place}" for place, module in enumerate(inside, start=1)}
    if version == "MobileNetV2":
        named |= {f"features.{len(places) + 1}.0": f"{BODY}{last}", f"features.{len(places) + 1}.1": f"{BODY}{last + 1}"}
    return named


def _inception(found: Mapping[str, str]) -> dict[str, str]:
    named = {"fc": HEAD + "4"}
    for module in found:
        block, _, rest = module.partition(".")
        if block not in INCEPTION_BODY:
            continue  # the head, and a training network's auxiliary one
        place = INCEPTION_BODY[block]
        if rest in ("conv", "bn"):
            named[module] = f"{BODY}{place + (rest == 'bn')}"
            continue
        branch, _, leaf = rest.rpartition(".")
        named[module] = f"{BODY}{place}.layers.{_branch(block, branch, leaf == 'bn')}"
    return named


def _branch(block: str, branch: str, norm: bool) -> str:
    """Name a layer in a block: which branch of the Parallel, which place in its Chain."""
    order = BRANCHES.get(block) or BRANCHES[block[:7]]
    stem, step = branch.rpartition("_")[::2] if "_" in branch and branch != "branch_pool" else (branch, "1")
    outer = order.index(stem) + 1
    if block in ("Mixed_7b", "Mixed_7c") and stem in ("branch3x3", "branch3x3dbl"):  # Chain(Chain(...), Parallel(cat, Chain, Chain))
        if step[-1] in "ab":
            return f"{outer}.layers.2.layers.{'ab'.index(step[-1]) + 1}.layers.{1 + norm}"
        return f"{outer}.layers.1.layers.{2 * int(step) - 1 + norm}"
    first = 2 if stem == "branch_pool" else 1  # behind the pool
    return f"{outer}.layers.{first + 2 * (int(step) - 1) + norm}"


BRANCHES = {
    "Mixed_5": ("branch1x1", "branch5x5", "branch3x3dbl", "branch_pool"),
    "Mixed_6": ("branch1x1", "branch7x7", "branch7x7dbl", "branch_pool"),
    "Mixed_7": ("branch1x1", "branch3x3", "branch3x3dbl", "branch_pool"),
    "Mixed_6a": ("branch3x3", "branch3x3dbl"),
    "Mixed_7a": ("branch3x3", "branch7x7x3"),
}
"""In the order in which both concatenate them; the pool of the halving blocks has no layers."""
NETWORKS: dict[str, Callable[[Mapping[str, str]], dict[str, str]]] = {
    "ResNet": _resnet,
    "VGG": _vgg,
    "SqueezeNet": _squeezenet,
    "AlexNet": lambda found: dict(ALEXNET) if set(found) == set(ALEXNET) else {},
    **{version: partial(_mobile, version) for version in MOBILE_STAGES},
    "InceptionV3": _inception,
}
