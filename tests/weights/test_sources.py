"""The Hub's real client against a local Hub: what it resolves, and what comes through our downloader."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import Checkpoint, sources
from weights.cache import key, read_json
from weights.errors import (
    CorruptCache,
    HashMismatch,
    InsecureSource,
    Offline,
    ProtocolError,
    SizeMismatch,
    SourceUnavailable,
    UnsupportedFormat,
)
from weights.pinning import frozen_by
from weights.places import SCHEMES
from weights.sources import offline

SOURCE = "hf://acme/wheels/model.safetensors"
GET = "import sys, weights; print(weights.get(weights.adhoc('ResNet20', sys.argv[1]), progress=False).sha256)"
DEAF = "import fcntl; fcntl.flock = lambda fd, how: None\n"
Make = Callable[..., Checkpoint]


def process(hub: HubServer, code: str = GET, source: str = SOURCE) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_ENDPOINT": hub.url}
    return subprocess.Popen([sys.executable, "-c", code, source], env=environment, text=True, stdout=-1, stderr=-1)


def result(run: subprocess.Popen[str]) -> str:
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    return out.strip()


def leftovers(own_cache: Path) -> list[Path]:
    return [*(own_cache / "partial").iterdir(), *(own_cache / "quarantine").iterdir()]


@pytest.mark.parametrize("form", ["hf://acme/wheels", "hf://acme/wheels@main", SOURCE, "hf://acme/wheels@{}/model.safetensors"])
def test_the_real_client_resolves_and_our_downloader_fetches(
    hub: HubServer, record: Make, data: bytes, sha: str, form: str, own_cache: Path
) -> None:
    commit = hub.repo("acme/wheels", {"model.safetensors": data, "other.safetensors": b"", "pytorch_model.bin": b""})
    source = form.format(commit)
    installed = weights.get(record(source))
    assert bytes(weights.load(installed)) == data
    assert installed.source == f"{hub.url}/acme/wheels/resolve/{commit}/model.safetensors"
    ref = read_json(own_cache / "refs" / f"{key(source)}.json")
    assert ref is not None
    assert (ref["commit"], ref["source_sha256"], ref["sha256"], ref["size"]) == (commit, sha, sha, len(data))
    assert [r.method for r in hub.log if r.port == "cdn"] == ["GET"]


def test_the_client_reads_its_endpoint_from_the_environment_of_its_start(hub: HubServer, data: bytes, sha: str, own_cache: Path) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    assert result(process(hub)) == sha
    assert leftovers(own_cache) == []


def test_a_download_from_the_hub_resumes_after_a_cut(hub: HubServer, record: Make, data: bytes) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("cut", after=123_456)
    assert bytes(weights.open_weights(record(SOURCE))) == data
    cut, rest = (r for r in hub.log if r.port == "cdn")
    assert (cut.sent, rest.range, rest.status) == (123_456, "bytes=123456-", 206)
    assert cut.sent + rest.sent == len(data)


def test_a_killed_process_leaves_what_the_next_one_resumes(hub: HubServer, data: bytes, sha: str, own_cache: Path) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("stall", after=200_000, seconds=20)
    first = process(hub)
    until = time.monotonic() + 300
    while sum(p.stat().st_size for p in (own_cache / "partial").glob("*.part")) < 200_000:
        assert time.monotonic() < until, first.communicate(timeout=1)
        time.sleep(0.02)
    first.kill()
    first.communicate()
    assert [p.suffix for p in leftovers(own_cache)].count(".part") == 1
    assert result(process(hub)) == sha
    assert hub.gets()[-1].range == "bytes=200000-"
    assert hub.gets()[-1].sent == len(data) - 200_000
    assert leftovers(own_cache) == []


@pytest.mark.parametrize("lock", ["works", "does nothing"])
def test_eight_processes_at_once(hub: HubServer, data: bytes, sha: str, own_cache: Path, lock: str) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    runs = [process(hub, (DEAF if lock != "works" else "") + GET) for _ in range(8)]
    assert [result(run) for run in runs] == [sha] * 8
    blobs = [r for r in hub.log if r.port == "cdn"]
    assert len(blobs) == 1 if lock == "works" else 1 <= len(blobs) <= 8
    assert leftovers(own_cache) == []
    assert weights.verify_all()[-1][1:] == (True, f"sha256 {sha}")


def test_a_lock_that_a_stopped_process_holds_is_not_waited_for(hub: HubServer, record: Make, data: bytes, monkeypatch: Any) -> None:
    from weights import cache

    monkeypatch.setattr(cache, "LOCK_IDLE_S", 0.5)
    row = record(hub.file("w", data))
    store = cache.Cache()
    store.prepare()
    with store.lock(key(row.sources[0])):
        assert bytes(weights.open_weights(row)) == data


@pytest.mark.parametrize("switch", ["ZOO_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_names_its_switch_at_once_and_opens_no_socket(
    record: Make, switch: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch, "1")
    monkeypatch.setattr(socket, "socket", None)
    for row in (record(SOURCE), record("https://example.org/w", SOURCE)):
        with pytest.raises(Offline, match=rf"ResNet20:test is not in .* and {switch}=1 forbids the network"):
            weights.get(row)
    assert not own_cache.exists()


@pytest.mark.parametrize("switch", ["ZOO_OFFLINE", "HF_HUB_OFFLINE", "ZOO_FROZEN"])
def test_a_switch_that_protects_is_on_at_any_word_but_those_for_off(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = frozen_by if switch == "ZOO_FROZEN" else offline
    for word in ("1", "2", "y", "Y", "True", " on ", "frozen", "enabled", "flase"):
        monkeypatch.setenv(switch, word)
        assert name() == f"{switch}={word}"
    for word in ("", " ", "0", "No", "false", "OFF", "n"):
        monkeypatch.setenv(switch, word)
        assert name() is None


def test_a_warm_cache_asks_nothing_of_the_network(hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    installed = weights.get(record("hf://acme/wheels"))
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert weights.get(record("hf://acme/wheels")) == installed
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    for mode in ("load", "stamp"):
        assert bytes(weights.open_weights(record("hf://acme/wheels"), verify=mode)) == data


def test_offline_local_sources_still_work(record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    (tmp_path / "w").write_bytes(data)
    assert bytes(weights.open_weights(record(SOURCE, (tmp_path / "w").as_uri()))) == data


def test_a_moved_branch_does_not_move_what_is_installed(
    hub: HubServer, record: Make, data: bytes, safetensors: Callable[..., bytes]
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    row = record("hf://acme/wheels")
    installed = weights.get(row)
    hub.repo("acme/wheels", {"model.safetensors": safetensors(seed=5)})
    assert weights.get(row) == installed
    installed.path.unlink()
    assert weights.get(row) == installed  # fetched again, from the commit of the first time


def test_the_hubs_own_hash_is_checked(hub: HubServer, record: Make, data: bytes, sha: str) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("flip", times=9)
    with pytest.raises(HashMismatch, match=rf"its own server says sha256 {sha}"):
        weights.get(record(SOURCE))
    hub.heal()
    hub.fail("linked_etag", method="HEAD")
    with pytest.raises(HashMismatch, match=rf"expected sha256 {sha}, and the server now announces 0000"):
        weights.get(record(SOURCE, sha256=sha))
    assert not hub.gets()
    hub.fail("linked_size", method="HEAD")
    with pytest.raises(SizeMismatch, match="the Hub says"):
        weights.get(record(SOURCE))


def test_a_mirror_of_the_hub_without_its_headers_still_serves_a_known_hash(hub: HubServer, record: Make, data: bytes, sha: str) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("no_commit", method="HEAD")
    assert weights.get(record(SOURCE, sha256=sha)).sha256 == sha


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.repo("acme/wheels", {"model.safetensors": data})
    weights.get(record(SOURCE))
    assert {(r.port, r.token) for r in hub.log} == {("hub", "Bearer hf_secret"), ("cdn", None)}


def test_a_token_that_left_does_not_come_back(hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.repo("acme/wheels", {"model.safetensors": data})
    back = hub.file("back", data)
    hub.fail("redirect", path="/blobs/", to=back)
    weights.get(record(SOURCE))
    assert next(r for r in hub.log if r.path == "/files/back").token is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://acme/none/model.safetensors", "the Hub has no such repository"),
        ("hf://acme/wheels@nope/model.safetensors", "the Hub has no such revision"),
        ("hf://acme/wheels/nope.safetensors", "the Hub has no such file"),
        ("hf://acme/none", "the Hub has no such repository"),
    ],
)
def test_what_is_not_there_is_named(hub: HubServer, record: Make, data: bytes, source: str, message: str) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    with pytest.raises(SourceUnavailable, match=f"{source}: {message}: check the name"):
        weights.get(record(source))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a.safetensors", "b.safetensors"], r"has 2 safetensors files \(a.safetensors, b.safetensors\); name one"),
        (["model-00001-of-00002.safetensors"], "name one"),
        (["pytorch_model.bin", "README.md"], r"name the file to have it converted: hf://acme/wheels/pytorch_model\.bin"),
        (["README.md"], "it has no weights that we read"),
    ],
)
def test_a_repository_without_one_clear_safetensors_is_explained(hub: HubServer, record: Make, files: list[str], message: str) -> None:
    hub.repo("acme/wheels", dict.fromkeys(files, b"."))
    with pytest.raises(UnsupportedFormat, match=message):
        weights.get(record("hf://acme/wheels"))


@pytest.mark.parametrize("source", ["hf://acme/wheels/../../x", "hf://acme/wheels/a//b", "hf://acme", "hf://a/b/..", "hf://a/b/c\\d"])
def test_a_hub_source_that_is_no_plain_name_is_refused(record: Make, hub: HubServer, source: str) -> None:
    with pytest.raises(ProtocolError, match="a Hub source is hf://org/repo"):
        weights.get(record(source))
    assert hub.log == []


@pytest.mark.parametrize("source", ["hf://acme/wheels", SOURCE])
@pytest.mark.parametrize("kind", ["html", "garbage", "drop", "status"])
def test_a_hub_that_talks_nonsense_is_a_typed_error(hub: HubServer, record: Make, data: bytes, source: str, kind: str) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail(kind, times=99, method="*")
    with pytest.raises((ProtocolError, SourceUnavailable)) as caught:
        weights.get(record(source))
    assert "acme/wheels" in str(caught.value)
    hub.heal()
    assert bytes(weights.open_weights(record(source))) == data


def test_an_endpoint_without_tls_on_another_machine_is_refused(record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://192.0.2.1")
    with pytest.raises(InsecureSource, match=r"refused http://192\.0\.2\.1"):
        weights.get(record(SOURCE))


def test_a_damaged_file_is_fetched_again_online_and_named_offline(
    hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    path = weights.get(record(SOURCE)).path
    for damage in (data[:-1] + bytes([data[-1] ^ 1]), data[:1000], b""):
        path.chmod(0o644)
        path.write_bytes(damage)
        assert bytes(weights.open_weights(record(SOURCE))) == data
    path.chmod(0o644)
    path.write_bytes(data[:-1] + b"?" if data[-1:] != b"?" else data[:-1] + b"!")
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(CorruptCache, match=r"expected blake3 .*got .*ZOO_OFFLINE=1 forbids the network"):
        weights.open_weights(record(SOURCE))


@pytest.mark.parametrize("proxy", ["http://user:secret@proxy.example.org:8080", "user:secret@proxy.example.org:8080", "secret@"])
def test_a_proxys_password_is_never_told(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from weights.patience import proxies

    monkeypatch.setenv("HTTPS_PROXY", proxy)
    assert "HTTPS_PROXY=" in proxies()
    assert "secret" not in proxies()


def test_each_scheme_that_a_record_may_name_is_one_that_is_opened() -> None:
    assert set(sources._OPENERS) == set(SCHEMES)
