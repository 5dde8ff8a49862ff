"""What several namings count or name alike: stages of one row of convolutions, and blocks of convolutions with a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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


def plain_resnet(found: Mapping[str, str]) -> bool:
    """Tell whether a ResNet has the layers of the paper's: no stem of three convolutions, no pool in its shortcuts, no other gate."""
    return not any(module == "conv1.0" or module.endswith((".downsample.2", ".se.conv")) for module in found)


def block(members: Sequence[str], prefix: str, gate: Mapping[str, str], *names: Sequence[str]) -> dict[str, str]:
    """Name a block's convolutions and their BatchNorms, and the layers of its gate.

    Args:
        members: our modules of the block, in order.
        prefix: what their names begin with.
        gate: the last word of our name of a layer of the gate, and theirs.
        names: theirs of all other members, in order; those are taken that are as many.
    """
    gates = {module: prefix + gate[last] for module in members if (last := module.rpartition(".")[2]) in gate}
    plain = [module for module in members if module not in gates]
    chosen = next((each for each in names if len(each) == len(plain)), names[-1])
    return {module: prefix + name for module, name in zip(plain, chosen, strict=True)} | gates
