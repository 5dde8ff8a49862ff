"""A pipe, a device or a dangling link where a file should lie stops nobody."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import Checkpoint, registry
from weights.cache import key
from weights.errors import BadLock, BadRecord, CacheNotWritable
from weights.part import Part
from weights.sbom import lock_entries

Make = Callable[..., Checkpoint]


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """End what hangs: a pipe without a writer is waited for without end."""

    def late(*_: Any) -> None:
        pytest.fail("it hung")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_for_a_note_is_no_note(hub: HubServer, record: Make, data: bytes, own_cache: Path) -> None:
    row = record(hub.file("w", data))
    weights.get(row)
    note = own_cache / "refs" / f"{key(row.sources[0])}.json"
    note.unlink()
    os.mkfifo(note)
    assert bytes(weights.open_weights(row)) == data
    assert weights.verify_all()[0][1]


def test_a_pipe_for_a_part_or_its_note_is_not_taken_over(tmp_path: Path) -> None:
    orphan = tmp_path / f"{'a' * 64}.{'0' * 12}.0.0.12345678.part"
    os.mkfifo(orphan)
    beside = orphan.with_name(f"{orphan.name}.json")
    beside.write_text(json.dumps({"url": "https://example.org/w", "etag": '"x"', "total": 9}))
    first = Part(tmp_path, "a" * 64, "https://example.org/w")
    assert (first.size, orphan.is_fifo()) == (0, True)
    first.discard()
    beside.unlink()
    os.mkfifo(beside)
    Part(tmp_path, "a" * 64, "https://example.org/w").discard()


@pytest.fixture
def own() -> Path:
    folder = registry.user_folder()
    folder.mkdir(parents=True)
    return folder


def test_a_pipe_among_the_records_is_named(own: Path) -> None:
    os.mkfifo(own / "p.toml")
    with pytest.raises(BadRecord, match=r"p\.toml.*no regular file"):
        weights.find("VGG19")


def test_hidden_files_among_the_records_are_nobodys(own: Path) -> None:
    (own / ".#mine.toml").symlink_to("user@host.123:456")  # Emacs, while it edits mine.toml
    (own / ".mine.toml").write_text("half a [table")
    assert weights.find("VGG19").model == "VGG19"


def test_a_link_to_nowhere_among_the_records_is_named(own: Path) -> None:
    (own / "mine.toml").symlink_to("gone.toml")
    with pytest.raises(BadRecord, match=r"mine\.toml: No such file"):
        weights.find("VGG19")


def test_a_device_is_no_lock() -> None:
    with pytest.raises(BadLock, match=r"/dev/zero can't be read \(It is no regular file\)"):
        lock_entries(Path("/dev/zero"))


def test_a_home_that_can_not_be_entered_stops_nobody(
    hub: HubServer, record: Make, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.safetensors").write_bytes(data)
    closed, stat = tmp_path / "home", Path.stat

    def refused(path: Path, **options: Any) -> os.stat_result:
        if closed in path.parents:  # for root, no mode closes a folder
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.delenv("ZOO_USER_REGISTRY")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(closed))
    monkeypatch.setenv("HOME", str(closed))
    monkeypatch.setattr(Path, "stat", refused)
    assert weights.find("VGG19").model == "VGG19"
    for _ in range(2):
        assert bytes(weights.open_weights(record(hub.file("w", data)))) == data
    weights.gc()
    with pytest.raises(CacheNotWritable):
        weights.add(tmp_path / "mine.safetensors", "VGG19", "mine", num_classes=10)
