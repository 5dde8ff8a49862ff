"""Bundles: the same input the same bytes, everything proven before anything counts, all or nothing."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint, archive
from weights.adding import to_toml
from weights.bundle import Contents, Member, bundle, read_contents
from weights.errors import (
    BadRecord,
    CacheNotWritable,
    CorruptCache,
    HashMismatch,
    LimitExceeded,
    MalformedFile,
    NoSpace,
    NoSuchFile,
    NotLocked,
    OutputsDiffer,
    SizeMismatch,
    SourceUnavailable,
    WeightsError,
)
from weights.fingerprint import fingerprint
from weights.lock import Entry, Lock, parse
from weights.pinning import entry_of
from weights.places import ELSEWHERE
from weights.unbundle import unbundle

Make = Callable[..., Checkpoint]
Cached = Callable[[], dict[str, bytes]]
PICKLE = b"PK\x03\x04 a pickle " + bytes(5000)
LABELS = b"n01\tcat\n"


def of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def row(record: Make, data: bytes, tmp_path: Path) -> Checkpoint:
    (tmp_path / "private").mkdir()
    path = tmp_path / "private" / "mine.safetensors"
    path.write_bytes(data)
    return record("https://example.org/w.safetensors", path.as_uri(), sha256=of(data), num_classes=10)


@pytest.fixture
def tar(row: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle, written on a machine that is then left for another without a network."""
    path = tmp_path / "zoo.tar"
    monkeypatch.setenv("ZOO_MIRROR", str(tmp_path / "private"))
    (tmp_path / "private" / of((tmp_path / "private" / "mine.safetensors").read_bytes())).write_bytes(
        (tmp_path / "private" / "mine.safetensors").read_bytes()
    )
    bundle([row], path, golden=lambda row, installed: b"golden outputs", labels=lambda name: LABELS)
    monkeypatch.delenv("ZOO_MIRROR")
    leave(monkeypatch, tmp_path)
    return path


def leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str = "elsewhere") -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / name / "cache"))
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(tmp_path / name / "registry"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")


def installed(root: Path) -> dict[str, bytes]:
    """Everything on the other machine that counts, and everything that was left over."""
    kinds = ("cache/blobs", "cache/partial", "cache/quarantine", "cache/refs", "cache/derived", "registry")
    return {str(path.relative_to(root)): path.read_bytes() for kind in kinds for path in (root / kind).rglob("*") if path.is_file()}


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as file:
        return {one.name: content(file, one) for one in file}


def content(file: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = file.extractfile(member)
    assert opened is not None
    return opened.read()


def forged(path: Path, change: Callable[[dict[str, Any]], None], more: Callable[[dict[str, bytes]], None] = lambda files: None) -> Path:
    """Write the bundle of somebody who knows the format and lies."""
    files = members(path)
    facts = json.loads(files.pop("bundle.json"))
    more(files)
    facts["members"] = [{"name": name, "size_bytes": len(data), "sha256": of(data)} for name, data in files.items()]
    change(facts)
    made = path.with_name("forged.tar")
    with made.open("wb") as file:
        for name, data in {"bundle.json": json.dumps(facts, indent=1).encode() + b"\n", **files}.items():
            file.write(archive.header(name, len(data)) + data + bytes(archive.padding(len(data))))
        file.write(bytes(1024))
    return made


def test_the_same_cache_writes_the_same_bytes(row: Checkpoint, tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbundle(tar)
    again = tmp_path / "again.tar"
    bundle([weights.find("ResNet20", "test")] * 2, again, golden=lambda row, installed: b"golden outputs", labels=lambda name: LABELS)
    assert of(again.read_bytes()) == of(tar.read_bytes())
    with tarfile.open(tar) as file:
        assert [one.name for one in file][:3] == ["bundle.json", "LICENCES.txt", "weights.lock"]
        assert {(one.mode, one.uid, one.gid, one.mtime, one.uname, one.type) for one in file} == {(0o644, 0, 0, 0, "", tarfile.REGTYPE)}


def test_what_was_bundled_loads_on_a_machine_without_a_network(tar: Path, data: bytes, tmp_path: Path) -> None:
    (done,) = unbundle(tar)
    assert (done.model, done.tag, done.sha256, done.new, done.converted) == ("ResNet20", "test", of(data), True, False)
    assert bytes(weights.open_weights(weights.find("ResNet20", "test"))) == data
    assert done.registered == tmp_path / "elsewhere" / "registry" / "ResNet20.test.toml"


def test_neither_side_needs_a_socket(tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(socket, "socket", lambda *args, **more: pytest.fail("a socket was opened"))
    unbundle(tar)
    bundle([weights.find("ResNet20", "test")], tmp_path / "again.tar")
    assert weights.open_weights(weights.find("ResNet20", "test"))


def test_doing_it_again_changes_nothing(tar: Path, tmp_path: Path) -> None:
    unbundle(tar)
    before = installed(tmp_path / "elsewhere")
    (done,) = unbundle(tar)
    assert (done.new, done.registered) == (False, None)
    assert installed(tmp_path / "elsewhere") == before


def test_a_damaged_blob_is_mended_by_unbundling_again(tar: Path, data: bytes, tmp_path: Path) -> None:
    unbundle(tar)
    blob = Cache().blob(of(data))
    blob.chmod(0o644)
    blob.write_bytes(data[:-1] + b"?")
    assert unbundle(tar)[0].new
    assert bytes(weights.open_weights(weights.find("ResNet20", "test"))) == data


def test_a_converted_file_needs_no_converter_on_the_other_side(
    record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w.pth").write_bytes(PICKLE)
    row = record((tmp_path / "w.pth").as_uri(), format="pytorch", sha256=of(PICKLE), num_classes=10)
    bundle([row], tmp_path / "zoo.tar", to_safetensors=lambda source, made, row: made.write_bytes(data) and None)
    leave(monkeypatch, tmp_path)
    (done,) = unbundle(tmp_path / "zoo.tar")
    assert done.converted
    assert bytes(weights.open_weights(weights.find("ResNet20", "test"))) == data


def test_folders_of_the_sending_machine_do_not_travel(tar: Path, tmp_path: Path) -> None:
    unbundle(tar)
    assert b"private" not in tar.read_bytes()
    assert f"{ELSEWHERE}mine.safetensors" in weights.find("ResNet20", "test").sources


def test_a_bundle_never_chooses_the_default(tar: Path) -> None:
    before = weights.find("ResNet20").tag
    unbundle(tar)
    assert weights.find("ResNet20").tag == before


def test_licences_and_a_lock_come_along(tar: Path, data: bytes) -> None:
    files = members(tar)
    assert b"ResNet20:test: unstated" in files["LICENCES.txt"]
    assert f'sha256 = "{of(data)}"'.encode() in files["weights.lock"]
    assert b'key = "ResNet20:test"' in files["weights.lock"]


def test_the_lock_that_comes_along_knows_the_tensors(tar: Path, data: bytes) -> None:
    entry = parse(members(tar)["weights.lock"].decode(), tar).entries["ResNet20:test"]
    assert (entry.tensors, entry.fingerprint) == fingerprint(memoryview(data), "")


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("sha256", {"sha256": "0" * 64}),
        ("fingerprint", {"fingerprint": "0" * 64}),
        ("tensors", {"tensors": 2}),
        ("license", {"license": "MIT"}),
        ("size_bytes", {"size_bytes": 1}),
        ("entry", {"key": "ResNet20:other"}),
    ],
)
def test_a_lock_that_says_something_else_than_the_bundle_is_refused(tar: Path, tmp_path: Path, what: str, change: dict[str, Any]) -> None:
    def more(files: dict[str, bytes]) -> None:
        (entry,) = parse(files["weights.lock"].decode(), tar).entries.values()
        entry = replace(entry, **change)
        files["weights.lock"] = Lock({entry.key: entry}, 1).render().encode()

    with pytest.raises(HashMismatch, match=rf"its weights.lock says of ResNet20:\w+ the {what} .*Nothing was installed"):
        unbundle(forged(tar, lambda facts: None, more))
    assert installed(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize("text", [b"\xff", b"version = 1\n"])
def test_a_lock_that_is_none_is_refused(tar: Path, tmp_path: Path, text: bytes) -> None:
    with pytest.raises(HashMismatch, match=r"its weights.lock is not as it is written"):
        unbundle(forged(tar, lambda facts: None, lambda files: files.update({"weights.lock": text})))
    assert installed(tmp_path / "elsewhere") == {}


def test_frozen_a_bundles_own_word_admits_nothing_and_a_lock_does(
    tar: Path, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_FROZEN", "1")
    said = "neither the registry nor a lock here has a full hash of ResNet20:test, and ZOO_FROZEN=1 takes no bundle's own word"
    with pytest.raises(NotLocked, match=f"{said}.*zoo lock ResNet20:test; then bring its weights.lock here") as refused:
        unbundle(tar)
    assert "Once without it: zoo lock" not in str(refused.value)  # here is nothing that it could be made of
    assert installed(tmp_path / "elsewhere") == {}
    (entry,) = parse(members(tar)["weights.lock"].decode(), tar).entries.values()
    monkeypatch.chdir(tmp_path)
    for sha256, kind in ((of(b""), HashMismatch), (of(data), None)):
        Lock({entry.key: replace(entry, sha256=sha256)}, 1).write(tmp_path / "weights.lock")
        with contextlib.nullcontext() if kind is None else pytest.raises(kind, match="a lock pins ResNet20:test"):
            unbundle(tar)
    assert bytes(weights.open_weights(weights.find("ResNet20", "test"))) == data


def test_frozen_what_a_bundle_converted_counts_only_where_a_lock_knows_its_tensors(
    record: Make, data: bytes, safetensors: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w.pth").write_bytes(PICKLE)
    row, theirs = record((tmp_path / "w.pth").as_uri(), format="pytorch", sha256=of(PICKLE), num_classes=10), safetensors(seed=5)
    bundle([row], tmp_path / "zoo.tar", to_safetensors=lambda source, made, row: made.write_bytes(theirs) and None)
    leave(monkeypatch, tmp_path)
    (tmp_path / "elsewhere" / "registry").mkdir(parents=True)
    (tmp_path / "elsewhere" / "registry" / "ResNet20.test.toml").write_text(to_toml(row))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_FROZEN", "1")
    for _ in range(2):
        with pytest.raises(
            NotLocked,
            match=r"no lock has the fingerprint of ResNet20:test, whose tensors are the sender's word, and ZOO_FROZEN=1.*"
            "On a machine that has it: zoo lock ResNet20:test; then bring its weights.lock here",
        ):
            unbundle(tmp_path / "zoo.tar")
        assert not any((tmp_path / "elsewhere" / "cache" / "blobs" / "sha256").iterdir())
        entry = Entry("ResNet20:test", "pytorch", row.sources, "unstated", of(PICKLE))
        Lock({entry.key: entry}, 1).write(tmp_path / "weights.lock")  # a full hash of what it was made of says nothing of its tensors
    count, tensors = fingerprint(memoryview(theirs), "")
    Lock({entry.key: replace(entry, tensors=count, fingerprint=tensors)}, 2).write(tmp_path / "weights.lock")
    unbundle(tmp_path / "zoo.tar")
    assert bytes(weights.open_weights(row)) == theirs
    Lock({entry.key: entry}, 3).write(tmp_path / "weights.lock")
    installed = weights.get(row, frozen=False)
    assert entry_of(Cache(), row, installed).fingerprint is None  # nor does a lock that is written here take the sender's word
    assert bytes(weights.open_weights(row, to_safetensors=lambda source, made, row: made.write_bytes(data) and None)) == data
    assert bytes(weights.open_weights(row)) == data
    assert entry_of(Cache(), row, weights.get(row)).fingerprint == fingerprint(memoryview(data), "")[1]


def test_labels_of_the_users_own_are_installed_beside_the_record(
    record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str) -> bytes:
        if not name.endswith(".tsv"):
            raise ValueError("there are no labels of that name")
        return Path(name).read_bytes()

    (tmp_path / "w.safetensors").write_bytes(data)
    (tmp_path / "pets.tsv").write_bytes(LABELS)
    row = record((tmp_path / "w.safetensors").as_uri(), sha256=of(data), num_classes=10, labels=str(tmp_path / "pets.tsv"))
    bundle([row], tmp_path / "zoo.tar", labels=read)
    leave(monkeypatch, tmp_path)
    for _ in range(2):
        unbundle(tmp_path / "zoo.tar", labels=read)
    labels = weights.find("ResNet20", "test").labels
    assert labels == str(tmp_path / "elsewhere" / "registry" / "ResNet20.test.labels.tsv")
    assert Path(labels).read_bytes() == LABELS


def test_a_bundle_cut_anywhere_is_refused_by_the_name_of_the_member(tar: Path, tmp_path: Path) -> None:
    whole, rng = tar.read_bytes(), random.Random(7)
    names = [*members(tar), "the end of the archive"]
    for at in [0, 1, 511, 512, len(whole) - 1, len(whole) - 1024, *rng.sample(range(len(whole)), 40)]:
        tar.write_bytes(whole[:at])
        with pytest.raises((SizeMismatch, MalformedFile)) as refused:
            unbundle(tar)
        assert any(name in str(refused.value) for name in names), str(refused.value)
        assert installed(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    "name", ["LICENCES.txt", "weights.lock", "records/ResNet20.test.toml", "golden/ResNet20.test.safetensors", "blobs/"]
)
def test_a_member_that_was_changed_is_named(tar: Path, tmp_path: Path, name: str) -> None:
    with tarfile.open(tar) as file:
        one = next(member for member in file if member.name.startswith(name))
    for at in (one.offset, one.offset + 130, one.offset_data, one.offset_data + one.size - 1, one.offset_data + one.size):
        data = bytearray(tar.read_bytes())
        data[at] ^= 1
        (tmp_path / "changed.tar").write_bytes(data)
        with pytest.raises((HashMismatch, MalformedFile), match=one.name):
            unbundle(tmp_path / "changed.tar")
    assert installed(tmp_path / "elsewhere") == {}


def test_any_flipped_bit_is_refused(tar: Path, tmp_path: Path) -> None:
    whole, rng = tar.read_bytes(), random.Random(11)
    for at in [*rng.sample(range(6000), 100), *rng.sample(range(len(whole)), 50)]:
        data = bytearray(whole)
        data[at] ^= 1 << rng.randrange(8)
        tar.write_bytes(data)
        with pytest.raises(WeightsError):
            unbundle(tar)
    assert installed(tmp_path / "elsewhere") == {}


def special(name: str, kind: bytes, **facts: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    for key, value in facts.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (special("weights.lock", tarfile.SYMTYPE, linkname="/etc/passwd"), "a symbolic link"),
        (special("weights.lock", tarfile.LNKTYPE, linkname="bundle.json"), "a hard link"),
        (special("weights.lock", tarfile.CHRTYPE, devmajor=1, devminor=3), "a character device"),
        (special("weights.lock", tarfile.FIFOTYPE), "a pipe"),
        (special("weights.lock", tarfile.DIRTYPE), "a folder"),
        (special("../../evil", tarfile.REGTYPE), r"'\.\./\.\./evil'"),
        (special("/etc/cron.d/evil", tarfile.REGTYPE), "/etc/cron.d/evil"),
        (special("weights.lock", tarfile.REGTYPE, uid=1000), "an owner"),
        (special("weights.lock", tarfile.REGTYPE, mode=0o4755), "a mode"),
        (special("x" * 200, tarfile.REGTYPE), "GNU long name"),
        (special("bundle.json", tarfile.REGTYPE), "'bundle.json'"),
    ],
)
def test_a_member_of_another_kind_is_refused(tar: Path, tmp_path: Path, made: tarfile.TarInfo, said: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(tar) as old, tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as new:
        for one in old:
            body = content(old, one)
            if one.name == "weights.lock":
                made.size = len(body) if made.type == tarfile.REGTYPE else 0
                new.addfile(made, io.BytesIO(body))
            else:
                (tmp_path / "header").write_bytes(archive.header(one.name, one.size))
                assert new.fileobj is not None
                new.fileobj.write(archive.header(one.name, one.size) + body + bytes(archive.padding(one.size)))
    size = tar.stat().st_size
    tar.write_bytes(buffer.getvalue()[:-1].ljust(size, b"\0")[:size])
    with pytest.raises(MalformedFile, match=said):
        unbundle(tar)
    assert installed(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda facts: facts["members"].append(dict(facts["members"][0])), MalformedFile),
        (lambda facts: facts["members"].append({"name": "evil.sh", "size_bytes": 4, "sha256": "0" * 64}), MalformedFile),
        (lambda facts: facts["members"].pop(), MalformedFile),
        (lambda facts: facts["members"][0].update(name="../evil"), MalformedFile),
        (lambda facts: facts["members"][0].update(size_bytes=300 << 20), LimitExceeded),
        (lambda facts: facts["members"][-1].update(size_bytes=1 << 60), MalformedFile),
        (lambda facts: facts["members"][0].update(size_bytes=True), MalformedFile),
        (lambda facts: facts["members"][0].update(size_bytes=-1), MalformedFile),
        (lambda facts: facts["members"][0].update(sha256="short"), MalformedFile),
        (lambda facts: facts["weights"][0].update(model="../ResNet20"), MalformedFile),
        (lambda facts: facts["weights"][0].update(tag="../../x"), MalformedFile),
        (lambda facts: facts["weights"][0].update(labels="/etc/passwd"), MalformedFile),
        (lambda facts: facts["weights"][0].update(blob="0" * 64), MalformedFile),
        (lambda facts: facts["weights"][0].update(size_bytes=1), MalformedFile),
        (lambda facts: facts["weights"][0].update(commit="main"), MalformedFile),
        (lambda facts: facts["weights"][0].update(source_size_bytes=-1), MalformedFile),
        (lambda facts: facts["weights"][0].update(source_sha256="0" * 64), MalformedFile),
        (lambda facts: facts["weights"].append(dict(facts["weights"][0])), MalformedFile),
        (lambda facts: facts["weights"].clear(), MalformedFile),
        (lambda facts: facts.update(weights={}), MalformedFile),
        (lambda facts: facts.update(kernelzoo_bundle=1), MalformedFile),
        (lambda facts: facts.update(kernelzoo_bundle=3), MalformedFile),
        (lambda facts: facts.update(more=1), MalformedFile),
    ],
)
def test_a_manifest_that_lies_is_refused(
    tar: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        unbundle(forged(tar, change))
    assert installed(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"[" * 100_000, b'{"kernelzoo_bundle": NaN}', b"\xff\xfe", b'{"a":1,"a":2}'])
def test_a_manifest_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(MalformedFile):
        read_contents(text, "zoo.tar")


@pytest.mark.parametrize("line", [b"default = true\n", b'sha256_prefix = "ffffff"\n', b"evil = 1\n", b"[Other.test]\n"])
def test_a_record_that_lies_is_refused(tar: Path, tmp_path: Path, line: bytes) -> None:
    def more(files: dict[str, bytes]) -> None:
        files["records/ResNet20.test.toml"] += line

    with pytest.raises((MalformedFile, BadRecord), match=r"ResNet20\.test\.toml"):
        unbundle(forged(tar, lambda facts: None, more))
    assert installed(tmp_path / "elsewhere") == {}


def test_a_blob_that_is_no_safetensors_is_refused(tar: Path, tmp_path: Path, data: bytes) -> None:
    evil = b"\x80\x04cos\nsystem\n" + bytes(1000)

    def more(files: dict[str, bytes]) -> None:
        del files[f"blobs/{of(data)}"]
        files[f"blobs/{of(evil)}"] = evil
        files["records/ResNet20.test.toml"] = files["records/ResNet20.test.toml"].replace(of(data).encode(), of(evil).encode())

    def change(facts: dict[str, Any]) -> None:
        facts["weights"][0].update(blob=of(evil), size_bytes=len(evil), source_sha256=of(evil))

    with pytest.raises(MalformedFile, match=f"blobs/{of(evil)} is no safetensors"):
        unbundle(forged(tar, change, more))
    assert installed(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize("start", [b"\x1f\x8b\x08", b"PK\x03\x04", b"hello", b""])
def test_another_kind_of_file_is_no_bundle(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "x").write_bytes(start.ljust(3000, b"x"))
    with pytest.raises(MalformedFile, match="is no bundle of kernelzoo"):
        unbundle(tmp_path / "x")
    with pytest.raises(MalformedFile, match="is no file, and a bundle is one"):
        unbundle(tmp_path)
    with pytest.raises(NoSuchFile, match="is not there: name the file that zoo bundle wrote"):
        unbundle(tmp_path / "none.tar")


def test_a_record_of_the_same_name_that_says_otherwise_is_a_conflict(tar: Path, row: Checkpoint, data: bytes, tmp_path: Path) -> None:
    steps = replace(row.preprocessing, resize=300)
    weights.add(tmp_path / "private" / "mine.safetensors", "ResNet20", "test", num_classes=10, preprocessing=steps)
    before = installed(tmp_path / "elsewhere")
    with pytest.raises(BadRecord, match=r"preprocessing is .* Nothing was installed; give yours another tag"):
        unbundle(tar)
    assert installed(tmp_path / "elsewhere") == before


def test_other_bytes_of_the_same_name_are_a_conflict(tar: Path, safetensors: Callable[..., bytes], tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(safetensors(seed=5))
    weights.add(tmp_path / "other.safetensors", "ResNet20", "test", num_classes=10)
    before = installed(tmp_path / "elsewhere")
    with pytest.raises(HashMismatch, match="brings another ResNet20:test"):
        unbundle(tar)
    assert installed(tmp_path / "elsewhere") == before


def test_other_bytes_than_an_earlier_install_had_are_refused(
    hubless: Callable[[bytes], Path], safetensors: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hubless(safetensors(seed=1)), hubless(safetensors(seed=2))
    leave(monkeypatch, tmp_path)
    unbundle(first)
    before = installed(tmp_path / "elsewhere")
    with pytest.raises(HashMismatch, match=r"the bundle has|brings another"):
        unbundle(second)
    assert installed(tmp_path / "elsewhere") == before


@pytest.fixture
def hubless(record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Path]:
    """Bundle these bytes as what one and the same shipped row gave, on a machine of their own."""

    def make(data: bytes) -> Path:
        leave(monkeypatch, tmp_path, of(data)[:8])
        monkeypatch.delenv("ZOO_OFFLINE")
        row = weights.find("VGG11", "tv_in1k")
        cache = Cache()
        cache.prepare()
        path = cache.temporary(of(data))
        path.write_bytes(data)
        place = cache.publish(path, of(data))
        cache.record(
            row.sources[0], weights.Installed(place, of(data), blake3(data).hexdigest(), len(data), row.sources[0], of(data)), None, None, 1
        )
        bundle([row], tmp_path / f"{of(data)[:8]}.tar")
        return tmp_path / f"{of(data)[:8]}.tar"

    return make


def test_outputs_that_differ_install_nothing(tar: Path, tmp_path: Path) -> None:
    def check(row: Checkpoint, installed: weights.Installed, data: bytes | None) -> str:
        assert data == b"golden outputs"
        raise OutputsDiffer("it computes something else here")

    with pytest.raises(OutputsDiffer):
        unbundle(tar, check=check)
    assert installed(tmp_path / "elsewhere") == {}


def test_a_bundle_that_changed_since_its_signature_was_checked_is_refused(tar: Path, tmp_path: Path) -> None:
    with pytest.raises(HashMismatch, match="changed since its signature was checked"):
        unbundle(tar, sha256="0" * 64)
    assert installed(tmp_path / "elsewhere") == {}
    unbundle(tar, sha256=of(tar.read_bytes()))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), MemoryError()])
def test_an_interrupted_bundle_leaves_nothing(row: Checkpoint, tmp_path: Path, error: BaseException) -> None:
    def stop(done: int, total: int | None) -> None:
        if total and done > total // 2:
            raise error

    weights.get(replace(row, sources=row.sources[1:]))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(NoSpace if isinstance(error, OSError) else type(error)):
        bundle([replace(row, sources=row.sources[1:])], tmp_path / "new.tar", progress=stop)
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupted_unbundle_leaves_nothing(tar: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        if total and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unbundle(tar, progress=stop)
    assert installed(tmp_path / "elsewhere") == {}


def test_a_record_that_can_not_be_written_leaves_none_registered(
    record: Make, data: bytes, safetensors: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for tag, content in (("a", data), ("b", safetensors(500, 1))):
        (tmp_path / tag).write_bytes(content)
        rows.append(record((tmp_path / tag).as_uri(), tag=tag, sha256=of(content), num_classes=10))
    bundle(rows, tmp_path / "zoo.tar")
    leave(monkeypatch, tmp_path)
    folder, replaced, done = tmp_path / "elsewhere" / "registry", Path.replace, []
    folder.mkdir(parents=True)
    (folder / "ResNet20.b.toml").write_text("# an old file without a record\n")

    def fails(self: Path, target: Path) -> Path:
        if target.name == "ResNet20.a.toml":
            done.extend(path.name for path in folder.glob("*.toml"))
            raise OSError(errno.EIO, "Input/output error")
        return replaced(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fails)
        with pytest.raises(CacheNotWritable):
            unbundle(tmp_path / "zoo.tar")
    assert done == ["ResNet20.b.toml"]
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("ResNet20.b.toml", "# an old file without a record\n")]
    assert len(unbundle(tmp_path / "zoo.tar")) == 2


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_an_unbundle_killed_at_any_rename_is_finished_by_the_next(tar: Path, data: bytes, tmp_path: Path, nth: int) -> None:
    code = f"""
import os, pathlib, signal
from weights.unbundle import unbundle
real, left = pathlib.Path.replace, [{nth}]
def fatal(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
pathlib.Path.replace = fatal
unbundle({str(tar)!r})
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode
    assert ended in (-signal.SIGKILL, 0)
    assert all(of(data) == Path(name).name for name, data in installed(tmp_path / "elsewhere").items() if "blobs" in name)
    unbundle(tar)
    assert bytes(weights.open_weights(weights.find("ResNet20", "test"))) == data
    assert not [name for name in installed(tmp_path / "elsewhere") if "partial" in name]


def test_a_damaged_cache_is_not_bundled(row: Checkpoint, tmp_path: Path) -> None:
    found = weights.get(replace(row, sources=row.sources[1:]))
    found.path.chmod(0o644)
    with found.path.open("r+b") as file:
        file.seek(1000)
        file.write(b"?")
    with pytest.raises((HashMismatch, CorruptCache)):
        bundle([replace(row, sources=row.sources[1:])], tmp_path / "new.tar")
    assert not (tmp_path / "new.tar").exists()


def test_a_file_that_changes_while_it_is_bundled_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"x" * 1000)
    for size in (999, 1000, 1001):
        writer = archive.Writer(io.BytesIO(), 0, lambda done, total: None)
        with pytest.raises(HashMismatch, match="it changed"):
            writer.large("blobs/x", tmp_path / "blob", size, of(b"y" * size))


def test_large_files_are_never_in_memory(record: Make, tmp_path: Path, safetensors: Callable[..., bytes], monkeypatch: Any) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors(16 << 20))
    row = record(path.as_uri(), num_classes=10)
    tracemalloc.start()
    try:
        bundle([row], tmp_path / "zoo.tar")
        leave(monkeypatch, tmp_path)
        unbundle(tmp_path / "zoo.tar")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_full_disk_is_noticed_before_the_first_byte(tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(NoSpace, match="bytes are needed"):
        unbundle(tar)
    assert installed(tmp_path / "elsewhere") == {}


def test_a_read_only_cache_that_has_everything_will_do(tar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbundle(tar)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("mkdir", "replace", "unlink", "write_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    assert not unbundle(tar)[0].new


def test_contents_read_back_as_they_were_written(tar: Path) -> None:
    text = members(tar)["bundle.json"]
    contents = read_contents(text, "zoo.tar")
    assert isinstance(contents, Contents)
    assert contents.text() == text
    assert contents.members[0] == Member("LICENCES.txt", len(members(tar)["LICENCES.txt"]), of(members(tar)["LICENCES.txt"]))


def test_headers_are_what_other_tools_write(tmp_path: Path) -> None:
    made = archive.header("blobs/" + "a" * 64, 12345)
    info = tarfile.TarInfo.frombuf(made, "ascii", "strict")
    assert (info.name, info.size, info.isreg(), info.mode) == ("blobs/" + "a" * 64, 12345, True, 0o644)
    with pytest.raises(ValueError, match="1 to 100 characters"):
        archive.header("x" * 101, 1)
    with pytest.raises(ValueError, match="at most"):
        archive.header("x", archive.LARGEST + 1)


def test_other_bytes_than_the_projects_lock_pins_are_refused(
    hubless: Callable[[bytes], Path], safetensors: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weights.lock import Entry, Lock

    tar, row = hubless(safetensors(seed=1)), weights.find("VGG11", "tv_in1k")
    leave(monkeypatch, tmp_path)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    entry = Entry("VGG11:tv_in1k", row.format, row.sources, row.license, "0" * 64)
    Lock({entry.key: entry}, 1).write(tmp_path / "project" / "weights.lock")
    with pytest.raises(HashMismatch, match="a lock pins VGG11:tv_in1k"):
        unbundle(tar)
    assert installed(tmp_path / "elsewhere") == {}


def test_the_lock_in_a_bundle_can_be_used_as_one(tar: Path, data: bytes, tmp_path: Path) -> None:
    from weights.lock import Lock

    (tmp_path / "weights.lock").write_bytes(members(tar)["weights.lock"])
    assert Lock.read(tmp_path / "weights.lock").entries["ResNet20:test"].sha256 == of(data)


def test_other_tensors_than_the_projects_lock_knows_are_refused(
    hubless: Callable[[bytes], Path], safetensors: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weights.lock import Entry, Lock

    tar, row = hubless(safetensors(seed=1)), weights.find("VGG11", "tv_in1k")
    claimed = json.loads(members(tar)["bundle.json"])["weights"][0]["source_sha256"]
    leave(monkeypatch, tmp_path)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    entry = Entry("VGG11:tv_in1k", row.format, row.sources, row.license, claimed, tensors=2, fingerprint="1" * 64)
    Lock({entry.key: entry}, 1).write(tmp_path / "project" / "weights.lock")
    with pytest.raises(HashMismatch, match="have the fingerprint 1111"):
        unbundle(tar)
    assert installed(tmp_path / "elsewhere") == {}


def test_a_bundles_word_is_no_first_sight(
    hubless: Callable[[bytes], Path], safetensors: Callable[..., bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weights.lock import user_lock

    tar, row = hubless(safetensors(seed=1)), weights.find("VGG11", "tv_in1k")
    leave(monkeypatch, tmp_path)
    unbundle(tar)
    assert bytes(weights.open_weights(row)) == safetensors(seed=1)
    assert not user_lock().exists()


def test_what_came_in_a_bundle_and_is_gone_is_brought_back_by_the_bundle(tar: Path, data: bytes, tmp_path: Path) -> None:
    unbundle(tar)
    row = weights.find("ResNet20", "test")
    for _ in range(2):
        Cache().blob(of(data)).unlink()
        with pytest.raises(SourceUnavailable, match=rf"It came in a bundle, unbundle it again: zoo unbundle {tar}$"):
            weights.open_weights(row)
        unbundle(tar)
        assert bytes(weights.open_weights(row)) == data
    Cache().blob(of(data)).unlink()
    tar.rename(tmp_path / "moved.tar")
    with pytest.raises(SourceUnavailable, match=rf"zoo unbundle {tar}, which is not there now: name the file where it is$"):
        weights.open_weights(row)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_what_came_only_in_a_bundle_is_not_looked_for_on_this_disk(
    record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: str
) -> None:
    (tmp_path / "w.pth").write_bytes(PICKLE)
    row = record((tmp_path / "w.pth").as_uri(), format="pytorch", sha256=of(PICKLE), num_classes=10)
    bundle([row], tmp_path / "zoo.tar", to_safetensors=lambda source, made, row: made.write_bytes(data) and None)
    leave(monkeypatch, tmp_path)
    monkeypatch.setenv("ZOO_OFFLINE", offline)
    unbundle(tmp_path / "zoo.tar")
    row, cache = weights.find("ResNet20", "test"), Cache()
    cache.blob(of(data)).unlink()
    (tmp_path / "mirror").mkdir()
    for mirror in ("", str(tmp_path / "mirror")):
        monkeypatch.setenv("ZOO_MIRROR", mirror)
        with pytest.raises(SourceUnavailable, match=r"(?s)It came in a bundle, unbundle it again: zoo unbundle .*zoo\.tar") as refused:
            weights.get(row, to_safetensors=lambda source, made, row: None)
        assert "can't be read" not in str(refused.value)
    shutil.rmtree(cache.root)
    with pytest.raises(SourceUnavailable, match=r"is not in .*It came in a bundle, unbundle it again: zoo unbundle FILE"):
        weights.get(row, to_safetensors=lambda source, made, row: None)


def test_what_came_in_a_bundle_and_no_source_has_any_more_is_told_with_both(
    hub: HubServer, record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(hub.file("w.safetensors", data), sha256=of(data), num_classes=10)
    bundle([row], tmp_path / "zoo.tar")
    leave(monkeypatch, tmp_path)
    unbundle(tmp_path / "zoo.tar")
    monkeypatch.delenv("ZOO_OFFLINE")
    Cache().blob(of(data)).unlink()
    del hub.bodies["w.safetensors"]
    with pytest.raises(
        SourceUnavailable, match=r"(?s)no source delivered ResNet20:test:.*HTTP 404.*unbundle it again: zoo unbundle .*zoo\.tar$"
    ):
        weights.get(weights.find("ResNet20", "test"))


def test_frozen_a_conversion_that_a_bundle_brought_is_told_with_a_way_that_works_here(
    record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w.pth").write_bytes(PICKLE)
    row = record((tmp_path / "w.pth").as_uri(), format="pytorch", sha256=of(PICKLE), num_classes=10)
    bundle([row], tmp_path / "zoo.tar", to_safetensors=lambda source, made, row: made.write_bytes(data) and None)
    theirs = entry_of(Cache(), row, weights.get(row))
    leave(monkeypatch, tmp_path)
    unbundle(tmp_path / "zoo.tar")
    row = weights.find("ResNet20", "test")
    with pytest.raises(
        NotLocked, match=r"no lock has the fingerprint of ResNet20:test.*zoo lock ResNet20:test; then bring its weights.lock"
    ):
        weights.open_weights(row, to_safetensors=lambda source, made, row: None, frozen=True)
    Lock({theirs.key: theirs}, 1).write(tmp_path / "weights.lock")  # as `zoo lock` writes it where the file is
    monkeypatch.chdir(tmp_path)
    assert bytes(weights.open_weights(row, to_safetensors=lambda source, made, row: None, frozen=True)) == data


def test_a_query_of_an_address_does_not_travel_and_that_is_said(
    hub: HubServer,
    record: Make,
    data: bytes,
    tmp_path: Path,
    own_cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = hub.file("w.safetensors", data)
    row = record(f"{url}?token=s3cret", f"{url}?token=s3cret&again#part", num_classes=10)
    bundle([row], tmp_path / "zoo.tar")
    assert b"s3cret" not in (tmp_path / "zoo.tar").read_bytes()
    assert not [path for path in own_cache.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]  # caches travel too
    assert [f"the query of {source} is left out" in said for source, said in zip(row.sources, caplog.messages, strict=True)] == [True] * 2
    assert "s3cret" not in caplog.text
    leave(monkeypatch, tmp_path)
    (tmp_path / "elsewhere" / "registry").mkdir(parents=True)
    table = tmp_path / "elsewhere" / "registry" / "ResNet20.test.toml"
    table.write_text(to_toml(record(f"{hub.url}/files/other?token=t0p", num_classes=10)))
    with pytest.raises(BadRecord, match=rf"sources is \('{hub.url}/files/other',\) here and \('{url}',\) there"):
        unbundle(tmp_path / "zoo.tar")
    table.write_text(to_toml(record(f"{url}?token=of+theirs", num_classes=10)))  # a team's table, with a key of each
    assert [one.registered for one in unbundle(tmp_path / "zoo.tar")] == [None]
    shutil.rmtree(tmp_path / "elsewhere")
    unbundle(tmp_path / "zoo.tar")
    assert weights.find("ResNet20", "test").sources == (url,)
    assert bytes(weights.open_weights(weights.find("ResNet20", "test"))) == data


def test_what_has_no_tag_is_not_bundled(record: Make, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(data)
    row = record((tmp_path / "w.safetensors").as_uri(), tag="https://example.org/w?token=s3cret", num_classes=10)
    with pytest.raises(BadRecord, match=r"has no tag by which the other side could call it: .* zoo add FILE ResNet20:mine") as refused:
        bundle([row], tmp_path / "zoo.tar")
    assert "s3cret" not in str(refused.value)
    assert not (tmp_path / "zoo.tar").exists()
