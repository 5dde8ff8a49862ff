"""How Keras orders and numbers the layers of a model, and what its older files call them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from convert.core import Row

DEPTHWISE = re.compile(r"conv_dw_\d+|.*depthwise|.*dwconv2?")
NUMBERED = re.compile(r"(conv2d|batch_normalization|depthwise_conv2d|separable_conv2d|dense)(?:_(\d+))?(\.depthwise|\.pointwise|)")
"""What Keras calls a layer that has no name of its own, and any layer in the groups of a .weights.h5 file."""
OLD: tuple[tuple[str, str], ...] = (
    (r"convolution2d(.*)", r"conv2d\1"),  # Keras 1
    (r"batchnormalization(.*)", r"batch_normalization\1"),
    (r"fc1000|probs|Logits", "predictions"),
    (r"Logits", "logits"),  # MobileNetV3 until 2023, with slashes for underscores
    (r"(.*)/BatchNorm", r"\1_bn"),
    (r"(.*)/squeeze_excite/Conv(.*)", r"\1_squeeze_excite_conv\2"),
    (r"(expanded_conv(?:_\d+)?)/(\w+)", r"\1_\2"),
    (r"Conv(.*)", r"conv\1"),
)
"""Older spellings of layers, where today's is what a network has."""


def align(theirs: Sequence[str], mapping: Sequence[Row]) -> dict[str, str]:
    """Give the modules of a file the names that the rows have.

    Layers without a name of their own are numbered through a whole process, so that a network's first may be conv2d_94; in files of
    Keras 3.0 to 3.5 all layers are numbered, by class. Within a class it is their order that counts.

    Args:
        theirs: the modules of the file.
        mapping: rows, in Keras's order.

    Returns:
        A name for each module, its own where it has one already or nobody knows better.
    """
    wanted = [row.theirs for row in mapping]
    spelt = {name: _today(name, set(wanted)) for name in theirs}
    named = [name for name in wanted if not NUMBERED.fullmatch(name)]
    if any(name in set(spelt.values()) for name in named):
        numbered = sorted((name for name in wanted if name not in named), key=_number)
        classes = {name: _class(name) for name in numbered}
    else:
        numbered = wanted
        classes = {row.theirs: _class_of(row) for row in mapping}
    places: dict[str, list[str]] = defaultdict(list)
    for name in numbered:
        places[classes[name]].append(name)
    there: dict[str, list[str]] = defaultdict(list)
    for name in sorted((name for name in theirs if NUMBERED.fullmatch(spelt[name])), key=lambda name: _number(spelt[name])):
        there[_class(spelt[name])].append(name)
    for kind, names in there.items():
        spelt.update(zip(names, places[kind], strict=False))
    return spelt


def _today(name: str, wanted: set[str]) -> str:
    if name in wanted:
        return name
    spelt = name
    for old, new in OLD:
        changed = re.sub(f"^(?:{old})$", new, spelt)
        if changed != spelt and (changed in wanted or "/" in spelt or NUMBERED.fullmatch(changed)):
            spelt = changed
    return spelt


def _number(name: str) -> int:
    match = NUMBERED.fullmatch(name)
    return int(match[2] or 0) if match else 0


def _class(numbered: str) -> str:
    match = NUMBERED.fullmatch(numbered)
    return match[1] + match[3] if match else ""


def _class_of(row: Row) -> str:
    """Tell the class of a layer, and which half of a separable convolution, as a .weights.h5 file spells it."""
    half = next((half for half in (".depthwise", ".pointwise") if row.theirs.endswith(half)), None)
    if half is not None:
        return "separable_conv2d" + half
    if row.kind == "conv" and DEPTHWISE.fullmatch(row.theirs):
        return "depthwise_conv2d"
    return {"linear": "dense", "norm": "batch_normalization"}.get(row.kind, "conv2d")


def resnet(found: Sequence[str]) -> list[str]:
    """Put a shortcut's convolution and BatchNorm right before those that end the branch beside it: they have the same depth."""
    ordered = [module for module in found if ".downsample." not in module]
    for block in dict.fromkeys(module.partition(".downsample.")[0] for module in found if ".downsample." in module):
        branch = [module for module in ordered if module.startswith(f"{block}.") and ".se." not in module]
        for part, last in (("0", branch[-2]), ("1", branch[-1])):
            ordered.insert(ordered.index(last), f"{block}.downsample.{part}")
    return ordered


def resnet_v2(found: Sequence[str]) -> list[str]:
    """Put a shortcut's convolution right before the one that ends the branch beside it: they have the same depth."""
    ordered = [module for module in found if not module.endswith(".downsample")]
    for module in found:
        if module.endswith(".downsample"):
            ordered.insert(ordered.index(module.replace(".downsample", ".conv3")), module)
    return ordered


def inception(found: Sequence[str]) -> list[str]:
    """Order a block's layers by their distance from the concatenation that ends it, those of one distance by branch."""
    ordered: list[str] = []
    blocks: dict[str, list[str]] = defaultdict(list)
    for module in found:
        blocks[module.partition(".")[0]].append(module)
    for block, members in blocks.items():
        branches: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for module in members if block.startswith("Mixed") else ():
            match = re.match(r"(\w+\.branch(?:_pool|[^_.]+))(?:_(\d))?", module)
            if match:
                branches[match[1]][int(match[2] or 1)].append(module)
        distance: dict[str, int] = {}
        for steps in branches.values():
            split = len(steps[max(steps)]) > 2  # two units side by side, which a concatenation of their own joins
            for step, units in steps.items():
                for module in units:  # a unit is convolution, BatchNorm and ReLU
                    distance[module] = 3 * (max(steps) - step) + (3 if module.endswith(".conv") else 2) + split
        ordered += sorted(members, key=lambda module: -distance.get(module, 0)) if distance else members
    return ordered


def convnext(found: Sequence[str]) -> list[str]:
    """Put a layer scale behind the layers of its block."""
    ordered = [module for module in found if not module.endswith(".layer_scale")]
    for scale in (module for module in found if module.endswith(".layer_scale")):
        last = f"{scale.removesuffix('layer_scale')}block.5"
        ordered.insert(ordered.index(last) + 1, scale)
    return ordered


def inception_resnet(found: Sequence[str]) -> list[str]:
    """Order a block's layers as `inception` does; the convolution behind the concatenation comes last."""
    ordered: list[str] = []
    blocks: dict[str, list[str]] = defaultdict(list)
    for module in found:
        blocks[module.rpartition(".branch")[0] or module].append(module)
    for members in blocks.values():
        steps: dict[str, list[int]] = defaultdict(list)
        place = {module: re.search(r"\.(branch\d+)(?:\.(\d+))?\.", module) for module in members}
        for match in place.values():
            if match:
                steps[match[1]].append(int(match[2] or 0))
        distance = {
            module: 3 * (max(steps[match[1]]) - int(match[2] or 0)) + (3 if module.endswith(".conv") else 2)
            for module, match in place.items()
            if match
        }
        ordered += sorted(members, key=lambda module: -distance.get(module, 0))
    return ordered


def nasnet(found: Sequence[str]) -> list[str]:
    """Order a cell's layers by their distance from the concatenation that ends it, those of one distance by branch."""
    places = {kind: {part: place for place, part in enumerate(_nasnet_parts(kind))} for kind in ("normal", "reduction")}
    cells: dict[str, list[str]] = defaultdict(list)
    for module in found:
        cells[module.partition(".")[0]].append(module)
    ordered: list[str] = []
    for cell, members in cells.items():
        parts = places["normal" if re.fullmatch(r"cell_\d+", cell) else "reduction"]
        ordered += sorted(members, key=lambda module: parts.get(module.partition(".")[2], -1))
    return ordered


def _nasnet_parts(kind: str) -> list[str]:
    """List the layers of a cell in Keras's order, with both ways to adjust the map before the last."""

    def steps(step: str, *branches: str) -> list[str]:
        halves = [".depthwise_conv2d", ".pointwise_conv2d"] if step.startswith("separable") else [""]
        return [f"comb_iter_{branch}.{step}{half}" for branch in branches for half in halves]

    both = ("separable_1", "bn_sep_1", "separable_2", "bn_sep_2")
    halved = ["path_1.conv", "path_2.conv"]
    if kind == "normal":
        adjusted = [*halved, "conv_prev_1x1.conv", "conv_1x1.conv", "conv_prev_1x1.bn", "final_path_bn", "conv_1x1.bn"]
        return adjusted + [part for step in both for part in steps(step, "0_left", "0_right", "1_left", "1_right", "4_left")]
    adjusted = [*halved, "conv_1x1.conv", "conv_prev_1x1.conv", "conv_1x1.bn", "conv_prev_1x1.bn", "final_path_bn"]
    parts = adjusted + [part for step in both for part in steps(step, "0_left", "0_right")]
    for convolution, norm in (both[:2], both[2:]):
        parts += steps(convolution, "1_right") + steps(norm, "1_right")
        parts += steps(convolution, "2_right", "4_left") + steps(norm, "2_right", "4_left")
    return parts


ORDERS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "ResNet": resnet,
    "ResNetV2": resnet_v2,
    "InceptionV3": inception,
    "InceptionResNetV2": inception_resnet,
    "NASNetA": nasnet,
    "ConvNeXt": convnext,
}
"""Where Keras's order of layers, by depth, is not ours."""
