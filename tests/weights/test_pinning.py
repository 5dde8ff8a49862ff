"""Trust on first use: what a name gave first is all that it may give, on every machine that has the lock."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
from blake3 import blake3
from hubserver import HubServer

import weights
from weights import BadLock, Cache, ChangedUpstream, Checkpoint, HashMismatch, NotLocked, SourceUnavailable, delivery, pinning
from weights.adding import to_toml
from weights.addresses import Address
from weights.auditing import check
from weights.cache import stamp_of
from weights.fetch import Expected, Progress
from weights.fingerprint import fingerprint
from weights.install import obtain, renew
from weights.lock import SHIPPED_LOCK, Entry, Lock, user_lock
from weights.part import Part
from weights.pinning import entry_of
from weights.places import ELSEWHERE
from weights.serials import update
from weights.sources import Remote

Make = Callable[..., Checkpoint]
Bytes = Callable[..., bytes]


def named(source: str) -> Checkpoint:
    """Make the record that `trained(ResNet20, source)` makes of a name that no registry knows."""
    return weights.adhoc("ResNet20", source)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a project that has a lock, with one entry of something else."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    monkeypatch.chdir(folder / "src")
    other = Entry("ResNet50:mine", "safetensors", ("https://example.org/w.safetensors",), "MIT", "0" * 64)
    Lock({other.key: other}, 5).write(folder / "weights.lock")
    return folder / "weights.lock"


def elsewhere(own_cache: Path) -> None:
    """Be another machine: nothing is cached and nothing was seen."""
    rmtree(own_cache, ignore_errors=True)
    user_lock().unlink(missing_ok=True)


def test_a_name_is_pinned_in_the_users_lock_at_its_first_install(hub: HubServer, data: bytes, sha: str) -> None:
    commit = hub.repo("acme/wheels", {"model.safetensors": data, "README.md": b"#"})
    weights.get(named("hf://acme/wheels"))
    lock = Lock.read(user_lock())
    entry = lock.entries["hf://acme/wheels"]
    assert (entry.sha256, entry.size_bytes, entry.tensors, entry.commit) == (sha, len(data), 1, commit)
    assert entry.sources == (f"hf://acme/wheels@{commit}/model.safetensors",)
    assert entry.fingerprint == fingerprint(memoryview(data), "")[1]
    before = user_lock().read_bytes()
    weights.get(named("hf://acme/wheels"))
    assert user_lock().read_bytes() == before


def test_a_name_is_pinned_in_the_projects_lock_where_there_is_one(hub: HubServer, data: bytes, sha: str, project: Path) -> None:
    weights.get(named(hub.file("w.safetensors", data)))
    lock = Lock.read(project)
    assert list(lock.entries) == ["ResNet50:mine", f"{hub.url}/files/w.safetensors"]
    assert (lock.serial, lock.entries[f"{hub.url}/files/w.safetensors"].sha256) == (6, sha)
    assert not user_lock().exists()


def test_what_the_user_has_pinned_is_what_a_new_project_gets(
    hub: HubServer, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = named(hub.file("w.safetensors", data))
    weights.get(row)
    Lock({}, 1).write(tmp_path / "weights.lock")
    monkeypatch.chdir(tmp_path)
    weights.get(row)
    assert Lock.read(tmp_path / "weights.lock").entries == Lock.read(user_lock()).entries


def test_a_row_with_a_prefix_is_pinned_and_one_with_a_full_hash_needs_no_pin(hub: HubServer, record: Make, data: bytes, sha: str) -> None:
    weights.get(record(hub.file("w", data), sha256=sha))
    assert not user_lock().exists()
    weights.get(record(hub.file("w", data), sha256_prefix=sha[:8]))
    assert Lock.read(user_lock()).entries["ResNet20:test"].sha256 == sha


def test_local_files_are_not_pinned_and_secrets_of_urls_are_not_written(hub: HubServer, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(data)
    weights.get(named(str(tmp_path / "w.safetensors")))
    assert not user_lock().exists()
    signed = hub.file("w.safetensors", data) + "?signature=s3cret"
    weights.get(named(signed))
    assert "s3cret" not in user_lock().read_text()
    assert list(Lock.read(user_lock()).entries) == [Address(signed).noted]
    assert Address(signed).noted != Address(signed + "2").noted


def test_s1_a_changed_file_stays_what_it_was_for_who_has_it_and_who_has_the_lock(
    hub: HubServer, data: bytes, sha: str, safetensors: Bytes, project: Path, own_cache: Path
) -> None:
    row = named("hf://acme/wheels")
    hub.repo("acme/wheels", {"model.safetensors": data})
    assert bytes(weights.open_weights(row)) == data
    hub.repo("acme/wheels", {"model.safetensors": safetensors(seed=5)})
    hub.heal()
    assert bytes(weights.open_weights(row)) == data
    assert hub.log == []  # what is pinned and here asks nobody
    elsewhere(own_cache)
    assert bytes(weights.open_weights(row)) == data
    assert Lock.read(project).entries["hf://acme/wheels"].sha256 == sha


def test_s1_a_deleted_commit_is_told_with_both_hashes_and_the_old_blob_still_loads(
    hub: HubServer,
    data: bytes,
    sha: str,
    safetensors: Bytes,
    project: Path,
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, new = named("hf://acme/wheels"), safetensors(seed=5)
    old = hub.repo("acme/wheels", {"model.safetensors": data})
    assert bytes(weights.open_weights(row)) == data
    hub.repo("acme/wheels", {"model.safetensors": new})
    del hub.repos["acme/wheels"][old]
    locked = project.read_bytes()
    assert bytes(weights.open_weights(row)) == data
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "another machine"))
    hub.heal()
    with pytest.raises(
        ChangedUpstream, match=rf"{project} says sha256 {sha}, got {digest(new)}.*zoo lock --update hf://acme/wheels"
    ) as caught:
        weights.open_weights(row)
    assert (caught.value.pinned, caught.value.found) == (sha, digest(new))
    assert hub.gets() == []  # the Hub's own word was enough
    assert project.read_bytes() == locked
    monkeypatch.setenv("ZOO_CACHE", str(own_cache))
    assert bytes(weights.open_weights(row)) == data


def test_s1_a_rewritten_history_with_the_same_bytes_is_no_change(hub: HubServer, data: bytes, project: Path, own_cache: Path) -> None:
    old = hub.repo("acme/wheels", {"model.safetensors": data})
    weights.get(named("hf://acme/wheels"))
    hub.repo("acme/wheels", {"model.safetensors": data, "README.md": b"#"})
    del hub.repos["acme/wheels"][old]
    elsewhere(own_cache)
    assert bytes(weights.open_weights(named("hf://acme/wheels"))) == data


def test_s1_a_renamed_repository_is_followed_and_a_vanished_one_told(
    hub: HubServer, data: bytes, sha: str, project: Path, own_cache: Path
) -> None:
    commit = hub.repo("acme/wheels", {"model.safetensors": data})
    row = named("hf://acme/wheels/model.safetensors")
    weights.get(row)
    hub.repo("acme/tyres", {"model.safetensors": data})
    hub.repos["acme/tyres"][commit] = hub.repos.pop("acme/wheels")[commit]
    elsewhere(own_cache)
    for method in ("HEAD", "GET"):
        to = f"/acme/tyres/resolve/{commit}/model.safetensors"
        hub.fail("redirect", path="/acme/wheels/resolve/", method=method, to=to)
    assert bytes(weights.open_weights(row)) == data
    elsewhere(own_cache)
    with pytest.raises(
        ChangedUpstream, match=rf"says sha256 {sha}, and there is nothing to get any more: the Hub has no such repository"
    ) as caught:
        weights.open_weights(row)
    assert caught.value.found is None
    assert isinstance(caught.value, HashMismatch)


def test_s1_a_url_that_serves_other_bytes_is_told_with_both_hashes(
    hub: HubServer, data: bytes, sha: str, safetensors: Bytes, own_cache: Path
) -> None:
    row, new = named(hub.file("w.safetensors", data)), safetensors(count=300, seed=5)
    path = weights.get(row).path
    path.unlink()
    hub.file("w.safetensors", new)
    with pytest.raises(ChangedUpstream, match=rf"{user_lock()} says sha256 {sha}, got {digest(new)}"):
        weights.get(row)
    rmtree(own_cache)
    with pytest.raises(ChangedUpstream, match=digest(new)):
        weights.get(row)
    hub.file("w.safetensors", data)
    assert bytes(weights.open_weights(row)) == data


def test_a_server_that_announces_the_pinned_bytes_and_sends_others_is_only_broken(hub: HubServer, data: bytes, own_cache: Path) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    weights.get(named("hf://acme/wheels"))
    rmtree(own_cache)
    hub.fail("flip", times=9)
    with pytest.raises(HashMismatch) as caught:
        weights.get(named("hf://acme/wheels"))
    assert type(caught.value) is HashMismatch


def test_another_source_with_the_pinned_bytes_helps(
    hub: HubServer, record: Make, data: bytes, sha: str, safetensors: Bytes, own_cache: Path
) -> None:
    row = record(hub.file("a", data), hub.file("b", data))
    weights.get(row)
    rmtree(own_cache)
    hub.file("a", safetensors(seed=3))
    assert weights.get(row).sha256 == sha
    rmtree(own_cache)
    hub.file("b", safetensors(seed=4))
    with pytest.raises(ChangedUpstream, match=r"(?s)no source delivered.*ChangedUpstream: .*/a: .*ChangedUpstream: .*/b: "):
        weights.get(row)


def test_new_bytes_are_pinned_only_when_asked_for(hub: HubServer, data: bytes, safetensors: Bytes) -> None:
    row, new = named("hf://acme/wheels"), safetensors(seed=5)
    hub.repo("acme/wheels", {"model.safetensors": data})
    weights.get(row)
    commit = hub.repo("acme/wheels", {"model.safetensors": new})
    entry = entry_of(Cache(), row, renew(row))
    assert (entry.sha256, entry.commit) == (digest(new), commit)
    assert bytes(weights.open_weights(row)) == data
    update(Cache(), user_lock(), lambda entries: {**entries, entry.key: entry})
    assert bytes(weights.open_weights(row)) == new


def test_a_corrected_record_outranks_the_users_first_sight_but_not_the_projects_lock(
    hub: HubServer, record: Make, data: bytes, safetensors: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = safetensors(seed=7)
    weights.get(record(hub.file("old", data)))
    corrected = record(hub.file("new", new), sha256_prefix=digest(new)[:8])
    Lock(Lock.read(user_lock()).entries, 1).write(tmp_path / "weights.lock")
    assert bytes(weights.open_weights(corrected)) == new
    assert Lock.read(user_lock()).entries["ResNet20:test"].sha256 == digest(new)
    monkeypatch.chdir(tmp_path)
    for row in (corrected, replace(corrected, sha256=digest(new))):
        with pytest.raises(ChangedUpstream, match=rf"{tmp_path}/weights.lock pins ResNet20:test to sha256 {digest(data)}, its record says"):
            weights.open_weights(row)


def test_frozen_admits_nothing_new_and_asks_nobody(
    hub: HubServer, record: Make, data: bytes, sha: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    row, prefixed = named("hf://acme/wheels"), record(hub.file("w", data), sha256_prefix=sha[:8])
    for refused in (row, prefixed):
        with pytest.raises(NotLocked, match=r"no lock has a full hash of (hf://acme/wheels|ResNet20:test, only the prefix .*), and frozen"):
            weights.open_weights(refused, frozen=True)
    assert hub.log == []
    weights.get(row)
    user_lock().unlink()
    monkeypatch.setenv("ZOO_FROZEN", "1")
    with pytest.raises(NotLocked, match="ZOO_FROZEN=1 admits nothing new"):
        weights.get(row)  # though it is in the cache: another machine would refuse it
    weights.get(row, frozen=False)
    assert bytes(weights.open_weights(row)) == data
    assert weights.get(record(hub.file("w", data), sha256=sha)).sha256 == sha
    before = user_lock().read_bytes()
    assert bytes(weights.open_weights(weights.find("ResNet20")))[:1]
    assert user_lock().read_bytes() == before


def test_frozen_what_the_user_has_pinned_is_not_copied_into_the_projects_lock(
    hub: HubServer, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = named(hub.file("w.safetensors", data))
    weights.get(row)
    Lock({}, 1).write(tmp_path / "weights.lock")
    monkeypatch.chdir(tmp_path)
    assert bytes(weights.open_weights(row, frozen=True)) == data
    assert dict(Lock.read(tmp_path / "weights.lock").entries) == {}


def test_a_mirror_is_held_to_the_pin_and_its_lie_is_no_change_upstream(
    hub: HubServer, data: bytes, safetensors: Bytes, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = named(hub.file("w.safetensors", data))
    weights.get(row)
    rmtree(own_cache)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / digest(data)).write_bytes(safetensors(seed=8))
    monkeypatch.setenv("ZOO_MIRROR", str(mirror))
    hub.fail("status", status=404, times=9)
    with pytest.raises(HashMismatch) as caught:
        weights.get(row)
    assert not isinstance(caught.value, ChangedUpstream)
    (mirror / digest(data)).write_bytes(data)
    assert bytes(weights.open_weights(row)) == data


def test_whoever_writes_a_lock_asks_the_source_itself_for_what_a_mirror_told(
    hub: HubServer, record: Make, safetensors: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, crafted = collision(safetensors)
    row = record(hub.file("w.safetensors", good), sha256_prefix=digest(good)[:6])
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "w.safetensors").write_bytes(crafted)
    with monkeypatch.context() as patch:
        patch.setenv("ZOO_MIRROR", str(tmp_path / "mirror"))
        assert weights.get(row).sha256 == digest(crafted)  # six digits can be forged, so
        assert not user_lock().exists()
    assert obtain(row).sha256 == digest(good)
    assert entry_of(Cache(), row, weights.get(row)).sha256 == digest(good)
    hub.heal()
    assert obtain(row).sha256 == digest(good)
    assert hub.log == []


@pytest.mark.parametrize("verify", ["load", "stamp"])
def test_frozen_a_cache_whose_file_and_notes_were_changed_together_is_not_believed(
    hub: HubServer, record: Make, data: bytes, sha: str, safetensors: Bytes, own_cache: Path, verify: str
) -> None:
    row, other = record(hub.file("w", data), sha256=sha), safetensors(seed=7)
    installed = weights.get(row)

    def change(**facts: str) -> None:
        (note,) = (own_cache / "refs").iterdir()
        note.write_text(json.dumps(json.loads(note.read_text()) | {"blake3": blake3(other).hexdigest()} | facts))

    def put(name: str) -> None:
        path = Cache().blob(name)
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(other)

    put(sha)
    change()
    if verify == "stamp":
        Cache().keep_stamp(sha, stamp_of(installed.path.stat()))
    assert bytes(weights.open_weights(row, verify=verify)) == other  # not frozen, a cache is as trusted as its folder
    assert bytes(weights.open_weights(row, verify=verify, frozen=True)) == data
    put(digest(other))
    change(sha256=digest(other))
    assert bytes(weights.open_weights(row, verify=verify, frozen=True)) == data


def test_frozen_the_tensors_of_a_conversion_are_counted_not_read_from_a_note(
    hub: HubServer, record: Make, data: bytes, safetensors: Bytes, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, other = record(hub.file("w.pth", b"a pickle"), format="pytorch", sha256=digest(b"a pickle")), safetensors(seed=7)
    count, right = fingerprint(memoryview(data), "")
    entry = Entry("ResNet20:test", "pytorch", row.sources, "unstated", row.sha256, tensors=count, fingerprint=right)
    Lock({entry.key: entry}, 1).write(tmp_path / "weights.lock")
    old = weights.get(row, to_safetensors=lambda source, made, row: made.write_bytes(data) and None)
    monkeypatch.chdir(tmp_path)
    blob = Cache().blob(digest(other))
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(other)
    (own_cache / "tensors" / f"{digest(other)}.json").write_text(json.dumps({"tensors": count, "fingerprint": right}))
    for note in (*(own_cache / "refs").iterdir(), *(own_cache / "derived").iterdir()):
        note.write_text(note.read_text().replace(old.sha256, digest(other)).replace(old.blake3 or "", blake3(other).hexdigest()))
    assert bytes(weights.open_weights(row)) == other
    assert bytes(weights.open_weights(row, frozen=True, to_safetensors=lambda source, made, row: made.write_bytes(data) and None)) == data
    (note,) = (own_cache / "derived").iterdir()
    note.write_text(note.read_text().replace(digest(data), digest(other)).replace(digest(b"a pickle"), digest(other)))
    for ref in (own_cache / "refs").iterdir():
        ref.unlink()
    assert bytes(weights.open_weights(row, frozen=True, to_safetensors=lambda source, made, row: made.write_bytes(data) and None)) == data


def test_s2_a_prefix_in_a_lock_never_satisfies(hub: HubServer, record: Make, data: bytes, sha: str, project: Path) -> None:
    row = record(hub.file("w", data), sha256_prefix=sha[:8])
    entry = Entry("ResNet20:test", "safetensors", row.sources, "unstated", sha256_prefix=sha[:8])
    Lock({entry.key: entry}, 6).write(project)
    with pytest.raises(NotLocked):
        weights.get(row, frozen=True)
    assert [one.what for one in check(project).differences if one.locked == "a full hash"] == ["sha256"]
    weights.get(row)
    assert Lock.read(project).entries["ResNet20:test"].sha256 == sha
    weights.get(row, frozen=True)


def test_s2_an_edited_lock_stops_everything_that_asks_it(hub: HubServer, data: bytes, sha: str, project: Path) -> None:
    row = named(hub.file("w.safetensors", data))
    weights.get(row)
    project.write_text(project.read_text().replace(sha, digest(b"")))
    for frozen in (False, True):
        with pytest.raises(BadLock, match=r"line 17: the row .*/files/w.safetensors was edited"):
            weights.get(row, frozen=frozen)


def test_s3_an_older_lock_is_refused_when_frozen_and_warned_of_otherwise(
    hub: HubServer, data: bytes, project: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [named(hub.file(f"{name}.safetensors", data)) for name in "ab"]
    weights.get(rows[0])
    older = project.read_bytes()
    weights.get(rows[1])
    newer = project.read_bytes()
    project.write_bytes(older)
    with pytest.raises(BadLock, match=r"has serial 6, 7 was seen there before: somebody put an older lock back.*frozen refuses it"):
        weights.get(rows[0], frozen=True)
    with caplog.at_level(logging.WARNING):
        weights.get(rows[0])
        weights.get(rows[0])
    assert [message.partition(",")[0] for message in caplog.messages] == [f"{project} has serial 6"]
    project.write_bytes(newer)
    weights.get(rows[0], frozen=True)
    project.write_bytes(older)
    weights.get(rows[1])  # written again: above all that was seen
    assert Lock.read(project).serial == 8
    weights.get(rows[0], frozen=True)


def test_s3_a_shipped_lock_that_went_back_is_noticed_too(record: Make, tmp_path: Path, data: bytes, sha: str, own_cache: Path) -> None:
    (tmp_path / "w").write_bytes(data)
    row = record((tmp_path / "w").as_uri(), sha256=sha)
    weights.get(row)
    weights.get(row)
    note = own_cache / "seen" / f"{digest(str(SHIPPED_LOCK).encode())}.json"
    serial = Lock.read(SHIPPED_LOCK).serial
    note.write_text(note.read_text().replace(f'"serial": {serial}', f'"serial": {serial + 1}'))
    with pytest.raises(BadLock, match=rf"{SHIPPED_LOCK} has serial {serial}"):
        weights.get(row, frozen=True)
    note.unlink()
    weights.get(row, frozen=True)


def collision(safetensors: Bytes) -> tuple[bytes, bytes]:
    """Make two files whose hashes begin with the same six digits, by a birthday: some five thousand tries."""
    base, seen = safetensors(count=64), {}
    for number in itertools.count():
        made = base[:-8] + number.to_bytes(8, "little")
        if (other := seen.setdefault(digest(made)[:6], made)) is not made:
            return other, made
    raise AssertionError


def test_s5_a_file_crafted_to_the_wanted_digits_is_refused_by_the_full_hash(
    hub: HubServer, record: Make, safetensors: Bytes, own_cache: Path
) -> None:
    good, crafted = collision(safetensors)
    prefix = digest(good)[:6]
    assert digest(crafted).startswith(prefix)
    row = record(hub.file("w.safetensors", good), sha256_prefix=prefix)
    weights.get(row)
    rmtree(own_cache)
    hub.file("w.safetensors", crafted)
    with pytest.raises(ChangedUpstream, match=digest(crafted)):
        weights.get(row)
    with pytest.raises(HashMismatch, match="its record says"):
        weights.get(replace(row, sha256=digest(good)))
    user_lock().unlink()
    with pytest.raises(NotLocked, match=rf"only the prefix {prefix}"):
        weights.get(row, frozen=True)


def test_a_converted_file_must_have_the_locks_fingerprint(
    hub: HubServer, record: Make, safetensors: Bytes, data: bytes, own_cache: Path
) -> None:
    row = record(hub.file("w.pth", b"a pickle"), format="pytorch", sha256_prefix=digest(b"a pickle")[:8])

    def converter(made: bytes) -> Callable[[Path, Path, Checkpoint], None]:
        return lambda source, destination, row: destination.write_bytes(made) and None

    weights.get(row, to_safetensors=converter(data))
    entry = Lock.read(user_lock()).entries["ResNet20:test"]
    assert (entry.sha256, entry.size_bytes, entry.fingerprint) == (digest(b"a pickle"), 8, fingerprint(memoryview(data), "")[1])
    rmtree(own_cache)
    other = safetensors(seed=1)
    found = fingerprint(memoryview(other), "")[1]
    with pytest.raises(
        HashMismatch, match=rf"its 1 tensors have the fingerprint {entry.fingerprint}, and what was made of it has 1 with {found}"
    ):
        weights.get(row, to_safetensors=converter(other))
    assert not list((own_cache / "blobs").rglob("*/*/*"))
    weights.get(row, to_safetensors=converter(data))
    assert check(user_lock()).proven == []  # no record of that name is registered, so it differs; its bytes are right
    assert [one.what for one in check(user_lock()).differences] == ["record"]


def test_a_warm_conversion_with_other_tensors_than_the_lock_names_is_made_anew(
    hub: HubServer, record: Make, safetensors: Bytes, data: bytes, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickle, made = b"PK\x03\x04 a pickle", safetensors(seed=1)
    row = record(hub.file("w.pth", pickle), format="pytorch", sha256=digest(pickle))

    def converter(result: bytes) -> Callable[[Path, Path, Checkpoint], None]:
        return lambda source, destination, row: destination.write_bytes(result) and None

    assert bytes(weights.open_weights(row, to_safetensors=converter(made))) == made  # by an older converter
    count, right = fingerprint(memoryview(data), "")
    entry = Entry("ResNet20:test", "pytorch", row.sources, "unstated", digest(pickle), tensors=count, fingerprint=right)
    Lock({entry.key: entry}, 1).write(tmp_path / "weights.lock")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HashMismatch, match=rf"{tmp_path}/weights.lock says that its 1 tensors have the fingerprint {right}"):
        weights.get(row, to_safetensors=converter(made))
    assert bytes(weights.open_weights(row, to_safetensors=converter(data))) == data
    hub.heal()
    reads: list[str] = []
    real = pinning.load
    monkeypatch.setattr(pinning, "load", lambda installed: (reads.append(installed.sha256), real(installed))[1])
    for _ in range(2):
        assert weights.get(row).sha256 == digest(data)
    assert (hub.log, len(reads)) == ([], 1)  # the tensors of one content are counted once


def test_a_check_finds_what_changed_in_the_cache(hub: HubServer, data: bytes, sha: str, safetensors: Bytes) -> None:
    row = named("hf://acme/wheels")
    hub.repo("acme/wheels", {"model.safetensors": data})
    path = weights.get(row).path
    assert (check(user_lock()).proven, check(user_lock()).differences) == (["hf://acme/wheels"], [])
    path.chmod(0o644)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert [(one.what, one.locked) for one in check(user_lock()).differences] == [("content", sha)]
    path.unlink()
    audit = check(user_lock())
    assert (audit.absent, audit.differences) == (["hf://acme/wheels"], [])
    hub.repo("acme/wheels", {"model.safetensors": safetensors(seed=5)})
    renew(row)
    assert [(one.what, one.locked) for one in check(user_lock()).differences] == [("installed here", sha)]


def test_many_processes_pin_into_one_lock_and_none_is_lost(hub: HubServer, data: bytes, own_cache: Path) -> None:
    urls = [hub.file(f"w{n}.safetensors", data) for n in range(12)]
    code = "import sys, weights\nfor url in sys.argv[1:]: weights.get(weights.adhoc('ResNet20', url))"
    started = [subprocess.Popen([sys.executable, "-c", code, *urls[n : n + 3], urls[0]]) for n in range(0, 12, 3)]
    assert [process.wait(60) for process in started] == [0] * 4
    lock = Lock.read(user_lock())
    assert sorted(lock.entries) == sorted(urls)
    assert [path.name for path in user_lock().parent.iterdir() if path.name.endswith(".json")] == []


def test_without_file_locks_what_others_add_meanwhile_is_merged(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.lock"
    entries = [Entry(f"ResNet50:t{n}", "safetensors", ("https://example.org/w",), "MIT", "0" * 64) for n in range(3)]
    write, raced = Lock.write, []

    def slow(self: Lock, target: Path) -> None:
        write(self, target)
        if len(raced) < 2:
            raced.append(entries[len(raced)])  # another process read before us and writes after us
            write(Lock({raced[-1].key: raced[-1]}, self.serial), target)

    monkeypatch.setattr(Lock, "write", slow)
    update(Cache(), path, lambda there: {**there, entries[2].key: entries[2]})
    assert {"ResNet50:t1", "ResNet50:t2"} <= Lock.read(path).entries.keys()


def test_what_another_process_pinned_meanwhile_wins(
    hub: HubServer, data: bytes, safetensors: Bytes, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, fetch = named(hub.file("w.safetensors", data)), delivery.fetch
    weights.get(row)
    theirs = Lock.read(user_lock())
    elsewhere(own_cache)
    hub.file("w.safetensors", safetensors(seed=9))

    def late(remote: Remote, part: Part, expected: Expected, progress: Progress, deadline: float) -> None:
        fetch(remote, part, expected, progress, deadline)
        theirs.write(user_lock())

    monkeypatch.setattr(delivery, "fetch", late)
    with pytest.raises(ChangedUpstream, match=digest(data)):
        weights.get(row)
    assert Lock.read(user_lock()).entries == theirs.entries


def test_a_lock_that_can_not_be_written_is_no_reason_to_fail(
    hub: HubServer, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(tmp_path / "file" / "registry"))
    with caplog.at_level(logging.INFO, "weights"):
        assert bytes(weights.open_weights(named(hub.file("w.safetensors", data)))) == data
    assert any("is not pinned" in message for message in caplog.messages)


def test_an_unreachable_pin_is_unavailable_not_changed(hub: HubServer, data: bytes, own_cache: Path) -> None:
    hub.repo("acme/wheels", {"model.safetensors": data})
    weights.get(named("hf://acme/wheels"))
    rmtree(own_cache)
    hub.fail("drop", times=99, method="*")
    with pytest.raises(SourceUnavailable) as caught:
        weights.get(named("hf://acme/wheels"))
    assert not isinstance(caught.value, ChangedUpstream)


def table(folder: Path, tag: str, *sources: str, **facts: str) -> Checkpoint:
    """Write a row of a registry of the project's own, as a user does, and find it."""
    folder.mkdir(exist_ok=True)
    row = weights.adhoc(
        "ResNet20", sources[0], **{"tag": tag, "sources": list(sources), "num_classes": 10, "format": "safetensors"} | facts
    )
    (folder / f"{tag}.toml").write_text(to_toml(row))
    return weights.find("ResNet20", tag)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tables").mkdir()
    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path / "tables"))
    return tmp_path / "tables"


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pin_of_a_source_holds_whichever_name_asks_for_it(
    hub: HubServer, data: bytes, sha: str, safetensors: Bytes, project: Path, own_cache: Path, tables: Path, frozen: bool
) -> None:
    url, new = hub.file("w.safetensors", data), safetensors(seed=5)
    weights.get(named(url))
    locked = project.read_bytes()
    elsewhere(own_cache)
    hub.file("w.safetensors", new)
    hub.heal()
    with pytest.raises(ChangedUpstream, match=rf"says sha256 {sha}, got {digest(new)}"):
        weights.open_weights(table(tables, "mine", url), frozen=frozen)
    hub.heal()
    for facts in ({"sha256": digest(new)}, {"sha256_prefix": digest(new)[:8]}):
        with pytest.raises(
            ChangedUpstream, match=rf"{project} pins {url} to sha256 {sha}, and the record of ResNet20:mine.*zoo lock --update {url}"
        ):
            weights.open_weights(table(tables, "mine", url, **facts), frozen=frozen)
    assert (hub.log, project.read_bytes()) == ([], locked)  # known before anybody is asked
    hub.file("w.safetensors", data)
    assert bytes(weights.open_weights(table(tables, "mine", url), frozen=frozen)) == data


def test_a_pin_of_a_record_holds_its_address_too_and_the_hubs_revision(
    hub: HubServer, data: bytes, safetensors: Bytes, project: Path, own_cache: Path, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.repo("acme/wheels", {"model.safetensors": data})
    weights.get(table(tables, "mine", "hf://acme/wheels"))
    assert list(Lock.read(project).entries) == ["ResNet20:mine", "ResNet50:mine"]
    elsewhere(own_cache)
    later = hub.repo("acme/wheels", {"model.safetensors": safetensors(seed=5)})
    asked = ("hf://acme/wheels", "hf://acme/wheels@main/model.safetensors", f"hf://acme/wheels@{commit}")
    for source in asked:
        assert bytes(weights.open_weights(named(source), frozen=True)) == data
    with pytest.raises(NotLocked):
        weights.get(named(f"hf://acme/wheels@{later}"), frozen=True)
    assert bytes(weights.open_weights(named(f"hf://acme/wheels@{later}"))) == safetensors(seed=5)  # another revision is another source
    monkeypatch.delenv("ZOO_REGISTRY")
    assert bytes(weights.open_weights(named(f"hf://acme/wheels@{commit}/model.safetensors"), frozen=True)) == data


def test_what_the_user_saw_first_at_an_address_holds_for_a_record_of_it(
    hub: HubServer,
    data: bytes,
    sha: str,
    safetensors: Bytes,
    own_cache: Path,
    tables: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = hub.file("w.safetensors", data)
    weights.get(named(url))
    rmtree(own_cache)
    hub.file("w.safetensors", safetensors(seed=5))
    with pytest.raises(ChangedUpstream, match=sha):
        weights.get(table(tables, "mine", url))
    new = digest(safetensors(seed=5))
    assert weights.get(table(tables, "mine", url, sha256=new)).sha256 == new  # a record's own hash outranks the user's first sight
    hub.file("w.safetensors", data)
    rmtree(own_cache)
    Lock({}, 1).write(tmp_path / "weights.lock")
    monkeypatch.chdir(tmp_path)
    weights.get(table(tables, "mine", url))
    assert [(key, entry.key, entry.sha256) for key, entry in Lock.read(tmp_path / "weights.lock").entries.items()] == [
        ("ResNet20:mine", "ResNet20:mine", sha)
    ]


def test_a_lock_that_pins_one_source_to_two_contents_is_told(hub: HubServer, data: bytes, sha: str, project: Path, tables: Path) -> None:
    url = hub.file("w.safetensors", data)
    weights.get(named(url))
    entries = Lock.read(project).entries
    other = replace(entries[url], key="ResNet20:mine", sha256="1" * 64, fingerprint=None, tensors=None)
    Lock({**entries, other.key: other}, 9).write(project)
    with pytest.raises(ChangedUpstream, match=rf"pins ResNet20:mine to sha256 {'1' * 64}, and {url}, which has the same source, to {sha}"):
        weights.get(table(tables, "mine", url))
    found = {(one.key, one.what, one.locked, one.found) for one in check(project).differences}
    assert (url, "pinned for ResNet20:mine, of the same source", sha, "1" * 64) in found
    assert ("ResNet20:mine", f"pinned for {url}, of the same source", "1" * 64, sha) in found


def test_a_check_finds_a_record_that_says_something_else_of_a_pinned_source(
    hub: HubServer, data: bytes, sha: str, project: Path, tables: Path
) -> None:
    url = hub.file("w.safetensors", data)
    weights.get(named(url))
    table(tables, "mine", url, sha256="1" * 64)
    differences = check(project, {url}).differences
    assert [(one.what, one.locked, one.found) for one in differences] == [("recorded for ResNet20:mine, of the same source", sha, "1" * 64)]
    assert check(project, {url}).entries == 1


def test_bundles_of_two_machines_may_have_files_of_one_name(
    record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry("ResNet20:theirs", "safetensors", (f"{ELSEWHERE}best.safetensors",), "MIT", "1" * 64)
    Lock({entry.key: entry}, 1).write(tmp_path / "weights.lock")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").write_bytes(data)
    row = record(f"{ELSEWHERE}best.safetensors", (tmp_path / "w").as_uri(), tag="mine", sha256=digest(data))
    assert bytes(weights.open_weights(row)) == data


def test_a_record_of_a_file_of_this_machine_is_pinned_at_first_sight_and_a_change_of_it_told(
    data: bytes, sha: str, safetensors: Bytes, tables: Path, tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, new = tmp_path / "w.safetensors", safetensors(seed=5)
    file.write_bytes(data)
    row = table(tables, "mine", file.as_uri())
    weights.get(row)
    assert Lock.read(user_lock()).entries["ResNet20:mine"].sha256 == sha
    file.touch()
    assert bytes(weights.open_weights(row)) == data
    assert caplog.messages == []
    file.write_bytes(new)
    assert bytes(weights.open_weights(row)) == data
    said = rf"{file} is no longer the file that {user_lock()} pins: what was pinned is loaded\. .*: zoo lock --update ResNet20:mine"
    assert [bool(re.fullmatch(said, message)) for message in caplog.messages] == [True]
    rmtree(own_cache)
    with pytest.raises(ChangedUpstream, match=rf"says sha256 {sha}, got {digest(new)}.*zoo lock --update ResNet20:mine"):
        weights.get(row)
    file.unlink()
    with pytest.raises(SourceUnavailable, match="can't be read: No such file"):
        weights.get(row)


def test_adding_a_file_takes_what_it_has_now_and_nothing_frozen(
    data: bytes, safetensors: Bytes, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, new = tmp_path / "w.safetensors", safetensors(seed=5)
    file.write_bytes(data)
    weights.get(table(tables, "pinned", file.as_uri()))
    file.write_bytes(new)
    assert weights.add(file, "ResNet20", "mine", num_classes=10).sha256 == digest(new)
    monkeypatch.setenv("ZOO_FROZEN", "1")
    with pytest.raises(NotLocked, match=r"w.safetensors is not added: its bytes are in no lock, and ZOO_FROZEN=1 admits nothing new"):
        weights.add(file, "ResNet20", "second", num_classes=10)
