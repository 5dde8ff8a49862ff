"""`inventory`: what lies in the cache, who brought it, who keeps it, and when it was last used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint
from weights.errors import CacheNotWritable
from weights.inventory import inventory
from weights.lock import Entry, Lock

Make = Callable[..., Checkpoint]
Bytes = Callable[..., bytes]


def test_each_file_has_its_names_its_origin_its_keepers_and_its_last_use(
    hub: HubServer, record: Make, safetensors: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.safetensors").write_bytes(safetensors(1000, 1))
    added = weights.add(tmp_path / "mine.safetensors", "DenseNet264", "mine", num_classes=10)
    fetched = weights.get(record(source := hub.file("w", safetensors(2000, 2))))
    Lock({"k": Entry("k", "safetensors", (source,), "MIT", sha256=fetched.sha256)}, serial=1).write(tmp_path / "weights.lock")
    for sha256, when in ((added.sha256, 2e9), (fetched.sha256, 3e9)):
        os.utime(Cache().root / "used" / str(sha256), (when, when))
    found = inventory()
    assert [(one.sha256, one.used, one.own) for one in found.files] == [(fetched.sha256, 3e9, False), (added.sha256, 2e9, True)]
    assert [one.checkpoints for one in found.files] == [(), ("DenseNet264:mine",)]
    assert [one.kept_by for one in found.files] == [(tmp_path / "weights.lock",), ()]
    assert found.files[0].sources == (source,)
    assert found.files[1].sources == added.sources
    assert found.size_bytes == sum(one.path.stat().st_size for one in found.files)
    assert {one.owner for one in found.files} == {found.root.owner()}


def test_a_file_has_all_names_by_which_records_know_it(hub: HubServer, safetensors: Bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.safetensors").write_bytes(safetensors(1000, 1))
    for tag in ("one", "two"):
        weights.add(tmp_path / "mine.safetensors", "DenseNet264", tag, num_classes=10, default=False)
    assert [one.checkpoints for one in inventory().files] == [("DenseNet264:one", "DenseNet264:two")]


def test_what_is_no_file_of_weights_is_counted_by_its_folder(own_cache: Path) -> None:
    assert inventory().files == ()
    for name, size in (("kernels/h100/a.json", 30), ("quarantine/x", 7), ("refs/y.json", 5)):
        (own_cache / name).parent.mkdir(parents=True, exist_ok=True)
        (own_cache / name).write_bytes(bytes(size))
    assert inventory().others == {"kernels": 30, "quarantine": 7}


def test_looking_uses_nothing(hub: HubServer, record: Make, data: bytes) -> None:
    fetched = weights.get(record(hub.file("w", data)))
    note = Cache().root / "used" / fetched.sha256
    os.utime(note, (1, 1))
    inventory()
    assert note.stat().st_mtime == 1


def test_a_cache_that_is_no_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheNotWritable, match="set ZOO_CACHE to one"):
        inventory()
