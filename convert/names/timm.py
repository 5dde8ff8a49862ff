"""timm's names: torchvision's for ResNets, DenseNets, Inception and Xception.

Its own for VGG's head, RegNet, ConvNeXt, Swin, vision transformers and all mobile networks.

Source: https://github.com/huggingface/pytorch-image-models, timm/models/vgg.py, regnet.py, convnext.py, swin_transformer.py,
swin_transformer_v2.py, vision_transformer.py and _efficientnet_builder.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.core import Row, Shape, modules
from convert.names._beside import side, table
from convert.names._stages import block

BESIDE = ("config.json",)

# Blocks of each stage of the papers' tables: timm counts by stage, torchvision straight through; EfficientNet's are by stage in both.
STAGES = {
    "MobileNetV1": (1, 2, 2, 6, 2),
    "MobileNetV2": (1, 2, 3, 4, 3, 3, 1),
    "MobileNetV3Large": (1, 2, 3, 4, 2, 3),
    "MobileNetV3Small": (1, 2, 3, 2, 3),
}
# What is before and after the blocks, ours: theirs
STEM = {"features.0.0": "conv_stem", "features.0.1": "bn1"}
HIDDEN = {"classifier.0": "conv_head", "classifier.3": "classifier"}
ENDS = {
    "VGG": {"classifier.0": "pre_logits.fc1", "classifier.3": "pre_logits.fc2", "classifier.6": "head.fc"},
    "MobileNetV1": {**STEM, "classifier.1": "classifier"},
    "MobileNetV2": {**STEM, "features.18.0": "conv_head", "features.18.1": "bn2", "classifier.1": "classifier"},
    "MobileNetV3Large": {**STEM, "features.16.0": "blocks.6.0.conv", "features.16.1": "blocks.6.0.bn1", **HIDDEN},
    "MobileNetV3Small": {**STEM, "features.12.0": "blocks.5.0.conv", "features.12.1": "blocks.5.0.bn1", **HIDDEN},
    "EfficientNet": {**STEM, "features.8.0": "conv_head", "features.8.1": "bn2", "classifier.1": "classifier"},
    "EfficientNetV2": {**STEM, "classifier.1": "classifier"},
    "ViT": {
        **{"class_token": "cls_token", "distillation_token": "dist_token", "register_tokens": "reg_token"},
        **{"conv_proj": "patch_embed.proj", "encoder.pos_embedding": "pos_embed", "encoder.ln_pre": "norm_pre", "encoder.ln": "norm"},
        **{"heads.head": "head", "heads.head_dist": "head_dist"},
    },
    "RegNet": {"stem.0": "stem.conv", "stem.1": "stem.bn", "fc": "head.fc"},
    "ConvNeXt": {
        **{f"features.0.{place}": f"stem.{place}" for place in range(3)},
        **{"features.8": "norm_pre", "classifier.0": "head.norm", "classifier.1.1": "head.pre_logits.fc", "classifier.2": "head.fc"},
    },
    "Swin": {"features.0.0": "patch_embed.proj", "features.0.2": "patch_embed.norm", "head": "head.fc"},
}
# Dense layers that are convolutions there, so that VGG reads larger images and MobileNetV3 pools late
CONVOLVED = ("pre_logits.fc1", "pre_logits.fc2", "conv_head")

SEPARABLE = ("conv_dw", "bn1", "conv_pw", "bn2")
INVERTED = ("conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3")
FUSED = ("conv_exp", "bn1", "conv_pwl", "bn2")
PLAIN = ("conv", "bn1")
GATE = {"fc1": "se.conv_reduce", "fc2": "se.conv_expand"}

# The stem of timm's legacy SENet-154, and of its other networks
DEEP_STEM = {
    **{"layer0.conv1": "conv1.0", "layer0.conv2": "conv1.3", "layer0.conv3": "conv1.6"},
    **{"layer0.bn1": "conv1.1", "layer0.bn2": "conv1.4", "layer0.bn3": "bn1"},
}

REGNETS_BLOCK = re.compile(r"trunk_output\.block(\d+)\.block\d+-(\d+)\.(?:f\.)?(\w+)\.(\w+)")
REGNETS = {"a": "conv1", "b": "conv2", "c": "conv3", "proj": "downsample", "0": "conv", "1": "bn"}

CONVNEXTS_LAYER = re.compile(r"features\.(\d+)\.(\d+)(?:\.(?:block\.)?(\w+))?")
CONVNEXTS = {
    "ConvNeXt": {"0": "conv_dw", "2": "norm", "3": "mlp.fc1", "5": "mlp.fc2", "layer_scale": "gamma"},
    "ConvNeXtV2": {"0": "conv_dw", "2": "norm", "3": "mlp.fc1", "5": "mlp.grn", "6": "mlp.fc2"},
}
CONVOLVED_BELOW = 96
"""Channels of ConvNeXt-T's first stage: the dense layers of narrower networks' blocks, and of HNF's, are 1x1 convolutions there."""

SWINS_LAYER = re.compile(r"features\.(\d+)\.(\w+)(.*)")
SWINS_DENSE = {".mlp.0": ".mlp.fc1", ".mlp.3": ".mlp.fc2"}
VITS_BLOCK = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)")
VITS_POOL = re.compile(r"attention_pool\.(.+)")
VITS = {
    **{"ln_1": "norm1", "ln_2": "norm2", "layer_scale_1.gamma": "ls1.gamma", "layer_scale_2.gamma": "ls2.gamma"},
    **{"self_attention.in_proj_weight": "attn.qkv.weight", "self_attention.in_proj_bias": "attn.qkv.bias"},
    **{"self_attention.out_proj": "attn.proj", "mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2", "ln": "norm"},
}


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; `family` is the class's name and its bases'."""
    found = modules(ours)
    name = next((name for name in ENDS if name in family), None)
    theirs = dict(ENDS[name]) if name is not None else {}
    kinds_of_blocks = (PLAIN, FUSED, INVERTED) if name == "EfficientNetV2" else (SEPARABLE, INVERTED)
    for ours_prefix, theirs_prefix in _blocks(name, found):
        theirs |= block([module for module in found if module.startswith(ours_prefix)], theirs_prefix, GATE, *kinds_of_blocks)
    if name == "EfficientNetV2":  # the number of stages differs
        last = max((int(match[1]) for module in found if (match := re.match(r"features\.(\d+)", module))), default=0)
        theirs |= {f"features.{last}.0": "conv_head", f"features.{last}.1": "bn2"}
    if name == "RegNet":
        theirs |= {module: _regnets(*match.groups()) for module in found if (match := REGNETS_BLOCK.fullmatch(module))}
    if "GhostNet" in family:
        theirs |= {module: module.replace(".se.fc1", ".se.conv_reduce").replace(".se.fc2", ".se.conv_expand") for module in found}
    if name == "ViT":
        theirs |= {module: f"blocks.{match[1]}.{VITS[match[2]]}" for module in found if (match := VITS_BLOCK.fullmatch(module))}
        theirs |= {module: f"attn_pool.{VITS.get(match[1], match[1])}" for module in found if (match := VITS_POOL.fullmatch(module))}
    convolved = {module for module, name in theirs.items() if name in CONVOLVED and found.get(module) == "linear"}
    if name == "ConvNeXt":
        theirs |= _convnexts(found, CONVNEXTS["ConvNeXtV2" if "ConvNeXtV2" in family else name])
        if ours["features.1.0.block.0.weight"][0] < CONVOLVED_BELOW or "features.8" in found:
            convolved |= {module for module, name in theirs.items() if ".mlp.fc" in name}
    if name == "Swin":
        theirs = _swins(found) | theirs
    kinds = found | dict.fromkeys(convolved, "linear_from_conv")
    if "SwinV2" in family:
        kinds |= {name: "keyless" for name in found if name.endswith(".qkv")}
    kinds |= {name: "parameter_from_vector" for name in found if name.endswith(".layer_scale")}
    return [Row(theirs.get(module, module), module, kind) for module, kind in kinds.items()]


def align(theirs: Sequence[str], mapping: Sequence[Row]) -> dict[str, str]:
    """Give the modules of the first port of SENet, which timm calls legacy, the names of its later networks."""
    if not any(name.startswith("layer0.") for name in theirs):
        return {name: name for name in theirs}
    deep = any(row.theirs == "conv1.0" for row in mapping)
    stem = DEEP_STEM if deep else {"layer0.conv1": "conv1", "layer0.bn1": "bn1"}
    return {name: stem.get(name, {"last_linear": "fc"}.get(name, name.replace(".se_module.", ".se."))) for name in theirs}


def told(files: Mapping[str, Any], family: Sequence[str]) -> dict[str, Any] | None:
    """Read the config.json that timm writes beside the weights of a repository; None of anybody else's.

    Raises:
        ValueError: it says how no image is prepared here.
    """
    config = table(files, "config.json")
    architecture, facts = config.get("architecture"), {**config, **table(config, "pretrained_cfg")}
    if not isinstance(architecture, str) or "input_size" not in facts:
        return None
    found: dict[str, Any] = {}
    if architecture.startswith(("tf_efficientnet", "tf_mobilenet")):
        found["options"] = {"padding": "same", "norm_eps": 1e-3}
    edge = side(list(facts["input_size"])[1:])
    mode = facts.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise ValueError(f"its images are cropped by the mode {mode!r}; known are center and squash")
    interpolation = facts.get("interpolation") or "bilinear"
    steps = {"resize": int(edge / float(facts.get("crop_pct") or 0.875)), "crop": edge, "squash": mode == "squash"}
    found["preprocessing"] = steps | {"interpolation": "bilinear" if interpolation == "random" else interpolation}
    found["preprocessing"] |= {name: [float(each) for each in facts[name]] for name in ("mean", "std") if name in facts}
    classes = config.get("num_classes", facts.get("num_classes"))
    if classes == 0:
        found |= {"embedding": True, "num_classes": 0}
    elif config.get("label_names"):
        described = table(config, "label_descriptions")
        found["classes"] = [str(described.get(name, name)) for name in config["label_names"]]
    elif classes == 1000 and "in1k" in str(facts.get("tag")):
        found["labels"] = "imagenet1k"
    return found


def _blocks(family: str | None, found: Mapping[str, str]) -> list[tuple[str, str]]:
    """List where each block begins in our names and in theirs."""
    if family in ("EfficientNet", "EfficientNetV2"):
        places = dict.fromkeys(re.findall(r"^features\.(\d+)\.(\d+)\.block", "\n".join(found), re.MULTILINE))
        return [(f"features.{stage}.{block}.", f"blocks.{int(stage) - 1}.{block}.") for stage, block in places]
    sizes = STAGES.get(family or "", ())
    places = ((stage, block) for stage, size in enumerate(sizes) for block in range(size))
    return [(f"features.{index}.", f"blocks.{stage}.{block}.") for index, (stage, block) in enumerate(places, start=1)]


def _regnets(stage: str, block: str, part: str, layer: str) -> str:
    """Name a layer of RegNet's blocks, which timm counts from 1 and without the stage."""
    return f"s{stage}.b{int(block) + 1}.{REGNETS.get(part, part)}.{REGNETS.get(layer, layer)}"


def _convnexts(found: Mapping[str, str], parts: Mapping[str, str]) -> dict[str, str]:
    """Name the layers of ConvNeXt's stages and of what halves the map before them, which timm counts as part of the stage."""
    names: dict[str, str] = {}
    for module in found:
        match = CONVNEXTS_LAYER.fullmatch(module)
        if match is None or match[1] == "0":
            continue
        stage, halves = divmod(int(match[1]) - 1, 2)
        names[module] = f"stages.{stage + 1}.downsample.{match[2]}" if halves else f"stages.{stage}.blocks.{match[2]}.{parts[match[3]]}"
    return names


def _swins(found: Mapping[str, str]) -> dict[str, str]:
    """Name the layers of Swin's stages, and of what halves the map before them, which timm counts as part of the stage."""
    names: dict[str, str] = {}
    for module in found:
        if match := SWINS_LAYER.fullmatch(module):
            stage, blocks = divmod(int(match[1]), 2)
            rest = SWINS_DENSE.get(match[3], match[3])
            names[module] = f"layers.{stage}.blocks.{match[2]}{rest}" if blocks else f"layers.{stage}.downsample.{match[2]}"
    return names
