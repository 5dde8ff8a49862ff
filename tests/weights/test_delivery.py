"""A file from the first place that has it: one deadline, one lock and one part for each place, for the cache and for mirrors alike."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import ChangedUpstream, Checkpoint, HashMismatch, NotLocked, SizeMismatch, SourceUnavailable, collecting, patience
from weights.elsewhere import torch_cache
from weights.install import renew
from weights.lock import Entry, Lock, user_lock
from weights.mirror import mirror
from weights.part import Part

Make = Callable[..., Checkpoint]
Bytes = Callable[..., bytes]
Cached = Callable[[], dict[str, bytes]]
Ask = Callable[[Checkpoint], Any]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Work in a project whose lock holds a record to these bytes."""

    def make(row: Checkpoint, data: bytes) -> Path:
        monkeypatch.chdir(tmp_path)
        key = f"{row.model}:{row.tag}"
        entry = Entry(key, row.format, row.sources, row.license, sha256=digest(data), size_bytes=len(data))
        Lock({key: entry}, 1).write(tmp_path / "weights.lock")
        return tmp_path / "weights.lock"

    return make


@pytest.fixture(params=["cache", "mirror"])
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Ask:
    """Have a file fetched into the cache, or into a mirror."""
    if request.param == "cache":
        return lambda row: weights.get(row, progress=False).path.read_bytes()
    return lambda row: (tmp_path / "m" / mirror(tmp_path / "m", [row], progress=False).files[0].name).read_bytes()


def left(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*.part*")]


# -- the lock and the deadline hold for both


def test_who_fetches_is_held_to_the_lock(ask: Ask, hub: HubServer, record: Make, safetensors: Bytes, project: Any, data: bytes) -> None:
    row = record(hub.file("w", safetensors(seed=5)))
    path = project(row, data)
    with pytest.raises(ChangedUpstream, match=rf"{path} says sha256 {digest(data)}, got {digest(safetensors(seed=5))}"):
        ask(row)
    hub.file("w", data)
    assert ask(row) == data


def test_frozen_nothing_is_fetched_that_no_lock_names(
    ask: Ask, hub: HubServer, record: Make, data: bytes, sha: str, project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_FROZEN", "1")
    row = record(hub.file("w", data), sha256_prefix=sha[:8])
    with pytest.raises(NotLocked, match=f"only the prefix {sha[:8]}"):
        ask(row)
    assert hub.log == []
    project(row, data)
    assert ask(row) == data


def test_where_the_pinned_commit_is_gone_the_branch_will_do(
    ask: Ask, hub: HubServer, record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hub.repo("acme/wheels", {"model.safetensors": data})
    row = record("hf://acme/wheels/model.safetensors")
    entry = Entry("ResNet20:test", "safetensors", (f"hf://acme/wheels@{old}/model.safetensors",), "unstated", sha256=digest(data))
    Lock({entry.key: entry}, 1).write(tmp_path / "weights.lock")
    monkeypatch.chdir(tmp_path)
    hub.repo("acme/wheels", {"model.safetensors": data, "README.md": b"#"})
    del hub.repos["acme/wheels"][old]
    assert ask(row) == data


def test_all_places_share_one_deadline(ask: Ask, hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, deadline_s=1.0, window_s=9.0, read_s=5.0, tries=99))
    hub.fail("drip", times=99, seconds=0.01)
    began = time.monotonic()
    with pytest.raises(SourceUnavailable, match="too slow"):
        ask(record(*[hub.file(f"w{number}", data) for number in range(60)]))
    assert time.monotonic() - began < 30  # a deadline for each would be twice as long


def test_another_file_in_a_mirror_than_the_lock_names_is_told(
    hub: HubServer, record: Make, data: bytes, safetensors: Bytes, project: Any, tmp_path: Path
) -> None:
    row = record(hub.file("w", data))
    mirror(tmp_path / "m", [row])
    path = project(row, safetensors(seed=4))
    with pytest.raises(weights.BadRecord, match=rf"has sha256 {digest(data)}; ResNet20:test needs .*, as {path} says. Move the file away"):
        mirror(tmp_path / "m", [row])


# -- a part for each place


def broken(hub: HubServer, ask: Ask, row: Checkpoint, at: int) -> None:
    """Have a download stop for good after so many bytes."""
    hub.fail("cut", after=at)
    hub.fail("drop", times=9)
    with pytest.raises(SourceUnavailable):
        ask(row)
    hub.heal()


@pytest.mark.parametrize("fault", ["cut", "flip", "endless", "status", "html"])
def test_a_mirror_that_fails_costs_the_source_nothing_of_what_came(
    ask: Ask,
    hub: HubServer,
    record: Make,
    data: bytes,
    sha: str,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own_cache: Path,
) -> None:
    row = record(hub.file("w", data), sha256=sha)
    broken(hub, ask, row, 150_000)
    monkeypatch.setenv("ZOO_MIRROR", f"{hub.url}/files")
    hub.file(sha, data)
    hub.fail(fault, after=50_000, path=sha, times=1 if fault == "cut" else 9)
    hub.fail("drop", path=sha, times=9)
    assert ask(row) == data
    assert hub.gets("/files/w")[0].range == "bytes=150000-"
    assert left(own_cache, tmp_path) == []


def test_another_tools_file_that_is_wrong_costs_the_source_nothing(
    ask: Ask, hub: HubServer, record: Make, data: bytes, sha: str, own_cache: Path, tmp_path: Path
) -> None:
    row = record(hub.file("w.safetensors", data), sha256=sha)
    broken(hub, ask, row, 150_000)
    torch_cache().mkdir(parents=True)
    (torch_cache() / "w.safetensors").write_bytes(data[::-1])
    assert ask(row) == data
    assert [r.range for r in hub.gets()] == ["bytes=150000-"]
    assert left(own_cache, tmp_path) == []


def test_parts_of_several_places_are_all_resumed_or_collected(
    hub: HubServer, record: Make, data: bytes, sha: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hub.file("a", data), hub.file("b", data)
    row = record(first, second, sha256=sha)
    for path, at in (("/a", 100_000), ("/b", 200_000)):
        hub.fail("cut", after=at, path=path)
    hub.fail("drop", times=99)
    with pytest.raises(SourceUnavailable):
        weights.get(row)
    notes = [json.loads(path.read_text()) for path in left(own_cache) if path.suffix == ".json"]
    assert {note["url"] for note in notes} == {first, second}
    hub.heal()
    hub.fail("status", status=404, path="/a")
    assert weights.get(row).sha256 == sha
    assert [r.range for r in hub.gets()] == ["bytes=200000-"]
    assert left(own_cache) == []

    weights.Cache().blob(sha).unlink()
    broken(hub, weights.get, row, 100_000)
    monkeypatch.setattr(collecting, "GRACE_S", 0)
    assert {one.kind for one in weights.gc().removed} == {"part"}
    assert left(own_cache) == []


# -- no more bytes than the lock knows of


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each write to a part had."""
    found: list[int] = []
    write = Part.write

    def watched(part: Part, data: bytes) -> None:
        found.append(len(data))
        write(part, data)

    monkeypatch.setattr(Part, "write", watched)
    return found


def test_more_bytes_than_the_lock_says_are_refused_before_they_come(
    ask: Ask, hub: HubServer, record: Make, data: bytes, project: Any, own_cache: Path, tmp_path: Path, written: list[int]
) -> None:
    row = record(hub.file("w", data + bytes(2_000_000)))
    path = project(row, data)
    with pytest.raises(
        ChangedUpstream, match=rf"{path} says sha256 {digest(data)}, and it now has more than the {len(data):,} bytes"
    ) as caught:
        ask(row)
    assert (caught.value.pinned, caught.value.found) == (digest(data), None)
    assert (written, left(own_cache, tmp_path)) == ([], [])


@pytest.mark.parametrize("known", ["lock", "record and lock"])
def test_an_endless_body_is_cut_off_at_the_locks_size(
    ask: Ask,
    hub: HubServer,
    record: Make,
    data: bytes,
    sha: str,
    project: Any,
    known: str,
    own_cache: Path,
    tmp_path: Path,
    cached: Cached,
    written: list[int],
) -> None:
    row = record(hub.file("w", data), sha256=sha if known != "lock" else None)
    path = project(row, data)
    hub.fail("endless", times=9)
    kind = ChangedUpstream if known == "lock" else SizeMismatch
    with pytest.raises(kind, match=rf"(?s){path} says .*{len(data):,} bytes") as caught:
        ask(row)
    assert "Nothing was installed" in str(caught.value) or "nothing was installed" in str(caught.value)
    assert len(hub.gets()) == 1  # nobody tries such a source again
    assert sum(written) <= len(data)
    assert (left(own_cache, tmp_path), cached()) == ([], {})


def test_what_was_installed_once_caps_what_may_come_again(hub: HubServer, record: Make, data: bytes, cached: Cached) -> None:
    row = record(hub.file("w", data))
    weights.get(row).path.unlink()
    user_lock().unlink()
    hub.file("w", data + b"more")
    with pytest.raises(ChangedUpstream, match=rf"its first install here says .* more than the {len(data):,} bytes"):
        weights.get(row)
    assert cached() == {}


@pytest.mark.parametrize("where", ["mirror", "torch"])
def test_a_longer_file_on_this_machine_is_not_read(
    hub: HubServer,
    record: Make,
    data: bytes,
    sha: str,
    project: Any,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    written: list[int],
) -> None:
    row = record(hub.file("w.safetensors", data))
    project(row, data)
    folder = tmp_path / "lan" if where == "mirror" else torch_cache()
    folder.mkdir(parents=True)
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path / "lan"))
    longer = folder / (sha if where == "mirror" else "w.safetensors")
    longer.write_bytes(data + bytes(100))
    assert weights.get(row).sha256 == sha
    assert sum(written) == len(data)


# -- what the sources serve today


def test_a_renewal_asks_no_mirror_and_no_other_tool(
    hub: HubServer, record: Make, data: bytes, safetensors: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(hub.file("w.safetensors", safetensors(seed=6)), sha256=digest(data))
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    torch_cache().mkdir(parents=True)
    for place in (tmp_path / digest(data), torch_cache() / "w.safetensors"):
        place.write_bytes(data)
        assert weights.get(row).source == place.as_uri()
        weights.Cache().blob(digest(data)).unlink()
        with pytest.raises(HashMismatch, match=digest(safetensors(seed=6))):
            renew(row)
