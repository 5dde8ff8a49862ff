"""Other tools' caches: their files are copied in where the record's hash proves them, and never believed by name."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint
from weights.elsewhere import elsewhere, hugging_face_cache, torch_cache
from weights.errors import Offline
from weights.lock import Lock, user_lock

Make = Callable[..., Checkpoint]
HF = "hf://acme/wheels/model.safetensors"
URL = "https://weights.invalid/models/resnet20-{}.pth"


def hub_file(data: bytes, name: str = "model.safetensors", blob: str | None = None) -> Path:
    """Lay a file down as the Hub's client does."""
    folder = hugging_face_cache() / "models--acme--wheels"
    (folder / "blobs").mkdir(parents=True)
    stored = folder / "blobs" / (blob or hashlib.sha256(data).hexdigest())
    stored.write_bytes(data)
    link = folder / "snapshots" / ("0" * 40) / name
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(stored, link.parent))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    return stored


def torch_file(name: str, data: bytes) -> Path:
    torch_cache().mkdir(parents=True)
    (torch_cache() / name).write_bytes(data)
    return torch_cache() / name


@pytest.mark.parametrize("blob", [None, "1234"])
def test_the_hubs_cache_is_read_through_without_a_network(
    record: Make, data: bytes, sha: str, blob: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = hub_file(data, blob=blob)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    installed = weights.get(record(HF, sha256=sha))
    assert bytes(weights.load(installed)) == data
    assert (stored.stat().st_nlink, stored.read_bytes()) == (1, data)  # neither moved nor linked
    stored.write_bytes(b"overwritten by another tool")
    assert bytes(weights.open_weights(record(HF, sha256=sha))) == data


def test_torch_hubs_cache_is_read_through_by_a_full_hash_or_a_prefix(record: Make, data: bytes, sha: str) -> None:
    url = URL.format(sha[:8])
    torch_file(url.rpartition("/")[2], data)
    for known in ({"sha256": sha}, {"sha256_prefix": sha[:8], "size_bytes": len(data)}, {"sha256_prefix": sha[:8]}):
        assert [source for _, source in elsewhere(record(url, **known))] == [url]
        installed = weights.get(record(url, **known))
        assert (installed.source_sha256, installed.source) == (sha, (torch_cache() / url.rpartition("/")[2]).as_uri())
        installed.path.unlink()


def test_what_no_hash_proves_is_not_even_looked_at(record: Make, data: bytes, sha: str) -> None:
    url = URL.format(sha[:8])
    torch_file(url.rpartition("/")[2], data)
    hub_file(data, blob="1234")
    for row in (record(url), record(url, size_bytes=len(data)), record(HF)):
        assert list(elsewhere(row)) == []


def test_a_prefix_alone_refuses_a_file_of_its_name_that_was_cut_short(hub: HubServer, record: Make, data: bytes, sha: str) -> None:
    url = hub.file(f"resnet20-{sha[:8]}.pth", data)
    torch_file(url.rpartition("/")[2], data[:-1])
    assert bytes(weights.open_weights(record(url, sha256_prefix=sha[:8]))) == data
    assert len(hub.gets()) == 1


def test_a_row_without_a_hash_takes_from_the_hubs_cache_the_very_file_that_the_hub_announces(
    hub: HubServer, record: Make, data: bytes, sha: str
) -> None:
    stored = hub_file(data)
    commit = hub.repo("acme/wheels", {"model.safetensors": data})  # another commit than the one that is in the cache
    installed = weights.get(record(HF))
    assert (installed.sha256, installed.source, hub.gets("/blobs/")) == (sha, stored.as_uri(), [])
    entry = Lock.read(user_lock()).entries["ResNet20:test"]  # what the Hub itself announced is a first sight
    assert (entry.sha256, entry.commit) == (sha, commit)


def test_what_the_hub_announces_and_its_cache_has_damaged_is_fetched(hub: HubServer, record: Make, data: bytes, sha: str) -> None:
    hub_file(data[:-1] + bytes([data[-1] ^ 1]), blob=sha)
    hub.repo("acme/wheels", {"model.safetensors": data})
    assert bytes(weights.open_weights(record(HF))) == data
    assert len(hub.gets("/blobs/")) == 1


@pytest.mark.parametrize("source", [HF, "hf://acme/wheels", f"hf://acme/wheels@{'0' * 40}/model.safetensors"])
def test_without_a_network_a_row_without_a_hash_takes_what_hashes_to_the_name_that_the_hubs_client_gave_it(
    record: Make, data: bytes, sha: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = hub_file(data)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert weights.get(record(source)).sha256 == sha
    assert not user_lock().exists()  # another tool's word is no first sight
    weights.gc(0)
    shutil.rmtree(Cache().root)
    stored.write_bytes(data[::-1])
    with pytest.raises(Offline):
        weights.get(record(source))


def test_without_a_network_only_the_commit_that_is_meant_is_taken(record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_file(data)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    ref = hugging_face_cache() / "models--acme--wheels" / "refs" / "main"
    other = f"hf://acme/wheels@{'1' * 40}/model.safetensors"
    for said, source in (("1" * 40, HF), ("", HF), ("../" * 3, HF), ("0" * 40, other), ("0" * 40, "hf://acme/wheels@..%2Fmain/x")):
        ref.write_text(said)
        assert list(elsewhere(record(source))) == []
    ref.write_text("0" * 40)
    assert len(list(elsewhere(record(HF)))) == 1


def test_a_name_proves_nothing(hub: HubServer, record: Make, data: bytes, sha: str, cached: Callable[[], dict[str, bytes]]) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub_file(data[:-1] + bytes([data[-1] ^ 1]), blob=sha)
    row = record(HF, sha256=sha)
    assert len(list(elsewhere(row))) == 1
    assert bytes(weights.open_weights(row)) == data
    assert cached() == {f"blobs/sha256/{sha[:2]}/{sha}": data}
    assert len(hub.gets("/blobs/")) == 1


def test_a_wrong_file_elsewhere_is_not_the_reason_of_a_failure(
    record: Make, data: bytes, sha: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    hub_file(data[::-1], blob=sha)
    with pytest.raises(Offline, match="ZOO_OFFLINE=1 forbids the network"):
        weights.get(record(HF, sha256=sha))


def test_a_pickle_elsewhere_is_converted_as_one_that_was_fetched(record: Make, data: bytes) -> None:
    pickled = b"PK\x03\x04 a pickle"
    sha256 = hashlib.sha256(pickled).hexdigest()
    torch_file(f"resnet20-{sha256[:8]}.pth", pickled)
    row = record(URL.format(sha256[:8]), format="pytorch", sha256=sha256)
    assert bytes(weights.open_weights(row, to_safetensors=lambda source, made, row: made.write_bytes(data) and None)) == data


@pytest.mark.parametrize("what", ["pipe", "folder", "loop", "empty"])
def test_what_is_no_file_elsewhere_is_passed_over(record: Make, sha: str, what: str) -> None:
    url = URL.format(sha[:8])
    path = torch_file(url.rpartition("/")[2], b"")
    if what != "empty":
        path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    assert list(elsewhere(record(url, sha256=sha))) == []


@pytest.mark.parametrize(
    "source", ["https://weights.invalid/..", "https://weights.invalid/a%2F..%2Fb", "https://weights.invalid/", HF + "/../x"]
)
def test_a_name_leads_nowhere_else(record: Make, sha: str, source: str, data: bytes) -> None:
    hub_file(data, name="x", blob="y")
    assert list(elsewhere(record(source, sha256=sha))) == []


def test_the_caches_are_found_by_the_variables_of_their_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"  # which reads them at its import
    for settings in ({"HF_HOME": "/h", "TORCH_HOME": "/t"}, {"XDG_CACHE_HOME": "/x"}, {"HF_HUB_CACHE": "~/c"}):
        for name in ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout.strip()
        assert str(hugging_face_cache()) == shown
        assert str(torch_cache().parent) == str(Path(torch.hub.get_dir()).expanduser())
