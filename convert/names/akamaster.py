"""The names of akamaster's CIFAR ResNets, which many CIFAR repositories share.

Source: https://github.com/akamaster/pytorch_resnet_cifar10, resnet.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convert.core import Row, Shape, modules


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; `family` is the class's name and its bases'."""
    del family
    theirs = {"fc": "linear"}
    return [Row(theirs.get(module, module.replace(".downsample.", ".shortcut.")), module, kind) for module, kind in modules(ours).items()]
