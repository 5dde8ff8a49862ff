"""The names of Flax's example networks, its ImageNet ResNets, and of Google's vision transformers and MLP-Mixers.

Modules without a name are numbered by class, blocks straight through. A vision transformer has queries, keys and values in three layers,
each with an axis for the heads (`convert.formats._flaxtree`). big_vision counts within a block otherwise than vision_transformer, whose
names are written; both are read, SigLIP's too, and blocks that are stacked in one tensor.

Source: https://github.com/google/flax, examples/imagenet/models.py; https://github.com/google-research/vision_transformer,
vit_jax/models_vit.py and models_mixer.py; https://github.com/google-research/big_vision, big_vision/models/vit.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.core import Row, Shape, modules

FORMATS = ("flax", "npz", "safetensors")
ENDS = {"conv1": "conv_init", "bn1": "bn_init", "fc": "Dense_0"}
PROJECTION = {"0": "conv_proj", "1": "norm_proj"}
VITS_ENDS = {
    **{"class_token": "cls", "conv_proj": "embedding", "encoder.pos_embedding": "Transformer.posembed_input.pos_embedding"},
    **{"encoder.ln": "Transformer.encoder_norm", "heads.head": "head", "attention_pool.latent": "MAPHead_0.probe"},
    **{"attention_pool.q": "MAPHead_0.MultiHeadDotProductAttention_0.query", "attention_pool.ln": "MAPHead_0.LayerNorm_0"},
    **{
        "attention_pool.proj": "MAPHead_0.MultiHeadDotProductAttention_0.out",
        "attention_pool.kv": "MAPHead_0.MultiHeadDotProductAttention_0.kv",
    },
    **{f"attention_pool.mlp.{ours}": f"MAPHead_0.MlpBlock_0.Dense_{theirs}" for theirs, ours in enumerate((0, 3))},
}
VITS_PARTS = {
    **{"ln_1": "LayerNorm_0", "ln_2": "LayerNorm_2", "mlp.0": "MlpBlock_3.Dense_0", "mlp.3": "MlpBlock_3.Dense_1"},
    "self_attention.out_proj": "MultiHeadDotProductAttention_1.out",
}
VITS_BLOCK = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)")
QUERY_KEY_VALUE = ("query", "key", "value")
HEADS = {1280: 16, 1152: 16}
"""Heads of the networks whose heads have not 64 channels, by width."""
BIG_VISIONS = re.compile(r"^(Transformer\.encoderblock_\d+\.)(MultiHeadDotProductAttention_0|MlpBlock_0|LayerNorm_1)\.")
BIG_VISION = {"MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1", "MlpBlock_0": "MlpBlock_3", "LayerNorm_1": "LayerNorm_2"}
OTHERS = ("DeiT", "DeiT3", "DINOv2", "CLIP")
IGNORED = ("txt.",)
"""The tower of texts beside SigLIP's."""

MIXERS_ENDS = {"stem.proj": "stem", "norm": "pre_head_layer_norm", "head": "head"}
MIXERS_PARTS = {"norm1": "LayerNorm_0", "norm2": "LayerNorm_1"}
MIXERS_BLOCK = re.compile(r"blocks\.(\d+)\.(norm\d|mlp_tokens|mlp_channels)(?:\.fc(\d))?")

BLOCK = re.compile(r"layer(\d)\.(\d+)\.(?:(conv|bn)(\d)|downsample\.([01]))")


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; ResNets are of ImageNet's kind only, and without gates or groups."""
    found = modules(ours)
    if "ViT" in family and not set(OTHERS) & set(family):
        return _vits(found, ours)
    if "MLPMixer" in family:
        return _mixers(found)
    if "ResNet" not in family or any(not (module in ENDS or BLOCK.fullmatch(module)) for module in found):
        return []
    block = "BottleneckResNetBlock" if any(module.endswith(".conv3") for module in found) else "ResNetBlock"
    places = list(dict.fromkeys(match.group(1, 2) for module in found if (match := BLOCK.fullmatch(module))))
    return [Row(ENDS.get(module) or _theirs(module, block, places), module, kind) for module, kind in found.items()]


def options(family: Sequence[str]) -> dict[str, Any]:
    """Say how our network has to be built: Flax pads as TensorFlow does, but for the first convolution, and approximates GELU."""
    if {"ViT", "MLPMixer"} & set(family):
        return {"activation": "gelu_tanh"}
    return {"padding": "same"} if "ResNet" in family else {}


def mend(name: str) -> str:
    """Count within a transformer's block as vision_transformer does, and name what SigLIP's pair has beside its image tower."""
    if name in ("t", "b"):  # by which it compares texts and images
        return f"txt.{name}"
    name = "Transformer.posembed_input.pos_embedding" if name.endswith("pos_embedding") else name.removeprefix("img.")
    return BIG_VISIONS.sub(lambda match: f"{match[1]}{BIG_VISION[match[2]]}.", name)


def preprocessing(family: Sequence[str]) -> dict[str, Any]:
    """Say how the example prepares its images, and what Google's networks take: pixels from -1 to 1."""
    if {"ViT", "MLPMixer"} & set(family):
        return {"interpolation": "bilinear", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "channel_order": "rgb"}
    if "ResNet" not in family:
        return {}
    return {
        "resize": 256,
        "crop": 224,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "channel_order": "rgb",
    }


def _vits(found: Mapping[str, str], ours: Mapping[str, Shape]) -> list[Row]:
    width = ours["encoder.ln.weight"][0]
    heads = HEADS.get(width, max(width // 64, 1))
    made: list[Row] = []
    for module, kind in found.items():
        match = VITS_BLOCK.fullmatch(module)
        if match is None:
            theirs = VITS_ENDS.get(module)
        elif match[2].startswith("self_attention.in_proj_"):
            place, leaf = f"Transformer.encoderblock_{match[1]}.MultiHeadDotProductAttention_1", match[2].rpartition("_")[2]
            three = tuple(f"{place}.{word}.{leaf}" for word in QUERY_KEY_VALUE)
            made.append(Row(f"{place}.qkv.{leaf}", module, "parameter", pieces=three, heads=heads))
            continue
        else:
            theirs = f"Transformer.encoderblock_{match[1]}.{VITS_PARTS[match[2]]}" if match[2] in VITS_PARTS else None
        if theirs is None:  # a network that Google's have not
            return []
        two = tuple(theirs.replace("kv", word) for word in QUERY_KEY_VALUE[1:]) if theirs.endswith(".kv") else ()
        made.append(Row(theirs, module, kind, pieces=two, heads=heads if "Attention_" in theirs else 0))
    return made


def _mixers(found: Mapping[str, str]) -> list[Row]:
    made: list[Row] = []
    for module, kind in found.items():
        theirs = MIXERS_ENDS.get(module)
        if match := MIXERS_BLOCK.fullmatch(module):
            part = MIXERS_PARTS.get(match[2]) or f"{match[2].removeprefix('mlp_').removesuffix('s')}_mixing.Dense_{int(match[3]) - 1}"
            theirs = f"MixerBlock_{match[1]}.{part}"
        if theirs is None:  # ResMLP's and gMLP's
            return []
        made.append(Row(theirs, module, kind))
    return made


def _theirs(module: str, block: str, places: list[tuple[str, ...]]) -> str:
    match = BLOCK.fullmatch(module)
    if match is None:
        return module
    stage, index, kind, number, projection = match.groups()
    leaf = PROJECTION[projection] if projection else f"{'Conv' if kind == 'conv' else 'BatchNorm'}_{int(number) - 1}"
    return f"{block}_{places.index((stage, index))}.{leaf}"
