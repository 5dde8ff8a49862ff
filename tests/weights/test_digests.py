"""Files in zips, and publishers who state an MD5 or a SHA-1: what is compared with it, where, and what is said of it."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import BadRecord, Checkpoint, HashMismatch, MalformedFile, NotLocked, SizeMismatch, SourceUnavailable
from weights.addresses import Address
from weights.auditing import check
from weights.bundle import bundle
from weights.digests import contradict, in_words, of_bytes, of_file, unlike
from weights.errors import ChangedUpstream
from weights.lock import Lock, user_lock
from weights.mirror import mirror
from weights.pinning import key_of
from weights.places import asked_at, file_name, zip_parts
from weights.record import record as validated
from weights.shipped import entry_of_record
from weights.unbundle import unbundle

Make = Callable[..., Checkpoint]
Bytes = Callable[..., bytes]
Cached = Callable[[], dict[str, bytes]]
MEMBER = "resnet20-0633-b00d1c8e.safetensors"


def sha1(data: bytes) -> str:
    return "sha1:" + hashlib.sha1(data).hexdigest()


def md5(data: bytes) -> str:
    return "md5:" + hashlib.md5(data).hexdigest()


def zipped(data: bytes, name: str = MEMBER, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        archive.writestr("read me", b"of whoever packed it")
        archive.writestr(name, data)
    return made.getvalue()


@pytest.fixture
def packed(hub: HubServer, data: bytes) -> str:
    """The source of a file in a zip that the server has."""
    return f"{hub.file('w.zip', zipped(data))}#{MEMBER}"


@pytest.mark.parametrize("digest", [sha1, md5, lambda data: sha1(data)[:13], lambda data: md5(data)[:12]])
def test_a_file_in_a_zip_is_installed_if_it_has_the_published_digest(
    packed: str, record: Make, data: bytes, sha: str, digest: Callable[[bytes], str], cached: Cached
) -> None:
    row = record(packed, digest=digest(data))
    found = weights.get(row, progress=False)
    assert (found.path.read_bytes(), found.source, found.source_sha256) == (data, packed, sha)
    assert list(cached()) == [f"blobs/sha256/{sha[:2]}/{sha}"]  # of the zip nothing is left
    assert weights.Cache().lookup(row) == found


@pytest.mark.parametrize("wrong", ["sha1:" + "0" * 40, "sha1:00000000", "md5:" + "0" * 32])
def test_another_digest_is_refused_and_nothing_is_left(hub: HubServer, packed: str, record: Make, wrong: str, cached: Cached) -> None:
    algorithm, _, digits = wrong.partition(":")
    with pytest.raises(
        HashMismatch, match=rf"expected (a )?{algorithm} (that begins with )?{digits}, got [1-9a-f]\w+. Nothing was installed"
    ):
        weights.get(record(packed, digest=wrong), progress=False)
    assert cached() == {}
    assert len(hub.gets("w.zip")) == 2  # fetched once more from the start


def test_a_digest_judges_a_plain_file_too(hub: HubServer, record: Make, data: bytes, safetensors: Bytes, cached: Cached) -> None:
    url = hub.file("w.safetensors", data)
    assert bytes(weights.open_weights(record(url, digest=md5(data)))) == data
    other = hub.file("other.safetensors", safetensors(seed=1))
    with pytest.raises(HashMismatch, match="expected md5"):
        weights.get(record(other, digest=md5(data)), progress=False)
    assert len(cached()) == 1


def test_what_unpacks_to_a_hundred_times_its_size_is_refused(hub: HubServer, record: Make, cached: Cached) -> None:
    data = bytes(4 << 20)
    bomb = hub.file("w.zip", zipped(data))
    with pytest.raises(SizeMismatch, match=r"unpacks to 4,194,304 bytes, more than the [\d,]+ that are accepted"):
        weights.get(record(f"{bomb}#{MEMBER}", digest=sha1(data)), progress=False)
    assert cached() == {}


def test_a_zip_that_says_less_than_it_unpacks_to_is_cut_off(hub: HubServer, record: Make, data: bytes, cached: Cached) -> None:
    made = bytearray(zipped(data))
    size = len(data).to_bytes(4, "little")
    assert made.count(size) >= 2
    hub.file("w.zip", bytes(made).replace(size, (1000).to_bytes(4, "little")))
    with pytest.raises((SizeMismatch, MalformedFile)):
        weights.get(record(f"{hub.url}/files/w.zip#{MEMBER}", digest=sha1(data)), progress=False)
    assert cached() == {}


def test_the_recorded_size_is_compared_before_anything_is_unpacked(packed: str, record: Make, data: bytes) -> None:
    with pytest.raises(SizeMismatch, match=rf"expected 7 bytes, the zip has {len(data):,}"):
        weights.get(record(packed, digest=sha1(data), size_bytes=7), progress=False)


def test_a_missing_member_names_what_is_there(packed: str, record: Make, data: bytes) -> None:
    with pytest.raises(SourceUnavailable, match=rf"the zip has no other.safetensors. It has {MEMBER}"):
        weights.get(record(packed.replace(MEMBER, "other.safetensors"), digest=sha1(data)), progress=False)


@pytest.mark.parametrize("damage", [lambda z: z[: len(z) // 2], lambda z: z[:200] + bytes(200) + z[400:], lambda z: b"PK\3\4" + bytes(900)])
def test_a_damaged_zip_is_no_traceback(hub: HubServer, record: Make, data: bytes, damage: Callable[[bytes], bytes], cached: Cached) -> None:
    url = hub.file("w.zip", damage(zipped(data)))
    with pytest.raises(MalformedFile, match=r"the zip is damaged"):
        weights.get(record(f"{url}#{MEMBER}", digest=sha1(data)), progress=False)
    assert cached() == {}


def test_a_download_of_a_zip_goes_on_where_it_broke_off(hub: HubServer, packed: str, record: Make, data: bytes) -> None:
    row = record(packed, digest=sha1(data))
    hub.fail("cut", after=100_000)
    hub.fail("status", status=503, times=9)
    with pytest.raises(SourceUnavailable):
        weights.get(row, progress=False)
    kept = sum(path.stat().st_size for path in weights.Cache().partial.glob("*.part"))
    hub.heal()
    assert bytes(weights.open_weights(row, progress=False)) == data
    assert [request.range for request in hub.gets("w.zip")] == [f"bytes={kept}-"]
    assert not list(weights.Cache().partial.iterdir())


def test_a_zip_on_this_machine_is_read_where_it_lies(record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b.zip").write_bytes(zipped(data))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    row = record(f"{(tmp_path / 'a b.zip').as_uri()}#{MEMBER}", digest=sha1(data))
    assert bytes(weights.open_weights(row)) == data


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_that_is_called_a_zip_does_not_hang(record: Make, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.zip")
    with pytest.raises(SourceUnavailable, match="is no regular file"):
        weights.get(record(f"{(tmp_path / 'w.zip').as_uri()}#{MEMBER}"), progress=False)


# records


@pytest.mark.parametrize(
    "source",
    ["https://a.example/w.zip#", "https://a.example/w.zip#a/../w.pth", "https://a.example/w.zip#%2e%2e/w", "https://a.example/w.zip#a\\w"],
)
def test_a_path_that_leads_out_of_the_zip_is_no_source(source: str) -> None:
    with pytest.raises(BadRecord, match=r"a file in a zip is https://HOST/NAME.zip#path/in/the/zip"):
        weights.adhoc("ResNet20", source)


@pytest.mark.parametrize(
    "digest", ["sha1:", "sha1:0b5a7", "sha1:" + "0" * 41, "md5:" + "0" * 33, "md5:ABCDEF12", "crc32:12345678", "0" * 32]
)
def test_a_digest_that_is_none_is_refused(record: Make, digest: str) -> None:
    with pytest.raises(BadRecord, match="digest is md5: or sha1: and at least 6 lower-case hex digits"):
        record("https://a.example/w.safetensors", digest=digest)


def test_a_sha256_has_keys_of_its_own(record: Make) -> None:
    with pytest.raises(BadRecord, match="of a SHA-256 say sha256 or sha256_prefix"):
        record("https://a.example/w.safetensors", digest="sha256:" + "0" * 64)


def test_a_zip_and_each_file_in_it_are_places_of_their_own() -> None:
    zip_, one = "https://a.example/w.zip", "https://a.example/w.zip#a%20b/one.pth"
    assert zip_parts(one) == (zip_, "a b/one.pth")
    assert zip_parts(zip_) is None
    assert zip_parts("https://a.example/w.pth#one.pth") is None
    assert len({asked_at(zip_), asked_at(one), asked_at(f"{zip_}#two.pth")}) == 3
    assert asked_at(one) == asked_at("https://a.example:443/w.zip#a b/one.pth")
    assert file_name(one) == "one.pth"
    assert Address(f"{zip_}?token=secret#one.pth").bare == f"{zip_}#one.pth"


def test_digests_in_words() -> None:
    assert in_words("md5:" + "0" * 32) == "MD5"
    assert in_words("sha1:0b5a71c2") == "first 8 digits of the SHA-1"
    assert unlike("sha1:0b5a71c2", "sha1:0b5a71c2" + "0" * 32) == ""
    assert unlike("sha1:0b5a71c2", "sha1:" + "0" * 40) == f"expected a sha1 that begins with 0b5a71c2, got {'0' * 40}"
    assert not contradict("sha1:0b5a71", "sha1:0b5a71c2")
    assert not contradict("md5:0b5a71", "sha1:c20b5a")
    assert contradict("md5:0b5a71", "md5:c20b5a")


def test_the_digest_of_an_alternative_is_its_own(record: Make) -> None:
    other = {"source": "https://a.example/w.zip#w.pth", "format": "pytorch", "digest": "sha1:0b5a71c2"}
    row = record("hf://acme/wheels/w.safetensors", sha256_prefix="12345678", alternatives=[other])
    own, alternative = row.containers()
    assert (own.digest, alternative.digest, alternative.sha256_prefix) == (None, "sha1:0b5a71c2", None)


def test_a_record_with_a_digest_is_written_and_read_back(record: Make) -> None:
    import tomllib

    from weights.adding import to_toml

    row = record("https://a.example/w.zip#w.pth", digest="sha1:0b5a71c2", format="pytorch", num_classes=10)
    table = tomllib.loads(to_toml(row))[row.model][row.tag]
    assert validated(row.model, row.tag, table, "here") == row


# what is remembered


def test_first_sight_pins_the_full_hash_and_the_lock_says_which_digest_it_had(packed: str, record: Make, data: bytes, sha: str) -> None:
    row = record(packed, digest=sha1(data))
    weights.get(row, progress=False)
    lock = Lock.read(user_lock())
    entry = lock.entries[key_of(row)]
    assert (entry.sha256, entry.digest, entry.sources) == (sha, sha1(data), (packed,))
    assert not [one for one in check(user_lock()).differences if one.what != "record"]


@pytest.mark.parametrize(
    ("digest", "status"),
    [
        ("sha1:" + "0" * 40, "SHA-1, weaker than a SHA-256; full hash pinned on first sight in your lock"),
        ("md5:00000000", "first 8 digits of the MD5, weaker than a SHA-256; full hash pinned on first sight in your lock"),
    ],
)
def test_the_shipped_lock_says_that_a_digest_is_weaker(record: Make, digest: str, status: str, tmp_path: Path) -> None:
    row = record("https://a.example/w.zip#w.pth", digest=digest, format="pytorch")
    Lock({key_of(row): entry_of_record(row)}, 1).write(tmp_path / "weights.lock")
    entry = Lock.read(tmp_path / "weights.lock").entries[key_of(row)]
    assert (entry.status, entry.digest, entry.known) == (status, digest, digest)


def test_frozen_a_digest_admits_nothing(packed: str, record: Make, data: bytes) -> None:
    with pytest.raises(NotLocked, match="only the SHA-1, and frozen admits nothing new"):
        weights.get(record(packed, digest=sha1(data)), progress=False, frozen=True)


def test_a_record_whose_digest_was_corrected_outranks_what_came_before(
    hub: HubServer, packed: str, record: Make, data: bytes, safetensors: Bytes
) -> None:
    weights.get(record(packed, digest=sha1(data)), progress=False)
    other = safetensors(seed=1)
    hub.file("w.zip", zipped(other))
    assert bytes(weights.open_weights(record(packed, digest=sha1(other)), progress=False)) == other


def test_what_came_before_the_record_had_a_digest_is_fetched_and_compared(
    hub: HubServer, packed: str, record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights.get(record(packed), progress=False)
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(tmp_path / "other" / "registry"))  # another user's lock, and the same cache
    weights.get(record(packed, digest=sha1(data)), progress=False)
    assert len(hub.gets("w.zip")) == 2


def test_a_projects_lock_that_was_pinned_with_another_digest_is_told(
    packed: str, record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = record(packed, digest=sha1(data))
    entry = replace(entry_of_record(row), sha256="1" * 64)
    Lock({entry.key: entry}, 1).write(tmp_path / "weights.lock")
    with pytest.raises(ChangedUpstream, match=r"which has the SHA-1 sha1:\w+, and the record of ResNet20:test says sha1:0000000"):
        weights.get(record(packed, digest="sha1:" + "0" * 40), progress=False)


# mirrors, bundles, other tools' files


def test_a_mirror_keeps_the_file_by_its_name_in_the_zip_and_serves_it(
    hub: HubServer, packed: str, record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(packed, digest=sha1(data))
    assert [file.name for file in mirror(tmp_path / "m", [row], progress=False).files] == [MEMBER]
    hub.heal()
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path / "m"))
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "other cache"))
    assert bytes(weights.open_weights(row, progress=False)) == data
    assert hub.log == []


def test_a_mirror_with_another_file_of_that_name_is_not_believed(
    packed: str, record: Make, data: bytes, safetensors: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MEMBER).write_bytes(safetensors(seed=1))
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path))
    assert bytes(weights.open_weights(record(packed, digest=sha1(data)), progress=False)) == data


def test_a_mirror_that_has_the_name_for_other_bytes_says_what_is_needed(
    packed: str, hub: HubServer, record: Make, data: bytes, safetensors: Bytes, tmp_path: Path
) -> None:
    mirror(tmp_path / "m", [record(packed, digest=sha1(data))], progress=False)
    other = safetensors(seed=1)
    again = record(f"{hub.file('again.zip', zipped(other))}#{MEMBER}", digest=sha1(other), tag="again")
    with pytest.raises(BadRecord, match=rf"ResNet20:again needs {sha1(other)}. Move the file away"):
        mirror(tmp_path / "m", [again], progress=False)


def test_a_bundle_carries_the_digest_and_is_found_by_the_record_that_has_it(
    packed: str, record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(packed, digest=sha1(data), num_classes=10)
    bundle([row], tmp_path / "zoo.tar")
    own = tmp_path / "there" / "registry"
    own.mkdir(parents=True)
    from weights.adding import to_toml

    (own / "ResNet20.test.toml").write_text(to_toml(row))  # the receiver's registry knows it, without the full hash
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(own))
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "there" / "cache"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    unbundle(tmp_path / "zoo.tar")
    assert bytes(weights.open_weights(weights.find("ResNet20", "test"))) == data


def test_a_bundle_of_another_digest_than_the_records_is_refused(
    packed: str, record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(packed, digest=sha1(data), num_classes=10)
    bundle([row], tmp_path / "zoo.tar")
    own = tmp_path / "there" / "registry"
    own.mkdir(parents=True)
    from weights.adding import to_toml

    (own / "ResNet20.test.toml").write_text(to_toml(replace(row, digest="sha1:" + "0" * 40)))
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(own))
    with pytest.raises(HashMismatch, match=rf"expected sha1:0{{40}}, got {sha1(data)}"):
        unbundle(tmp_path / "zoo.tar")


@pytest.mark.parametrize("right", [True, False])
def test_what_another_tool_has_unpacked_already_is_copied_if_its_digest_is_right(
    right: bool, hub: HubServer, packed: str, record: Make, data: bytes, safetensors: Bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / MEMBER).write_bytes(data if right else safetensors(seed=1))
    assert bytes(weights.open_weights(record(packed, digest=sha1(data)), progress=False)) == data
    assert bool(hub.gets("w.zip")) != right


def test_a_part_hashes_what_it_takes_over(hub: HubServer, record: Make, data: bytes) -> None:
    url, row_facts = hub.file("w.safetensors", data), {"digest": sha1(data)}
    hub.fail("cut", after=100_000)
    hub.fail("status", status=503, times=9)
    with pytest.raises(SourceUnavailable):
        weights.get(record(url, **row_facts), progress=False)
    hub.heal()
    assert bytes(weights.open_weights(record(url, **row_facts), progress=False)) == data
    assert hub.gets("w.safetensors")[0].range is not None


def test_the_command_says_what_the_digest_is(record: Make, capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.browsing.facts import facts as told

    facts: dict[str, Any] = told(record("https://a.example/w.zip#w.pth", digest="sha1:0b5a71c2", format="pytorch"))
    assert facts["digest"] == "sha1:0b5a71c2 (first 8 digits of the SHA-1, weaker than a SHA-256)"


def test_known_bytes_are_recognised_by_the_digest_if_by_no_sha256(
    record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weights.adding import to_toml

    asked: list[str] = []

    def by(digest: str) -> str:
        asked.append(digest)
        return of_bytes(data, digest)

    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path))
    row = record("https://a.example/w.zip#w.pth", digest=sha1(data)[:13], format="pytorch", num_classes=10)
    (tmp_path / "own.toml").write_text(to_toml(row))
    assert weights.recognise("0" * 64, by) == row
    assert sorted(set(asked)) == sorted(asked)  # each algorithm once, whatever the number of records
    assert weights.recognise("0" * 64) is None
    assert weights.recognise("0" * 64, lambda digest: of_bytes(data[:-1], digest)) is None
    assert of_file(tmp_path / "own.toml", "md5:") == md5((tmp_path / "own.toml").read_bytes())
