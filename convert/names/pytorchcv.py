"""The names of pytorchcv (imgclsmob): stages and units, a new stage wherever the grid is halved.

Some names stand for two networks with the same tensors, which only pytorchcv's own name tells apart: ``resnet50b`` has its stride
where ours has it, ``resnet50`` needs ``stride_on="1x1"``; ``efficientnet_b0`` is ours, ``efficientnet_b0b`` and ``b0c`` need
``padding="same"`` and ``norm_eps=1e-3``.

Left out, as no options of ours compute the same: MobileNetV3-Small (1280 hidden channels there, 1024 in the paper), the Wide ResNet
(without BatchNorm there), GoogLeNet (there is none).

Source: https://github.com/osmr/imgclsmob, pytorch/pytorchcv/models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from convert.core import Row, Shape, modules
from convert.names._stages import block, stages

FORMATS = ("pytorch", "safetensors", "npz")

Names = dict[str, str]

MOBILE = {"MobileNetV1": (1, 2, 2, 6, 2), "MobileNetV2": (1, 2, 3, 7, 4), "MobileNetV3Large": (1, 2, 3, 6, 3)}
"""Blocks of each stage."""
EFFICIENT = {"1": (1, ()), "2": (2, ()), "3": (3, ()), "4": (4, ()), "5": (4, ("4",)), "6": (5, ()), "7": (5, ("6",))}
"""Our stage: theirs, and our stages that its units are counted on from."""
GATES = {"fc1": "se.conv1", "fc2": "se.conv2"}
SEPARABLE, EXPANDED = ("dw_conv", "pw_conv"), ("conv1", "conv2", "conv3")
BIASLESS = ("output.conv1",)
MIXED = {
    **{f"5{letter}": (1, n) for n, letter in enumerate("bcd", 1)},
    **{f"6{letter}": (2, n) for n, letter in enumerate("abcde", 1)},
    **{f"7{letter}": (3, n) for n, letter in enumerate("abc", 1)},
}
REDUCTIONS = ("6a", "7a")
DEEP = tuple(f"features.init_block.conv{number}.{leaf}" for number in (1, 2, 3) for leaf in ("conv", "bn"))
STEM = ("1a_3x3", "2a_3x3", "2b_3x3", "3b_1x1", "4a_3x3")


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; none where pytorchcv has another network, or none."""
    found = modules(ours)
    make = next((make for name, make in FAMILIES.items() if name in family), None)
    if make is None:
        return []
    theirs = make(found, family)
    if theirs.keys() != found.keys():
        return []
    return [_row(theirs[module], module, kind, family) for module, kind in found.items()]


def options(family: Sequence[str]) -> dict[str, Any]:
    """Say how our network has to be built."""
    if "CIFARResNet" in family:
        return {"shortcut": "B"}
    return {"norm_eps": 1e-5} if "MobileNetV3Large" in family else {}


def preprocessing(family: Sequence[str]) -> dict[str, Any]:
    """Say how images are prepared: ImageNet's statistics, whatever the network."""
    if "CIFARResNet" in family or "CIFARDenseNet" in family:
        return {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
    return {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "channel_order": "rgb"}


def _row(theirs: str, ours: str, kind: str, family: Sequence[str]) -> Row:
    convolved = kind == "linear" and ("MobileNetV2" in family or "MobileNetV3Large" in family)
    lacks = ("bias",) if convolved and (theirs in BIASLESS or "MobileNetV2" in family) else ()
    return Row(theirs, ours, "linear_from_conv" if convolved else kind, lacks=lacks)


def _leaf(kind: str) -> str:
    return "bn" if kind == "norm" else "conv"


def _stacked(found: Mapping[str, str], family: Sequence[str]) -> Names:
    numbered = stages(found).items()
    theirs = {module: f"features.stage{stage}.unit{unit}.{_leaf(found[module])}" for module, (stage, unit) in numbered}
    dense = [module for module, kind in found.items() if kind == "linear"]
    return theirs | dict(zip(dense, ("output.fc1.fc", "output.fc2.fc", "output.fc3"), strict=False))


def _resnet(found: Mapping[str, str], family: Sequence[str]) -> Names:
    stem = "features.init_block" if "CIFARResNet" in family else "features.init_block.conv"
    theirs: Names = {"conv1": f"{stem}.conv", "bn1": f"{stem}.bn", "fc": "output"}
    if "SENet154" in family:
        theirs = {"fc": "output.fc", **dict(zip(("conv1.0", "conv1.1", "conv1.3", "conv1.4", "conv1.6", "bn1"), DEEP, strict=True))}
    for module in found:
        if match := re.fullmatch(r"layer(\d)\.(\d+)\.(?:(conv|bn)(\d)|downsample\.([01])|se\.fc([12]))", module):
            stage, index, kind, number, projection, gate = match.groups()
            inner = (
                f"body.conv{number}.{kind}"
                if kind
                else f"identity_conv.{('conv', 'bn')[int(projection)]}"
                if projection
                else f"se.conv{gate}"
            )
            theirs[module] = f"features.stage{stage}.unit{int(index) + 1}.{inner}"
    return theirs


def _densenet(found: Mapping[str, str], family: Sequence[str]) -> Names:
    theirs: Names = {"classifier": "output"}
    for module, kind in found.items():
        if match := re.fullmatch(r"features\.denseblock(\d)\.denselayer(\d+)\.(?:norm|conv)([12])", module):
            theirs[module] = f"features.stage{match[1]}.unit{match[2]}.conv{match[3]}.{_leaf(kind)}"
        elif match := re.fullmatch(r"features\.transition(\d)\.(?:norm|conv)", module):
            stage = int(match[1]) + 1
            theirs[module] = f"features.stage{stage}.trans{stage}.conv.{_leaf(kind)}"
        elif module == "features.conv0":
            theirs[module] = "features.init_block.conv" if "features.norm0" in found else "features.init_block"
        elif module == "features.norm0":
            theirs[module] = "features.init_block.bn"
        elif re.fullmatch(r"features\.norm\d", module):
            theirs[module] = "features.post_activ.bn"
    return theirs


def _squeezenet(found: Mapping[str, str], family: Sequence[str]) -> Names:
    theirs: Names = {"features.0": "features.init_block.conv", "classifier.1": "output.final_conv"}
    stage, unit, before = 0, 0, -1
    for module in found:
        if match := re.fullmatch(r"features\.(\d+)\.(\w+)", module):
            position = int(match[1])
            if position != before:
                stage, unit = (stage, unit + 1) if position == before + 1 else (stage + 1, 1)
                before = position
            theirs[module] = f"features.stage{stage}.unit{unit}.{match[2]}.conv"
    return theirs


def _pairs(*names: str) -> list[str]:
    """Name convolutions and the BatchNorm behind each."""
    return [f"{name}.{leaf}" for name in names for leaf in ("conv", "bn")]


def _mobile(found: Mapping[str, str], family: Sequence[str]) -> Names:
    name = next(name for name in MOBILE if name in family)
    places = [(stage, unit) for stage, size in enumerate(MOBILE[name], 1) for unit in range(1, size + 1)]
    theirs: Names = {"features.0.0": "features.init_block.conv", "features.0.1": "features.init_block.bn"}
    last = len(places) + 1
    final = "features.final_block.conv" if name == "MobileNetV3Large" else "features.final_block"
    theirs |= {f"features.{last}.0": f"{final}.conv", f"features.{last}.1": f"{final}.bn"}
    hidden = name == "MobileNetV3Large"
    theirs |= {"classifier.0": "output.conv1", "classifier.3": "output.conv2"} if hidden else {"classifier.1": "output"}
    for number, (stage, unit) in enumerate(places, 1):
        members = [module for module in found if module.startswith(f"features.{number}.")]
        names = _pairs(*(SEPARABLE if name == "MobileNetV1" else ("exp_conv", "conv1", "conv2") if hidden else EXPANDED))
        theirs |= block(members, f"features.stage{stage}.unit{unit}.", GATES, names[2:], names)
    return {ours: name for ours, name in theirs.items() if ours in found}


def _efficientnet(found: Mapping[str, str], family: Sequence[str]) -> Names:
    theirs: Names = {"features.0.0": "features.init_block.conv.conv", "features.0.1": "features.init_block.conv.bn"}
    theirs |= {"features.8.0": "features.final_block.conv", "features.8.1": "features.final_block.bn", "classifier.1": "output.fc"}
    inner = [module for module in found if re.match(r"features\.[1-7]\.\d+\.", module)]
    blocks = {key: list(members) for key, members in groupby(inner, lambda module: tuple(module.split(".")[1:3]))}
    sizes = {stage: sum(key[0] == stage for key in blocks) for stage in EFFICIENT}
    for (ours, index), members in blocks.items():
        stage, earlier = EFFICIENT[ours]
        unit = int(index) + 1 + sum(sizes[other] for other in earlier)
        theirs |= block(members, f"features.stage{stage}.unit{unit}.", GATES, _pairs(*EXPANDED), _pairs(*SEPARABLE))
    return theirs


def _inception(found: Mapping[str, str], family: Sequence[str]) -> Names:
    theirs: Names = {"fc": "output.fc"}
    branches: dict[str, list[str]] = {}
    for module in found:
        if match := re.fullmatch(r"Conv2d_(\w+)\.(conv|bn)", module):
            theirs[module] = f"features.init_block.conv{STEM.index(match[1]) + 1}.{match[2]}"
        elif match := re.fullmatch(r"Mixed_(\w+)\.branch(\w+?)(?:_(\d)([ab]?))?\.(conv|bn)", module):
            block, branch, number, side, leaf = match.groups()
            known = branches.setdefault(block, [])
            if branch not in known:
                known.append(branch)
            stage, unit = MIXED[block]
            inner = f"conv{'1x3' if side == 'a' else '3x1'}" if side else f"conv_list.conv{number or 1}"
            if not number and block not in REDUCTIONS:
                inner = "conv"
            theirs[module] = f"features.stage{stage}.unit{unit}.branches.branch{known.index(branch) + 1}.{inner}.{leaf}"
    return theirs


def _inception_v4(found: Mapping[str, str], family: Sequence[str]) -> Names:
    theirs: Names = {"last_linear": "output.fc"}
    for leaf in ("conv", "bn"):
        theirs |= {f"features.{number}.{leaf}": f"features.init_block.conv{number + 1}.{leaf}" for number in range(3)}
        theirs[f"features.3.conv.{leaf}"] = f"features.init_block.block1.branches.branch2.conv.{leaf}"
        theirs[f"features.5.conv.{leaf}"] = f"features.init_block.block3.branches.branch1.conv.{leaf}"
    blocks = {"features.4": "init_block.block2"}
    for stage, (first, last) in enumerate(((6, 10), (10, 18), (18, 22)), 1):
        blocks |= {f"features.{number}": f"stage{stage}.unit{number - first + 1}" for number in range(first, last)}
    return theirs | _branches(found, blocks, ("features.10", "features.18"))


def _inception_resnet(found: Mapping[str, str], family: Sequence[str]) -> Names:
    theirs: Names = {"classif": "output.fc"}
    for leaf in ("conv", "bn"):
        theirs |= {
            f"conv2d_{name}.{leaf}": f"features.init_block.conv{n}.{leaf}" for n, name in enumerate(("1a", "2a", "2b", "3b", "4a"), 1)
        }
        theirs[f"conv2d_7b.{leaf}"] = f"features.final_conv.{leaf}"
    blocks = {"mixed_5b": "init_block.block", "mixed_6a": "stage2.unit1", "mixed_7a": "stage3.unit1", "block8": "stage3.unit11"}
    for stage, (repeated, count) in enumerate((("repeat", 10), ("repeat_1", 20), ("repeat_2", 9)), 1):
        blocks |= {f"{repeated}.{index}": f"stage{stage}.unit{index + 1 + (stage > 1)}" for index in range(count)}
    theirs |= {f"{ours}.conv2d": f"features.{there}.conv" for ours, there in blocks.items() if f"{ours}.conv2d" in found}
    return theirs | _branches(found, blocks, ("mixed_6a", "mixed_7a"))


def _branches(found: Mapping[str, str], blocks: Mapping[str, str], reductions: Sequence[str]) -> Names:
    """Name the branches of blocks: a lone convolution is a "conv", but in a reduction, and several are a list of them."""
    theirs: Names = {}
    for module in found:
        match = re.fullmatch(r"(.+)\.branch(\d)(?:[._](\d)([ab]?))?\.(conv|bn)", module)
        if match is None or match[1] not in blocks:
            continue
        block, branch, place, side, leaf = match.groups()
        several = any(f"{block}.branch{branch}{dot}0.{leaf}" in found for dot in "._") if place else block in reductions
        inner = f"conv_list.conv{int(place or 0) + 1}" if several else "conv"
        inner = f"conv{'1x3' if side == 'a' else '3x1'}" if side else inner
        theirs[module] = f"features.{blocks[block]}.branches.branch{int(branch) + 1}.{inner}.{leaf}"
    return theirs


def _xception(found: Mapping[str, str], family: Sequence[str]) -> Names:
    theirs: Names = {"fc": "output"}
    layers = {"conv1": "dw_conv", "pointwise": "pw_conv"}
    for module in found:
        if match := re.fullmatch(r"(conv|bn)([12])", module):
            theirs[module] = f"features.init_block.conv{match[2]}.{match[1]}"
        elif match := re.fullmatch(r"(?:conv|bn)([34])(?:\.(\w+))?", module):
            theirs[module] = f"features.final_block.conv{int(match[1]) - 2}." + (f"conv.{layers[match[2]]}" if match[2] else "bn")
        elif match := re.fullmatch(r"block(\d+)\.(?:(skip|skipbn)|rep\.(\d+)(?:\.(\w+))?)", module):
            number, skip, place, layer = int(match[1]), match[2], match[3], match[4]
            stage, unit = (number, 1) if number < 3 else (3, number - 2) if number < 12 else (4, 1)
            if skip:
                inner = "identity_conv." + ("conv" if skip == "skip" else "bn")
            else:
                at = int(place) + (number == 1)  # the first block has no ReLU before its first convolution
                inner = f"body.block{(at - 1) // 3 + 1}." + (f"conv.{layers[layer]}" if layer else "bn")
            theirs[module] = f"features.stage{stage}.unit{unit}.{inner}"
    return theirs


FAMILIES: dict[str, Callable[[Mapping[str, str], Sequence[str]], Names]] = {
    "VGG": _stacked,
    "AlexNet": _stacked,
    "ResNet": _resnet,
    "CIFARResNet": _resnet,
    "DenseNet": _densenet,
    "SqueezeNet": _squeezenet,
    **dict.fromkeys(MOBILE, _mobile),
    "EfficientNet": _efficientnet,
    "InceptionV3": _inception,
    "InceptionV4": _inception_v4,
    "InceptionResNetV2": _inception_resnet,
    "Xception": _xception,
}
