"""What `load` returns is what was hashed; a stamp spares the hash and never outlives a change."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

import weights
from weights import Installed, reading
from weights.cache import stamp_of
from weights.errors import CorruptCache, SourceUnavailable


@pytest.fixture
def installed(tmp_path: Path, safetensors: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Five and a bit chunks, installed long enough ago, by a clock that the test owns."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors(5 * reading.CHUNK + 12_345))
    found = weights.get(weights.adhoc("ResNet20", str(path)))
    monkeypatch.setattr(reading, "now", lambda: time.time() + 2 * reading.SETTLED_S)
    return found


def damage(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize("blake3", [True, False])
def test_the_bytes_are_right_writable_and_private(installed: Installed, blake3: bool) -> None:
    content = installed.path.read_bytes()
    installed = installed if blake3 else replace(installed, blake3=None)
    for mode in ("load", "stamp", "stamp"):
        data = weights.load(installed, mode)
        assert bytes(data) == content
        data[0] ^= 1
    assert installed.path.read_bytes() == content


@pytest.mark.parametrize("blake3", [True, False])
@pytest.mark.parametrize("at", [0, reading.CHUNK - 1, reading.CHUNK, 3 * reading.CHUNK + 7, -1])
def test_one_wrong_bit_anywhere_is_found_and_moved_aside(installed: Installed, blake3: bool, at: int) -> None:
    damage(installed.path, at)
    kind = "blake3" if blake3 else "sha256"
    with pytest.raises(CorruptCache, match=rf"expected {kind} [0-9a-f]{{64}}, got [0-9a-f]{{64}}"):
        weights.load(installed if blake3 else replace(installed, blake3=None))
    assert not installed.path.exists()
    assert len(list((weights.Cache().root / "quarantine").iterdir())) == 1


def test_another_length_is_found(installed: Installed) -> None:
    for size in (0, 100):
        os.truncate(installed.path, size)
        with pytest.raises(CorruptCache, match=rf"expected 10,4\d\d,\d\d\d bytes, got {size}"):
            weights.load(installed, "stamp")
        weights.get(weights.adhoc("ResNet20", installed.source))
    installed.path.unlink()
    with pytest.raises(CorruptCache, match="can't be opened: No such file"):
        weights.load(installed)


def test_a_file_that_shrinks_while_it_is_read_is_found(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    real = io.FileIO.readinto
    opened = os.fdopen

    class Shrinking(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            os.truncate(installed.path, 3 * reading.CHUNK)
            return real(self, buffer)

    monkeypatch.setattr(
        os, "fdopen", lambda fd, *a, **k: Shrinking(fd, closefd=False) if not k.get("closefd", True) else opened(fd, *a, **k)
    )
    with pytest.raises(CorruptCache, match="it shrank to 6,291,456 bytes while it was read"):
        weights.load(installed)


def test_a_file_that_another_thread_rewrites_is_right_or_refused(installed: Installed) -> None:
    content, stop = installed.path.read_bytes(), threading.Event()
    installed.path.chmod(0o644)

    def scribble() -> None:
        with installed.path.open("r+b") as file:
            while not stop.is_set():
                for piece in (b"\0" * 64, content[reading.CHUNK * 2 : reading.CHUNK * 2 + 64]):
                    file.seek(reading.CHUNK * 2)
                    file.write(piece)
                    file.flush()

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(20):
            try:
                assert bytes(weights.load(installed)) == content
            except CorruptCache:
                aside = next((weights.Cache().root / "quarantine").iterdir())
                aside.rename(installed.path)
    finally:
        stop.set()
        thread.join()


def test_a_stamp_spares_the_hash(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(weights.load(installed, "load").obj, int)
    weights.load(installed, "stamp")
    monkeypatch.setattr(reading, "_read", None)
    data = weights.load(installed, "stamp")
    assert isinstance(data.obj, mmap.mmap)
    assert not data.readonly


def test_a_stamp_does_not_outlive_a_change_that_keeps_size_and_time(installed: Installed) -> None:
    weights.load(installed, "stamp")
    before = installed.path.stat()
    damage(installed.path)
    os.utime(installed.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    installed.path.chmod(0o444)
    with pytest.raises(CorruptCache, match="expected blake3"):
        weights.load(installed, "stamp")


def test_a_copy_with_other_inode_is_checked_anew(installed: Installed) -> None:
    weights.load(installed, "stamp")
    content = installed.path.read_bytes()
    installed.path.unlink()
    installed.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptCache):
        weights.load(installed, "stamp")


def test_a_file_that_changed_just_now_gets_no_stamp(
    tmp_path: Path, safetensors: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w.safetensors").write_bytes(safetensors(10))
    found = weights.get(weights.adhoc("ResNet20", str(tmp_path / "w.safetensors")))
    changed = found.path.stat().st_ctime
    monkeypatch.setattr(reading, "now", lambda: changed + reading.SETTLED_S / 2)
    weights.load(found, "stamp")
    assert weights.Cache().stamp(found.sha256) is None
    monkeypatch.setattr(reading, "now", lambda: changed + reading.SETTLED_S * 2)
    weights.load(found, "stamp")
    assert weights.Cache().stamp(found.sha256) is not None


@pytest.mark.parametrize("stamp", ["", "{}", '{"stamp": [1, 2]}', '{"stamp": "x"}'])
def test_a_damaged_stamp_is_no_stamp(installed: Installed, stamp: str) -> None:
    weights.load(installed, "stamp")
    (weights.Cache().root / "stamps" / f"{installed.sha256}.json").write_text(stamp)
    damage(installed.path)
    with pytest.raises(CorruptCache):
        weights.load(installed, "stamp")


def test_an_unknown_way_to_verify_is_refused(installed: Installed) -> None:
    with pytest.raises(ValueError, match=r'"load" or "stamp", got \'no\''):
        weights.load(installed, "no")


def test_a_file_of_the_users_is_read_where_it_lies(tmp_path: Path, own_cache: Path) -> None:
    content = os.urandom(3 * reading.CHUNK + 1)
    (tmp_path / "w.pth").write_bytes(content)
    (tmp_path / "link.pth").symlink_to("w.pth")
    for name in ("w.pth", "link.pth"):
        sha256, data = weights.read_file(tmp_path / name)
        assert (sha256, bytes(data)) == (hashlib.sha256(content).hexdigest(), content)
    assert not own_cache.exists()


def test_what_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    reasons = {"absent": "No such", "empty": "is empty", "loop": "(?i)symlink|symbolic", "pipe": "no regular file", ".": "no regular file"}
    for name, why in reasons.items():
        with pytest.raises(SourceUnavailable, match=why):
            weights.read_file(tmp_path / name)


@pytest.mark.parametrize("by", ["variable", "keyword"])
def test_frozen_a_stamp_is_not_believed_by_whoever_loads_directly(
    installed: Installed, safetensors: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    other, cache = safetensors(5 * reading.CHUNK + 12_345, 7), weights.Cache()
    if by == "keyword":
        installed = weights.get(weights.adhoc("ResNet20", installed.source, tag="test", sha256=installed.sha256), frozen=True)
    installed.path.chmod(0o644)
    installed.path.write_bytes(other)
    cache.keep_stamp(installed.sha256, stamp_of(installed.path.stat()))
    forged = replace(installed, blake3=blake3(other).hexdigest())
    if by == "variable":
        assert bytes(weights.load(forged, "stamp")) == other  # not frozen, a cache is as trusted as its folder
        monkeypatch.setenv("ZOO_FROZEN", "1")
    with pytest.raises(CorruptCache, match=f"expected sha256 {installed.sha256}"):
        weights.load(forged, "stamp")
