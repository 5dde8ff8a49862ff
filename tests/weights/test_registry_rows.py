"""Every shipped checkpoint, checked without a network; and torchvision's own enums, so that none is forgotten or mistyped."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import zoo
from convert import names
from weights.record import Checkpoint, record
from weights.registry import SHIPPED

ROWS = [
    record(model, tag, table, path.name)
    for path in sorted(SHIPPED.glob("*.toml"))
    for model, tables in tomllib.loads(path.read_text(encoding="utf-8")).items()
    for tag, table in tables.items()
]
SPDX = ("Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC-BY-NC-4.0", "MIT")
CLASSES = {"imagenet1k": 1000, "cifar10": 10}

each_row = pytest.mark.parametrize("row", ROWS, ids=[f"{row.model}-{row.tag}" for row in ROWS])

REGNETS = "X_400MF X_800MF X_1_6GF X_3_2GF X_8GF X_16GF X_32GF Y_400MF Y_800MF Y_1_6GF Y_3_2GF Y_8GF Y_16GF Y_32GF Y_128GF"
# torchvision's names of our networks
ARCHS = {
    "AlexNet": "alexnet",
    **{f"VGG{depth}{bn}": f"vgg{depth}{bn.lower()}" for depth in (11, 13, 16, 19) for bn in ("", "_BN")},
    **{f"ResNet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    **{f"ResNeXt{kind}": f"resnext{kind}" for kind in ("50_32x4d", "101_32x8d", "101_64x4d")},
    **{f"WideResNet{depth}_2": f"wide_resnet{depth}_2" for depth in (50, 101)},
    **{f"DenseNet{depth}": f"densenet{depth}" for depth in (121, 161, 169, 201)},
    **{f"SqueezeNet{version}": f"squeezenet{version}" for version in ("1_0", "1_1")},
    **{f"ShuffleNetV2_{width}": f"shufflenet_v2_{width}" for width in ("x0_5", "x1_0", "x1_5", "x2_0")},
    **{f"EfficientNetB{size}": f"efficientnet_b{size}" for size in range(8)},
    **{f"RegNet{size}": f"regnet_{size.lower()}" for size in REGNETS.split()},
    **{f"MNASNet{width}": f"mnasnet{width}" for width in ("0_5", "0_75", "1_0", "1_3")},
    "MobileNetV2": "mobilenet_v2",
    "MobileNetV3Large": "mobilenet_v3_large",
    "MobileNetV3Small": "mobilenet_v3_small",
    "GoogLeNet": "googlenet",
    "InceptionV3": "inception_v3",
}


@cache
def classes(model: str, num_classes: int, options: tuple[tuple[str, Any], ...]) -> int:
    """Build a network as a row says, once for all rows that say the same."""
    with torch.device("meta"):
        return zoo.CATALOGUE[model](num_classes=num_classes, **dict(options)).num_classes


@each_row
def test_the_variant_exists_and_takes_the_options(row: Checkpoint) -> None:
    assert classes(row.model, row.num_classes, tuple(sorted(row.options.items()))) == row.num_classes


@each_row
def test_stated_parameters_are_the_classs(row: Checkpoint) -> None:
    cls = zoo.CATALOGUE[row.model]
    if row.params is None:
        return
    counts = {cls.params}
    if "aux_logits" in inspect.signature(cls).parameters:  # torchvision counts InceptionV3's auxiliary head
        with torch.device("meta"):
            counts.add(sum(p.numel() for p in cls(aux_logits=True).parameters()))
    assert row.params in counts


@each_row
def test_the_bytes_are_hashed_or_announced_by_the_hub(row: Checkpoint) -> None:
    """By a hash, whole or begun, or by the Hub, which tells the sha256 of what it serves before it does."""
    hub = all(re.fullmatch(r"hf://[\w.-]+/[\w.-]+(@[\w.-]+)?/[\w./-]+\.safetensors", source) for source in row.sources)
    assert row.sha256 or row.sha256_prefix or hub or row.sources[0].startswith("package:")
    assert all("://" in source or source.startswith("package:") for source in row.sources)
    assert (row.format == "safetensors") == all(source.endswith(".safetensors") for source in row.sources)
    if row.sha256 or row.sha256_prefix:
        digits = re.findall(r"-([0-9a-f]{8,})\.\w+$", row.sources[0])
        assert all((row.sha256 or row.sha256_prefix or "").startswith(d) for d in digits)


@each_row
def test_a_reported_hash_says_by_whom_and_a_pinned_commit_leaves_the_branch_behind_it(row: Checkpoint) -> None:
    if row.sha256_reported:
        assert row.sha256 is None
        assert re.search(r"source|table|torch\.hub", row.reported_by or "")
    pinned = [source for source in row.sources if re.match(r"hf://[^@]+@[0-9a-f]{40}/", source)]
    assert all(re.sub("@[0-9a-f]{40}", "", source) == row.sources[-1] for source in pinned)  # so that a wrong commit costs nobody the file


@each_row
def test_an_alternative_is_a_pickle_whose_name_has_its_hash(row: Checkpoint) -> None:
    for other in row.alternatives:
        assert other.format == "pytorch"
        assert f"-{other.sha256_prefix}." in other.source or other.sha256_prefix in other.source
        assert other.source not in row.sources


def test_as_many_rows_have_a_full_hash_as_the_notes_say() -> None:
    assert sum(bool(row.sha256 or row.sha256_reported) for row in ROWS) == 62


@each_row
def test_licence_naming_labels_and_metrics_are_stated(row: Checkpoint) -> None:
    assert row.license in (*SPDX, "unstated")
    assert row.names in names.NAMINGS
    assert row.provenance
    assert row.labels is None or CLASSES[row.labels] == row.num_classes
    assert bool(row.metrics) == bool(row.metrics_data)
    assert set(row.metrics) <= {"top1", "top5"}
    assert row.metrics.get("top1", 0) <= row.metrics.get("top5", 100)


@each_row
def test_the_preprocessing_is_complete_and_fits_the_network(row: Checkpoint) -> None:
    steps, cls = row.preprocessing, zoo.CATALOGUE[row.model]
    assert len(steps.mean) == len(steps.std) == 3
    assert (steps.resize is None) == (steps.crop is None)
    if steps.resize is not None and steps.crop is not None:
        assert cls.min_size <= steps.crop <= steps.resize
    assert max(steps.mean) <= 1
    assert all(0 < s <= 1 for s in steps.std)  # in 0..1, not in 0..255


def test_each_variant_with_weights_has_one_default_and_no_name_twice() -> None:
    """The loader lets a mistake in this pass, since a user's table could be the cause."""
    assert max(Counter((row.model, row.tag) for row in ROWS).values()) == 1
    defaults = Counter(row.model for row in ROWS if row.default)
    assert set(defaults) == {row.model for row in ROWS}
    assert set(defaults.values()) == {1}


def test_a_default_has_the_best_known_accuracy_under_a_free_licence_or_is_torchvisions() -> None:
    for row in ROWS:
        if row.default and row.names == "timm":
            rivals = [other for other in ROWS if other.model == row.model and other.metrics_data == row.metrics_data]
            assert row.metrics["top1"] == max(other.metrics["top1"] for other in rivals)
            assert row.license == "Apache-2.0"


def test_a_file_is_one_record_and_a_record_is_in_its_familys_file() -> None:
    assert not [source for source, count in Counter(source for row in ROWS for source in row.sources).items() if count > 1]
    for path in SHIPPED.glob("*.toml"):
        heads = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("[")]
        models = {match[1] for line in heads if (match := re.fullmatch(r"\[(\w+)\.[\w+-]+\]", line))}
        assert len(heads) == len([row for row in ROWS if row.model in models])  # the loader reads these files table by table
        modules = {zoo.CATALOGUE[model].__mro__[1].__module__ for model in models}
        assert modules == {f"zoo.networks.{path.stem}"}


def test_variants_that_nobody_published_weights_of_have_none() -> None:
    without = set(zoo.CATALOGUE) - {row.model for row in ROWS}
    assert "DenseNet264" in without
    assert without == {
        "SEResNet18", "SEResNet101", "SEResNet152", "ResNet44", "ResNet56", "ResNet110", "DenseNet264", "DenseNet_BC_100_12",
        "MobileNetV1_075", "MobileNetV1_050", "MobileNetV2_075", "MobileNetV2_035",
    }  # fmt: skip


@pytest.mark.reference
@pytest.mark.parametrize(("model", "arch"), ARCHS.items(), ids=list(ARCHS))
def test_torchvisions_checkpoints_are_all_there_as_it_states_them(model: str, arch: str) -> None:
    import torchvision

    theirs = {entry.name.lower(): entry for entry in torchvision.models.get_model_weights(arch)}
    ours = {row.tag: row for row in ROWS if row.model == model and row.names == "torchvision" and row.sources[0].startswith("https:")}
    assert ours.keys() == theirs.keys()
    for tag, row in ours.items():
        entry = theirs[tag]
        meta: dict[str, Any] = entry.meta
        transforms = entry.transforms()
        steps = row.preprocessing
        assert row.sources[0] == entry.url
        assert all(source.startswith("pypi://") and source.endswith(entry.url.rpartition("/")[2]) for source in row.sources[1:])
        assert f"-{row.sha256_prefix or (row.sha256 or '')[:8]}." in entry.url
        assert (steps.resize, steps.crop) == (transforms.resize_size[0], transforms.crop_size[0])
        assert steps.interpolation == transforms.interpolation.value
        assert (steps.mean, steps.std) == (tuple(transforms.mean), tuple(transforms.std))
        assert (row.params, row.gmacs, row.recipe) == (meta["num_params"], meta["_ops"], meta.get("recipe"))
        if tag != "imagenet1k_features":  # whose classifier is NaN
            stated = meta["_metrics"]["ImageNet-1K"]
            assert dict(row.metrics) == {"top1": stated["acc@1"], "top5": stated["acc@5"]}
        assert row.default == (entry is getattr(type(entry), "DEFAULT"))  # noqa: B009
        assert ("transform_input" in row.options) == (model in ("GoogLeNet", "InceptionV3"))


@pytest.mark.reference
def test_torchvision_has_no_network_of_ours_that_the_table_above_forgets() -> None:
    import torchvision

    archs = torchvision.models.list_models(module=torchvision.models)
    ours = (
        "alexnet",
        "vgg",
        "resnet",
        "resnext",
        "wide_",
        "densenet",
        "mobilenet",
        "squeeze",
        "shuffle",
        "google",
        "inception",
        "efficientnet_b",
    )
    assert {arch for arch in archs if arch.startswith((*ours, "regnet", "mnasnet"))} == set(ARCHS.values())


@pytest.mark.reference
@pytest.mark.parametrize("row", [row for row in ROWS if row.names == "timm"], ids=lambda row: f"{row.model}-{row.tag}")
def test_timms_checkpoints_are_as_it_states_them(row: Checkpoint) -> None:
    from timm.models import get_pretrained_cfg

    name = row.sources[-1].split("/")[3] if row.sources[0].startswith("hf:") else "legacy_xception.tf_in1k"
    config = get_pretrained_cfg(name)
    assert config is not None
    steps = row.preprocessing
    crops = {config.input_size[1]: config.crop_pct, **({config.test_input_size[1]: config.test_crop_pct} if config.test_input_size else {})}
    assert steps.crop in crops
    assert steps.resize == int(steps.crop / crops[steps.crop])
    assert (steps.interpolation, steps.mean, steps.std) == (config.interpolation, tuple(config.mean), tuple(config.std))
    assert (row.num_classes, row.license.lower(), config.crop_mode) == (config.num_classes, config.license, "center")
    assert row.tag == ("tf_" if name.startswith("tf_") else "") + name.split(".")[1]
    assert row.sources[-1] in (f"hf://timm/{name}/model.safetensors", config.url)


@pytest.mark.reference
def test_no_checkpoint_of_timms_for_our_networks_is_forgotten() -> None:
    """What is on its list for the same architectures and not in ours is left out for a reason, named here."""
    from timm.models import list_pretrained

    left_out = {
        "resnet50.bamboo",  # has no classifier
        "efficientnet_b5.sw_in12k_ft_in1k",  # measured on squashed images, which a record can't say
    }
    ours = {row.sources[-1].split("/")[3] for row in ROWS if row.sources[0].startswith("hf://timm/")} | {"legacy_xception.tf_in1k"}
    archs = {name.split(".")[0] for name in ours}
    assert {name for name in list_pretrained() if name.split(".")[0] in archs} - ours == left_out
