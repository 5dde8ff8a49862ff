"""The layer names of keras.applications, in the order of its ``model.layers``.

Rows come in that order, because Keras's files are read by it: legacy ``.h5`` files are loaded layer by layer, and ``.weights.h5``
files number the layers of each class. Networks that keras.applications has not keep our names.

Source: https://github.com/keras-team/keras, keras/src/applications (version 3.15, and 2.1 to 2.15 for older spellings).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convert.core import Row, Shape, modules
from convert.names._keras_order import ORDERS
from convert.names._keras_order import align as align
from convert.names._stages import plain_resnet, stages

FORMATS = ("keras", "tensorflow", "graphdef", "onnx")
BY_NAME = ("npz",)

IGNORED = ("normalization.", "normalization_", "rescaling")
"""Layers that prepare images, in EfficientNet, ConvNeXt and MobileNetV3; here that belongs to the checkpoint, not to the network."""

CAFFE = {"mean": (103.939 / 255, 116.779 / 255, 123.68 / 255), "std": (1 / 255,) * 3, "channel_order": "bgr"}
SIGNED = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "channel_order": "rgb"}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "channel_order": "rgb"}
PREPROCESSING: dict[str, dict[str, Any]] = {
    "VGG": CAFFE,
    "ResNet": CAFFE,
    "ResNetV2": SIGNED,
    "DenseNet": IMAGENET,
    "MobileNetV1": SIGNED,
    "MobileNetV2": SIGNED,
    "MobileNetV3": {**SIGNED, "built_in": True},
    "InceptionV3": SIGNED,
    "InceptionResNetV2": SIGNED,
    "Xception": SIGNED,
    "NASNetA": SIGNED,
    "EfficientNet": {**IMAGENET, "built_in": True},
    "ConvNeXt": {**IMAGENET, "built_in": True},
    "EfficientNetV2": {"mean": (128 / 255,) * 3, "std": (128 / 255,) * 3, "channel_order": "rgb", "built_in": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ResNet": {"stride_on": "1x1", "norm_eps": 1.001e-5},
    "DenseNet": {"norm_eps": 1.001e-5},
    "MobileNetV1": {"padding": "even", "norm_eps": 1e-3, "activation": "relu6"},
    "MobileNetV2": {"padding": "same", "norm_eps": 1e-3},
    "MobileNetV3": {"padding": "same", "norm_eps": 1e-3},
    "InceptionV3": {"padding": "same"},
    "Xception": {"padding": "same", "norm_eps": 1e-3},
    "NASNetA": {"padding": "zero"},
    "EfficientNet": {"padding": "same", "norm_eps": 1e-3},
    "EfficientNetV2": {"padding": "same"},
}
NORMALISING = ("EfficientNetV2_B0", "EfficientNetV2_B1", "EfficientNetV2_B2", "EfficientNetV2_B3")
"""Those of V2 that normalise their images as V1 does; the larger ones have no layer for it that has weights."""
BOTTLENECKED = ("ResNet50", "ResNet101", "ResNet152")
"""The ResNets that Keras has; stride and biases of the others are nobody's."""

INVERTED = ("expand", "expand_bn", "depthwise", "depthwise_bn", "project", "project_bn")
FUSED = ("expand", "expand_bn", "project", "project_bn")
SPELLINGS = {  # of the parts of an inverted bottleneck and its gate
    "MobileNetV2": {word: word.replace("_bn", "_BN") for word in INVERTED},
    "MobileNetV3": {"fc1": "squeeze_excite_conv", "fc2": "squeeze_excite_conv_1"},
    "EfficientNet": {
        "expand": "expand_conv",
        "depthwise": "dwconv",
        "depthwise_bn": "bn",
        "project": "project_conv",
        "fc1": "se_reduce",
        "fc2": "se_expand",
    },
}
SPELLINGS["EfficientNetV2"] = {**SPELLINGS["EfficientNet"], "depthwise": "dwconv2"}


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules, as Keras orders its layers; `family` is the class's name and its bases'."""
    found = modules(ours)
    name = _known(family)
    name = "" if name == "ResNet" and not plain_resnet(found) else name
    theirs = FAMILIES[name](found) if name else {}
    if name == "ConvNeXt":  # whose layers all begin with the network's name
        theirs = {module: there.replace("convnext", family[0].lower()) for module, there in theirs.items()}
    convolved = name in ("MobileNetV1", "MobileNetV3")
    adds = ("bias",) if set(family) & {*BOTTLENECKED} else ()
    made: list[Row] = []
    for module, kind in found.items():
        if kind == "linear" and convolved:
            kind = "linear_from_conv"
        elif kind == "parameter" and module in theirs:
            kind = "parameter_from_vector"
        lacks = ("weight",) if kind == "norm" and name in ("InceptionV3", "InceptionResNetV2") else ()
        made.append(Row(theirs.get(module, module), module, kind, adds if kind == "conv" else (), lacks))
    if name not in ORDERS:
        return made
    ordered = ORDERS[name](list(found))
    return sorted(made, key=lambda row: ordered.index(row.ours))


def order(family: Sequence[str], ours: Mapping[str, Shape]) -> list[str]:
    """List our modules in the order of Keras's layers."""
    return [row.ours for row in rows(family, ours)]


def options(family: Sequence[str]) -> dict[str, Any]:
    """Tell the constructor keywords with which our network computes what Keras's does."""
    name = _known(family)
    if name == "ResNet" and not set(family) & {*BOTTLENECKED} and family[0] != "ResNet":
        return {}
    return dict(OPTIONS.get(name, {}))


def preprocessing(family: Sequence[str]) -> dict[str, Any]:
    """Tell how the images of keras.applications' own weights are prepared; "built_in" where their network does it to pixels."""
    known = "EfficientNet" if set(family) & {*NORMALISING} else _known(family)
    return dict(PREPROCESSING.get(known, {}))


def _known(family: Sequence[str]) -> str:
    return next((name for name in FAMILIES if name in family), "") if "ConvNeXtV2" not in family else ""


def _vgg(found: Mapping[str, str]) -> dict[str, str]:
    names = {"classifier.0": "fc1", "classifier.3": "fc2", "classifier.6": "predictions"}
    norms = {"conv": "", "norm": "_bn"}
    return names | {module: f"block{stage}_conv{place}{norms[found[module]]}" for module, (stage, place) in stages(found).items()}


def _resnet(found: Mapping[str, str]) -> dict[str, str]:
    names = {"conv1": "conv1_conv", "bn1": "conv1_bn", "fc": "predictions"}
    parts = {"downsample.0": "0_conv", "downsample.1": "0_bn"}
    for module in found:
        if match := re.fullmatch(r"layer(\d+)\.(\d+)\.(.+)", module):
            part = re.sub(r"(conv|bn)(\d)", r"\2_\1", match[3])
            names[module] = f"conv{int(match[1]) + 1}_block{int(match[2]) + 1}_{parts.get(match[3], part)}"
    return names


def _resnet_v2(found: Mapping[str, str]) -> dict[str, str]:
    names = {"conv1": "conv1_conv", "bn": "post_bn", "fc": "predictions"}
    parts = {"downsample": "0_conv", "bn1": "preact_bn", "bn2": "1_bn", "bn3": "2_bn"}
    for module in found:
        if match := re.fullmatch(r"layer(\d+)\.(\d+)\.(.+)", module):
            part = parts.get(match[3], f"{match[3][-1]}_conv")
            names[module] = f"conv{int(match[1]) + 1}_block{int(match[2]) + 1}_{part}"
    return names


def _densenet(found: Mapping[str, str]) -> dict[str, str]:
    names = {"features.conv0": "conv1_conv", "features.norm0": "conv1_bn", "classifier": "predictions"}
    parts = {"norm1": "0_bn", "conv1": "1_conv", "norm2": "1_bn", "conv2": "2_conv"}
    for module in found:
        if match := re.fullmatch(r"features\.denseblock(\d+)\.denselayer(\d+)\.(.+)", module):
            names[module] = f"conv{int(match[1]) + 1}_block{match[2]}_{parts[match[3]]}"
        elif match := re.fullmatch(r"features\.transition(\d+)\.(norm|conv)", module):
            names[module] = f"pool{int(match[1]) + 1}_{match[2].replace('norm', 'bn')}"
        elif re.fullmatch(r"features\.norm[1-9]", module):
            names[module] = "bn"
    return names


def _mobilenet_v1(found: Mapping[str, str]) -> dict[str, str]:
    names = {"features.0.0": "conv1", "features.0.1": "conv1_bn", "classifier.1": "conv_preds"}
    for module in found:
        if match := re.fullmatch(r"features\.(\d+)\.([01])\.([01])", module):
            names[module] = f"conv_{('dw', 'pw')[int(match[2])]}_{match[1]}{('', '_bn')[int(match[3])]}"
    return names


def _mobilenet_v2(found: Mapping[str, str]) -> dict[str, str]:
    names = {"features.0.0": "Conv1", "features.0.1": "bn_Conv1", "classifier.1": "predictions"}
    names |= {"features.18.0": "Conv_1", "features.18.1": "Conv_1_bn"}
    return names | _inverted(found, r"features\.(\d+)\.conv", "MobileNetV2", "block_")


def _mobilenet_v3(found: Mapping[str, str]) -> dict[str, str]:
    last = max((int(match[1]) for module in found if (match := re.match(r"features\.(\d+)", module))), default=0)
    names = {"features.0.0": "conv", "features.0.1": "conv_bn", f"features.{last}.0": "conv_1", f"features.{last}.1": "conv_1_bn"}
    names |= {"classifier.0": "conv_2", "classifier.3": "logits"}
    return names | _inverted(found, r"features\.(\d+)\.block", "MobileNetV3", "expanded_conv_")


def _efficientnet(found: Mapping[str, str]) -> dict[str, str]:
    return _ends(found) | _inverted(found, r"features\.(\d+)\.(\d+)\.block", "EfficientNet", "block")


def _efficientnet_v2(found: Mapping[str, str]) -> dict[str, str]:
    return _ends(found) | _inverted(found, r"features\.(\d+)\.(\d+)\.block", "EfficientNetV2", "block")


def _ends(found: Mapping[str, str]) -> dict[str, str]:
    """Name what is before and after EfficientNet's stages, of which V2 has six or seven."""
    last = max((int(match[1]) for module in found if (match := re.match(r"features\.(\d+)", module))), default=0)
    names = {"features.0.0": "stem_conv", "features.0.1": "stem_bn", "classifier.1": "predictions"}
    return names | {f"features.{last}.0": "top_conv", f"features.{last}.1": "top_bn"}


def _inverted(found: Mapping[str, str], block: str, family: str, prefix: str) -> dict[str, str]:
    """Name the convolutions, BatchNorms and gates of inverted bottlenecks; the first of a network may have no expansion."""
    spelling = SPELLINGS[family]
    blocks: dict[str, list[str]] = defaultdict(list)
    names: dict[str, str] = {}
    for module in found:
        if not (match := re.match(block + r"\.", module)):
            continue
        if len(match.groups()) == 2:  # stage and block: block3b
            start = f"{prefix}{match[1]}{chr(ord('a') + int(match[2]))}_"
        else:  # counted straight through, and the first is no block yet
            start = f"{prefix}{int(match[1]) - 1}_" if match[1] != "1" else "expanded_conv_"
        part = module.rpartition(".")[2]
        if part in ("fc1", "fc2"):
            names[module] = start + spelling[part]
        else:
            blocks[start].append(module)
    for start, members in blocks.items():
        words = FUSED if len(members) == len(FUSED) and family == "EfficientNetV2" else INVERTED[-len(members) :]
        names |= {module: start + spelling.get(word, word) for module, word in zip(members, words, strict=True)}
    return names


def _inception(found: Mapping[str, str]) -> dict[str, str]:
    """Number the convolutions as Keras makes them, which is our order too."""
    units = [module.removesuffix(".conv") for module in found if module.endswith(".conv") and not module.startswith("AuxLogits.")]
    names = {"fc": "predictions"}
    for number, unit in enumerate(units):
        suffix = f"_{number}" if number else ""
        names |= {f"{unit}.conv": f"conv2d{suffix}", f"{unit}.bn": f"batch_normalization{suffix}"}
    return names


def _inception_resnet(found: Mapping[str, str]) -> dict[str, str]:
    """Number what has no name of its own as Keras makes it, in our order; what ends a block, and the network, has one."""
    names = {"classif": "predictions", "conv2d_7b.conv": "conv_7b", "conv2d_7b.bn": "conv_7b_bn", "block8.conv2d": "block8_10_conv"}
    for repeat, block in {"repeat": "block35", "repeat_1": "block17", "repeat_2": "block8"}.items():
        for module in found:
            if match := re.fullmatch(rf"{repeat}\.(\d+)\.conv2d", module):
                names[module] = f"{block}_{int(match[1]) + 1}_conv"
    units = [module.removesuffix(".conv") for module in found if module.endswith(".conv") and module not in names]
    for number, unit in enumerate(units):
        suffix = f"_{number}" if number else ""
        names |= {f"{unit}.conv": f"conv2d{suffix}", f"{unit}.bn": f"batch_normalization{suffix}"}
    return names


def _xception(found: Mapping[str, str]) -> dict[str, str]:
    names = {"fc": "predictions"}
    for number in (1, 2):
        names |= {f"conv{number}": f"block1_conv{number}", f"bn{number}": f"block1_conv{number}_bn"}
        for half, part in (("depthwise", "conv1"), ("pointwise", "pointwise")):
            names[f"conv{number + 2}.{part}"] = f"block14_sepconv{number}.{half}"
        names[f"bn{number + 2}"] = f"block14_sepconv{number}_bn"
    counts: dict[str, int] = defaultdict(int)
    skips = 0
    for module in found:
        if not (match := re.fullmatch(r"block(\d+)\.(rep\.\d+(?:\.(conv1|pointwise))?|skip|skipbn)", module)):
            continue
        block = f"block{int(match[1]) + 1}"
        if match[2].startswith("rep"):
            counts[block] += match[3] == "conv1"
            half = {"conv1": ".depthwise", "pointwise": ".pointwise", None: "_bn"}[match[3]]
            names[module] = f"{block}_sepconv{counts[block]}{half}"
        else:
            suffix = f"_{skips}" if skips else ""
            names[module] = ("batch_normalization" if match[2] == "skipbn" else "conv2d") + suffix
            skips += match[2] == "skipbn"
    return names


def _convnext(found: Mapping[str, str]) -> dict[str, str]:
    names = {"classifier.0": "convnext_head_layernorm", "classifier.2": "convnext_head_dense"}
    names |= {"features.0.0": "convnext_stem.convnext_stem_conv", "features.0.1": "convnext_stem.convnext_stem_layernorm"}
    parts = {"0": "depthwise_conv", "2": "layernorm", "3": "pointwise_conv_1", "5": "pointwise_conv_2"}
    for module in found:
        if match := re.fullmatch(r"features\.(\d+)\.(\d+)\.(?:block\.(\d)|layer_scale)", module):
            block = f"convnext_stage_{int(match[1]) // 2}_block_{match[2]}"
            names[module] = f"{block}_{parts[match[3]]}" if match[3] else f"{block}_layer_scale.weight"
        elif match := re.fullmatch(r"features\.([246])\.([01])", module):
            number = int(match[1]) // 2 - 1
            names[module] = f"convnext_downsampling_block_{number}.convnext_downsampling_{('layernorm', 'conv')[int(match[2])]}_{number}"
    return names


def _nasnet(found: Mapping[str, str]) -> dict[str, str]:
    """Name layers by what they do and by their cell; a reduction counts as a cell, and the fifth branch of one is left4 twice."""
    names = {"conv0.conv": "stem_conv1", "conv0.bn": "stem_bn1", "last_linear": "predictions"}
    last = max((int(match[1]) for module in found if (match := re.match(r"cell_(\d+)\.", module))), default=-1)
    repeats = (last + 1) // 3
    adjusting = {"conv_prev_1x1.conv": "conv_projection", "conv_prev_1x1.bn": "bn", "final_path_bn": "bn"}
    adjusting |= {"path_1.conv": "conv_1", "path_2.conv": "conv_2"}
    for module in found:
        if not (match := re.fullmatch(r"(cell_stem|reduction_cell|cell)_(\d+)\.(.+)", module)):
            continue
        number, part = int(match[2]), match[3]
        cell = {
            "cell_stem": f"stem_{number + 1}",
            "reduction_cell": f"reduce_{(number + 1) * repeats}",
            "cell": f"{number + (number >= repeats)}",
        }[match[1]]
        kind = "normal" if match[1] == "cell" else "reduction"
        if part in adjusting:
            names[module] = f"adjust_{adjusting[part]}_{cell}"
        elif part.startswith("conv_1x1."):
            names[module] = f"{kind}_{part.removeprefix('conv_1x1.')}_1_{cell}"
        elif branch := re.fullmatch(r"comb_iter_(\d)_(left|right)\.(bn_sep|separable)_(\d)(?:\.(depthwise|pointwise)_conv2d)?", part):
            place = f"{branch[2]}{4 if (kind, branch[1]) == ('reduction', '4') else int(branch[1]) + 1}"
            norm, half = ("bn_", "") if branch[3] == "bn_sep" else ("", f".{branch[5]}")
            names[module] = f"separable_conv_{branch[4]}_{norm}{kind}_{place}_{cell}{half}"
    return names


FAMILIES: dict[str, Callable[[Mapping[str, str]], dict[str, str]]] = {
    "VGG": _vgg,
    "ResNet": _resnet,
    "ResNetV2": _resnet_v2,
    "DenseNet": _densenet,
    "MobileNetV1": _mobilenet_v1,
    "MobileNetV2": _mobilenet_v2,
    "MobileNetV3": _mobilenet_v3,
    "InceptionV3": _inception,
    "InceptionResNetV2": _inception_resnet,
    "Xception": _xception,
    "NASNetA": _nasnet,
    "EfficientNet": _efficientnet,
    "ConvNeXt": _convnext,
    "EfficientNetV2": _efficientnet_v2,
}
