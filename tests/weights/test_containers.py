"""The same weights in another container, and hashes that others reported."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import ChangedUpstream, Checkpoint, CorruptCache, HashMismatch, NotLocked, Offline, SourceUnavailable
from weights.containers import get_any, open_any
from weights.install import renew
from weights.lock import Lock, user_lock
from weights.record import Alternative

Make = Callable[..., Checkpoint]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def floats(names: dict[str, list[float]]) -> bytes:
    """A safetensors file of float32 vectors."""
    header, body = {}, b""
    for name, values in names.items():
        packed = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(body), len(body) + len(packed)]}
        body += packed
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


OWN, SAME, OTHER = floats({"a": [1, 2], "b": [3]}), floats({"x.b": [3], "x.a": [1, 2]}), floats({"a": [1, 2], "b": [4]})


@pytest.fixture
def both(hub: HubServer, record: Make, tmp_path: Path) -> Callable[..., Checkpoint]:
    """A record whose own file is on the hub, or not, and whose other container is."""

    def make(own: bytes | None, other: bytes, **facts: Any) -> Checkpoint:
        url = hub.file("own.safetensors", own) if own else f"{hub.url}/files/none.safetensors"
        alternative = Alternative(hub.file("other.safetensors", other), "safetensors", sha256=digest(other))
        return replace(record(url, **facts), alternatives=(alternative,))

    return make


def test_where_the_own_container_cant_be_reached_the_other_one_is_used_and_named(both: Any) -> None:
    row, installed = get_any(both(None, SAME), progress=False)
    assert (row.tag, row.names, row.alternatives) == (row.sources[0], "auto", ())
    assert installed.path.read_bytes() == SAME
    assert open_any(both(None, SAME), progress=False)[1].tobytes() == SAME


def test_the_own_container_comes_first_and_what_is_here_before_it(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = both(OWN, SAME)
    assert get_any(whole, progress=False)[0] == whole
    other = both(None, SAME)
    get_any(other, progress=False)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert get_any(other, progress=False)[0].tag == other.alternatives[0].source


@pytest.mark.parametrize(("other", "same"), [(SAME, True), (OTHER, False)])
def test_what_is_fetched_is_compared_with_the_container_that_is_here(both: Any, hub: HubServer, other: bytes, same: bool) -> None:
    row = both(None, other)
    get_any(row, progress=False)
    hub.file("none.safetensors", OWN)
    assert open_any(row, progress=False)[0].tag == row.alternatives[0].source  # nothing is fetched where one is here
    if same:
        assert get_any(row, progress=False)[0] == row
    else:
        for _ in range(2):  # what was refused is not taken for installed the next time
            with pytest.raises(HashMismatch, match=r"none.safetensors and .*other.safetensors should hold the same weights, and don't"):
                get_any(row, progress=False)
        assert open_any(row, progress=False)[0].tag == row.alternatives[0].source


def test_a_damaged_own_container_is_told_where_no_source_can_be_reached(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = both(OWN, SAME)
    path = get_any(row, progress=False)[1].path
    path.chmod(0o600)
    path.write_bytes(OWN[:-1])
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(CorruptCache, match="is damaged"):
        open_any(row, progress=False)


def test_wrong_bytes_of_the_own_container_are_no_reason_to_take_the_other(both: Any) -> None:
    with pytest.raises(HashMismatch, match="its record says sha256"):
        get_any(both(OWN, SAME, sha256="0" * 64), progress=False)


def test_where_none_can_be_reached_the_error_is_of_the_own(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(Offline, match="ResNet20:test is not in"):
        get_any(both(OWN, SAME), progress=False)


def test_a_lock_pins_the_other_container_by_its_own_name(both: Any) -> None:
    row = replace(both(None, SAME), alternatives=(replace(both(None, SAME).alternatives[0], sha256=None, sha256_prefix=digest(SAME)[:8]),))
    get_any(row, progress=False)
    entries = Lock.read(user_lock()).entries
    assert entries[row.alternatives[0].source].sha256 == digest(SAME)
    assert "ResNet20:test" not in entries


# -- hashes that others reported


@pytest.fixture
def reported(hub: HubServer, record: Make, data: bytes) -> Callable[..., Checkpoint]:
    def make(sha256: str, **facts: Any) -> Checkpoint:
        row = record(hub.file("w.safetensors", data), sha256_prefix=digest(data)[:8], size_bytes=len(data), **facts)
        return replace(row, sha256_reported=sha256, reported_by="two sources")

    return make


def test_a_reported_hash_that_holds_is_pinned_like_any_other(reported: Any, data: bytes) -> None:
    assert weights.get(reported(digest(data)), progress=False).path.read_bytes() == data
    assert Lock.read(user_lock()).entries["ResNet20:test"].sha256 == digest(data)


def test_a_wrong_report_says_what_agrees_and_what_to_do_and_the_publisher_wins_when_asked(reported: Any, data: bytes) -> None:
    row = reported(digest(data)[:8] + "0" * 56)
    with pytest.raises(HashMismatch) as caught:
        weights.get(row, progress=False)
    assert type(caught.value) is HashMismatch
    for said in ("agree with its published prefix and its known size", "(two sources)", "zoo lock --update ResNet20:test", digest(data)):
        assert said in str(caught.value)
    assert renew(row, progress=False).source_sha256 == digest(data)
    wrong_size = replace(row, size_bytes=7)
    assert renew(wrong_size, progress=False).source_sha256 == digest(data)


def test_frozen_a_reported_hash_admits_these_bytes_and_no_others(reported: Any, data: bytes) -> None:
    assert weights.get(reported(digest(data)), progress=False, frozen=True).source_sha256 == digest(data)
    with pytest.raises(NotLocked):
        weights.get(replace(reported("0" * 64), sha256_reported=None, reported_by=None), progress=False, frozen=True)
    with pytest.raises((HashMismatch, ChangedUpstream)):
        weights.get(replace(reported("0" * 64), sources=(f"{reported('0' * 64).sources[0]}?2",)), progress=False, frozen=True)


def test_of_a_branch_behind_a_commit_that_is_gone_the_branch_is_taken(hub: HubServer, record: Make, data: bytes) -> None:
    old = hub.repo("acme/wheels", {"model.safetensors": data})
    hub.repo("acme/wheels", {"model.safetensors": data, "README.md": b"#"})
    del hub.repos["acme/wheels"][old]
    pinned = f"hf://acme/wheels@{old}/model.safetensors"
    with pytest.raises(SourceUnavailable):
        weights.get(record(pinned, sha256=digest(data)), progress=False)
    assert weights.get(record(pinned, "hf://acme/wheels/model.safetensors", sha256=digest(data)), progress=False).path.read_bytes() == data
