"""TF-slim's names of the MobileNets, which the authors' own checkpoints have.

Its classifiers have 1001 outputs: class 0 is "background", and class n + 1 is class n of ImageNet's 1000. A network of ours that
takes all of such a file is built with ``num_classes=CLASSES``. The published accuracies
are those of the weights' moving averages (`convert.formats.tensorflow.read`, `averages`).

Source: https://github.com/tensorflow/models, research/slim/nets/mobilenet_v1.py, mobilenet/mobilenet_v2.py, mobilenet/mobilenet_v3.py
and preprocessing/inception_preprocessing.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.core import Row, Shape, modules
from convert.names._stages import block

FORMATS = ("tensorflow", "graphdef")
BY_NAME = ("npz",)

CLASSES = 1001

SCOPES = {"MobileNetV1": "MobilenetV1", "MobileNetV2": "MobilenetV2", "MobileNetV3": "MobilenetV3"}
LOGITS = "Logits/Conv2d_1c_1x1"
CONVOLVED = (LOGITS, "Conv_2")
"""Dense layers that are 1x1 convolutions there."""
PARTS = [part + norm for part in ("expand", "depthwise", "project") for norm in ("", "/BatchNorm")]
"""Of a block; the first has no expansion."""
GATE = {"fc1": "squeeze_excite/Conv", "fc2": "squeeze_excite/Conv_1"}


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; `family` is the class's name and its bases', and only the MobileNets have these names."""
    found = modules(ours)
    name = next((name for name in SCOPES if any(base.startswith(name) for base in family)), None)
    if name is None:
        return []
    theirs = _first(found) if name == "MobileNetV1" else _later(found)
    return [
        Row(f"{SCOPES[name]}/{place}", module, "linear_from_conv" if kind == "linear" and place in CONVOLVED else kind)
        for module, kind in found.items()
        if (place := theirs.get(module)) is not None
    ]


def options(family: Sequence[str]) -> dict[str, Any]:
    """Tell the constructor's keywords with which our network computes what TF-slim's does."""
    same = {"padding": "same", "norm_eps": 1e-3}
    return {**same, "activation": "relu6"} if any(base.startswith("MobileNetV1") for base in family) else same


def preprocessing(family: Sequence[str]) -> dict[str, Any]:
    """Tell how TF-slim evaluates: the middle 87.5 %, 224 pixels, from -1 to 1."""
    del family
    half = (0.5, 0.5, 0.5)
    return {"resize": 256, "crop": 224, "interpolation": "bilinear", "mean": half, "std": half, "channel_order": "rgb"}


def _first(found: Mapping[str, str]) -> dict[str, str]:
    """Name V1's modules: Conv2d_0, then pairs of a depthwise and a pointwise convolution."""
    theirs = {"features.0.0": "Conv2d_0", "features.0.1": "Conv2d_0/BatchNorm", "classifier.1": LOGITS}
    for module in found:
        if (parts := re.fullmatch(r"features\.(\d+)\.([01])\.([01])", module)) is not None:
            half = "pointwise" if parts[2] == "1" else "depthwise"
            theirs[module] = f"Conv2d_{parts[1]}_{half}" + ("/BatchNorm" if parts[3] == "1" else "")
    return theirs


def _later(found: Mapping[str, str]) -> dict[str, str]:
    """Name the modules of V2 and V3, whose blocks are expanded_conv, expanded_conv_1 and so on, each counted in its own order."""
    blocks: dict[int, list[str]] = {}
    for module in found:
        if (index := re.match(r"features\.(\d+)\.(?:conv|block)\.", module)) is not None:
            blocks.setdefault(int(index[1]), []).append(module)
    last = max(blocks, default=0) + 1
    theirs = {
        "features.0.0": "Conv",
        "features.0.1": "Conv/BatchNorm",
        f"features.{last}.0": "Conv_1",
        f"features.{last}.1": "Conv_1/BatchNorm",
        "classifier.0": "Conv_2",
        "classifier.1": LOGITS,
        "classifier.3": LOGITS,
    }
    for index, members in blocks.items():
        scope = "expanded_conv" + (f"_{index - 1}" if index > 1 else "")
        theirs |= block(members, f"{scope}/", GATE, PARTS[2:], PARTS)
    return theirs
