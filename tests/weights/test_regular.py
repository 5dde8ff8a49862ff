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
from weights.errors import BadLock, BadRecord, CacheNotWritable, NoSpace
from weights.part import Part, disk
from weights.sbom import lock_entries
from zoo.commands import doctor

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
    monkeypatch.delenv("ZOO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(closed))
    monkeypatch.setenv("HOME", str(closed))
    monkeypatch.setattr(Path, "stat", refused)
    assert weights.find("VGG19").model == "VGG19"
    for _ in range(2):
        assert bytes(weights.open_weights(record(hub.file("w", data)))) == data
    weights.gc()
    place = closed / "kernelzoo" / "registry"
    with pytest.raises(CacheNotWritable, match=rf"{place} can't be entered, .*: set HOME, or ZOO_USER_REGISTRY to a folder\.$"):
        weights.add(tmp_path / "mine.safetensors", "VGG19", "mine", num_classes=10)
    with pytest.raises(BadRecord, match=f"only what is in {place} can be removed"):
        weights.remove("VGG19", "imagenet1k_v1")
    found = [one for one in doctor._registry() if one.name == "your own"]
    assert [(one.state, one.found) for one in found] == [("warning", f"{place} can't be entered")]


def test_a_home_that_is_no_folder_is_named_by_its_own_name(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.safetensors").write_bytes(data)
    (tmp_path / "file").touch()
    monkeypatch.delenv("ZOO_USER_REGISTRY")
    monkeypatch.delenv("ZOO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert weights.find("VGG19").model == "VGG19"
    with pytest.raises(CacheNotWritable, match=f"^{tmp_path}/file/kernelzoo/registry can't be entered, .*: set HOME"):
        weights.add(tmp_path / "mine.safetensors", "VGG19", "mine", num_classes=10)


def test_a_cache_that_can_not_be_entered_is_named_as_what_to_set(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.safetensors").write_bytes(data)
    (tmp_path / "file").touch()
    monkeypatch.delenv("ZOO_USER_REGISTRY")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    registry._warn_of_home.cache_clear()
    assert weights.find("VGG19").model == "VGG19"
    assert "file/own/registry can't be entered: nothing of your own is read or kept there; set ZOO_CACHE, or" in caplog.text
    with pytest.raises(CacheNotWritable, match="set ZOO_CACHE to a folder that can"):
        weights.add(tmp_path / "mine.safetensors", "VGG19", "mine", num_classes=10)


def test_a_user_without_any_home_gets_no_folder_called_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "ZOO_CACHE", "ZOO_USER_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert weights.find("VGG19").model == "VGG19"
    with pytest.raises(CacheNotWritable, match="this user has no home folder for the cache: set HOME, or ZOO_CACHE to a folder"):
        weights.get(weights.find("VGG19"))
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_nobody_has_is_a_mistake_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_REGISTRY", "~nobodyatall/tables")
    with pytest.raises(BadRecord, match="ZOO_REGISTRY names ~nobodyatall/tables, and there is no such home: set it to a folder"):
        weights.find("VGG19")
    monkeypatch.delenv("ZOO_REGISTRY")
    monkeypatch.setenv("ZOO_USER_REGISTRY", "~nobodyatall/mine")
    with pytest.raises(BadRecord, match="ZOO_USER_REGISTRY names"):
        weights.find("VGG19")


@pytest.mark.parametrize(
    ("below", "todo"),
    [
        ("cache/partial", "set ZOO_CACHE to a folder that can"),
        ("registry", "set ZOO_USER_REGISTRY to a folder that can"),
        ("mirror/.incoming", "name a folder that can"),
    ],
)
def test_a_folder_that_can_not_be_written_is_named_with_what_names_another(own_cache: Path, below: str, todo: str) -> None:
    folder = own_cache.parent / below
    with pytest.raises(CacheNotWritable, match=rf"^{folder} can't be written \(.*\): {todo}\.$"), disk(folder):
        raise PermissionError(errno.EACCES, "Permission denied")
    with (
        pytest.raises(NoSpace, match=f"^the disk of {folder} is full .*, or {todo.removesuffix(' that can')} on another disk"),
        disk(folder),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
