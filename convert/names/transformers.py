"""The names in Hugging Face's transformers: its image classifiers and its image towers, as `save_pretrained` writes them.

Queries, keys and values are three layers there. Files of a bare network lack the network's prefix, and what
`torch.save(model.state_dict())` of version 5 writes has newer names for some layers; both are read. Classifiers of DINOv2 and SigLIP read
other features than the published networks, and one of DeiT has no teacher: `POOLS` says with which option ours do so.
LayerNorms of ViT and DeiT, and the last of ConvNeXt, add 1e-12 to the variance there and 1e-6 here.

Source: https://github.com/huggingface/transformers, src/transformers/models (version 5.24), and conversion_mapping.py for newer names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from convert.core import Row, Shape, modules
from convert.names._beside import side, table
from convert.names._stages import block

FORMATS = ("safetensors", "pytorch")
BESIDE = ("config.json", "preprocessor_config.json")

PREFIXES = (
    *("resnet", "regnet", "convnext", "convnextv2", "vit", "deit", "dinov2", "dinov2_with_registers"),
    *("swin", "swinv2", "mobilenet_v1", "mobilenet_v2", "efficientnet", "vision_model"),
)
"""What stands before a network's own names in a file of a classifier."""
HEADS = ("classifier", "classifier.1", "cls_classifier", "distillation_classifier", "visual_projection")
IGNORED = (
    *("text_model.", "text_projection.", "logit_scale", "logit_bias"),
    *(f"{prefix}{name}" for prefix in ("", *(f"{name}." for name in PREFIXES)) for name in ("embeddings.mask_token", "pooler.")),
    *(f"{prefix}embeddings.position_ids" for prefix in ("", "vision_model.")),
)
"""Other towers, what only training needs, and a dense layer behind the class token that no classifier reads."""
UNREAD = {"vision_model.head.": "attention_pool."}
"""Their modules that a network without these of ours does not read."""

QUERY_KEY_VALUE = ("query", "key", "value")


def _newer(attention: str, *rest: tuple[str, str]) -> list[tuple[str, str]]:
    three = [(rf"\.attention\.{word[0]}_proj$", f".{attention}.{word}") for word in QUERY_KEY_VALUE]
    return [*three, (r"\.attention\.o_proj$", ".attention.output.dense"), *rest]


DENSE = ((r"\.mlp\.fc1$", ".intermediate.dense"), (r"\.mlp\.fc2$", ".output.dense"))
NEWER: dict[str, list[tuple[str, str]]] = {
    **dict.fromkeys(("vit", "deit"), _newer("attention.attention", (r"^layers\.", "encoder.layer."), *DENSE)),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), _newer("attention.attention")),
    "swin": _newer("attention.self", (r"\.attention\.relative_position_bias$", ".attention.self"), *DENSE),
}
"""How a state dict of version 5 spells what files have under the older names."""

UNIT = ("convolution", "normalization")
RESNETS_BLOCK = re.compile(r"layer(\d)\.(\d+)\.(?:(conv|bn)(\d)|downsample\.([01]))")
REGNETS_BLOCK = re.compile(r"trunk_output\.block(\d+)\.block\d+-(\d+)\.(?:f\.)?(\w+)\.(\w+)")
CONVNEXTS_LAYER = re.compile(r"features\.(\d+)\.(\d+)(?:\.(?:block\.)?(\w+))?")
CONVNEXTS = {"0": "dwconv", "2": "layernorm", "3": "pwconv1", "5": "pwconv2", "layer_scale": "layer_scale_parameter"}
CONVNEXTS_V2 = {"0": "dwconv", "2": "layernorm", "3": "pwconv1", "5": "grn", "6": "pwconv2"}
SWINS_LAYER = re.compile(r"features\.(\d+)\.(\w+)(.*)")
SWINS = {
    **{".norm1": ".layernorm_before", ".norm2": ".layernorm_after", ".attn.proj": ".attention.output.dense"},
    **{".attn.relative_position_bias_table": ".attention.self.relative_position_bias_table", ".mlp.0": ".intermediate.dense"},
    **{".attn.logit_scale": ".attention.self.logit_scale", ".mlp.3": ".output.dense", ".attn.qkv": ".attention.self.qkv"},
    **{f".attn.cpb_mlp.{place}": f".attention.self.continuous_position_bias_mlp.{place}" for place in (0, 2)},
}
MOBILENETS_V1_LAYER = re.compile(r"features\.(\d+)\.([01])\.([01])")
MOBILENETS_V2_UNITS = [f"{part}.{layer}" for part in ("expand_1x1", "conv_3x3", "reduce_1x1") for layer in UNIT]
EFFICIENTNETS_UNITS = [
    *("expansion.expand_conv", "expansion.expand_bn", "depthwise_conv.depthwise_conv", "depthwise_conv.depthwise_norm"),
    *("projection.project_conv", "projection.project_bn"),
]
GATE = {"fc1": "squeeze_excite.reduce", "fc2": "squeeze_excite.expand"}

VITS_BLOCK = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)")
VITS_PARTS = {"ln_1": "layernorm_before", "ln_2": "layernorm_after", "mlp.0": "intermediate.dense", "mlp.3": "output.dense"}
DINOS_PARTS = {
    **{"ln_1": "norm1", "ln_2": "norm2", "mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2"},
    **{"layer_scale_1.gamma": "layer_scale1.lambda1", "layer_scale_2.gamma": "layer_scale2.lambda1"},
}
TOWERS_PARTS = {
    **{"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2"},
    **{"self_attention.out_proj": "self_attn.out_proj"},
}
VITS_ENDS = {
    **{"class_token": "embeddings.cls_token", "distillation_token": "embeddings.distillation_token"},
    **{"register_tokens": "embeddings.register_tokens", "conv_proj": "embeddings.patch_embeddings.projection"},
    **{"encoder.pos_embedding": "embeddings.position_embeddings", "encoder.ln": "layernorm"},
}
TOWERS_ENDS = {
    **{"class_token": "embeddings.class_embedding", "conv_proj": "embeddings.patch_embedding", "encoder.ln": "post_layernorm"},
    **{"encoder.pos_embedding": "embeddings.position_embedding.weight", "encoder.ln_pre": "pre_layrnorm"},
    **{"attention_pool.latent": "head.probe", "attention_pool.proj": "head.attention.out_proj", "attention_pool.ln": "head.layernorm"},
    **{"attention_pool.mlp.0": "head.mlp.fc1", "attention_pool.mlp.3": "head.mlp.fc2"},
}


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; none for a network that transformers has not."""
    found = modules(ours)
    name = next((name for name in FAMILIES if name in family), None)
    if name is None or {"EfficientNetLite", "DeiT3"} & set(family):
        return []
    made = list(FAMILIES[name](found, ours))
    covered = {row.ours for row in made} | {row.ours.rpartition(".")[0] for row in made if row.kind.startswith("parameter")}
    return made if found.keys() <= covered else []


EPS = 1e-12
"""What its ViT and DeiT add to variances where a config.json says nothing; the papers' code, timm and torchvision add 1e-6."""


def options(family: Sequence[str]) -> dict[str, Any]:
    """Tell the constructor keywords with which our network computes what transformers' does."""
    tensorflows = {"padding": "same", "norm_eps": 1e-3}
    if "MobileNetV1" in family:
        return {**tensorflows, "activation": "relu6"}
    if "SigLIP" in family:
        return {"activation": "gelu_tanh"}
    if "ViT" in family and not {"CLIP", "DINOv2"} & set(family):
        return {"norm_eps": EPS}
    return tensorflows if {"MobileNetV2", "EfficientNet"} & set(family) else {}


def align(theirs: Sequence[str], mapping: Sequence[Row]) -> dict[str, str]:
    """Give modules their names in files, with the prefix that a classifier's have."""
    prefix = next((row.theirs.partition(".")[0] for row in mapping if row.theirs.partition(".")[0] in PREFIXES), "")
    aligned: dict[str, str] = {}
    for name in theirs:
        head, dot, rest = name.partition(".")
        own = rest if dot and head in PREFIXES else name
        for pattern, older in NEWER.get(prefix, ()):
            own = re.sub(pattern, older, own)
        aligned[name] = name if not prefix or name in HEADS else f"{prefix}.{own}"
    return aligned


def _named(found: Mapping[str, str], theirs: Mapping[str, str], prefix: str, heads: Mapping[str, str]) -> Iterator[Row]:
    """Make the rows of modules that are one on both sides."""
    for module, kind in found.items():
        if module in heads:
            yield Row(heads[module], module, kind)
        elif module in theirs:
            yield Row(f"{prefix}.{theirs[module]}", module, kind)


def _resnets(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterable[Row]:
    theirs = {"conv1": "embedder.embedder.convolution", "bn1": "embedder.embedder.normalization"}
    for module in found:
        if (match := RESNETS_BLOCK.fullmatch(module)) is None:
            continue
        stage, index, kind, number, shortcut = match.groups()
        unit = f"shortcut.{UNIT[int(shortcut)]}" if shortcut else f"layer.{int(number) - 1}.{UNIT[kind == 'bn']}"
        theirs[module] = f"encoder.stages.{int(stage) - 1}.layers.{index}.{unit}"
    first, second, third = (ours.get(f"layer1.0.conv{number}.weight", (0, 0)) for number in (1, 2, 3))
    if first[0] != second[1] or third[0] not in (0, 4 * second[0]):  # groups, and bottlenecks that are wider than a quarter
        return []
    return _named(found, theirs, "resnet", {"fc": "classifier.1"})


def _regnets(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterable[Row]:
    theirs = {"stem.0": "embedder.embedder.convolution", "stem.1": "embedder.embedder.normalization"}
    gated = any(module.endswith(".se.fc1") for module in found)
    places = {"a": "layer.0", "b": "layer.1", "c": f"layer.{2 + gated}", "proj": "shortcut"}
    for module in found:
        if match := REGNETS_BLOCK.fullmatch(module):
            stage, index, part, layer = match.groups()
            gate = {"fc1": "layer.2.attention.0", "fc2": "layer.2.attention.2"}
            unit = gate[layer] if part == "se" else f"{places[part]}.{UNIT[int(layer)]}"
            theirs[module] = f"encoder.stages.{int(stage) - 1}.layers.{index}.{unit}"
    return _named(found, theirs, "regnet", {"fc": "classifier.1"})


def _convnexts(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterator[Row]:
    second = not any(module.endswith(".layer_scale") for module in found)
    prefix, parts = ("convnextv2", CONVNEXTS_V2) if second else ("convnext", CONVNEXTS)
    theirs = {"features.0.0": "embeddings.patch_embeddings", "features.0.1": "embeddings.layernorm", "classifier.0": "layernorm"}
    for module in found:
        match = CONVNEXTS_LAYER.fullmatch(module)
        if match is None or match[1] == "0":
            continue
        stage, halves = divmod(int(match[1]) - 1, 2)
        if halves:
            theirs[module] = f"encoder.stages.{stage + 1}.downsampling_layer.{match[2]}"
        elif match[3] in parts:
            theirs[module] = f"encoder.stages.{stage}.layers.{match[2]}.{parts[match[3]]}"
    for row in _named(found, theirs, prefix, {"classifier.2": "classifier"}):
        if row.theirs.endswith(".grn"):
            for leaf in ("weight", "bias"):
                yield Row(f"{row.theirs}.{leaf}", f"{row.ours}.{leaf}", "parameter_from_map")
        else:
            yield Row(row.theirs, row.ours, "parameter_from_vector" if row.kind == "parameter" else row.kind)


def _swins(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterator[Row]:
    second = any(module.endswith(".logit_scale") for module in found)
    theirs = {"features.0.0": "embeddings.patch_embeddings.projection", "features.0.2": "embeddings.norm", "norm": "layernorm"}
    for module in found:
        if (match := SWINS_LAYER.fullmatch(module)) and match[1] != "0":
            stage, blocks = divmod(int(match[1]), 2)
            place = f"blocks.{match[2]}{SWINS[match[3]]}" if blocks else f"downsample.{match[2]}"
            theirs[module] = f"encoder.layers.{stage if blocks else stage - 1}.{place}"
    for row in _named(found, theirs, "swinv2" if second else "swin", {"head": "classifier"}):
        if row.theirs.endswith(".qkv"):
            three = tuple(f"{row.theirs.removesuffix('qkv')}{word}" for word in QUERY_KEY_VALUE)
            yield Row(row.theirs, row.ours, "keyless" if second else "linear", pieces=three)
        else:
            yield row


def _mobilenets_v1(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterable[Row]:
    theirs = {f"features.0.{place}": f"conv_stem.{layer}" for place, layer in enumerate(UNIT)}
    for module in found:
        if match := MOBILENETS_V1_LAYER.fullmatch(module):
            theirs[module] = f"layer.{2 * (int(match[1]) - 1) + int(match[2])}.{UNIT[int(match[3])]}"
    return _named(found, theirs, "mobilenet_v1", {"classifier.1": "classifier"})


def _mobilenets_v2(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterable[Row]:
    theirs = {f"features.0.{place}": f"conv_stem.first_conv.{layer}" for place, layer in enumerate(UNIT)}
    last = max(int(module.split(".")[1]) for module in found if module.startswith("features."))
    theirs |= {f"features.{last}.{place}": f"conv_1x1.{layer}" for place, layer in enumerate(UNIT)}
    for index in range(1, last):
        members = [module for module in found if module.startswith(f"features.{index}.")]
        prefix = "conv_stem." if index == 1 else f"layer.{index - 2}."
        theirs |= block(members, prefix, {}, MOBILENETS_V2_UNITS[2:], MOBILENETS_V2_UNITS)
    return _named(found, theirs, "mobilenet_v2", {"classifier.1": "classifier"})


def _efficientnets(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterable[Row]:
    theirs = {"features.0.0": "embeddings.convolution", "features.0.1": "embeddings.batchnorm"}
    theirs |= {"features.8.0": "encoder.top_conv", "features.8.1": "encoder.top_bn"}
    places = dict.fromkeys(re.findall(r"^(features\.\d+\.\d+\.)block", "\n".join(found), re.MULTILINE))
    for index, place in enumerate(places):
        members = [module for module in found if module.startswith(place)]
        theirs |= block(members, f"encoder.blocks.{index}.", GATE, EFFICIENTNETS_UNITS[2:], EFFICIENTNETS_UNITS)
    return _named(found, theirs, "efficientnet", {"classifier.1": "classifier"})


def _vits(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterator[Row]:
    """List the rows of ViT, which has no layer scales, DeiT, and DINOv2, which has them."""
    scaled = any(module.endswith(".gamma") for module in found)
    distilled, registers = "distillation_token" in found, "register_tokens" in found
    prefix = "deit" if distilled else "vit" if not scaled else "dinov2_with_registers" if registers else "dinov2"
    parts = {"self_attention.out_proj": "attention.output.dense", **(DINOS_PARTS if scaled else VITS_PARTS)}
    if scaled and ours["encoder.layers.encoder_layer_0.mlp.0.weight"][0] != ours["encoder.layers.encoder_layer_0.mlp.3.weight"][1]:
        parts |= {"mlp.0": "mlp.weights_in", "mlp.3": "mlp.weights_out"}
    heads = {"heads.head": "cls_classifier" if "heads.head_dist" in found else "classifier", "heads.head_dist": "distillation_classifier"}
    positions = f"{prefix}.embeddings.position_embeddings" if registers and scaled else ""
    for row in _transformers(found, prefix, "encoder.layer", "attention.attention", QUERY_KEY_VALUE, parts, VITS_ENDS, heads):
        if positions and row.ours in ("class_token", "encoder.pos_embedding"):
            theirs = row.theirs.replace("position_embeddings", "patch_positions")
            yield Row(theirs, row.ours, row.kind, positions=positions)
        else:
            yield row


def _towers(found: Mapping[str, str], ours: Mapping[str, Shape]) -> Iterator[Row]:
    """List the rows of CLIP's and SigLIP's image towers.

    Behind a pool by attention there is no classifier there, and ours has a name that no file has. SigLIP's reads the mean.
    """
    classifier = "classifier" if "class_token" not in found else "visual_projection"
    heads = {"heads.head": "vision_model.head.classifier" if "attention_pool.latent" in found else classifier}
    projections = tuple(f"{letter}_proj" for letter in "qkv")
    tables = ("class_token", "encoder.pos_embedding")
    for row in _transformers(found, "vision_model", "encoder.layers", "self_attn", projections, TOWERS_PARTS, TOWERS_ENDS, heads):
        if row.ours in tables:
            yield Row(row.theirs, row.ours, "parameter_from_table")
        elif row.theirs == "visual_projection":
            yield Row(row.theirs, row.ours, row.kind, lacks=("bias",))
        else:
            yield row
    for layer, first, end in (("q", 0, 1), ("kv", 1, 3)):
        for leaf in ("weight", "bias"):
            if f"attention_pool.{layer}" in found:
                place = "vision_model.head.attention."
                cut = (f"{place}in_proj_{leaf}", first, end, 3)
                yield Row(f"{place}{layer}.{leaf}", f"attention_pool.{layer}.{leaf}", "parameter", cut=cut)


def _transformers(
    found: Mapping[str, str],
    prefix: str,
    layers: str,
    attention: str,
    projections: Sequence[str],
    parts: Mapping[str, str],
    ends: Mapping[str, str],
    heads: Mapping[str, str],
) -> Iterator[Row]:
    """List the rows of blocks of attention and dense layers, and of what is around them."""
    theirs = dict(ends)
    for module in found:
        match = VITS_BLOCK.fullmatch(module)
        if match is None:
            continue
        if match[2].startswith("self_attention.in_proj_"):
            place, leaf = f"{prefix}.{layers}.{match[1]}.{attention}", match[2].rpartition("_")[2]
            three = tuple(f"{place}.{word}.{leaf}" for word in projections)
            yield Row(f"{place}.qkv.{leaf}", module, "parameter", pieces=three)
        elif match[2] in parts:
            theirs[module] = f"{layers}.{match[1]}.{parts[match[2]]}"
    yield from _named(found, theirs, prefix, heads)


FAMILIES: dict[str, Callable[[Mapping[str, str], Mapping[str, Shape]], Iterable[Row]]] = {
    **{"ResNet": _resnets, "RegNet": _regnets, "ConvNeXt": _convnexts, "Swin": _swins},
    **{"MobileNetV1": _mobilenets_v1, "MobileNetV2": _mobilenets_v2, "EfficientNet": _efficientnets},
    **{"CLIP": _towers, "SigLIP": _towers, "ViT": _vits},
}

NETWORKS = {
    **{"resnet": "ResNet", "regnet": "RegNet", "convnext": "ConvNeXt", "convnextv2": "ConvNeXtV2", "vit": "ViT", "deit": "DeiT"},
    **{"dinov2": "DINOv2", "dinov2_with_registers": "DINOv2", "swin": "Swin", "swinv2": "SwinV2"},
    **{"mobilenet_v1": "MobileNetV1", "mobilenet_v2": "MobileNetV2", "efficientnet": "EfficientNet"},
    **{"clip": "CLIP", "clip_vision_model": "CLIP", "siglip": "SigLIP", "siglip_vision_model": "SigLIP"},
}
"""Families by the `model_type` of config.json."""
ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_python": "gelu", "quick_gelu": "quick_gelu"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}
POOLS = {
    **{"SiglipForImageClassification": "mean", "DeiTForImageClassification": "class"},
    **dict.fromkeys(("Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification"), "class_and_mean"),
}
"""What the classifier reads, where that is not what the published network's does."""
UNLIKE = {"CLIPForImageClassification": "classifies the mean of the patches before the last norm"}
"""Classifiers that read other features than the networks here."""
RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Interpolations by PIL's numbers."""
SHORTEST_EDGE = ("CLIP", "ConvNext", "MobileNet")
"""How processors are called for which one number as `size` is the shorter edge's; for others it is that of both edges."""


def told(files: Mapping[str, Any], family: Sequence[str]) -> dict[str, Any] | None:
    """Read what config.json and preprocessor_config.json say of the weights beside them; None where they are of another network.

    Raises:
        ValueError: they describe what no network here computes, or how no image is prepared here.
    """
    config = table(files, "config.json")
    if NETWORKS.get(str(config.get("model_type"))) not in family:
        return None
    kind = str(next(iter(config.get("architectures") or ()), ""))
    if kind in UNLIKE:
        raise ValueError(f"{kind} {UNLIKE[kind]}, which no network here does; name a file of the bare network")
    pool = {"pool": POOLS[kind]} if kind in POOLS else {}
    found: dict[str, Any] = {"options": {**_configured(config), **pool}}
    labels = {int(number): str(label) for number, label in table(config, "id2label").items()}
    if kind.endswith(("Model", "Backbone", "WithProjection")):
        projected = "CLIP" in family and kind != "CLIPVisionModel"
        found |= {"embedding": True, "num_classes": int(config.get("projection_dim", 512)) if projected else 0}
    elif labels and not all(re.fullmatch(r"LABEL_\d+", label) for label in labels.values()):
        found["classes"] = [label for _, label in sorted(labels.items())]
    if processor := table(files, "preprocessor_config.json"):
        found["preprocessing"] = _prepared(processor)
    return found


def _configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """List the constructor keywords that a config.json asks for."""
    family = NETWORKS[config["model_type"]]
    config = {**config, **table(config, "vision_config")}
    if family == "ResNet":
        return {"stride_on": "1x1"} if config.get("downsample_in_bottleneck") else {}
    if family in ("MobileNetV1", "MobileNetV2"):
        padding = "same" if config.get("tf_padding", True) else "symmetric"
        activation = {"activation": str(config.get("hidden_act", "relu6"))} if family == "MobileNetV1" else {}
        return {"padding": padding, "norm_eps": float(config.get("layer_norm_eps", 1e-3)), **activation}
    if family == "EfficientNet":
        return {"padding": "same", "norm_eps": float(config.get("batch_norm_eps", 1e-3))}
    if family == "Swin":
        return {"window": int(config.get("window_size", 7))}
    if family == "SwinV2":
        window, smallest = int(config.get("window_size", 7)), side(config.get("image_size", 224)) // 32
        found = {"window": window} | ({"last_window": smallest} if smallest < window else {})
        learnt = (config.get("pretrained_window_sizes") or [0])[0]
        return found | ({"trained_window": int(learnt)} if learnt else {})
    if family not in ("ViT", "DeiT", "DINOv2", "CLIP", "SigLIP"):
        return {}
    found: dict[str, Any] = {"image_size": side(config.get("image_size", 224))}
    usual_eps = {"CLIP": 1e-5, "SigLIP": 1e-6, "DINOv2": 1e-6}.get(family, EPS)
    eps = config.get("layer_norm_eps", usual_eps)
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise ValueError(f"its layer_norm_eps is {eps!r}, which no norm adds to a variance")
    found["norm_eps"] = float(eps)
    if not config.get("use_swiglu_ffn"):
        usual = {"CLIP": "quick_gelu", "SigLIP": "gelu_pytorch_tanh"}.get(family, "gelu")
        activation = config.get("hidden_act", usual)
        if activation not in ACTIVATIONS:
            raise ValueError(f"its activation is {activation!r}; known are {', '.join(ACTIVATIONS)}")
        found["activation"] = ACTIVATIONS[activation]
    return found


def _prepared(processor: Mapping[str, Any]) -> dict[str, Any]:
    """List the fields of `weights.Preprocessing` that a preprocessor_config.json asks for."""
    name = str(processor.get("image_processor_type") or processor.get("feature_extractor_type") or "")
    found: dict[str, Any] = {}
    resample = processor.get("resample", 3 if name.startswith("CLIP") else 2)
    if resample not in RESAMPLING:
        raise ValueError(f"its images are resized by PIL's interpolation {resample!r}; known are nearest (0), bilinear (2) and bicubic (3)")
    found["interpolation"] = RESAMPLING[resample]
    size = processor.get("size") if processor.get("do_resize", True) else None
    if size is not None:
        found["squash"] = "shortest_edge" not in size if isinstance(size, Mapping) else not name.startswith(SHORTEST_EDGE)
        found["resize"] = side(size)
    if processor.get("do_center_crop", name.startswith(("CLIP", "DeiT", "MobileNet"))):
        found["crop"] = side(processor["crop_size"]) if processor.get("crop_size") is not None else found.get("resize")
    elif found.get("squash"):
        found["crop"] = found["resize"]
    if name.startswith("ConvNext") and "resize" in found:  # below 384 pixels the shorter edge of a larger image, then the middle of that
        edge, share = found["resize"], float(processor.get("crop_pct") or 224 / 256)
        found |= {"crop": edge, "resize": int(edge / share), "squash": False} if edge < 384 else {"crop": edge, "squash": True}
    mean, std = processor.get("image_mean"), processor.get("image_std")
    if mean is not None and std is not None:
        again = std if name.startswith("EfficientNet") and processor.get("include_top", True) else [1.0] * len(std)  # divided by twice
        if not processor.get("do_normalize", True):
            mean, std = [0.0] * len(std), [1.0] * len(std)
        std = [one * other for one, other in zip(std, again, strict=True)]
        factor = 255 * float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 255.0
        shift = 1.0 if processor.get("rescale_offset") else 0.0
        found["mean"] = [round((float(each) + shift) / factor, 9) for each in mean]
        found["std"] = [round(float(each) / factor, 9) for each in std]
    return found
