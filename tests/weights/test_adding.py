"""`add`: the user's own checkpoint is kept whole, under a record that reads back the same."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hubserver import HubServer
from hypothesis import given
from hypothesis import strategies as st

import weights
from weights import Checkpoint, registry
from weights.adding import to_toml
from weights.errors import BadRecord, NoPretrainedWeights, NotLocked, SourceUnavailable, UnknownWeights
from weights.lock import Entry, Lock


@pytest.fixture
def mine(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "my weights.safetensors").write_bytes(data)
    return tmp_path / "my weights.safetensors"


def test_what_was_added_is_found_and_outlives_its_file(mine: Path, data: bytes, sha: str) -> None:
    row = weights.add(mine, "DenseNet264", "mine", num_classes=10, license="MIT", metrics={"top1": 12.5}, metrics_data='my "own" \\ photos')
    assert weights.find("DenseNet264") == weights.find("DenseNet264", "mine") == row
    assert (row.sha256, row.default, row.format) == (sha, True, "safetensors")
    mine.unlink()
    assert bytes(weights.open_weights(weights.find("DenseNet264", "mine"))) == data
    assert weights.recognise(sha) == row


def test_the_original_may_change_under_the_same_path(mine: Path, data: bytes, safetensors: Callable[..., bytes]) -> None:
    row = weights.add(mine, "DenseNet264", "mine", num_classes=10)
    mine.write_bytes(safetensors(seed=9))
    assert bytes(weights.open_weights(weights.adhoc("DenseNet264", str(mine)))) == safetensors(seed=9)
    assert bytes(weights.open_weights(row)) == data


def test_a_foreign_file_is_converted(tmp_path: Path, data: bytes) -> None:
    def convert(source: Path, made: Path, row: Checkpoint) -> None:
        made.write_bytes(data)

    (tmp_path / "w.pth").write_bytes(b"PK a pickle")
    row = weights.add(tmp_path / "w.pth", "DenseNet264", "mine", num_classes=10, to_safetensors=convert)
    (tmp_path / "w.pth").unlink()
    assert row.format == "pytorch"
    assert bytes(weights.open_weights(row, to_safetensors=lambda source, made, row: None)) == data


def test_a_name_that_is_taken_is_refused(mine: Path, safetensors: Callable[..., bytes]) -> None:
    weights.add(mine, "DenseNet264", "mine", num_classes=10)
    with pytest.raises(
        BadRecord, match=r"DenseNet264:mine exists: choose another tag; or replace=True replaces it, your own in .*DenseNet264.mine.toml"
    ):
        weights.add(mine, "DenseNet264", "mine", num_classes=10)
    mine.write_bytes(safetensors(seed=3))
    again = weights.add(mine, "DenseNet264", "mine", num_classes=10, replace=True)
    assert (weights.find("DenseNet264"), again.default) == (again, True)
    assert not weights.add(mine, "DenseNet264", "second", num_classes=10).default
    with pytest.raises(BadRecord, match="VGG19:imagenet1k_v1 exists: choose another tag"):
        weights.add(mine, "VGG19", "imagenet1k_v1", replace=True)


def test_the_users_own_default_goes_before_the_shipped_one_and_there_is_one(mine: Path) -> None:
    shipped = weights.find("VGG19")
    row = weights.add(mine, "VGG19", "mine", num_classes=10, default=True)
    assert weights.find("VGG19") == row
    assert [c.tag for c in weights.checkpoints("VGG19") if c.default] == ["mine"]
    with pytest.raises(BadRecord, match=r"VGG19.mine.toml \[VGG19.mine\] is your default of VGG19; take default = true away"):
        weights.add(mine, "VGG19", "second", num_classes=10, default=True)
    assert weights.add(mine, "VGG19", "mine", num_classes=10, default=True, replace=True) == row
    weights.remove("VGG19", "mine")
    assert weights.find("VGG19") == shipped


def test_what_is_added_and_pinned_lies_in_the_folder_of_the_cache_and_nothing_at_home(
    mine: Path, hub: HubServer, record: Callable[..., weights.Checkpoint], data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, cache = tmp_path / "home", tmp_path / "disk"
    home.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("ZOO_USER_REGISTRY")
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("ZOO_CACHE", str(cache))
    weights.add(mine, "DenseNet264", "mine", num_classes=10)
    weights.get(record(hub.file("w", data), tag="pinned"))
    assert weights.find("DenseNet264").tag == "mine"
    assert (cache / "own" / "registry" / "DenseNet264.mine.toml").is_file()
    assert "ResNet20:pinned" in (cache / "own" / "weights.lock").read_text()
    assert list(home.rglob("*")) == list((tmp_path / "work").iterdir()) == []
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "another"))
    assert weights.checkpoints("DenseNet264") == ()


def test_frozen_believes_no_record_and_no_lock_in_the_caches_own_folder(
    mine: Path, hub: HubServer, record: Callable[..., weights.Checkpoint], data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZOO_USER_REGISTRY")
    row = weights.add(mine, "DenseNet264", "mine", num_classes=10)
    pinned = record(hub.file("w", data), tag="pinned")
    weights.get(pinned)
    monkeypatch.setenv("ZOO_FROZEN", "1")
    with pytest.raises(NotLocked, match=r"DenseNet264:mine lies in the cache's own folder, and ZOO_FROZEN=1 .* zoo lock DenseNet264:mine"):
        weights.get(row)
    with pytest.raises(NotLocked, match="no lock has a full hash of ResNet20:pinned"):
        weights.get(pinned)
    entry = Entry("DenseNet264:mine", "safetensors", row.sources, "unstated", sha256=row.sha256)
    Lock({entry.key: entry}, serial=1).write(tmp_path / "weights.lock")
    assert weights.get(row).source_sha256 == row.sha256


def test_a_record_says_how_many_classes_it_has(mine: Path) -> None:
    with pytest.raises(BadRecord, match="say num_classes, how many DenseNet264:mine tells apart"):
        weights.add(mine, "DenseNet264", "mine")
    assert not registry.user_folder().exists()


def test_what_is_removed_is_not_found_and_its_bytes_stay(mine: Path, data: bytes) -> None:
    row = weights.add(mine, "DenseNet264", "mine", num_classes=10)
    path = weights.remove("DenseNet264", "mine")
    assert (path, path.exists()) == (registry.user_folder() / "DenseNet264.mine.toml", False)
    with pytest.raises(NoPretrainedWeights):
        weights.find("DenseNet264")
    mine.unlink()
    assert bytes(weights.open_weights(row)) == data


def test_only_ones_own_record_can_be_removed(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = registry.user_folder()
    with pytest.raises(BadRecord, match=r"vgg.toml \[VGG19.imagenet1k_v1\] is not your own: only what is in"):
        weights.remove("VGG19", "imagenet1k_v1")
    weights.add(mine, "VGG19", "mine", num_classes=10)
    with pytest.raises(UnknownWeights, match=r"VGG19 has no checkpoint 'other'\. Of your own it has: mine\."):
        weights.remove("VGG19", "other")
    with (own / "VGG19.mine.toml").open("a") as file:
        file.write((own / "VGG19.mine.toml").read_text().replace("mine", "second", 1))
    with pytest.raises(BadRecord, match=r"\[VGG19.mine\] can't be removed alone: delete that table"):
        weights.remove("VGG19", "mine")
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(own / "empty"))
    monkeypatch.setenv("ZOO_REGISTRY", str(own))
    with pytest.raises(BadRecord, match="is not your own"):
        weights.remove("VGG19", "mine")
    assert weights.find("VGG19", "mine").tag == "mine"


@pytest.mark.parametrize("tag", ["", "../x", "a/b", ".x", "a b", "ü", "a\n"])
def test_a_tag_is_a_plain_name(mine: Path, tag: str) -> None:
    with pytest.raises(BadRecord, match="a tag is letters, digits"):
        weights.add(mine, "DenseNet264", tag, num_classes=10)


def test_a_missing_file_adds_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"absent.safetensors can't be read"):
        weights.add(tmp_path / "absent.safetensors", "DenseNet264", "mine", num_classes=10)
    with pytest.raises(BadRecord, match=r"'\.\./x' is no class name"):
        weights.add(tmp_path / "absent.safetensors", "../x", "mine", num_classes=10)
    assert not registry.user_folder().exists()


TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.one_of(TEXTS, st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False))


@given(TEXTS, st.dictionaries(TEXTS, st.one_of(VALUES, st.lists(TEXTS, min_size=1))))
def test_a_written_table_reads_back_the_same(text: str, options: dict[str, object]) -> None:
    row = replace(weights.adhoc("Net", "https://example.org/w", num_classes=10), tag="v1", provenance=text, recipe=text, options=options)
    table = tomllib.loads(to_toml(row))
    assert registry.record("Net", "v1", table["Net"]["v1"], "here") == row


def test_a_record_is_written_with_its_zeros_and_without_what_is_empty() -> None:
    row = weights.adhoc("ResNet20", "https://example.org/w.pth")
    text = to_toml(row)
    assert "num_classes = 0\n" in text
    assert not [name for name in ("default", "metrics", "options", "alternatives", "sha256") if f"\n{name} = " in text]
