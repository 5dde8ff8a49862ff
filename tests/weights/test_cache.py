"""The cache: one name a content, whole files or none, no pickle, and damage that is found."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint, cache, part
from weights.errors import CacheNotWritable, CorruptCache, HashMismatch, MalformedFile, SourceUnavailable, UnsupportedFormat

Make = Callable[..., Checkpoint]
Cached = Callable[[], dict[str, bytes]]
PICKLE = b"PK\x03\x04 a pickle " + bytes(5000)


def converter(data: bytes) -> Callable[[Path, Path, Checkpoint], None]:
    def convert(source: Path, destination: Path, row: Checkpoint) -> None:
        assert source.read_bytes() == PICKLE
        destination.write_bytes(data)

    return convert


def test_the_layout_is_that_of_its_docstring(hub: HubServer, record: Make, data: bytes, sha: str, own_cache: Path) -> None:
    row = record(hub.file("w", data))
    weights.get(row)
    assert (own_cache / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert json.loads((own_cache / "layout.json").read_text()) == {"version": 1}
    ref = json.loads((own_cache / "refs" / f"{hashlib.sha256(row.sources[0].encode()).hexdigest()}.json").read_text())
    assert {"source", "commit", "source_sha256", "sha256", "blake3", "size", "seen"} <= set(ref)
    assert (own_cache / "blobs" / "sha256" / sha[:2] / sha).read_bytes() == data
    assert not [path for path in own_cache.rglob("*") if path.is_symlink()]


def test_a_later_layout_is_left_alone(record: Make, own_cache: Path, tmp_path: Path, data: bytes) -> None:
    own_cache.mkdir()
    (own_cache / "layout.json").write_text('{"version": 2}')
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(CacheNotWritable, match="has layout 2 and this version writes 1"):
        weights.get(record((tmp_path / "w").as_uri()))


def test_no_pickle_stays(hub: HubServer, record: Make, data: bytes, sha: str, cached: Cached, own_cache: Path) -> None:
    pickled = hashlib.sha256(PICKLE).hexdigest()
    row = record(hub.file("w.pth", PICKLE), format="pytorch", sha256=pickled)
    installed = weights.get(row, to_safetensors=converter(data))
    assert (installed.sha256, installed.source_sha256) == (sha, pickled)
    assert cached() == {f"blobs/sha256/{sha[:2]}/{sha}": data}
    assert json.loads((own_cache / "derived" / f"{pickled}.1.json").read_text())["sha256"] == sha
    assert weights.get(row) == installed  # warm: needs no converter
    elsewhere = record("https://example.org/same.pth", format="pytorch", sha256=pickled)
    assert weights.get(elsewhere).path == installed.path


def test_a_foreign_file_needs_a_converter(record: Make) -> None:
    with pytest.raises(UnsupportedFormat, match="is a pytorch file: pass to_safetensors"):
        weights.get(record("https://example.org/w.pth", format="pytorch"))


@pytest.mark.parametrize("error", [ValueError("bad"), OSError("torn"), MalformedFile("odd"), MemoryError(), RecursionError()])
def test_a_converter_that_fails_leaves_nothing(hub: HubServer, record: Make, cached: Cached, error: Exception) -> None:
    def convert(source: Path, destination: Path, row: Checkpoint) -> None:
        destination.write_bytes(b"half")
        raise error

    with pytest.raises(MalformedFile):
        weights.get(record(hub.file("w.pth", PICKLE), format="pytorch"), to_safetensors=convert)
    assert cached() == {}


def test_a_file_that_changed_between_its_proof_and_its_conversion_is_refused(
    hub: HubServer, record: Make, data: bytes, cached: Cached, own_cache: Path
) -> None:
    def convert(source: Path, destination: Path, row: Checkpoint) -> str:
        source.write_bytes(PICKLE[::-1])  # another process, that has the same cache
        destination.write_bytes(data)
        return hashlib.sha256(source.read_bytes()).hexdigest()

    with pytest.raises(HashMismatch, match="changed on this disk after it had come"):
        weights.get(record(hub.file("w.pth", PICKLE), format="pytorch"), to_safetensors=convert)
    assert cached() == {}


def test_a_converter_that_writes_nonsense_is_not_believed(hub: HubServer, record: Make, cached: Cached) -> None:
    with pytest.raises(MalformedFile, match="is no safetensors file"):
        weights.get(record(hub.file("w.pth", PICKLE), format="pytorch"), to_safetensors=converter(b"nonsense!"))
    assert cached() == {}


def test_a_pickle_that_a_killed_process_left_is_swept_at_the_next_start(hub: HubServer, record: Make, data: bytes, cached: Cached) -> None:
    code = f"""
import os, signal, sys, weights
def convert(source, destination, row):
    destination.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
weights.get(weights.adhoc("ResNet20", {hub.file("w.pth", PICKLE)!r}), to_safetensors=convert)
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, timeout=300)
    assert run.returncode == -signal.SIGKILL
    assert PICKLE in cached().values()
    weights.get(record(hub.file("other", data)))
    assert list(cached().values()) == [data]


@pytest.mark.parametrize("step", ["write", "fsync", "chmod", "replace"])
def test_a_process_killed_at_any_step_leaves_the_cache_right(hub: HubServer, data: bytes, sha: str, cached: Cached, step: str) -> None:
    url = hub.file("w.safetensors", data)
    ended = []
    for nth in (1, 2, 3):
        code = f"""
import os, pathlib, signal, weights
where = pathlib.Path if {step!r} in ("chmod", "replace") else os
real, left = getattr(where, {step!r}), [{nth}]
def fatal(*args, **more):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **more)
setattr(where, {step!r}, fatal)
weights.get(weights.adhoc("ResNet20", {url!r}))
"""
        ended.append(subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode)
        assert all(hashlib.sha256(content).hexdigest() == name[-64:] for name, content in cached().items() if name.startswith("blobs"))
    assert ended[0] == -signal.SIGKILL
    assert set(ended) <= {0, -signal.SIGKILL}  # a step may happen fewer than three times
    assert bytes(weights.open_weights(weights.adhoc("ResNet20", url))) == data
    assert cached() == {f"blobs/sha256/{sha[:2]}/{sha}": data}


def test_a_warm_cache_may_be_read_only(hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    row = record(hub.file("w", data))
    weights.get(row)
    real = os.open

    def read_only(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *args, **more)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    for name in ("rename", "replace", "mkdir", "unlink", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    assert bytes(weights.open_weights(row)) == data
    monkeypatch.setattr("weights.reading.now", lambda: time.time() + 60)
    assert bytes(weights.open_weights(row, verify="stamp")) == data
    with pytest.raises(CacheNotWritable, match=r"Read-only file system.*set ZOO_CACHE to a folder that can"):
        weights.get(record(hub.file("x", data)))


def test_a_cache_below_a_file_is_an_error_that_says_so(hub: HubServer, record: Make, data: bytes, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheNotWritable, match=r"file/cache can't be written .*set ZOO_CACHE"):
        weights.get(record(hub.file("w", data)))


def test_a_cache_filled_beforehand_is_used(record: Make, data: bytes, sha: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    blob = own_cache / "blobs" / "sha256" / sha[:2] / sha
    blob.parent.mkdir(parents=True)
    blob.write_bytes(data)
    assert bytes(weights.open_weights(record("https://example.org/w", sha256=sha))) == data
    blob.write_bytes(data[:-1])
    with pytest.raises(CorruptCache, match=f"expected sha256 {sha}"):
        weights.open_weights(record("https://example.org/w", sha256=sha))


@pytest.mark.parametrize("what", ["pipe", "folder", "link", "dangling"])
def test_what_is_no_file_is_never_read_as_one(
    hub: HubServer, record: Make, data: bytes, what: str, monkeypatch: Any, tmp_path: Path
) -> None:
    row = record(hub.file("w", data))
    installed = weights.get(row)

    def replace() -> None:
        installed.path.unlink()
        if what == "pipe":
            os.mkfifo(installed.path)
        elif what == "folder":
            installed.path.mkdir()
            (installed.path / "x").write_text("")
        else:
            (tmp_path / "good").write_bytes(data)
            installed.path.symlink_to(tmp_path / ("good" if what == "link" else "absent"))

    replace()
    with pytest.raises(CorruptCache):
        weights.load(installed)
    weights.get(row)
    replace()
    assert bytes(weights.open_weights(row)) == data
    replace()
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(CorruptCache, match="it is no regular file"):
        weights.open_weights(row)


@pytest.mark.parametrize("note", ["", "[]", "{", '{"sha256": 3}', '{"sha256": "../../x", "size": 1}', "[" * 100_000, "\xff"])
def test_a_damaged_note_is_no_note(hub: HubServer, record: Make, data: bytes, own_cache: Path, note: str) -> None:
    row = record(hub.file("w", data))
    weights.get(row)
    for path in [*(own_cache / "refs").iterdir(), own_cache / "layout.json"]:
        path.write_text(note, encoding="latin-1")
    assert bytes(weights.open_weights(row)) == data


def test_a_corrected_record_outranks_an_old_note(hub: HubServer, record: Make, safetensors: Callable[..., bytes]) -> None:
    old, new = safetensors(seed=1), safetensors(seed=2)
    url = hub.file("w", old)
    weights.get(record(url))
    hub.file("w", new)
    for facts in ({"sha256": hashlib.sha256(new).hexdigest()}, {"sha256_prefix": hashlib.sha256(new).hexdigest()[:8]}):
        assert bytes(weights.open_weights(record(url, **facts))) == new


def test_parts_of_the_living_are_left_alone_and_those_of_the_dead_taken_over(own_cache: Path) -> None:
    Cache().prepare()
    name = "0" * 64
    mine = part.Part(own_cache / "partial", name, "u")
    mine.write(b"x" * 10)
    mine.remember('"e"', 20)
    part.sweep(own_cache / "partial")
    other = part.Part(own_cache / "partial", name, "u")
    assert (mine.path.exists(), other.size) == (True, 0)
    other.discard()
    mine.release()
    stranger = part.Part(own_cache / "partial", name, "v")
    assert stranger.size == 0  # of another source, which may fail, and costs this one nothing
    stranger.discard()
    heir = part.Part(own_cache / "partial", name, "u")
    assert (heir.size, heir.etag, heir.total) == (10, '"e"', 20)
    assert heir.sha256 == hashlib.sha256(b"x" * 10).hexdigest()
    heir.discard()
    assert list((own_cache / "partial").iterdir()) == []


def test_the_part_of_a_killed_process_is_taken_over_though_nobody_has_reaped_it(own_cache: Path) -> None:
    Cache().prepare()
    code = f"""
import os, signal, pathlib, weights.part
part = weights.part.Part(pathlib.Path({str(own_cache / "partial")!r}), "0" * 64, "u")
part.write(b"x" * 10)
part.remember('"e"', 20)
os.kill(os.getpid(), signal.SIGKILL)
"""
    zombie = subprocess.Popen([sys.executable, "-c", code])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    heir = part.Part(own_cache / "partial", "0" * 64, "u")
    assert (heir.size, heir.foreign) == (10, False)
    heir.discard()
    zombie.wait()


def test_parts_of_another_machine_are_copied_after_ten_idle_minutes_and_deleted_after_an_hour(own_cache: Path) -> None:
    Cache().prepare()
    folder, name = own_cache / "partial", "0" * 64
    foreign = folder / f"{name}.{'a' * 12}.1.1.{'b' * 8}.part"
    foreign.write_bytes(b"x" * 10)
    Path(f"{foreign}.json").write_text('{"url": "u", "etag": "\\"e\\"", "total": 20}')
    fresh = part.Part(folder, name, "u")
    assert fresh.size == 0
    os.utime(foreign, (time.time() - 700, time.time() - 700))
    part.sweep(folder)
    assert foreign.exists()  # it can be resumed
    heir = part.Part(folder, name, "u")
    assert heir.size == 10
    heir.write(b"y")
    assert foreign.read_bytes() == b"x" * 10  # its owner may only sleep
    heir.discard()
    fresh.discard()
    part.sweep(folder, done=name)
    assert foreign.exists()
    for path in (foreign, Path(f"{foreign}.json")):
        os.utime(path, (1, 1))
    part.sweep(folder, done=name)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("known", [True, False])
def test_a_part_that_another_boot_left_is_continued_only_where_a_hash_will_judge_it(
    hub: HubServer, record: Make, data: bytes, sha: str, own_cache: Path, known: bool
) -> None:
    Cache().prepare()
    row = record(hub.file("w", data), sha256=sha if known else None)
    name = sha if known else hashlib.sha256(row.sources[0].encode()).hexdigest()
    left = own_cache / "partial" / f"{name}.{'a' * 12}.1.1.{'b' * 8}.part"
    left.write_bytes(data[:100_000] if known else bytes(100_000))
    note = {"url": row.sources[0], "etag": f'"{sha}"', "total": len(data)}
    Path(f"{left}.json").write_text(json.dumps(note))
    os.utime(left, (1, 1))
    assert bytes(weights.open_weights(row)) == data
    assert [r.range for r in hub.gets()] == ["bytes=100000-" if known else None]


def test_verify_finds_the_damaged_file_moves_it_aside_and_tells_of_it_until_it_is_replaced(
    hub: HubServer, record: Make, safetensors: Callable[..., bytes], own_cache: Path
) -> None:
    rows = [record(hub.file(f"w{seed}", safetensors(100, seed)), tag=f"w{seed}") for seed in range(3)]
    paths = [weights.get(row).path for row in rows]
    everything = weights.verify_all()
    assert [ok for _, ok, _ in everything] == [True] * len(everything)
    assert {row.sources[0] for row in rows} <= {name for name, _, _ in everything}
    paths[1].chmod(0o644)
    paths[1].write_bytes(b"x")
    assert [name for name, ok, _ in weights.verify_all() if not ok] == [rows[1].sources[0]]
    assert not paths[1].exists()
    assert weights.verify(rows[0])[1]
    (aside,) = (own_cache / "quarantine").iterdir()
    said = f"it was damaged, was moved aside earlier, and is missing since: load it once more from where it came; or delete {aside}"
    for _ in range(2):  # as long as it is so, everybody who asks is told
        assert [told for told in weights.verify_all() if not told[1]] == [(rows[1].sources[0], False, said)]
        assert weights.verify(rows[1]) == ("ResNet20:w1", False, said)
    assert weights.verify(replace(rows[1], sources=("https://example.org/other",)))[1:] == (True, "not installed")
    assert weights.verify(weights.get(rows[1]))[1]
    told = {name: (ok, detail) for name, ok, detail in weights.verify_all()}[rows[1].sources[0]]
    assert told == (True, f"sha256 {paths[1].name}; a damaged one was moved to {aside} earlier: look at it, or delete it")
    aside.unlink()
    assert all(ok and "damaged" not in detail for _, ok, detail in weights.verify_all())


@pytest.mark.parametrize("how", ["shorter", "other bytes"])
def test_an_error_made_of_several_ends_each_of_them_once(
    hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    row = record(hub.file("w", data))
    path = weights.get(row).path
    path.chmod(0o644)
    path.write_bytes(data[:-1] if how == "shorter" else data[:-1] + b"?")
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(CorruptCache) as caught:
        weights.open_weights(row)
    for said in (str(caught.value), *caplog.messages):
        assert not re.search(r"\.\s*[.;,]|[;,]\s*\.", said), said
    assert "is damaged: " in " ".join(caplog.messages)


def test_verify_names_the_checkpoint_that_would_replace_a_damaged_file(own_cache: Path) -> None:
    row, mine = weights.find("VGG19"), weights.Cache()
    mine.prepare()
    sha256 = "ab" * 32
    aside = own_cache / "quarantine" / f"{sha256}.{'0' * 8}"
    aside.touch()
    mine.record(row.sources[0], weights.Installed(aside, sha256, sha256, 1, row.sources[0], row.sha256_prefix + "0" * 56), None, None, 1)
    (told,) = (detail for _, ok, detail in weights.verify_all() if not ok)
    assert f"missing since: zoo pull VGG19 --weights {row.tag} fetches it again; or delete {aside}" in told


@pytest.mark.parametrize("below", ["", "cache"])
def test_verify_says_that_the_cache_is_no_folder(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file" / below))
    with pytest.raises(CacheNotWritable, match=r"is no folder that can be read \(Not a directory\): set ZOO_CACHE"):
        weights.verify_all()
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "not yet"))
    assert all(ok for _, ok, _ in weights.verify_all())


def test_a_shipped_file_that_is_missing_is_an_error_unless_another_source_has_it(
    hub: HubServer, record: Make, data: bytes, sha: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weights.get(record("package:registry/absent.safetensors", hub.file("w", data), sha256=sha)).sha256 == sha
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    for source in ("package:registry/absent.safetensors", "package:../pyproject.toml"):
        with pytest.raises(SourceUnavailable, match="is missing there; reinstall kernelzoo"):
            weights.get(record(source, sha256="0" * 64))


def test_a_shipped_file_is_read_in_place_and_never_moved(
    record: Make, data: bytes, sha: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "PACKAGE", tmp_path)
    (tmp_path / "w.safetensors").write_bytes(data)
    row = record("package:w.safetensors", sha256=sha)
    assert bytes(weights.open_weights(row)) == data
    assert not own_cache.exists()
    (tmp_path / "w.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptCache, match=f"expected sha256 {sha}"):
        weights.open_weights(row)
    assert (tmp_path / "w.safetensors").exists()


def test_threads_of_one_process_do_not_disturb_each_other(hub: HubServer, record: Make, data: bytes, cached: Cached) -> None:
    row, found = record(hub.file("w", data)), []
    threads = [threading.Thread(target=lambda: found.append(bytes(weights.open_weights(row)) == data)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    assert len(cached()) == 1
    assert len(hub.gets()) == 1
