"""Write the rows of weights/registry that follow from timm's and torchvision's own tables, and compare those that are there.

    python recipes/registry_rows.py                # write what is missing
    python recipes/registry_rows.py vit swin       # of these families' files alone
    python recipes/registry_rows.py --check        # write nothing; say what is missing or differs, and exit with 1
    python recipes/registry_rows.py --left-out     # say which published checkpoints have no row, and why

A row that is there stays as it is: hashes, sizes and other facts of it were found by hand. A new one has what timm 1.0.31's
`pretrained_cfg` or torchvision's enum of weights states. timm states no accuracies there; those in registry_metrics.tsv are of its
results-imagenet.csv, and a row has one only if it was measured with that row's own preprocessing. Where timm measured at two sizes, the row
has the one that it was trained at.

Which architectures of theirs are a network of ours: those that are called so but for case and underscores, and those in `ARCHS`, with the
constructor options that their checkpoints need. timm's network is then built on the meta device: a row is written only if its tensors,
renamed, have the names and shapes of ours. What pytorchcv and Keras publish is in
registry_pytorchcv.py and registry_keras.py.

The default of a network is torchvision's own default where torchvision has it. Else it is the free checkpoint of 1000 classes without an
option `image_size` that is most accurate; where nothing was measured, timm's default tag; where that is not free, the first free one; and
a checkpoint that is not free only where no other is there. Free are the licences of `weights.record.PERMISSIVE`. pytorchcv's and Keras's
are never the default where there is another.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import math
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import zoo
from convert import names
from recipes import registry_keras, registry_pytorchcv
from weights.record import PERMISSIVE, Checkpoint, record
from weights.registry import SHIPPED
from zoo.networks.model import Model

Options = dict[str, Any]

METRICS = Path(__file__).with_name("registry_metrics.tsv")
DATA = "ImageNet-1k validation"
SAME: Options = {"padding": "same"}
TF: Options = {"padding": "same", "norm_eps": 0.001}
EPS: Options = {"norm_eps": 1e-05}
CEILED: Options = {"ceil_mode": True}

ARCHS: dict[str, dict[str, Options]] = {
    **{f"EfficientNetB{size}": {f"efficientnet_b{size}": {}, f"tf_efficientnet_b{size}": TF} for size in range(5)},
    "EfficientNetB5": {"efficientnet_b5": EPS, "tf_efficientnet_b5": SAME},
    "EfficientNetB6": {"efficientnet_b6": EPS, "tf_efficientnet_b6": SAME},
    "EfficientNetB8": {"tf_efficientnet_b8": SAME},
    "EfficientNetL2": {"tf_efficientnet_l2": SAME},
    "EfficientNetB7": {"efficientnet_b7": EPS, "tf_efficientnet_b7": SAME},
    **{
        f"EfficientNetLite{size}": {
            f"tf_efficientnet_lite{size}": {},
            f"efficientnet_lite{size}": {"norm_eps": 1e-05, "padding": "symmetric"},
        }
        for size in range(5)
    },
    "MobileNetV1": {"mobilenetv1_100": {"activation": "relu6"}},
    "MobileNetV1_125": {"mobilenetv1_125": {"activation": "relu6"}},
    "MobileNetV2": {"mobilenetv2_100": {}},
    "MobileNetV3Large": {"mobilenetv3_large_100": EPS, "tf_mobilenetv3_large_100": SAME},
    "MobileNetV3Small": {"mobilenetv3_small_100": EPS, "tf_mobilenetv3_small_100": SAME},
    "MNASNet0_5": {"mnasnet_050": {}},
    "MNASNet0_75": {"mnasnet_075": {}},
    "MNASNet1_0": {"mnasnet_100": {}},
    "RegNetX_400MF": {"regnetx_004_tv": {}},
    "RegNetX_400MF_Pycls": {"regnetx_004": {}},
    "RegNetX_800MF": {"regnetx_008": {}},
    **{
        f"RegNet{kind}_{size}": {f"regnet{kind.lower()}_{theirs}": {}}
        for kind in "XY"
        for size, theirs in (
            ("200MF", "002"),
            ("600MF", "006"),
            ("4_0GF", "040"),
            ("6_4GF", "064"),
            ("12GF", "120"),
            ("64GF", "640"),
            ("256GF", "2560"),
        )
    },
    "RegNetX_1_6GF": {"regnetx_016": {}},
    "RegNetX_3_2GF": {"regnetx_032": {}},
    "RegNetX_8GF": {"regnetx_080": {}},
    "RegNetX_16GF": {"regnetx_160": {}},
    "RegNetX_32GF": {"regnetx_320": {}},
    "RegNetY_400MF": {"regnety_004": {}},
    "RegNetY_800MF": {"regnety_008_tv": {}},
    "RegNetY_800MF_Pycls": {"regnety_008": {}},
    "RegNetY_1_6GF": {"regnety_016": {}},
    "RegNetY_3_2GF": {"regnety_032": {}},
    "RegNetY_8GF": {"regnety_080_tv": {}},
    "RegNetY_8GF_Pycls": {"regnety_080": {}},
    "RegNetY_16GF": {"regnety_160": {}},
    "RegNetY_32GF": {"regnety_320": {}},
    "RegNetY_128GF": {"regnety_1280": {}},
    "Xception": {"legacy_xception": {}},
    **{f"EfficientNetV2_{size}": {f"tf_efficientnetv2_{size.lower()}": SAME} for size in ("S", "M", "L", "XL", "B0", "B1", "B2", "B3")},
    "Swin_T": {"swin_tiny_patch4_window7_224": {}},
    "Swin_S": {"swin_small_patch4_window7_224": {}},
    "Swin_B": {"swin_base_patch4_window7_224": {}, "swin_base_patch4_window12_384": {"window": 12}},
    "Swin_L": {"swin_large_patch4_window7_224": {}, "swin_large_patch4_window12_384": {"window": 12}},
    "Swin_V2_T": {"swinv2_tiny_window8_256": {}, "swinv2_tiny_window16_256": {"window": 16, "last_window": 8}},
    "Swin_V2_S": {"swinv2_small_window8_256": {}, "swinv2_small_window16_256": {"window": 16, "last_window": 8}},
    "Swin_V2_B": {
        "swinv2_base_window8_256": {},
        "swinv2_base_window16_256": {"window": 16, "last_window": 8},
        "swinv2_base_window12_192": {"window": 12, "last_window": 6},
        "swinv2_base_window12to16_192to256": {"window": 16, "last_window": 8, "trained_window": 12},
        "swinv2_base_window12to24_192to384": {"window": 24, "last_window": 12, "trained_window": 12},
    },
    "Swin_V2_L": {
        "swinv2_large_window12_192": {"window": 12, "last_window": 6},
        "swinv2_large_window12to16_192to256": {"window": 16, "last_window": 8, "trained_window": 12},
        "swinv2_large_window12to24_192to384": {"window": 24, "last_window": 12, "trained_window": 12},
    },
    "SENet154": {"legacy_senet154": CEILED},
    **{f"Legacy_SEResNet{depth}": {f"legacy_seresnet{depth}": CEILED} for depth in (18, 34)},
    **{f"SEResNet{depth}": {f"seresnet{depth}": {}, f"legacy_seresnet{depth}": CEILED | {"stride_on": "1x1"}} for depth in (50, 101, 152)},
    **{f"SEResNeXt{depth}_32x4d": {f"seresnext{depth}_32x4d": {}, f"legacy_seresnext{depth}_32x4d": CEILED} for depth in (26, 50, 101)},
    **{
        f"ViT_{short}_{patch}": {f"vit_{size}_patch{patch}_{side}": {} for side in (224, 384)}
        for short, size, patches in (
            ("Ti", "tiny", [16]),
            ("S", "small", [32, 16, 8]),
            ("B", "base", [32, 16, 8]),
            ("L", "large", [32, 16]),
        )
        for patch in patches
    },
    "ViT_H_14": {"vit_huge_patch14_224": {}, "vit_huge_patch14_gap_224": {"pool": "mean"}},
    "CLIP_ViT_XS_16": {"vit_xsmall_patch16_clip_224": {}},
    "CLIP_ViT_M_32": {"vit_medium_patch32_clip_224": {}},
    "CLIP_ViT_M_16": {"vit_medium_patch16_clip_224": {}},
    "CLIP_ViT_Betwixt_32": {"vit_betwixt_patch32_clip_224": {}},
    "CLIP_ViT_B_16_Plus": {"vit_base_patch16_plus_clip_240": {}},
    "CLIP_ViT_Giant_14": {"vit_giant_patch14_clip_224": {}},
    "CLIP_ViT_Gigantic_14": {
        **{f"vit_gigantic_patch14_clip_{side}": {} for side in (224, 378)},
        "vit_gigantic_patch14_clip_quickgelu_224": {"activation": "quick_gelu"},
    },
    **{
        f"DeiT_{short}_16{suffix}": {f"deit_{size}{suffix.lower()}_patch16_{side}": {} for side in (224, 384)}
        for short, size in (("Ti", "tiny"), ("S", "small"), ("B", "base"))
        for suffix in ("", "_Distilled")
    },
    **{
        f"DeiT3_{short}": {f"deit3_{size}_{side}": {} for side in (224, 384)}
        for short, size in (
            ("S_16", "small_patch16"),
            ("M_16", "medium_patch16"),
            ("B_16", "base_patch16"),
            ("L_16", "large_patch16"),
            ("H_14", "huge_patch14"),
        )
    },
    **{
        f"DINOv2_{short}_14{suffix}": {f"vit_{size}_patch14{suffix.lower()}_dinov2": {}}
        for short, size in (("S", "small"), ("B", "base"), ("L", "large"), ("G", "giant"))
        for suffix in ("", "_Reg4")
    },
    **{
        f"CLIP_ViT_{short}{own}{suffix}": {f"vit_{size}_clip{suffix.lower()}_{side}": {} for side in sides}
        for short, size, own, sides in (
            ("B_32", "base_patch32", "", (224, 256, 384, 448)),
            ("B_16", "base_patch16", "", (224, 384)),
            ("L_14", "large_patch14", "", (224,)),
            ("L_14", "large_patch14", "_336", (336,)),
            ("H_14", "huge_patch14", "", (224, 336, 378)),
        )
        for suffix in ("", "_QuickGELU")
    },
    **{
        f"SigLIP_{short}": {f"vit_{size}_siglip{gap}_{side}": {"pool": "mean"} if gap else {} for gap in ("", "_gap") for side in sides}
        for short, size, sides in (
            ("B_32", "base_patch32", (256,)),
            ("B_16", "base_patch16", (224, 256, 384, 512)),
            ("L_16", "large_patch16", (256, 384, 512)),
            ("So400m_14", "so400m_patch14", (224, 378, 384, 448, 896)),
            ("So400m_16", "so400m_patch16", (256, 384, 512)),
            ("GOpt_16", "giantopt_patch16", (256, 384)),
        )
    },
}
"""timm's architectures of our networks, the principal one first, that are called otherwise, need options, or are several."""

TORCHVISION: dict[str, Options] = {"GoogLeNet": {"transform_input": True}, "InceptionV3": {"transform_input": True}}
"""Options that torchvision's checkpoints need."""

LEFT_OUT: dict[str, str] = {
    "mnasnet_100.rmsp_in1k": "timm's names of MNASNet's layers are no naming of convert's",
    **{f"resmlp_{size}_224.fb_dino": "trained without labels, and nobody says what its 1000 outputs are" for size in (12, 24)},
}
"""Checkpoints of timm's that have no row, each with the reason."""

ELSEWHERE: dict[str, str] = {
    "google/mobilenet_v1_* and mobilenet_v2_* of the Hub": "of 1001 classes no list is here; hf:// reads them with their config.json",
    "microsoft/resnet-18, -34, -50, -101, -152 of the Hub": "timm's weights once more, by transformers' names; hf:// reads them",
    "torchvision's *_QuantizedWeights": "int8 modules, as no network here is",
    "PaddleClas's DenseNet264": "its names are no naming of convert's, its list says 33.74 M parameters where ours has 33.34 M",
}
"""Checkpoints of others' networks that we have, in no table that this script reads, each with the reason why it has no row."""

ABSENT: dict[str, str] = {}
"""Networks of torchvision's, in modules of which we have others, that we lack."""

DIFFERS: dict[str, dict[str, str]] = {}
"""Rows whose facts differ from what this script writes: the key, and the reason."""

FOREIGN = ("pytorchcv", "keras")
"""Namings whose rows are the default only of networks that have no other, Keras's only where there is none of the others."""

LABELS = {
    1000: "imagenet1k", 11_221: "imagenet21k_miil", 11_821: "imagenet12k", 21_841: "imagenet22k", 21_842: "imagenet22k_ms",
    21_843: "imagenet21k_goog",
}  # fmt: skip
"""The list of a number of classes, as timm's ImageNetInfo tells them."""
FEWEST = 2000
"""Below so many outputs, and not 1000, they are no classes but the width of an embedding: 0, or CLIP's projection."""
SPDX = {
    "apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause", "cc-by-nc-4.0": "CC-BY-NC-4.0", "cc-by-4.0": "CC-BY-4.0",
    None: "unstated", "unknown": "unstated",
}  # fmt: skip
"""timm's licence: ours. What has no SPDX identifier is called LicenseRef- and as timm calls it."""
LINKED = {"https://github.com/facebookresearch/SWAG/blob/main/LICENSE": "CC-BY-NC-4.0"}
"""The licence behind a link of torchvision's."""


@dataclass
class Wanted:
    """A row as it should be: the keys that follow from their tables, in the files' order, and where they come from."""

    model: str
    tag: str
    table: dict[str, Any]
    names: tuple[str, ...]
    notes: list[str] = field(default_factory=list[str])


def plain(name: str) -> str:
    """Drop what tells our spelling from theirs; the _ of "1_6" is a number's."""
    return re.sub(r"(?<!\d)_|_(?!\d)", "", name.lower())


@cache
def timm_archs() -> dict[str, tuple[str, ...]]:
    """List timm's architectures that have published checkpoints, with their tags, timm's default first."""
    from timm.models import get_pretrained_cfg, list_pretrained

    found: dict[str, list[str]] = {}
    for name in list_pretrained():
        arch, _, tag = name.partition(".")
        found.setdefault(arch, []).append(tag)
    for arch, tags in found.items():
        default = get_pretrained_cfg(arch)
        if default is not None and default.tag in tags:
            tags.remove(default.tag)
            tags.insert(0, default.tag)
    return {arch: tuple(tags) for arch, tags in found.items()}


def archs(cls: type[Model]) -> dict[str, Options]:
    """List timm's architectures of a network, the principal one first, each with the options of its checkpoints."""
    known = timm_archs()
    named = ARCHS.get(cls.__name__, {})
    same = {arch: Options() for arch in known if plain(arch) == plain(cls.__name__) and arch not in named}
    return {arch: options for arch, options in {**named, **same}.items() if arch in known}


def torchvision_arch(cls: type[Model]) -> str | None:
    """Name torchvision's builder of a network."""
    return _builders().get(plain(cls.__name__))


@cache
def _builders() -> dict[str, str]:
    import torchvision

    return {plain(name): name for name in torchvision.models.list_models(module=torchvision.models)}


@cache
def misfit(model: str, arch: str, options: tuple[tuple[str, Any], ...], num_classes: int) -> str:
    """Say how the tensors of timm's network differ from those of ours; "" where they don't. With 0 classes neither has a classifier."""
    import timm

    cls = zoo.CATALOGUE[model]
    with torch.device("meta"):
        theirs = timm.create_model(arch, num_classes=num_classes).state_dict()  # pyright: ignore[reportPrivateImportUsage]
        ours = cls(num_classes=num_classes or 1000, **dict(options)).state_dict()
    heads = tuple(f"{name}." for name in cls.classifiers) if not num_classes else ()
    got = names.to_ours(theirs, ours, naming="timm", family=cls)
    missing = [
        name for name in ours if name not in got and not name.endswith("num_batches_tracked") and not (heads and name.startswith(heads))
    ]
    other = [name for name, tensor in got.items() if name not in ours or tensor.shape != ours[name].shape]
    return f"its tensors are not ours: {len(missing)} missing ({missing[:1]}), {len(other)} other ({other[:1]})" if missing or other else ""


@cache
def metrics() -> dict[str, list[tuple[int, float, str, float, float, str]]]:
    """Read the accuracies by checkpoint: side, crop_pct, interpolation, top-1, top-5, commit."""
    found: dict[str, list[tuple[int, float, str, float, float, str]]] = {}
    for line in METRICS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, side, crop, kind, top1, top5, commit = line.split("\t")
            found.setdefault(name, []).append((int(side), float(crop), kind, float(top1), float(top5), commit))
    return found


def timm_row(cls: type[Model], arch: str, tag: str, options: Options, prove: bool) -> Wanted | str:
    """Make the row of a checkpoint of timm's, or say why there is none; with `prove` that its tensors are not ours is a reason too."""
    from timm.models import get_pretrained_cfg

    name = f"{arch}.{tag}"
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    config = get_pretrained_cfg(name)
    assert config is not None
    url = str(config.url or "")
    if config.hf_hub_id is None and not re.search(r"-[0-9a-f]{8,}\.(pth|pt)$", url):
        return "no file with a published hash"
    if config.crop_mode == "border":
        return "measured on images with a border, which a record can't say"
    if config.input_size[0] != 3:
        return f"reads {config.input_size[0]} channels"
    if config.hf_hub_filename and not config.hf_hub_filename.endswith(".safetensors"):
        return f"its file is {config.hf_hub_filename}"
    if any("natively QuickGELU" in note for note in config.notes or ()) and "quickgelu" not in arch:
        return "was trained with QuickGELU, whose architecture has the same file"
    if config.input_size[1] % cls.size_multiple:
        return f"reads images of {config.input_size[1]} px, which patches of {cls.size_multiple} px don't divide"
    embedding = config.num_classes < FEWEST and config.num_classes not in LABELS
    sizes = {config.input_size[1]: config.crop_pct}
    sizes.setdefault((config.test_input_size or config.input_size)[1], config.test_crop_pct or config.crop_pct)
    side, crop_pct, found = *next(iter(sizes.items())), None
    for one, pct in sizes.items():
        near = [e for e in metrics().get(name, []) if e[0] == one and abs(e[1] - pct) < 2e-3 and e[2] == config.interpolation]
        if near and found is None:
            side, crop_pct, found = one, pct, near[0]
    options = {**sized(cls, config.input_size[1] if config.fixed_input_size else side), **options}
    if found is not None and options.get("image_size", side) != side:
        side, crop_pct, found = config.input_size[1], config.crop_pct, None
    if prove and (why := misfit(cls.__name__, arch, tuple(sorted(options.items())), config.num_classes)):
        return why
    hub = f"hf://{config.hf_hub_id}/{config.hf_hub_filename or 'model.safetensors'}" if config.hf_hub_id else None
    digits = re.search(r"-([0-9a-f]{8,})\.\w+$", url)
    table: dict[str, Any] = {"sources": [hub or url], "format": "safetensors" if hub else "pytorch", "names": "timm"}
    if hub is None and digits:
        table["sha256_prefix"] = digits[1]
    if hub and digits and "/pytorch-image-models/releases/" in url and url.endswith(".pth"):
        table["alternatives"] = [{"source": url, "format": "pytorch", "sha256_prefix": digits[1]}]
    table["num_classes"] = config.num_classes
    if embedding:
        table["embedding"] = True
    if config.num_classes in LABELS and not embedding:
        table["labels"] = LABELS[config.num_classes]
    if found is not None and not embedding:
        table["metrics"] = {"top1": found[3], "top5": found[4]}
        table["metrics_data"] = DATA
    table["license"] = SPDX.get(config.license, f"LicenseRef-{config.license}")
    steps: dict[str, Any] = {"resize": int(side / crop_pct), "crop": side, "interpolation": config.interpolation}
    table["preprocessing"] = steps | {"mean": list(config.mean), "std": list(config.std)}
    if config.crop_mode == "squash":
        table["preprocessing"]["squash"] = True
    if options:
        table["options"] = options
    origin = f"; metrics: its results-imagenet.csv at {found[5]}" if "metrics" in table and found else ""
    table["provenance"] = f"timm 1.0.31: pretrained_cfg{origin}" + ("; ported by timm from TensorFlow" if arch.startswith("tf_") else "")
    return Wanted(cls.__name__, tag_of(cls, arch, tag, options), table, (name,))


def sized(cls: type[Model], side: int) -> Options:
    """Return the option of a network that is built for one size, where that is not its own."""
    return {"image_size": side} if "image_size" in inspect.signature(cls).parameters and side != cls.input_size else {}


def tag_of(cls: type[Model], arch: str, tag: str, options: Mapping[str, Any]) -> str:
    """Name a checkpoint of timm's among its network's: by its tag, and by what else tells its architecture from the principal one."""
    if arch.startswith("tf_"):
        return f"tf_{tag}"
    known = list(archs(cls))
    side = options.get("image_size")
    if arch != known[0]:
        principal = known[0].split("_")
        more = [word for word in arch.split("_") if word not in principal and not (side and word.endswith(str(side)))]
        tag = "_".join([*more, tag])
    return tag if side is None or tag.endswith(f"_{side}") else f"{tag}_{side}"


def torchvision_rows(cls: type[Model]) -> Iterator[Wanted]:
    """Make the rows of torchvision's checkpoints of a network."""
    import torchvision

    arch = torchvision_arch(cls)
    if arch is None:
        return
    enum = torchvision.models.get_model_weights(arch)
    for entry in sorted(enum, key=lambda one: one is not getattr(enum, "DEFAULT")):  # noqa: B009
        meta, steps = entry.meta, entry.transforms()
        digits = re.search(r"-([0-9a-f]{8,})\.pth$", entry.url)
        assert digits is not None
        table: dict[str, Any] = {"default": True} if entry is getattr(enum, "DEFAULT") else {}  # noqa: B009
        table |= {"sources": [entry.url], "format": "pytorch", "names": "torchvision", "sha256_prefix": digits[1]}
        table["num_classes"] = 1000
        stated = meta["_metrics"]["ImageNet-1K"]
        if not math.isnan(stated["acc@1"]):  # the classifier of VGG16's features is NaN
            table |= {"labels": "imagenet1k", "metrics": {"top1": stated["acc@1"], "top5": stated["acc@5"]}, "metrics_data": DATA}
        table["license"] = LINKED[meta["license"]] if "license" in meta else "unstated"
        if meta.get("recipe"):
            table["recipe"] = meta["recipe"]
        table |= {"params": meta["num_params"], "gmacs": meta["_ops"]}
        side = steps.crop_size[0]
        table["preprocessing"] = {
            "resize": steps.resize_size[0], "crop": side, "interpolation": steps.interpolation.value,
            "mean": list(steps.mean), "std": list(steps.std),
        }  # fmt: skip
        if options := {**sized(cls, side), **TORCHVISION.get(cls.__name__, {})}:
            table["options"] = options
        told = f"; the licence is behind its link, {meta['license']}" if "license" in meta else "; it states no licence per file"
        version = torchvision.__version__.partition("+")[0]
        table["provenance"] = f"torchvision {version}: weights enum{told}"
        yield Wanted(cls.__name__, entry.name.lower(), table, (entry.url,))


def pytorchcv_rows(cls: type[Model]) -> Iterator[Wanted]:
    """Make the rows of pytorchcv's checkpoints of a network."""
    for name, table in registry_pytorchcv.rows(cls.__name__):
        yield Wanted(cls.__name__, f"pytorchcv_{name}", table, (name,))


def keras_rows(cls: type[Model]) -> Iterator[Wanted]:
    """Make the row of the checkpoint of a network that keras.applications has."""
    for table in registry_keras.rows(cls.__name__):
        yield Wanted(cls.__name__, "keras_imagenet", table, (table["sources"][0],))


def wanted(cls: type[Model], prove: bool = True) -> tuple[list[Wanted], dict[str, str]]:
    """List the rows that a network should have, torchvision's first, and the checkpoints that have none, each with the reason."""
    rows, out = list(torchvision_rows(cls)), dict[str, str]()
    for arch, options in archs(cls).items():
        for tag in timm_archs()[arch]:
            row = timm_row(cls, arch, tag, options, prove)
            if isinstance(row, str):
                out[f"{arch}.{tag}"] = row
            else:
                rows.append(row)
    rows += [*pytorchcv_rows(cls), *keras_rows(cls)]
    tags = [row.tag for row in rows]
    assert len(set(tags)) == len(tags), f"{cls.__name__} has a tag twice: {sorted(tag for tag in tags if tags.count(tag) > 1)}"
    return rows, out


def choose_default(cls: type[Model], rows: list[Checkpoint]) -> Checkpoint:
    """Choose the default of a network as the docstring of this file says."""

    def free(row: Checkpoint) -> bool:
        return row.license in PERMISSIVE

    rows = min(([row for row in rows if row.names not in FOREIGN[n:]] for n in range(3)), key=lambda some: not some)
    own = [row for row in rows if row.num_classes == 1000 and not row.embedding and "image_size" not in row.options] or rows
    measured = [row for row in own if free(row) and row.metrics_data == DATA]
    if measured:
        return max(measured, key=lambda row: row.metrics["top1"])
    first = next(iter(archs(cls)), None)
    theirs = f"{first}.{timm_archs()[first][0]}" if first else ""
    usual = [row for row in own if f"/{theirs}/" in row.sources[-1]]
    return next(
        iter([row for row in usual if free(row)] + [row for row in own if free(row)] + [row for row in rows if free(row)] + usual + own)
    )


# the text of a row


def text(row: Wanted) -> str:
    """Write a row as the files have it."""
    lines = [f"[{row.model}.{row.tag}]"]
    for key, value in row.table.items():
        if key == "alternatives":
            lines += ["alternatives = [", *(f"    {inline(one)}," for one in value), "]"]
        else:
            lines.append(f"{key} = {inline(value)}")
    return "\n".join(lines) + "\n"


def inline(value: Any) -> str:
    """Write a value of TOML in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, int):
        return f"{value:_}" if value >= 10_000 else str(value)
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {inline(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return repr(float(value))


# what is there


def family_file(cls: type[Model]) -> Path:
    """Return the file of a network's rows."""
    return SHIPPED / f"{cls.family().__module__.rpartition('.')[2]}.toml"


def there(path: Path) -> list[Checkpoint]:
    """Read the rows of a file."""
    tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return [record(model, tag, table, path.name) for model, tags in tables.items() for tag, table in tags.items()]


FACTS = (
    "format",
    "names",
    "sha256_prefix",
    "digest",
    "num_classes",
    "embedding",
    "labels",
    "metrics",
    "metrics_data",
    "license",
    "preprocessing",
    "options",
    "recipe",
    "params",
    "gmacs",
)


def differences(row: Wanted, found: Checkpoint) -> dict[str, str]:
    """Say which facts of a row are not what their tables state, but for a hash that is known in full by now."""
    made = record(row.model, row.tag, row.table, "made")
    told = {}
    for key in FACTS:
        if key == "sha256_prefix" and (found.sha256 or made.sha256_prefix is None):
            continue
        if getattr(made, key) != getattr(found, key) and key not in DIFFERS.get(f"{row.model}.{found.tag}", {}):
            told[key] = f"{getattr(found, key)!r}, stated {getattr(made, key)!r}"
    if found.tag != row.tag:
        told["tag"] = f"{found.tag}, should be {row.tag}"
    if found.sources[-1].startswith("hf:") and found.sources[-1] != made.sources[-1]:
        told["sources"] = f"{found.sources[-1]}, stated {made.sources[-1]}"
    return told


def same(row: Wanted, found: Checkpoint) -> bool:
    """Tell whether a row that is there is of the same published file."""
    return row.model == found.model and any(source in found.sources for source in row.table["sources"])


def update(path: Path, classes: list[type[Model]], check: bool) -> tuple[list[str], dict[str, str], int]:
    """Bring a family's file up to date, or say what that would change: the findings, what is left out, and the number of new rows."""
    rows, findings, left_out, added = there(path), list[str](), dict[str, str](), 0
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    for cls in classes:
        needed, out = wanted(cls)
        left_out |= out
        new: list[Wanted] = []
        for row in needed:
            found = next((one for one in rows if same(row, one)), None)
            if found is None:
                new.append(row)
            elif told := differences(row, found):
                findings += [f"{path.name} [{row.model}.{found.tag}] {key}: {what}" for key, what in told.items()]
        if not new:
            continue
        if check:
            findings += [f"{path.name} [{row.model}.{row.tag}] is missing" for row in new]
            continue
        mine = [row for row in rows if row.model == cls.__name__]
        for row in new if any(row.default for row in mine) else ():
            row.table.pop("default", None)
        made = [record(row.model, row.tag, row.table, path.name) for row in new]
        if not any(row.default for row in [*mine, *made]):
            chosen = choose_default(cls, made)
            at = next(n for n, row in enumerate(made) if row is chosen)
            new[at].table = {"default": True, **new[at].table}
            new.insert(0, new.pop(at))
        content = inserted(content or header(path, classes), cls.__name__, [text(row) for row in new])
        rows += made
        added += len(new)
    if added:
        path.write_text(content, encoding="utf-8")
    return findings, left_out, added


def header(path: Path, classes: list[type[Model]]) -> str:
    """Begin a new file."""
    families = dict.fromkeys(cls.family().__name__ for cls in classes)
    del path
    return f"# Checkpoints of {', '.join(families)}; the keys are explained at weights.registry.Checkpoint.\n"


def inserted(content: str, model: str, new: list[str]) -> str:
    """Put new tables behind those of the same network, else at the end."""
    parts = re.split(r"^(?=\[)", content, flags=re.MULTILINE)
    at = max((n for n, part in enumerate(parts) if part.startswith(f"[{model}.")), default=len(parts) - 1) + 1
    parts = [part.rstrip("\n") + "\n" for part in (*parts[:at], *new, *parts[at:])]
    return "\n".join(parts)


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="names of files in weights/registry without .toml; all if left out")
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if anything is missing or differs")
    parser.add_argument("--left-out", action="store_true", help="list the published checkpoints that have no row, and why")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    files: dict[Path, list[type[Model]]] = {}
    for cls in zoo.CATALOGUE.values():
        files.setdefault(family_file(cls), []).append(cls)
    if unknown := set(asked.families) - {path.stem for path in files}:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(path.stem for path in files)}")
    wrong = 0
    for path, classes in files.items():
        if asked.families and path.stem not in asked.families:
            continue
        findings, left_out, added = update(path, classes, asked.check or asked.left_out)
        if asked.left_out:
            print(*(f"{name}: {why}" for name, why in left_out.items()), sep="\n", end="\n" if left_out else "")
            continue
        print(*findings, sep="\n", end="\n" if findings else "")
        print(f"{path.name}: {added} new, {len(there(path))} rows, {len(left_out)} left out")
        wrong += len(findings)
    if asked.left_out and not asked.families:
        for table in (registry_pytorchcv, registry_keras):
            print(*(f"{name}: {why}" for name, why in table.left_out().items()), sep="\n")
        print(*(f"{name}: {why}" for name, why in ELSEWHERE.items()), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
