"""The names of EfficientNet-PyTorch, in which the Lite networks were published too: one row of blocks, counted straight through.

Source: https://github.com/lukemelas/EfficientNet-PyTorch, efficientnet_pytorch/model.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from convert.core import Row, Shape, modules
from convert.names._stages import block

ENDS = {"features.0.0": "_conv_stem", "features.0.1": "_bn0", "features.8.0": "_conv_head", "features.8.1": "_bn1", "classifier.1": "_fc"}
GATE = {"fc1": "_se_reduce", "fc2": "_se_expand"}
EXPANSION = ("_expand_conv", "_bn0")
"""Absent in the first stage, whose blocks expand nothing."""
REST = ("_depthwise_conv", "_bn1", "_project_conv", "_bn2")


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; `family` is the class's name and its bases', and only EfficientNet has these names."""
    if "EfficientNet" not in family:
        return []
    found = modules(ours)
    names = dict(ENDS)
    blocks: dict[str, list[str]] = {}
    for module in found:
        if match := re.match(r"features\.\d+\.\d+\.block\.", module):
            blocks.setdefault(match[0], []).append(module)
    for number, inner in enumerate(blocks.values()):
        names |= block(inner, f"_blocks.{number}.", GATE, REST, EXPANSION + REST)
    return [Row(names.get(module, module), module, kind) for module, kind in found.items()]


def options(family: Sequence[str]) -> dict[str, object]:
    """Tell the constructor keywords with which ours computes what theirs does: TensorFlow's padding and eps."""
    return {"padding": "same", "norm_eps": 1e-3} if "EfficientNet" in family else {}
