"""The lock file: one form, a reader that takes no other, and the shipped one equal to the registry."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weights
from weights import BadLock, HashMismatch, MalformedFile, NoSuchFile
from weights.auditing import check, diff
from weights.fingerprint import fingerprint
from weights.lock import SHIPPED_LOCK, Entry, Lock, find_locks, project_lock, user_lock
from weights.shipped import shipped, write_shipped

NO_TENSORS = {"fingerprint": None, "tensors": None}
HASHES = {name: hashlib.sha256(name.encode()).hexdigest() for name in "abcd"}


def entry(name: str, **facts: object) -> Entry:
    base = {
        "format": "pytorch",
        "sources": (f"https://example.org/{name}.pth", "hf://acme/wheels"),
        "license": "MIT",
        "sha256": HASHES[name],
    }
    return Entry(f"ResNet50:{name}", **base | {"size_bytes": 123, "tensors": 2, "fingerprint": HASHES["a"]} | facts)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "weights.lock"
    path.parent.mkdir()
    entries = (entry("a"), entry("b", **NO_TENSORS), entry("c", sha256=None, sha256_prefix="0123abcd", **NO_TENSORS))
    Lock({one.key: one for one in reversed(entries)}, 7).write(path)
    return path


def test_the_shipped_lock_is_what_the_registry_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("")
    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path))
    lock = Lock.read(SHIPPED_LOCK)
    assert dict(lock.entries) == shipped(), "make it anew: zoo lock --shipped weights"
    assert lock.entries.keys() == {f"{row.model}:{row.tag}" for row in weights.checkpoints()}
    (tmp_path / "weights.lock").write_bytes(SHIPPED_LOCK.read_bytes())
    assert write_shipped(tmp_path).serial == lock.serial
    assert (tmp_path / "weights.lock").read_bytes() == SHIPPED_LOCK.read_bytes() == lock.render().encode()


def test_a_row_with_a_prefix_calls_it_one_and_the_embedded_file_is_known_by_its_tensors() -> None:
    text = SHIPPED_LOCK.read_text()
    vgg = text[text.index('key = "VGG19:imagenet1k_v1"') :].partition("\n\n")[0]
    assert 'sha256_prefix = "dcbb9e9d"' in vgg
    assert 'sha256_reported = "dcbb9e9d' in vgg
    assert 'status = "full hash that others reported; pinned on first sight in your lock"' in vgg
    assert "fingerprint" not in vgg
    densenet = text[text.index('key = "DenseNet169:imagenet1k_v1"') :].partition("\n\n")[0]
    assert 'status = "prefix; full hash pinned on first sight in your lock"' in densenet
    embedded = Lock.read(SHIPPED_LOCK).entries["ResNet20:cifar10"]
    assert (embedded.tensors, embedded.status) == (116, "full hash")
    assert embedded.fingerprint == "5bbf23efcd37b406975154f24db928ed4d53164c86ca179f8ed7e3613d86a029"


def test_what_is_written_is_read_and_written_the_same(lock: Path) -> None:
    read = Lock.read(lock)
    assert (list(read.entries), read.serial) == (["ResNet50:a", "ResNet50:b", "ResNet50:c"], 7)
    assert read.entries["ResNet50:a"] == entry("a")
    assert read.entries["ResNet50:b"].status == "full hash, tensors not seen yet"
    assert lock.read_text() == read.render()
    lock.write_bytes(lock.read_bytes().replace(b"\n", b"\r\n"))  # as a checkout on Windows may do
    assert Lock.read(lock).entries == read.entries


def rows(text: str) -> list[str]:
    return text.split("\n[[weights]]")


EDITS: dict[str, tuple[Callable[[str], str], str]] = {
    "a digit of a hash": (
        lambda t: t.replace(HASHES["b"], HASHES["b"][:-1] + ("0" if HASHES["b"][-1] != "0" else "1")),
        r"line 21: the row ResNet50:b was edited",
    ),
    "a digit of a prefix": (lambda t: t.replace("0123abcd", "0123abce"), r"line 34: the row ResNet50:c was edited"),
    "a digit of the size": (lambda t: t.replace("size_bytes = 123", "size_bytes = 124", 1), r"line 6: the row ResNet50:a was edited"),
    "a licence": (lambda t: t.replace('"MIT"', '"GPL-3.0"', 1), r"line 6: the row ResNet50:a was edited"),
    "a row removed": (
        lambda t: "\n[[weights]]".join(rows(t)[:2] + rows(t)[3:]),
        r"line 4: the checksum is not that of .*: a row was removed",
    ),
    "the last row removed": (lambda t: "\n[[weights]]".join(rows(t)[:3]), r"line 4: the checksum"),
    "all rows removed": (lambda t: rows(t)[0], r"line 4: the checksum"),
    "a row twice": (lambda t: t + "\n[[weights]]" + rows(t)[3], r"line 47: ResNet50:c stands twice, first in line 34"),
    "rows in another order": (
        lambda t: "\n[[weights]]".join([rows(t)[0], rows(t)[2].rstrip() + "\n", *rows(t)[1:2]]),
        r"line 19: ResNet50:a stands behind ResNet50:b",
    ),
    "a byte order mark": (lambda t: "\ufeff" + t, r"line 1: it begins with a byte order mark"),
    "eight digits for a hash": (
        lambda t: t.replace(HASHES["a"], "0123abcd", 1),
        r"line 8: sha256 is 64 lower-case hex digits, got 8 characters, '0123abcd'; a prefix is",
    ),
    "a hash in capitals": (lambda t: t.replace(HASHES["a"], HASHES["a"].upper(), 1), r"line 8: sha256 is 64 lower-case"),
    "a prefix that calls itself a hash": (
        lambda t: t.replace("sha256_prefix", "sha256"),
        r"line 36: sha256 is 64 lower-case hex digits, got 8",
    ),
    "an unknown key": (lambda t: t.replace("size_bytes = 123", 'sizes = "x"', 1), r"line 9: unknown key 'sizes'"),
    "an unknown key above the rows": (lambda t: t.replace("serial = 7", "serial = 7\nowner = 1"), r"line 4: unknown key 'owner'"),
    "a key twice": (lambda t: t.replace("size_bytes = 123", "size_bytes = 123\nsize_bytes = 123", 1), r"can be read \(.*line 10"),
    "a later version": (lambda t: t.replace("version = 2", "version = 3"), r"line 2: version is 2, got 3"),
    "another serial": (lambda t: t.replace("serial = 7", "serial = 9"), r"line 4: the checksum"),
    "a serial that is none": (lambda t: t.replace("serial = 7", "serial = -7"), r"line 3: serial is a number of at least 1"),
    "a status that promises more": (
        lambda t: t.replace("prefix; full hash pinned on first sight in your lock", "full hash"),
        r"line 44: status is 'prefix; full",
    ),
    "another checksum": (lambda t: t.replace('checksum = "', 'checksum = "0', 1), r"line 4: the checksum"),
    "a comment": (lambda t: t.replace("serial = 7", "serial = 7  # mine"), r"line 3: expected 'serial = 7', got 'serial = 7  # mine'"),
    "the end is missing": (lambda t: t[:-30], r"can be read|line 35"),
    "a merge": (lambda t: t.replace("serial = 7", "<<<<<<< ours\nserial = 7"), r"no TOML that can be read \(.*line 3"),
    "rows in one line": (
        lambda t: t.split("\n[[weights]]")[0] + 'weights = [{key = "a"}]\n',
        r"the rows are not written as \[\[weights\]\]",
    ),
    "size as a word": (lambda t: t.replace("size_bytes = 123", 'size_bytes = "123"', 1), r"line 9: size_bytes is a int, got '123'"),
    "no source": (
        lambda t: t.replace('sources = [\n    "https://example.org/a.pth",\n    "hf://acme/wheels",\n]', "sources = []"),
        "line 11: sources is a list of at least one URL",
    ),
    "a hash and a prefix": (
        lambda t: t.replace("size_bytes = 123", 'sha256_prefix = "0123abcd"\nsize_bytes = 123', 1),
        r"line 6: ResNet50:a has a full hash and a prefix",
    ),
    "no licence": (lambda t: t.replace('license = "MIT"\n', "", 1), r"line 6: license missing"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_lock_is_refused_with_its_line(lock: Path, edit: str) -> None:
    change, message = EDITS[edit]
    text = lock.read_text()
    lock.write_text(change(text))
    assert lock.read_text() != text
    with pytest.raises(BadLock, match=rf"{lock}.*{message}") as caught:
        Lock.read(lock)
    assert "Restore it from version control, or delete it and let `zoo lock` write it anew" in str(caught.value)


def test_a_lock_of_an_earlier_version_is_kept_aside_for_its_hashes(lock: Path) -> None:
    lock.write_text(lock.read_text().replace("version = 2", "version = 1"))
    with pytest.raises(BadLock, match=r"version is 2, got 1\. Keep it aside, let `zoo lock` write the same names anew, and compare"):
        Lock.read(lock)


def test_a_lock_that_is_no_text_is_refused(lock: Path) -> None:
    lock.write_bytes(lock.read_bytes() + b"\xff")
    with pytest.raises(BadLock, match="it is not UTF-8"):
        Lock.read(lock)
    lock.write_bytes(b"#" * (17 << 20))
    with pytest.raises(BadLock, match="17,825,792 bytes"):
        Lock.read(lock)


def test_a_fingerprint_without_the_hash_of_its_file_is_refused(lock: Path) -> None:
    lock.write_text(Lock({one.key: one for one in (entry("a"), entry("b", sha256=None))}, 1).render())
    with pytest.raises(BadLock, match=r"line \d+: ResNet50:b has a fingerprint and no sha256"):  # or it would be passed over in silence
        Lock.read(lock)


@pytest.mark.parametrize("how", ["permission", "disk", "folder"])
def test_a_lock_that_can_not_be_opened_is_told(lock: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "folder":
        lock.unlink()
        lock.mkdir()
    else:
        error = PermissionError(13, "Permission denied") if how == "permission" else OSError(5, "Input/output error")
        monkeypatch.setattr("weights.lock.read_regular", lambda path: (_ for _ in ()).throw(error))
    with pytest.raises(BadLock, match=rf"{lock} can't be read \(.*\): a lock is a file that zoo lock NAME writes; look who may read it"):
        Lock.read(lock)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_pipe_in_a_locks_place_is_not_waited_for(lock: Path) -> None:
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(BadLock, match="It is no regular file"):
        Lock.read(lock)


def test_a_lock_that_is_not_there_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none.lock", tmp_path / "file" / "none.lock"):
        with pytest.raises(NoSuchFile, match=rf"there is no lock {path}: check the path; zoo lock NAME writes one"):
            Lock.read(path)


def test_a_lock_is_replaced_at_once_or_not_at_all(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lock.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            Lock({}, 8).write(lock)
    assert lock.read_bytes() == before
    assert [path.name for path in lock.parent.iterdir()] == ["weights.lock"]


@pytest.mark.parametrize("fact", [{"license": ""}, {"license": "MIT\nor not"}, {"sources": ()}, {"size_bytes": -1}])
def test_a_lock_that_could_not_be_read_again_does_not_replace_a_good_one(lock: Path, fact: dict[str, Any]) -> None:
    before = lock.read_bytes()
    with pytest.raises(BadLock, match=rf"{lock} stays as it is, what would be written can't be read again: .*line \d+: {next(iter(fact))}"):
        Lock({"ResNet50:a": entry("a", **fact)}, 8).write(lock)
    assert lock.read_bytes() == before
    assert [path.name for path in lock.parent.iterdir()] == ["weights.lock"]


@pytest.mark.parametrize("fact", [{"license": ""}, {"license": "MIT\nor not"}, {"license": "MIT "}, {"tag": "a\nb"}, {"tag": ""}])
def test_a_record_that_no_lock_could_name_is_refused(fact: dict[str, str]) -> None:
    with pytest.raises(weights.BadRecord, match=f"{next(iter(fact))} is one line of text"):
        weights.adhoc("ResNet20", "https://example.org/w.safetensors", **{"tag": "mine"} | fact)


def test_the_nearest_lock_upwards_is_the_projects(lock: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = lock.parent / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert project_lock() == lock
    assert find_locks() == [lock, SHIPPED_LOCK]
    user_lock().write_bytes(lock.read_bytes())
    assert find_locks() == [lock, user_lock(), SHIPPED_LOCK]
    assert user_lock() == own_cache.parent / "weights.lock"
    monkeypatch.chdir(SHIPPED_LOCK.parent / "registry")
    assert project_lock() not in (SHIPPED_LOCK, lock)
    monkeypatch.chdir(user_lock().parent)
    assert project_lock() is None


def test_a_fingerprint_is_of_the_tensors_not_of_the_file() -> None:
    a, b = b"\1\2", b"\3\4\5\6"
    order = {"x": ("U8", [2], (0, 2)), "y": ("F32", [1], (2, 6))}
    turned = {"y": ("F32", [1], (0, 4)), "x": ("U8", [2], (4, 6))}
    plain = made(order, a + b)
    assert fingerprint(plain, "p") == fingerprint(made(turned, b + a, metadata='"__metadata__": {"by": "me"}, '), "q")
    assert fingerprint(plain, "p")[0] == 2
    others = [
        made(order, b"\1\3" + b),
        made(order | {"y": ("I32", [1], (2, 6))}, a + b),
        made(order | {"y": ("F32", [1, 1], (2, 6))}, a + b),
        made({"z" if name == "x" else name: facts for name, facts in order.items()}, a + b),
    ]
    assert len({fingerprint(one, "p")[1] for one in (plain, *others)}) == 5
    for broken in (b"", b"\0" * 8, plain[:-1], struct.pack("<Q", 1 << 40) + b"{}", made({"x": ("U8", [9], (0, 9))}, a)):
        with pytest.raises(MalformedFile, match="p has no fingerprint"):
            fingerprint(memoryview(broken), "p")


def made(tensors: dict[str, tuple[str, list[int], tuple[int, int]]], data: bytes, metadata: str = "") -> memoryview:
    body = ", ".join(f'"{n}": {{"dtype": "{d}", "shape": {s}, "data_offsets": {list(o)}}}' for n, (d, s, o) in tensors.items())
    header = f"{{{metadata}{body}}}".encode()
    return memoryview(struct.pack("<Q", len(header)) + header + data)


def test_two_locks_side_by_side(lock: Path, tmp_path: Path) -> None:
    other = Lock({one.key: one for one in (entry("a", license="GPL-3.0"), entry("d"))}, 3)
    found = {(one.key, one.what): (one.locked, one.found) for one in diff(Lock.read(lock), other)}
    assert found == {
        ("ResNet50:a", "license"): ("MIT", "GPL-3.0"),
        ("ResNet50:b", "entry"): (HASHES["b"], None),
        ("ResNet50:c", "entry"): ("0123abcd", None),
        ("ResNet50:d", "entry"): (None, HASHES["d"]),
    }
    assert diff(other, other) == []


def test_a_check_names_what_the_registry_says_otherwise(lock: Path) -> None:
    found = {(one.key, one.what): (one.locked, one.found) for one in check(lock).differences}
    assert found[("ResNet50:a", "record")] == ("one in the registry", None)
    assert found[("ResNet50:c", "sha256")] == ("a full hash", "only 0123abcd")
    vgg = Lock.read(SHIPPED_LOCK).entries["VGG19:imagenet1k_v1"]
    wrong = Entry(vgg.key, "safetensors", vgg.sources, "MIT", HASHES["a"])
    Lock({vgg.key: wrong}, 8).write(lock)
    found = {one.what: (one.locked, one.found) for one in check(lock).differences}
    assert found == {
        "record sha256": (HASHES["a"], "dcbb9e9d"),
        "record format": ("safetensors", "pytorch"),
        "record license": ("MIT", vgg.license),
    }


def test_the_shipped_lock_passes_its_own_check() -> None:
    audit = check(SHIPPED_LOCK)
    assert (audit.differences, audit.proven) == ([], ["ResNet20:cifar10"])
    assert audit.entries == len(audit.absent) + 1


def test_changed_upstream_is_a_hash_mismatch() -> None:
    assert issubclass(weights.ChangedUpstream, HashMismatch)
    assert issubclass(weights.NotLocked, weights.UnknownWeights)
