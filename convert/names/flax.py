"""The names of Flax's example networks: its ImageNet ResNets; modules without a name are numbered by class, blocks straight through.

Source: https://github.com/google/flax, examples/imagenet/models.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.core import Row, Shape, modules

FORMATS = ("flax", "npz", "safetensors")
ENDS = {"conv1": "conv_init", "bn1": "bn_init", "fc": "Dense_0"}
PROJECTION = {"0": "conv_proj", "1": "norm_proj"}
BLOCK = re.compile(r"layer(\d)\.(\d+)\.(?:(conv|bn)(\d)|downsample\.([01]))")


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; there are ResNets of ImageNet's kind only, and without gates or groups."""
    found = modules(ours)
    if "ResNet" not in family or any(not (module in ENDS or BLOCK.fullmatch(module)) for module in found):
        return []
    block = "BottleneckResNetBlock" if any(module.endswith(".conv3") for module in found) else "ResNetBlock"
    places = list(dict.fromkeys(match.group(1, 2) for module in found if (match := BLOCK.fullmatch(module))))
    return [Row(ENDS.get(module) or _theirs(module, block, places), module, kind) for module, kind in found.items()]


def options(family: Sequence[str]) -> dict[str, Any]:
    """Say how our network has to be built: Flax pads as TensorFlow does, but for the first convolution."""
    return {"padding": "same"} if "ResNet" in family else {}


def preprocessing(family: Sequence[str]) -> dict[str, Any]:
    """Say how the example prepares its images."""
    if "ResNet" not in family:
        return {}
    return {
        "resize": 256,
        "crop": 224,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "channel_order": "rgb",
    }


def _theirs(module: str, block: str, places: list[tuple[str, ...]]) -> str:
    match = BLOCK.fullmatch(module)
    if match is None:
        return module
    stage, index, kind, number, projection = match.groups()
    leaf = PROJECTION[projection] if projection else f"{'Conv' if kind == 'conv' else 'BatchNorm'}_{int(number) - 1}"
    return f"{block}_{places.index((stage, index))}.{leaf}"
