"""Other tools' caches: their files are copied in where the record's hash proves them, and never believed by name."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hubserver import HubServer

import weights
from weights import Checkpoint
from weights.elsewhere import elsewhere, hugging_face_cache, torch_cache
from weights.errors import Offline

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


def test_torch_hubs_cache_is_read_through_by_a_full_hash_or_a_prefix_with_a_size(record: Make, data: bytes, sha: str) -> None:
    url = URL.format(sha[:8])
    torch_file(url.rpartition("/")[2], data)
    for known in ({"sha256": sha}, {"sha256_prefix": sha[:8], "size_bytes": len(data)}):
        assert [source for _, source in elsewhere(record(url, **known))] == [url]
        installed = weights.get(record(url, **known))
        assert (installed.source_sha256, installed.source) == (sha, (torch_cache() / url.rpartition("/")[2]).as_uri())
        installed.path.unlink()


@pytest.mark.parametrize("known", [{}, {"prefix": 8}, {"size": True}])
def test_what_no_hash_proves_is_not_even_looked_at(record: Make, data: bytes, sha: str, known: dict[str, int]) -> None:
    url = URL.format(sha[:8])
    torch_file(url.rpartition("/")[2], data)
    facts = {"sha256_prefix": sha[: known["prefix"]]} if "prefix" in known else {"size_bytes": len(data)} if known else {}
    assert list(elsewhere(record(url, **facts))) == []


def test_a_name_proves_nothing(hub: HubServer, record: Make, data: bytes, sha: str, cached: Callable[[], dict[str, bytes]]) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub_file(data[:-1] + bytes([data[-1] ^ 1]), blob=sha)
    row = record(HF, sha256=sha)
    assert len(list(elsewhere(row))) == 2
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
    assert bytes(weights.open_weights(row, to_safetensors=lambda source, made: made.write_bytes(data) and None)) == data


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
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
        assert str(hugging_face_cache()) == shown
        assert str(torch_cache().parent) == str(Path(torch.hub.get_dir()).expanduser())
