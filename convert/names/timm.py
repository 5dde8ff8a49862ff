"""timm's names: torchvision's for ResNets, DenseNets, Inception and Xception, its own for VGG's head, RegNet and all mobile networks.

Source: https://github.com/huggingface/pytorch-image-models, timm/models/vgg.py, regnet.py, vision_transformer.py, _efficientnet_builder.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from convert.core import Row, Shape, modules
from convert.names._stages import block

# Blocks of each stage of the papers' tables: timm counts by stage, torchvision straight through. EfficientNet's are by stage in both.
STAGES = {
    "MobileNetV1": (1, 2, 2, 6, 2),
    "MobileNetV2": (1, 2, 3, 4, 3, 3, 1),
    "MobileNetV3Large": (1, 2, 3, 4, 2, 3),
    "MobileNetV3Small": (1, 2, 3, 2, 3),
    "EfficientNet": (),
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
    "ViT": {
        **{"class_token": "cls_token", "distillation_token": "dist_token", "register_tokens": "reg_token"},
        **{"conv_proj": "patch_embed.proj", "encoder.pos_embedding": "pos_embed", "encoder.ln_pre": "norm_pre", "encoder.ln": "norm"},
        **{"heads.head": "head", "heads.head_dist": "head_dist"},
    },
    "RegNet": {"stem.0": "stem.conv", "stem.1": "stem.bn", "fc": "head.fc"},
}
# Dense layers that are convolutions there, so that VGG reads larger images and MobileNetV3 pools late
CONVOLVED = ("pre_logits.fc1", "pre_logits.fc2", "conv_head")

SEPARABLE = ("conv_dw", "bn1", "conv_pw", "bn2")
INVERTED = ("conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3")
GATE = {"fc1": "se.conv_reduce", "fc2": "se.conv_expand"}

REGNETS_BLOCK = re.compile(r"trunk_output\.block(\d+)\.block\d+-(\d+)\.(?:f\.)?(\w+)\.(\w+)")
REGNETS = {"a": "conv1", "b": "conv2", "c": "conv3", "proj": "downsample", "0": "conv", "1": "bn"}

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
    for ours_prefix, theirs_prefix in _blocks(name, found):
        theirs |= block([module for module in found if module.startswith(ours_prefix)], theirs_prefix, GATE, SEPARABLE, INVERTED)
    if name == "RegNet":
        theirs |= {module: _regnets(*match.groups()) for module in found if (match := REGNETS_BLOCK.fullmatch(module))}
    if name == "ViT":
        theirs |= {module: f"blocks.{match[1]}.{VITS[match[2]]}" for module in found if (match := VITS_BLOCK.fullmatch(module))}
        theirs |= {module: f"attn_pool.{VITS.get(match[1], match[1])}" for module in found if (match := VITS_POOL.fullmatch(module))}
    convolved = {module for module, name in theirs.items() if name in CONVOLVED and found.get(module) == "linear"}
    kinds = found | dict.fromkeys(convolved, "linear_from_conv")
    return [Row(theirs.get(module, module), module, kind) for module, kind in kinds.items()]


def _blocks(family: str | None, found: Mapping[str, str]) -> list[tuple[str, str]]:
    """List where each block begins in our names and in theirs."""
    if family == "EfficientNet":
        places = dict.fromkeys(re.findall(r"^features\.(\d+)\.(\d+)\.block", "\n".join(found), re.MULTILINE))
        return [(f"features.{stage}.{block}.", f"blocks.{int(stage) - 1}.{block}.") for stage, block in places]
    sizes = STAGES.get(family or "", ())
    places = ((stage, block) for stage, size in enumerate(sizes) for block in range(size))
    return [(f"features.{index}.", f"blocks.{stage}.{block}.") for index, (stage, block) in enumerate(places, start=1)]


def _regnets(stage: str, block: str, part: str, layer: str) -> str:
    """Name a layer of RegNet's blocks, which timm counts from 1 and without the stage."""
    return f"s{stage}.b{int(block) + 1}.{REGNETS.get(part, part)}.{REGNETS.get(layer, layer)}"
