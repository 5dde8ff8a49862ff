"""KerasHub's names, where they differ from those of keras.applications: a backbone within a classifier, stages counted from nought.

MobileNetV3's blocks are layers of KerasHub's own there, whose files don't say what their parts are; they have no rows here.

Source: https://github.com/keras-team/keras-hub, keras_hub/src/models (version 0.32): vgg, resnet, densenet, xception, efficientnet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.core import Row, Shape
from convert.names import keras

FORMATS = ("keras",)

WITHIN = re.compile(r"(?:[a-z0-9_]+_backbone(?:_\d+)?|head(?:_\d+)?|sequential(?:_\d+)?)\.")
"""The models that a classifier is made of; their layers' names are behind it."""

OPTIONS: dict[str, dict[str, Any]] = {
    "DenseNet": {"padding": "same", "norm_eps": 1.001e-5},
    "Xception": {"padding": "same", "norm_eps": 1e-3},
    "EfficientNet": {"norm_eps": 1e-5},
}


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; none for a network that KerasHub has not."""
    name = next((name for name in SPELLINGS if name in family), None)
    if name is None:
        return []
    spell = SPELLINGS[name]
    return [replace(row, theirs=spell(row.theirs, row.ours), adds=()) for row in keras.rows(family, ours)]


def options(family: Sequence[str]) -> dict[str, Any]:
    """Tell the constructor keywords with which our network computes what KerasHub's does."""
    none: dict[str, Any] = {}
    return dict(next((options for name, options in OPTIONS.items() if name in family), none))


def align(theirs: Sequence[str], mapping: Sequence[Row]) -> dict[str, str]:
    """Leave out the model that a layer is in; what has no name of its own is numbered as keras.applications' is."""
    plain = {name: WITHIN.sub("", name) for name in theirs}
    spelt = keras.align(list(dict.fromkeys(plain.values())), mapping)
    return {name: spelt[short] for name, short in plain.items()}


def _resnet(theirs: str, ours: str) -> str:
    del ours
    return re.sub(r"^conv(\d+)_block(\d+)", lambda m: f"stack{int(m[1]) - 2}_block{int(m[2]) - 1}", theirs)


def _densenet(theirs: str, ours: str) -> str:
    if match := re.fullmatch(r"features\.denseblock(\d+)\.denselayer(\d+)\.(norm|conv)(\d)", ours):
        return f"stack{match[1]}_block{match[2]}_{match[4]}_{match[3].replace('norm', 'bn')}"
    return re.sub(r"^pool(\d+)_", lambda m: f"transition{int(m[1]) - 1}_", theirs)


def _xception(theirs: str, ours: str) -> str:
    if match := re.fullmatch(r"block(\d+)\.skip(bn)?", ours):
        return f"block{int(match[1]) + 1}_residual_{match[2] or 'conv'}"
    return theirs


def _efficientnet(theirs: str, ours: str) -> str:
    del ours
    return re.sub(r"^(block\d+[a-z]_)(bn|project_conv)$", lambda m: m[1] + {"bn": "dwconv_bn", "project_conv": "project"}[m[2]], theirs)


SPELLINGS: dict[str, Callable[[str, str], str]] = {
    "VGG": lambda theirs, ours: theirs,
    "ResNet": _resnet,
    "DenseNet": _densenet,
    "Xception": _xception,
    "EfficientNet": _efficientnet,
}
