"""The names of the MobileNetV1 that face detectors are built on: three stages, each block one Sequential of six layers.

Source: https://github.com/biubug6/Pytorch_Retinaface, models/net.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from convert.core import Row, Shape, modules

STAGES = (6, 6, 2)
"""Our `features` in each of their stages, the stem among the first."""
PLACES = [(stage, block) for stage, size in enumerate(STAGES, start=1) for block in range(size)]


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; `family` is the class's name and its bases', and only MobileNetV1 has these names."""
    if "MobileNetV1" not in family:
        return []
    return [Row(_theirs(module), module, kind) for module, kind in modules(ours).items()]


def _theirs(module: str) -> str:
    """Write features.4.1.0, the pointwise convolution of a block, as stage1.4.3: its ReLU counts."""
    if module == "classifier.1":
        return "fc"
    index, *inner = (int(number) for number in re.findall(r"\d+", module))
    stage, block = PLACES[index]
    layer = 3 * inner[0] + inner[1] if len(inner) == 2 else inner[0]
    return f"stage{stage}.{block}.{layer}"


def options(family: Sequence[str]) -> dict[str, str]:
    """Tell the constructor keywords with which ours computes what theirs does: every activation leaks."""
    return {"activation": "leaky_relu_0.1"} if "MobileNetV1" in family else {}
