"""Every checkpoint of a classifier, checked without a network; and timm's and torchvision's own tables, so that none is forgotten.

A family adds nothing here: which architectures of theirs are ours follows from the catalogue and from recipes/registry_rows.py.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from deeper import kind
from torch import nn

import zoo
from convert import names
from recipes import registry_darknet, registry_keras, registry_pytorchcv, registry_rows, registry_vision
from weights.record import PERMISSIVE, Checkpoint, record
from weights.registry import SHIPPED, quickly
from weights.sbom import SPDX
from zoo.labels import labels
from zoo.networks.model import Model

FAMILIES = {
    path.stem: [
        record(model, tag, table, path.name)
        for model, tables in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for tag, table in tables.items()
    ]
    for path in sorted(SHIPPED.glob("*.toml"))
    if path not in (*registry_vision.files(), registry_darknet.FILE)  # tests of these recipes check theirs
}
ROWS = [row for rows in FAMILIES.values() for row in rows]

each_family = pytest.mark.parametrize("rows", FAMILIES.values(), ids=list(FAMILIES))
Faults = Iterator[str]
"""What is wrong with a row; every test of a family lists all of them."""


def faults(rows: list[Checkpoint], check: Any) -> list[str]:
    """List what a check finds in the rows of a family, by their names."""
    return [f"{row.model}:{row.tag}: {fault}" for row in rows for fault in check(row)]


@cache
def built(model: str, num_classes: int, options: tuple[tuple[str, Any], ...]) -> tuple[int, int]:
    """Build a network as a row says, once for all rows that say the same: its classes and its parameters."""
    with torch.device("meta"):
        network = zoo.CATALOGUE[model](num_classes=num_classes, **dict(options))
    return network.num_classes, sum(parameter.numel() for parameter in network.parameters())


def takes(cls: type[Model]) -> tuple[Any, ...]:
    """What decides which options a network takes: its kind, and for which sizes of images it can be built."""
    return *kind(cls), getattr(cls, "patch", 0)


SMALLEST = {takes(cls): name for name, cls in sorted(zoo.CATALOGUE.items(), key=lambda item: -item[1].params)}


@each_family
@pytest.mark.parametrize("itself", [False, pytest.param(True, marks=pytest.mark.long)], ids=["the smallest", "itself"])
def test_the_variant_exists_and_takes_the_options(rows: list[Checkpoint], itself: bool) -> None:
    """Or the smallest of its kind takes them, which has the same constructor and is built in a moment."""

    def check(row: Checkpoint) -> Faults:
        model = row.model if itself else SMALLEST[takes(zoo.CATALOGUE[row.model])]
        if built(model, row.num_classes or 1000, tuple(sorted(row.options.items())))[0] != (row.num_classes or 1000):
            yield "another number of classes"

    assert faults(rows, check) == []


@each_family
def test_stated_parameters_are_the_classs(rows: list[Checkpoint]) -> None:
    def check(row: Checkpoint) -> Faults:
        cls, options = zoo.CATALOGUE[row.model], dict(row.options)
        counts = {built(row.model, row.num_classes, tuple(sorted(options.items())))[1] if options and row.num_classes else cls.params}
        if "aux_logits" in inspect.signature(cls).parameters:  # torchvision counts InceptionV3's auxiliary head
            counts.add(built(row.model, row.num_classes, (("aux_logits", True),))[1])
        if row.params not in (None, *counts):
            yield f"{row.params} parameters, not {counts}"

    assert faults(rows, check) == []


@each_family
def test_the_bytes_are_hashed_or_announced_by_the_hub(rows: list[Checkpoint]) -> None:
    """By a hash, whole or begun, or by the Hub, which tells the sha256 of what it serves before it does."""

    def check(row: Checkpoint) -> Faults:
        hub = all(re.fullmatch(r"hf://[\w.-]+/[\w.-]+(@[\w.-]+)?/[\w./-]+\.safetensors", source) for source in row.sources)
        if not (row.sha256 or row.published or hub or row.sources[0].startswith("package:")):
            yield "nobody says the hash"
        if not all("://" in source or source.startswith("package:") for source in row.sources):
            yield "a source is no URL"
        if (row.format == "safetensors") != all(source.endswith(".safetensors") for source in row.sources):
            yield "the format is not that of the sources"
        digits = re.findall(r"-([0-9a-f]{8,})\.\w+$", row.sources[0])
        known = row.sha256 or row.sha256_prefix or (row.digest or "").partition(":")[2]
        if known and not all(known.startswith(d) for d in digits):
            yield "the hash is not that in the file's name"
        if row.digest and (row.digest.startswith("sha1:") != (row.names == "pytorchcv") or len(digits) != (row.names == "pytorchcv")):
            yield "a digest of another algorithm than its publisher's"

    assert faults(rows, check) == []


@each_family
def test_a_reported_hash_says_by_whom_and_a_pinned_commit_leaves_the_branch_behind_it(rows: list[Checkpoint]) -> None:
    def check(row: Checkpoint) -> Faults:
        if row.sha256_reported and (row.sha256 or not re.search(r"source|table|torch\.hub", row.reported_by or "")):
            yield "reported by nobody, or of no use"
        pinned = [source for source in row.sources if re.match(r"hf://[^@]+@[0-9a-f]{40}/", source)]
        if any(re.sub("@[0-9a-f]{40}", "", source) != row.sources[-1] for source in pinned):
            yield "a wrong commit costs the file"

    assert faults(rows, check) == []


@each_family
def test_an_alternative_is_a_pickle_whose_name_has_its_hash(rows: list[Checkpoint]) -> None:
    def check(row: Checkpoint) -> Faults:
        for other in row.alternatives:
            named = f"-{other.sha256_prefix}." in other.source or str(other.sha256_prefix) in other.source
            if other.format != "pytorch" or not named or other.source in row.sources:
                yield other.source

    assert faults(rows, check) == []


def test_no_hash_that_was_found_by_hand_is_lost() -> None:
    assert sum(bool(row.sha256 or row.sha256_reported) for row in ROWS) >= 62


@each_family
def test_licence_naming_labels_and_metrics_are_stated(rows: list[Checkpoint]) -> None:
    def check(row: Checkpoint) -> Faults:
        if row.license not in (*SPDX, "unstated") and not re.fullmatch(r"LicenseRef-[a-z0-9.-]+", row.license):
            yield f"licence {row.license}"
        if row.names not in names.NAMINGS:
            yield f"naming {row.names}"
        if not row.provenance:
            yield "no provenance"
        if row.labels is not None and len(labels(row.labels)) != row.num_classes:
            yield f"{row.num_classes} classes of {row.labels}"
        if bool(row.metrics) != bool(row.metrics_data) or not set(row.metrics) <= {"top1", "top5"}:
            yield f"metrics {row.metrics} on {row.metrics_data}"
        if row.metrics.get("top1", 0) > row.metrics.get("top5", 100):
            yield "top-1 above top-5"
        if not row.num_classes and not row.embedding:
            yield "no classes"

    assert faults(rows, check) == []


@each_family
def test_the_preprocessing_is_complete_and_fits_the_network(rows: list[Checkpoint]) -> None:
    def check(row: Checkpoint) -> Faults:
        steps, cls = row.preprocessing, zoo.CATALOGUE[row.model]
        if not len(steps.mean) == len(steps.std) == 3 or max(steps.mean) > 1 or not all(0 < s <= 1 for s in steps.std):
            yield "mean and std are not of 0..1"
        if (steps.resize is None) != (steps.crop is None):
            yield "resize or crop is missing"
        if steps.resize is None or steps.crop is None:
            return
        if not cls.min_size <= steps.crop <= steps.resize or steps.crop % cls.size_multiple:
            yield f"the network does not take {steps.crop} px"
        side = row.options.get("image_size", cls.input_size)
        if (cls.fixed_size or "image_size" in row.options) and steps.crop != side:
            yield f"the network is built for {side} px, and the images have {steps.crop}"

    assert faults(rows, check) == []


@each_family
def test_the_loaders_quick_reader_reads_what_the_validating_one_does(rows: list[Checkpoint]) -> None:
    text = (SHIPPED / f"{zoo.CATALOGUE[rows[0].model].__mro__[1].__module__.rpartition('.')[2]}.toml").read_text(encoding="utf-8")
    assert [quickly(part) for part in re.split(r"^(?=\[)", text, flags=re.MULTILINE)[1:]] == rows


def test_each_variant_with_weights_has_one_default_and_no_name_twice() -> None:
    """The loader lets a mistake in this pass, since a user's table could be the cause."""
    assert max(Counter((row.model, row.tag) for row in ROWS).values()) == 1
    defaults = Counter(row.model for row in ROWS if row.default)
    assert set(defaults) == {row.model for row in ROWS}
    assert set(defaults.values()) == {1}


@each_family
def test_a_default_has_the_best_known_accuracy_under_a_free_licence_or_is_torchvisions(rows: list[Checkpoint]) -> None:
    def check(row: Checkpoint) -> Faults:
        if not row.default or row.names != "timm":
            return
        rivals = [other for other in rows if other.model == row.model]
        free = [other for other in rivals if other.license in PERMISSIVE]
        if free and row.license not in PERMISSIVE:
            yield f"not free, and {free[0].tag} is"
        usual = [other for other in free if "image_size" not in other.options and other.metrics_data == "ImageNet-1k validation"]
        if usual and row.metrics.get("top1") != max(other.metrics["top1"] for other in usual):
            yield f"not the best of {sorted(other.tag for other in usual)}"

    assert faults(rows, check) == []


def test_a_file_is_one_record_and_a_record_is_in_its_familys_file() -> None:
    assert not [source for source, count in Counter(source for row in ROWS for source in row.sources).items() if count > 1]
    for path in (SHIPPED / f"{family}.toml" for family in FAMILIES):
        heads = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("[")]
        models = {match[1] for line in heads if (match := re.fullmatch(r"\[(\w+)\.[\w+-]+\]", line))}
        assert len(heads) == len([row for row in ROWS if row.model in models])  # the loader reads these files table by table
        modules = {zoo.CATALOGUE[model].__mro__[1].__module__ for model in models}
        assert modules == {f"zoo.networks.{path.stem}"}


def test_densenet264_has_no_weights_and_resnet50_has() -> None:
    """What the tests of missing weights use; the reference test below knows which networks nobody published any of."""
    assert "DenseNet264" not in {row.model for row in ROWS}
    assert "ResNet50" in {row.model for row in ROWS}


def test_what_nobody_measured_has_no_accuracy_and_the_rows_text_is_read_as_it_was_meant() -> None:
    table = {"sources": ["hf://a/b/c.safetensors"], "format": "safetensors", "names": "timm", "num_classes": 11_821, "license": "MIT"}
    steps = {"resize": 448, "crop": 448, "interpolation": "bicubic", "mean": [0.0, 0.5, 0.5], "std": [1.0, 1 / 3, 0.5], "squash": True}
    other = {"source": "https://a.example/b-12345678.pth", "format": "pytorch", "sha256_prefix": "12345678"}
    table |= {"alternatives": [other], "preprocessing": steps, "options": {"image_size": 448, "padding": "same"}, "provenance": "a test"}
    row = registry_rows.Wanted("ResNet50", "tag_in12k", table, ())
    assert tomllib.loads(registry_rows.text(row)) == {"ResNet50": {"tag_in12k": table}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# head\n\n[A.x]\na = 1\n\n[B.x]\na = 1\n", "# head\n\n[A.x]\na = 1\n\n[A.new]\na = 2\n\n[B.x]\na = 1\n"),
        ("# head\n\n[B.x]\na = 1\n", "# head\n\n[B.x]\na = 1\n\n[A.new]\na = 2\n"),
        ("# head\n", "# head\n\n[A.new]\na = 2\n"),
    ],
)
def test_a_new_row_stands_behind_those_of_its_network_and_the_others_stay_as_they_are(before: str, after: str) -> None:
    assert registry_rows.inserted(before, "A", ["[A.new]\na = 2\n"]) == after


def test_names_are_the_same_but_for_case_and_underscores_that_are_no_decimal_point() -> None:
    assert registry_rows.plain("RegNetX_16GF") == registry_rows.plain("regnet_x_16gf")
    assert registry_rows.plain("RegNetX_1_6GF") != registry_rows.plain("regnet_x_16gf")


@pytest.mark.reference
@each_family
def test_torchvisions_checkpoints_are_all_there_as_it_states_them(rows: list[Checkpoint]) -> None:
    import torchvision

    wrong: list[str] = []
    for model in dict.fromkeys(row.model for row in rows):
        arch = registry_rows.torchvision_arch(zoo.CATALOGUE[model])
        theirs = {} if arch is None else {one.name.lower(): one for one in torchvision.models.get_model_weights(arch)}
        ours = {row.tag: row for row in rows if row.model == model and row.names == "torchvision" and row.sources[0].startswith("https:")}
        wrong += [f"{model}: {sorted(ours.keys() ^ theirs.keys())}"] if ours.keys() != theirs.keys() else []
        for tag, row in ours.items():
            wrong += [f"{model}:{tag}: {what}" for what in unlike_torchvisions(row, theirs[tag])] if tag in theirs else []
    assert wrong == []


def unlike_torchvisions(row: Checkpoint, entry: Any) -> Faults:
    """Say what of a row is not what torchvision's enum says."""
    meta: dict[str, Any] = entry.meta
    transforms, steps = entry.transforms(), row.preprocessing
    if row.sources[0] != entry.url or f"-{row.sha256_prefix or (row.sha256 or '')[:8]}." not in entry.url:
        yield "source"
    if not all(source.startswith("pypi://") and source.endswith(entry.url.rpartition("/")[2]) for source in row.sources[1:]):
        yield "other sources"
    if (steps.resize, steps.crop) != (transforms.resize_size[0], transforms.crop_size[0]) or steps.squash:
        yield "size"
    if steps.interpolation != transforms.interpolation.value:
        yield "interpolation"
    if (steps.mean, steps.std) != (tuple(transforms.mean), tuple(transforms.std)):
        yield "mean, std"
    if (row.params, row.gmacs, row.recipe) != (meta["num_params"], meta["_ops"], meta.get("recipe")):
        yield "params, gmacs, recipe"
    stated = meta["_metrics"]["ImageNet-1K"]
    if row.tag != "imagenet1k_features" and dict(row.metrics) != {
        "top1": stated["acc@1"],
        "top5": stated["acc@5"],
    }:  # whose classifier is NaN
        yield "metrics"
    if row.default != (entry is getattr(type(entry), "DEFAULT")):  # noqa: B009
        yield "default"
    if ("transform_input" in row.options) != (row.model in ("GoogLeNet", "InceptionV3")):
        yield "transform_input"
    if (row.license == "unstated") != ("license" not in meta):
        yield "licence"


@pytest.mark.reference
def test_torchvision_has_no_network_in_modules_of_ours_that_we_lack() -> None:
    import torchvision

    ours = {registry_rows.torchvision_arch(cls) for cls in zoo.CATALOGUE.values()} - {None}
    module = {
        name: torchvision.models.get_model_builder(name).__module__ for name in torchvision.models.list_models(module=torchvision.models)
    }
    shared = {module[str(name)] for name in ours}
    assert {name for name in module if module[name] in shared} - ours - set(registry_rows.ABSENT) == set()
    assert ours - {str(registry_rows.torchvision_arch(zoo.CATALOGUE[row.model])) for row in ROWS} == set()


@pytest.mark.reference
@each_family
def test_timms_checkpoints_are_as_it_states_them(rows: list[Checkpoint]) -> None:
    from timm.models import get_pretrained_cfg

    def check(row: Checkpoint) -> Faults:
        name = row.sources[-1].split("/")[3] if row.sources[0].startswith("hf:") else published[row.sources[0]]
        config = get_pretrained_cfg(name)
        assert config is not None, name
        steps, cls = row.preprocessing, zoo.CATALOGUE[row.model]
        if "quick_gelu" in str(
            row.options.get("activation", vars(cls.variant()).get("activation"))
        ):  # timm has another architecture for the same file
            name = name.replace("_clip_", "_clip_quickgelu_")
        crops = {config.input_size[1]: config.crop_pct}
        crops |= {config.test_input_size[1]: config.test_crop_pct or config.crop_pct} if config.test_input_size else {}
        if steps.crop not in crops or steps.resize != int(steps.crop / crops[steps.crop]):
            yield "size"
        if (steps.interpolation, steps.mean, steps.std) != (config.interpolation, tuple(config.mean), tuple(config.std)):
            yield "interpolation, mean, std"
        if steps.squash != (config.crop_mode == "squash") or config.crop_mode not in ("center", "squash"):
            yield "crop mode"
        licence = config.license if config.license not in (None, "unknown") else "unstated"
        if row.num_classes != config.num_classes or row.license.lower().removeprefix("licenseref-") != licence:
            yield "classes, licence"
        if row.embedding != (config.num_classes < 2000 and config.num_classes != 1000):
            yield "embedding"
        arch, _, tag = name.partition(".")
        if arch not in registry_rows.archs(cls) or row.tag != registry_rows.tag_of(cls, arch, tag, row.options):
            yield "tag"
        elif not registry_rows.archs(cls)[arch].items() <= row.options.items():
            yield "options"
        if row.sources[-1] not in (f"hf://timm/{name}/model.safetensors", f"hf://{config.hf_hub_id}/model.safetensors", config.url):
            yield "source"

    published = {
        config.url: name
        for row in rows
        for arch in registry_rows.archs(zoo.CATALOGUE[row.model])
        for tag in registry_rows.timm_archs()[arch]
        if (config := get_pretrained_cfg(name := f"{arch}.{tag}")) is not None
    }
    assert faults([row for row in rows if row.names == "timm"], check) == []


@pytest.mark.reference
@pytest.mark.parametrize("family", sorted({cls.__mro__[1].__module__.rpartition(".")[2] for cls in zoo.CATALOGUE.values()}))
def test_no_checkpoint_of_theirs_is_forgotten_and_what_is_left_out_has_a_reason(family: str) -> None:
    """Builds nothing: that the tensors of each fit is what the script sees to when it writes a row, and the test below."""
    rows = FAMILIES.get(family, [])
    for cls in [cls for cls in zoo.CATALOGUE.values() if registry_rows.family_file(cls).stem == family]:
        needed, left_out = registry_rows.wanted(cls, prove=False)
        missing = [row.names[0] for row in needed if not any(registry_rows.same(row, one) for one in rows)]
        told = {
            f"{one.model}:{one.tag}": registry_rows.differences(row, one) for row in needed for one in rows if registry_rows.same(row, one)
        }
        assert missing == []
        assert {name: what for name, what in told.items() if what} == {}
        assert all(left_out.values())
        assert bool(needed) <= any(row.model == cls.__name__ for row in rows)


@pytest.mark.reference
def test_a_default_without_measured_rivals_follows_the_scripts_rule() -> None:
    for model in {row.model for row in ROWS if row.names == "timm" and row.default}:
        rows = [row for row in ROWS if row.model == model]
        assert next(row.tag for row in rows if row.default) == registry_rows.choose_default(zoo.CATALOGUE[model], rows).tag


OPTIONS = {
    (cls.__name__, arch, tuple(sorted(options.items())))
    for cls in zoo.CATALOGUE.values()
    for arch, options in registry_rows.ARCHS.get(cls.__name__, {}).items()
}
"""What the script's table says of networks: our class, timm's architecture, and the options that its checkpoints need."""


@pytest.mark.long
@pytest.mark.reference
@pytest.mark.parametrize(("model", "arch", "options"), sorted(OPTIONS), ids=lambda one: one if isinstance(one, str) else "")
def test_a_network_with_the_options_of_a_row_computes_what_timms_does(model: str, arch: str, options: tuple[tuple[str, Any], ...]) -> None:
    """With timm's fresh parameters, and running statistics of one batch of noise."""
    import timm

    cls = zoo.CATALOGUE[model]
    tags = registry_rows.timm_archs().get(arch, ())
    if not {f"{arch}.{tag}" for tag in tags} - set(registry_rows.LEFT_OUT):
        return
    if cls.params > 150e6:
        pytest.skip("too large to draw here")
    torch.manual_seed(0)
    theirs: Any = timm.create_model(arch)  # pyright: ignore[reportPrivateImportUsage]
    side = int(theirs.pretrained_cfg["input_size"][1])
    ours = cls(num_classes=theirs.num_classes or 1000, **{**registry_rows.sized(cls, side), **dict(options)}).eval()
    x = torch.rand(2, 3, *[side if cls.fixed_size or cls.size_multiple > 1 else max(97, cls.min_size)] * 2)
    for layer in theirs.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        theirs.train()(x)
        theirs.eval()
        ours.load_state_dict(names.to_ours(theirs.state_dict(), ours.state_dict(), naming="timm", family=cls))
        torch.testing.assert_close(ours(x), theirs(x), rtol=2e-4, atol=2e-4)
    assert epsilons(ours) == epsilons(theirs)


def epsilons(network: nn.Module) -> Counter[float]:
    """Count the eps of the layers that normalise: variances of noise are too large to tell them apart by outputs."""
    return Counter(layer.eps for layer in network.modules() if isinstance(layer, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm))


@pytest.mark.reference
@each_family
def test_pytorchcvs_checkpoints_are_as_it_states_them(rows: list[Checkpoint]) -> None:
    from pytorchcv.models.common.model_store import get_model_name_suffix_data  # the digits of an error, the SHA-1, the release

    def check(row: Checkpoint) -> Faults:
        name = row.tag.removeprefix("pytorchcv_")
        error, sha1, release = get_model_name_suffix_data(name)
        file = f"{name}-{error}-{sha1[:8]}.pth"
        if row.sources != (f"https://github.com/osmr/imgclsmob/releases/download/{release}/{file}.zip#{file}",):
            yield "source"
        if row.digest != f"sha1:{sha1}" or row.sha256_prefix:
            yield "digest"
        if row.metrics and round(100 * (100 - row.metrics["top5"])) != int(error):
            yield f"top-5 {row.metrics['top5']}, and the file's name says {error}"
        if row.default and any(other.names != "pytorchcv" for other in rows if other.model == row.model):
            yield "the default, and there are others"
        if not row.metrics and row.preprocessing.mean == (0.485, 0.456, 0.406):
            yield "no metrics"

    assert faults([row for row in rows if row.names == "pytorchcv"], check) == []


@pytest.mark.reference
def test_each_file_of_pytorchcvs_has_a_row_or_a_reason() -> None:
    files, left_out = registry_pytorchcv.files(), registry_pytorchcv.left_out()
    taken = {row.tag.removeprefix("pytorchcv_") for row in ROWS if row.names == "pytorchcv"}
    assert {f"{files[name].stem}.pth" for name in taken} | left_out.keys() == {f"{file.stem}.pth" for file in files.values()}
    assert len(taken) + len(left_out) == len(files) > 300
    assert all(left_out.values())


PYTORCHCV = [(model, name, tuple(options.items())) for model, known in registry_pytorchcv.FILES.items() for name, options in known.items()]


@pytest.mark.long
@pytest.mark.reference
@pytest.mark.parametrize(("model", "name", "options"), PYTORCHCV, ids=[name for _, name, _ in PYTORCHCV])
def test_a_network_with_the_options_of_a_row_computes_what_pytorchcvs_does(
    model: str, name: str, options: tuple[tuple[str, Any], ...]
) -> None:
    """With fresh parameters, and running statistics of one batch of noise; of larger networks names and shapes are compared alone."""
    from pytorchcv.model_provider import get_model

    cls = zoo.CATALOGUE[model]
    large = cls.params > 70e6
    torch.manual_seed(0)
    with torch.device("meta" if large else "cpu"):
        theirs, ours = get_model(name), cls(**dict(options)).eval()
    state = names.to_ours(theirs.state_dict(), ours.state_dict(), naming="pytorchcv", family=cls)
    assert {key: tensor.shape for key, tensor in state.items()} == {key: tensor.shape for key, tensor in ours.state_dict().items()}
    assert epsilons(ours) == epsilons(theirs)
    if large:
        return
    side = cls.input_size
    x = torch.rand(2, 3, side, side)
    for layer in theirs.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        theirs.train()(x)
        theirs.eval()
        ours.load_state_dict(names.to_ours(theirs.state_dict(), ours.state_dict(), naming="pytorchcv", family=cls))
        torch.testing.assert_close(ours(x), theirs(x), rtol=2e-4, atol=2e-4)


@pytest.mark.reference
@each_family
def test_kerass_checkpoints_are_as_its_table_states_them(rows: list[Checkpoint]) -> None:
    def check(row: Checkpoint) -> Faults:
        url, digest, side = registry_keras.files()[row.model]
        if row.sources != (url,) or row.format != "keras" or row.tag != "keras_imagenet":
            yield "source"
        if digest not in (row.digest, f"sha256:{row.sha256}"):
            yield "digest"
        if row.preprocessing.crop != side or (row.preprocessing.channel_order == "bgr") != (max(row.preprocessing.std) < 0.1):
            yield "preprocessing"
        if row.metrics or (row.default and any(other.names != "keras" for other in rows if other.model == row.model)):
            yield "measured by nobody, or the default although there are others"

    assert faults([row for row in rows if row.names == "keras"], check) == []


def test_each_file_of_kerass_that_has_a_hash_has_a_row_and_the_others_a_reason() -> None:
    assert {row.model for row in ROWS if row.names == "keras"} == registry_keras.files().keys()
    names_of = {url.rpartition("/")[2] for url, _, _ in registry_keras.files().values()}
    assert len(names_of) == len(registry_keras.files())
    assert not names_of & registry_keras.left_out().keys()
    assert all(registry_keras.left_out().values())


@pytest.mark.long
@pytest.mark.reference
@pytest.mark.parametrize("model", ["DenseNet121", "EfficientNetV2_S", "MobileNetV3Small", "NASNetAMobile", "VGG16"])
def test_kerass_table_is_what_keras_asks_for(model: str) -> None:
    function, arguments = {**registry_keras.APPLICATIONS, **registry_keras.ALSO}[model]
    assert registry_keras.published(function, arguments) == registry_keras.files()[model]
