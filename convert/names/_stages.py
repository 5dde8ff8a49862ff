"""Stages of networks that are one row of convolutions: VGG and AlexNet, whose layers we number straight through."""

from __future__ import annotations

from collections.abc import Mapping


def stages(found: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Give each convolution, and the BatchNorm behind it, its stage and its place there, both from 1.

    A stage ends with a pool: there the numbers of two convolutions are further apart than usual.

    Args:
        found: modules and their kinds, from `convert.core.modules`.
    """
    usual = 3 if "norm" in found.values() else 2
    numbered: dict[str, tuple[int, int]] = {}
    stage, place, before = 0, 0, 0
    for module, kind in found.items():
        position = int(module.rpartition(".")[2])
        if kind == "conv":
            stage, place = (stage, place + 1) if position - before == usual and stage else (stage + 1, 1)
            before = position
        if kind != "linear":
            numbered[module] = stage, place
    return numbered
