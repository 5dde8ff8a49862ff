"""Tables become validated records, and every mistake in one is named with its file, table and key."""

from __future__ import annotations

import copy
import os
import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import weights
from weights import Checkpoint, registry
from weights.errors import BadRecord, InsecureSource, NoPretrainedWeights, UnknownWeights

TABLE: dict[str, Any] = {
    "sources": ["https://example.org/w.pth"],
    "format": "pytorch",
    "names": "torchvision",
    "num_classes": 10,
    "license": "unstated",
    "provenance": "made up",
    "preprocessing": {"interpolation": "bilinear", "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
}
TEXT = """
default = true
sources = ["https://example.org/w.pth"]
format = "pytorch"
names = "torchvision"
num_classes = 10
license = "unstated"
provenance = "made up"
preprocessing = { interpolation = "bilinear", mean = [0.5], std = [0.25] }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    monkeypatch.setenv("ZOO_REGISTRY", os.pathsep.join([str(tmp_path / "mine"), str(tmp_path / "theirs")]))
    return tmp_path / "mine"


def test_a_table_becomes_a_record() -> None:
    row = registry.record("Net", "v1", TABLE, "here")
    assert (row.model, row.tag, row.sources, row.metrics, row.default) == ("Net", "v1", ("https://example.org/w.pth",), {}, False)
    assert (row.preprocessing.resize, row.preprocessing.crop, row.preprocessing.mean) == (None, None, (0.5, 0.5, 0.5))
    assert pickle.loads(pickle.dumps(row)) == copy.deepcopy(row) == row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"licence": "MIT"}, "unknown key 'licence'; did you mean license?"),
        ({"zzz": 1}, "unknown key 'zzz'; known are sources, format"),
        ({"license": None}, 'license missing; a licence that nobody states is "unstated"'),
        ({"sources": None, "names": None}, "sources, names missing"),
        ({"sources": []}, "at least one entry, got []"),
        ({"sources": "https://example.org/w"}, "sources is a tuple[str, ...], got 'https://example.org/w'"),
        ({"sources": [1]}, "sources is a tuple[str, ...] with at least one entry, got [1]"),
        ({"sources": ["ftp://example.org/w"]}, "a source starts with hf://, https://, pypi:// or file://, got 'ftp://example.org/w'"),
        ({"sources": ["package:w.pth"]}, "ships with the package, must be safetensors and needs its sha256"),
        ({"sources": ["package:w"], "format": "safetensors"}, "ships with the package, must be safetensors and needs its sha256"),
        ({"sources": ["pypi://lite0/w.pth"]}, "a file of a package is pypi://NAME==VERSION/path/in/the/wheel, got 'pypi://lite0/w.pth'"),
        ({"sources": ["pypi://lite0==1.0/a/../w.pth"]}, "a file of a package is pypi://NAME==VERSION/path/in/the/wheel"),
        ({"sha256_reported": "0" * 64}, "sha256_reported and reported_by belong together"),
        ({"sha256_reported": "0" * 63, "reported_by": "two sources"}, "sha256_reported is 64 lower-case hex digits"),
        ({"sha256_prefix": "abcdef", "sha256_reported": "0" * 64, "reported_by": "two"}, "that begin with sha256_prefix"),
        ({"sha256": "0" * 64, "sha256_reported": "0" * 64, "reported_by": "two"}, "keep one of them"),
        ({"alternatives": ["https://example.org/w.pth"]}, "alternatives[0] is a table with source and format"),
        ({"alternatives": [{"source": "https://example.org/w.pth"}]}, "alternatives[0].format missing"),
        ({"alternatives": [{"source": "ftp://example.org/w", "format": "pytorch"}]}, "a source starts with"),
        ({"alternatives": [{"source": "https://example.org/w", "format": "pytorch", "sha": "0"}]}, r"unknown key 'alternatives[0].sha'"),
        ({"alternatives": [{"source": "https://example.org/w", "format": "pytorch", "sha256": "0"}]}, "alternatives[0].sha256 is 64"),
        ({"format": "onnx"}, "format is one of safetensors, pytorch, keras, file, darknet, got 'onnx'"),
        ({"num_classes": "10"}, "num_classes is a int, got '10'"),
        ({"num_classes": True}, "num_classes is a int, got True"),
        ({"num_classes": -1}, "num_classes is positive, got -1"),
        ({"num_classes": 0}, "num_classes is positive, got 0"),
        ({"embedding": True, "labels": "cifar10"}, "labels and metrics are of classes, and an embedding has none"),
        ({"preprocessing": {**TABLE["preprocessing"], "squash": True}}, "squash needs resize"),
        ({"preprocessing": {**TABLE["preprocessing"], "squash": 1}}, "preprocessing.squash is a bool, got 1"),
        ({"default": 1}, "default is a bool, got 1"),
        ({"sha256": "abc"}, "sha256 is 64 lower-case hex digits, got 'abc'"),
        ({"sha256": "A" * 64}, "sha256 is 64 lower-case hex digits"),
        ({"sha256_prefix": "xyzxyz"}, "sha256_prefix is 6 to 64 lower-case hex digits, got 'xyzxyz'"),
        ({"sha256": "a" * 64, "sha256_prefix": "b" * 8}, "does not start with sha256_prefix bbbbbbbb"),
        ({"size_bytes": 0}, "size_bytes is positive, got 0"),
        ({"gmacs": -1.0}, "gmacs is positive, got -1.0"),
        ({"metrics": {"top1": 101.0}, "metrics_data": "x"}, "metrics.top1 is a percentage, 0 to 100, got 101.0"),
        ({"metrics": {"top1": "9"}, "metrics_data": "x"}, "metrics.top1 is a percentage, 0 to 100, got '9'"),
        ({"metrics": {"top1": 9}}, "metrics mean nothing without metrics_data"),
        ({"preprocessing": {"interpolation": "bilinear", "mean": [0.5]}}, "preprocessing.std missing"),
        ({"preprocessing": {**TABLE["preprocessing"], "scale": 1}}, "unknown key 'preprocessing.scale'"),
        ({"preprocessing": {**TABLE["preprocessing"], "resize": 2.5}}, "preprocessing.resize is a int | None, got 2.5"),
        ({"preprocessing": {**TABLE["preprocessing"], "mean": ["a"]}}, "preprocessing.mean is a tuple[float, ...]"),
        ({"preprocessing": {**TABLE["preprocessing"], "std": [1, 2]}}, "mean and std need one number per channel each"),
        ({"sources": ["https://example.org/\udc80"]}, "a source is text that UTF-8 can write"),
        ({"preprocessing": 3}, "preprocessing is a Preprocessing, got 3"),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], message: str) -> None:
    table = {key: value for key, value in (TABLE | change).items() if value is not None}
    with pytest.raises(BadRecord) as caught:
        registry.record("Net", "v1", table, "net.toml [Net.v1]")
    assert str(caught.value).startswith("net.toml [Net.v1]: ")
    assert message in str(caught.value)


def test_http_on_another_machine_is_insecure() -> None:
    with pytest.raises(InsecureSource, match=r"net.toml: a source on another machine needs https, got 'http://example.org/w'"):
        registry.record("Net", "v1", TABLE | {"sources": ["http://example.org/w"]}, "net.toml")
    with pytest.raises(InsecureSource, match="use https"):
        weights.adhoc("Net", "http://example.org/w")
    assert weights.adhoc("Net", "http://127.0.0.1/w").sources == ("http://127.0.0.1/w",)


def test_every_shipped_model_has_one_default_and_find_takes_it() -> None:
    for model in {row.model for row in weights.checkpoints()}:
        assert [row for row in weights.checkpoints(model) if row.default] == [weights.find(model)]


def test_reading_one_model_reads_what_reading_all_does() -> None:
    rows = weights.checkpoints()
    for model in {row.model for row in rows}:
        assert weights.checkpoints(model) == tuple(row for row in rows if row.model == model)


def test_finding_one_network_parses_the_files_that_name_it_alone() -> None:
    """Parsing all takes a hundred times as long."""
    registry._parse_shipped.cache_clear()
    weights.find("VGG19")
    one = registry._parse_shipped.cache_info().misses
    weights.checkpoints()
    assert 0 < 4 * one <= registry._parse_shipped.cache_info().misses


def test_an_unknown_tag_lists_the_nearest_and_all() -> None:
    with pytest.raises(
        UnknownWeights, match=r"ResNet50 has no checkpoint 'imagenet1k_v3'; did you mean imagenet1k_v.* It has: .*imagenet1k_v1"
    ):
        weights.find("ResNet50", "imagenet1k_v3")


def test_a_model_without_rows_is_told_apart() -> None:
    with pytest.raises(NoPretrainedWeights, match="no checkpoint of DenseNet264 is in the registry; import a file with: zoo add FILE"):
        weights.find("DenseNet264")


def test_folders_of_the_environment_and_of_the_user_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.toml").write_text(f"[Net.v1]{TEXT}")
    (folder.parent / "theirs" / "b.toml").write_text(f"[Net.v2]{TEXT.replace('default = true', '')}")
    registry.user_folder().mkdir(parents=True)
    (registry.user_folder() / "c.toml").write_text(f'["Net" . "v 3"]{TEXT.replace("default = true", "")}'.replace("v 3", "v3"))
    assert [row.tag for row in weights.checkpoints("Net")] == ["v1", "v2", "v3"]
    assert weights.find("Net").tag == "v1"
    assert {"v1", "v2", "v3"} <= {row.tag for row in weights.checkpoints() if row.model == "Net"}
    monkeypatch.setenv("ZOO_REGISTRY", str(folder / "absent"))
    with pytest.raises(BadRecord, match=r"ZOO_REGISTRY names .*absent, which is no folder"):
        weights.find("Net")


def test_a_changed_file_is_read_again(folder: Path) -> None:
    (folder / "a.toml").write_text(f"[Net.v1]{TEXT}")
    assert weights.find("Net").num_classes == 10
    (folder / "a.toml").write_text(f"[Net.v1]{TEXT.replace('num_classes = 10', 'num_classes = 100')}")
    assert weights.find("Net").num_classes == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Net.v1]\nx = ", "a.toml is no TOML that can be read .Invalid"),
        ("Net = 3", "Net holds no tables"),
        ("Net = " + "[" * 5000 + "]" * 5000, "a.toml is nested more than 64 deep"),
        ("[Net]\nv1 = 3", "Net holds no tables"),
        (f'[Net."a/b"]{TEXT}', r"a tag is letters, digits and _ \. \+ -, got 'a/b'"),
        (f"[Net.v1]{TEXT}lr = 3\n", r"a.toml \[Net.v1\]: unknown key 'lr'"),
    ],
)
def test_a_bad_file_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "a.toml").write_text(text)
    with pytest.raises(BadRecord, match=message):
        weights.find("Net")


QUIET = TEXT.replace("default = true", "")


def defaults(model: str) -> list[str]:
    assert [row for row in weights.checkpoints() if row.model == model] == list(weights.checkpoints(model))
    return [row.tag for row in weights.checkpoints(model) if row.default]


def test_the_nearest_default_wins_the_users_own_then_the_folders_in_order_then_the_shipped(folder: Path) -> None:
    own, theirs = registry.user_folder(), folder.parent / "theirs"
    own.mkdir(parents=True)
    shipped = weights.find("VGG19").tag
    places = ((theirs, TEXT, "theirs"), (folder, TEXT, "mine"), (own, QUIET, "mine"), (own, TEXT, "own"))
    assert defaults("VGG19") == [shipped]
    for number, (place, text, winner) in enumerate(places):
        (place / "x.toml").write_text(f"[VGG19.{'quiet' if text == QUIET else winner}]{text}")
        assert (weights.find("VGG19").tag, defaults("VGG19")) == (winner, [winner]), number
        assert weights.find("VGG19").default
        assert not weights.find("VGG19", shipped).default


def test_several_defaults_in_one_folder_matter_only_to_who_names_no_tag(folder: Path) -> None:
    (folder / "a.toml").write_text(f"[Net.v1]{TEXT}")
    (folder / "b.toml").write_text(f"[Net.v2]{TEXT}")
    with pytest.raises(BadRecord, match=r"Net has several defaults, .*a.toml \[Net.v1\] and .*b.toml \[Net.v2\]: keep"):
        weights.find("Net")
    assert (weights.find("Net", "v1").default, defaults("Net")) == (False, [])
    assert weights.find("VGG19").default


def test_a_models_only_checkpoint_is_its_default_and_of_several_none(folder: Path) -> None:
    (folder / "a.toml").write_text(f"[Net.v1]{QUIET}")
    assert (weights.find("Net").tag, weights.find("Net").default, defaults("Net")) == ("v1", True, ["v1"])
    (folder / "b.toml").write_text(f"[Net.v2]{QUIET}")
    with pytest.raises(UnknownWeights, match=r"none of the checkpoints of Net is the default; name one: v1, v2\."):
        weights.find("Net")
    assert (weights.find("Net", "v2").tag, defaults("Net")) == ("v2", [])


@pytest.mark.parametrize("text", [TEXT, QUIET])
def test_of_two_records_with_one_name_the_shipped_is_listed_and_none_is_found(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = weights.checkpoints()
    (folder / "a.toml").write_text(f"[VGG19.imagenet1k_v1]{text}")
    assert weights.checkpoints() == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a.toml [VGG19.imagenet1k_v1] is left out: " in caplog.text
    for tag in ("imagenet1k_v1", None):
        with pytest.raises(BadRecord, match=r"vgg.toml \[VGG19.imagenet1k_v1\] and .*a.toml \[VGG19.imagenet1k_v1\] have the same name"):
            weights.find("VGG19", tag)
    assert weights.find("VGG16").tag  # another model is not disturbed


def test_a_folder_that_is_named_twice_counts_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.toml").write_text(f"[Net.v1]{TEXT}")
    monkeypatch.setenv("ZOO_REGISTRY", os.pathsep.join([str(folder)] * 2))
    assert weights.find("Net").tag == "v1"
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(folder))
    assert weights.find("Net").tag == "v1"


def test_a_file_is_recognised_by_its_hash_or_where_only_that_is_public_by_its_prefix(folder: Path) -> None:
    full, prefix = "1" * 64, "2" * 8
    quiet = TEXT.replace("default = true", "")
    text = f'[Net.v1]{TEXT}sha256 = "{full}"\n[Net.v2]{quiet}sha256_prefix = "{prefix}"\n'
    (folder / "a.toml").write_text(text + f'[Net.v3]{quiet}sha256 = "{"3" * 64}"\nsha256_prefix = "33333333"\n')
    found = [weights.recognise(sha256) for sha256 in (full, prefix + "0" * 56, "3" * 8 + "0" * 56, "4" * 64)]
    assert [row and row.tag for row in found] == ["v1", "v2", None, None]


def test_an_adhoc_record_says_what_it_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = weights.adhoc("Net", "hf://acme/wheels", num_classes=7)
    assert (row.tag, row.names, row.num_classes, row.license, row.metrics) == ("hf://acme/wheels", "auto", 7, "unstated", {})
    kinds = {
        "hf://acme/wheels": "safetensors",
        "hf://acme/wheels@v1": "safetensors",
        "hf://acme/wheels/model.bin": "pytorch",
        "https://example.org/a.safetensors?download=1": "safetensors",
        "https://example.org/a.pth": "pytorch",
        "b.th": "pytorch",
    }
    assert {source: weights.adhoc("Net", source).format for source in kinds} == kinds
    monkeypatch.chdir(tmp_path)
    assert weights.adhoc("Net", "a b#c.pth").sources == ((tmp_path / "a b#c.pth").as_uri(),)
    with pytest.raises(BadRecord, match=r"the record of gs://bucket/w: a source starts with hf://, https://, pypi:// or file://, got"):
        weights.adhoc("Net", "gs://bucket/w")
    with pytest.raises(BadRecord, match="did you mean num_classes"):
        weights.adhoc("Net", "x.pth", num_clases=3)


def test_the_records_are_data() -> None:
    assert isinstance(weights.find("VGG19"), Checkpoint)
    assert pickle.loads(pickle.dumps(weights.checkpoints())) == copy.deepcopy(weights.checkpoints())


def test_a_password_in_a_source_is_refused_and_not_repeated() -> None:
    with pytest.raises(InsecureSource, match="HF_TOKEN") as caught:
        weights.adhoc("ResNet20", "https://me:secret@example.org/w.safetensors")
    assert "secret" not in str(caught.value)


QUICK = {
    "sources": 'sources = ["https://example.org/w-12345678.pth", "https://example.org/v-12345678.pth"]',
    "alternatives": 'alternatives = [\n    { source = "https://example.org/v.pth", format = "pytorch", size_bytes = 1_000_000 },\n]',
    "format": 'format = "pytorch"',
    "names": 'names = "timm"',
    "num_classes": "num_classes = 11_221",
    "default": "default = true",
    "options": 'options = { eps = 1e-05, padding = "same" }',
    "metrics": "metrics = { top1 = 76.5 }",
    "metrics_data": 'metrics_data = "ImageNet-1k validation"',
    "license": 'license = "MIT"',
    "preprocessing": 'preprocessing = { resize = 4, crop = 4, interpolation = "nearest", mean = [0.5], std = [1.0], squash = true }',
    "provenance": 'provenance = "made up, by a test"',
}


@pytest.mark.parametrize(
    "line",
    [
        'license = "says \\"so\\""',
        "license = 'MIT'",
        'license = """\nMIT"""',
        'options = { padding = "a, b" }',
        "options = { widths = [1, 2] }",
        "options.padding = 3",
        "sources = [\"https://example.org/a.pth\", 'https://example.org/b.pth']",
        "num_classes\t= 3",
        'alternatives = [{ source = "https://example.org/v.pth", format = "pytorch" }]',
        "metrics = { top1 = 76.5, top5 = 80 } # of them",
        "gmacs = 0x1F",
        'preprocessing = { interpolation = "nearest", mean = [0.5], std = [1.0] } # nothing',
    ],
)
def test_the_quick_reader_leaves_what_it_does_not_know_to_tomllib(line: str) -> None:
    text = "\n".join(["[Net.v1]", *{**QUICK, re.split(r"\W", line)[0]: line}.values()])
    assert registry.quickly(text) is None
    assert registry.record("Net", "v1", tomllib.loads(text)["Net"]["v1"], "here")


def test_the_quick_reader_reads_as_tomllib_does() -> None:
    text = "\n".join(["[Net.v1]", *QUICK.values(), "# a comment, = 3", ""])
    assert registry.quickly(text) == registry.record("Net", "v1", tomllib.loads(text)["Net"]["v1"], "here")
