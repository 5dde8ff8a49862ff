"""torchvision's names, which are ours.

Source: https://github.com/pytorch/vision (models); DenseNet's files of 2017 are older than a rule against dots in names,
and ViT's of 2021 than the Sequential of its dense layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from convert.core import Row, Shape, modules

DOTTED = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")

DENSE = re.compile(r"(encoder_layer_\d+\.mlp)\.linear_([12])\.")


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; `family` is the class's name and its bases'."""
    del family
    return [Row(module, module, kind) for module, kind in modules(ours).items()]


def mend(name: str) -> str:
    """Write DenseNet's ``denselayer1.norm.1.weight`` as ``denselayer1.norm1.weight``, and ViT's ``mlp.linear_2`` as ``mlp.3``."""
    return DENSE.sub(lambda found: f"{found[1]}.{'0' if found[2] == '1' else '3'}.", DOTTED.sub(r"\1\2.", name))
