"""OpenAI's names of CLIP's image tower, which open_clip has too; its towers of timm, SigLIP's, have timm's names behind a prefix.

The projection is a matrix beside the layers, inputs first, and has no bias. Whether the activation is OpenAI's approximation of GELU
says open_clip_config.json or nobody; OpenAI's own weights need it: `CLIP_ViT_B_32_QuickGELU`, or ``activation="quick_gelu"``.

Source: https://github.com/openai/CLIP, clip/model.py, and https://github.com/mlfoundations/open_clip, src/open_clip/transformer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.core import Row, Shape, modules
from convert.names import timm
from convert.names._beside import side, table

FORMATS = ("safetensors", "pytorch")
BESIDE = ("open_clip_config.json",)
IGNORED = (
    *("transformer.", "text.", "token_embedding.", "ln_final.", "positional_embedding", "text_projection", "logit_scale", "logit_bias"),
    *("input_resolution", "context_length", "vocab_size"),
)
"""The tower of texts, and what compares both."""

ENDS = {
    **{"class_token": "class_embedding", "conv_proj": "conv1", "encoder.pos_embedding": "positional_embedding"},
    **{"encoder.ln_pre": "ln_pre", "encoder.ln": "ln_post"},
}
BLOCK = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.(.+)")
PARTS = {"self_attention": "attn", "mlp.0": "mlp.c_fc", "mlp.3": "mlp.c_proj"}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's images."""


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules; there are CLIP's towers and SigLIP's."""
    found = modules(ours)
    if "SigLIP" in family:
        return [replace(row, theirs=f"visual.trunk.{row.theirs}") for row in timm.rows(family, ours)]
    if "CLIP" not in family:
        return []
    made: list[Row] = []
    for module, kind in found.items():
        if module == "heads.head":
            made.append(Row("visual.proj", module, "projection", lacks=("bias",)))
            continue
        if match := BLOCK.fullmatch(module):
            rest = match[2].replace("self_attention", "attn")
            theirs = f"transformer.resblocks.{match[1]}.{PARTS.get(rest, rest)}"
        else:
            theirs = ENDS[module]
        made.append(Row(f"visual.{theirs}", module, "parameter_from_table" if module in ("class_token", "encoder.pos_embedding") else kind))
    return made


def told(files: Mapping[str, Any], family: Sequence[str]) -> dict[str, Any] | None:
    """Read the open_clip_config.json that open_clip writes beside weights; None where it is of another tower.

    Raises:
        ValueError: it says how no image is prepared here.
    """
    config = table(files, "open_clip_config.json")
    model, processing = table(config, "model_cfg"), table(config, "preprocess_cfg")
    vision = table(model, "vision_cfg")
    if "image_size" not in vision or not {"CLIP", "SigLIP"} & set(family):
        return None
    edge, mode = side(vision["image_size"]), processing.get("resize_mode") or "shortest"
    if mode not in ("shortest", "squash"):
        raise ValueError(f"its images are resized by the mode {mode!r}; known are shortest and squash")
    own = "timm_model_name" not in vision
    return {
        "options": {"image_size": edge, "activation": "quick_gelu" if own and model.get("quick_gelu") else "gelu"},
        "embedding": True,
        "num_classes": int(model["embed_dim"]) if own else 0,
        "preprocessing": {
            "resize": edge,
            "crop": edge,
            "squash": mode == "squash",
            "interpolation": processing.get("interpolation") or "bicubic",
            "mean": [float(each) for each in processing.get("mean") or MEAN],
            "std": [float(each) for each in processing.get("std") or STD],
        },
    }
