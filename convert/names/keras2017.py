"""The names that Keras's ResNet50 had until 2018, after Caffe's; everything else is as in keras.applications.

Source: https://github.com/fchollet/deep-learning-models, resnet50.py; keras-applications 1.0.7, keras_applications/resnet50.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.core import Row, Shape
from convert.names import keras

FORMATS = ("keras",)

ENDS = {"conv1_conv": "conv1", "conv1_bn": "bn_conv1", "predictions": "fc1000"}
BRANCHES = {"0": "1", "1": "2a", "2": "2b", "3": "2c"}


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; only ResNet50 was there."""
    if "ResNet50" not in family:
        return []
    return [replace(row, theirs=_old(row.theirs)) for row in keras.rows(family, ours)]


def options(family: Sequence[str]) -> dict[str, Any]:
    """Tell the constructor keywords with which our network computes what Keras's did: eps was its default then."""
    return {**keras.options(family), "norm_eps": 1e-3} if "ResNet50" in family else {}


def preprocessing(family: Sequence[str]) -> dict[str, Any]:
    """Tell how images were prepared: as today."""
    return keras.preprocessing(family)


def _old(name: str) -> str:
    if match := re.fullmatch(r"conv(\d)_block(\d)_(\d)_(conv|bn)", name):
        kind = {"conv": "res", "bn": "bn"}[match[4]]
        return f"{kind}{match[1]}{chr(ord('a') + int(match[2]) - 1)}_branch{BRANCHES[match[3]]}"
    return ENDS.get(name, name)
