"""`gc`: what is old goes; what a lock names, what is in use and what can't be fetched again stays."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint, Installed, collecting, part
from weights.cache import BUNDLE
from weights.errors import BadLock, CacheNotWritable, CorruptCache
from weights.lock import Entry, Lock

Make = Callable[..., Checkpoint]
Bytes = Callable[..., bytes]
DAY = 86_400.0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder without a lock above it; a file may go the moment after its last use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collecting, "GRACE_S", 0)
    return tmp_path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    real = time.time
    return lambda days: monkeypatch.setattr(collecting.time, "time", lambda: real() + days * DAY)


@pytest.fixture
def three(hub: HubServer, record: Make, safetensors: Bytes) -> list[Installed]:
    return [weights.get(record(hub.file(f"w{seed}", safetensors(1000 * (seed + 1), seed)))) for seed in range(3)]


def lock(folder: Path, *hashes: str) -> Path:
    path = folder / "weights.lock"
    Lock({h: Entry(f"ResNet20:{h[:4]}", "safetensors", ("hf://o/n/f",), "MIT", sha256=h) for h in hashes}, serial=1).write(path)
    return path


def test_what_nobody_used_for_long_goes_the_largest_first(three: list[Installed], later: Callable[[float], None]) -> None:
    assert weights.gc().removed == ()
    later(31)
    foreseen = weights.gc(dry_run=True)
    assert all(one.path.exists() for one in three)
    assert [one.path for one in foreseen.removed] == [one.path for one in reversed(three)]
    assert foreseen.freed_bytes == sum(one.size_bytes for one in three)
    assert {one.why for one in foreseen.removed} == {"not used for 31 days"}
    assert weights.gc() == foreseen
    assert not any(one.path.exists() for one in three)
    assert list((Cache().root / "used").iterdir()) == list((Cache().root / "stamps").iterdir()) == []


def test_a_use_is_noticed(three: list[Installed], later: Callable[[float], None]) -> None:
    used = Cache().root / "used" / three[1].sha256
    for way in (lambda: weights.load(three[1]), lambda: weights.get(weights.adhoc("ResNet20", three[1].source, format="safetensors"))):
        os.utime(used, (1, 1))
        way()
        assert time.time() - used.stat().st_mtime < 60
    os.utime(used, (time.time() + 25 * DAY,) * 2)
    later(31)
    assert [one.path for one in weights.gc().removed] == [three[2].path, three[0].path]


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_jumped_when_the_last_use_was_noted_expires_nothing(three: list[Installed], years: int) -> None:
    for one in three:
        os.utime(Cache().root / "used" / one.sha256, (max(0, time.time() + years * 365 * DAY),) * 2)
    assert weights.gc().removed == ()  # the inode's own time says when it came
    os.utime(Cache().root / "used" / three[0].sha256, (0, 0))
    assert weights.gc().removed == ()


def test_what_a_lock_names_stays_though_nobody_uses_it(
    three: list[Installed], elsewhere: Path, later: Callable[[float], None], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = lock(elsewhere, three[0].sha256)
    (elsewhere / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(elsewhere / "deep" / "er")
    (own_cache.parent / "registry").mkdir(exist_ok=True)
    lock(own_cache.parent, three[1].sha256)
    later(3650)
    found = weights.gc(0)
    gone = {one.path for one in found.removed}  # the user's own lock names what was ever used, and keeps none of it
    assert (gone, found.locked, found.locks) == ({three[1].path, three[2].path}, 1, (project,))
    monkeypatch.chdir("/")
    found = weights.gc(0)  # called from elsewhere: the project that used this cache is remembered
    assert (found.removed, found.locks) == ((), (project,))
    project.unlink()
    assert [one.path for one in weights.gc(0).removed] == [three[0].path]


def test_where_there_is_no_cache_the_command_says_so(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.commands.app import main

    assert main(["gc"]) == 0
    assert capsys.readouterr().out == f"there is no cache at '{own_cache}', so there is nothing to remove\n"
    assert not own_cache.exists()


def test_a_dry_run_writes_nothing(three: list[Installed], elsewhere: Path, own_cache: Path) -> None:
    project = lock(elsewhere, three[0].sha256)
    weights.get(weights.adhoc("ResNet20", three[0].source, format="safetensors"))
    project.unlink()
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in own_cache.rglob("*")}
    assert list((own_cache / "projects").iterdir())
    assert len(weights.gc(0, dry_run=True).removed) == 3
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in own_cache.rglob("*")} == before
    assert len(weights.gc(0).removed) == 3
    assert list((own_cache / "projects").iterdir()) == []


def test_what_a_project_on_a_disk_that_is_not_mounted_names_stays_until_its_note_goes(
    three: list[Installed],
    elsewhere: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from zoo.commands.app import main

    (elsewhere / "disk" / "project").mkdir(parents=True)
    project = lock(elsewhere / "disk" / "project", three[0].sha256)
    monkeypatch.chdir(project.parent)
    weights.get(weights.adhoc("ResNet20", three[0].source, format="safetensors"))
    (note,) = (own_cache / "projects").iterdir()
    facts = json.loads(note.read_text())
    facts["stamp"][0] += 1  # it lay on another disk than the folder where that is mounted
    note.write_text(json.dumps(facts))
    monkeypatch.chdir("/")
    rmtree(elsewhere / "disk")
    found = weights.gc(0)
    assert ({one.path for one in found.removed}, found.unreachable) == ({three[1].path, three[2].path}, ((project, note),))
    assert main(["gc", "--keep-days", "0"]) == 0
    assert f"kept what '{project}' named, whose disk is not mounted; to let go of it: rm {note}" in capsys.readouterr().out
    note.unlink()
    assert [one.path for one in weights.gc(0).removed] == [three[0].path]


def test_a_project_that_was_deleted_with_its_folder_keeps_nothing(
    three: list[Installed], elsewhere: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "project").mkdir()
    monkeypatch.chdir(lock(elsewhere / "project", three[0].sha256).parent)
    weights.get(weights.adhoc("ResNet20", three[0].source, format="safetensors"))
    monkeypatch.chdir("/")
    rmtree(elsewhere / "project")
    assert (len(weights.gc(0).removed), list((own_cache / "projects").iterdir())) == (3, [])


def test_a_bundles_conversion_never_makes_ones_own_outdated(hub: HubServer, record: Make, safetensors: Bytes, own_cache: Path) -> None:
    pickle = b"PK\x03\x04 a pickle"
    row = record(hub.file("w.pth", pickle), format="pytorch", sha256=hashlib.sha256(pickle).hexdigest())
    own = weights.get(row, to_safetensors=lambda source, made, row: made.write_bytes(safetensors(500, 1)) and None)
    theirs = weights.get(record(hub.file("other", safetensors(500, 2)), tag="other"))
    Cache().derive(replace(theirs, source_sha256=own.source_sha256), BUNDLE)
    os.utime(own_cache / "derived" / f"{own.source_sha256}.1.json", (1, 1))
    for note in (own_cache / "refs").glob("*"):
        note.unlink()
    assert weights.get(row).sha256 == own.sha256
    assert [one.path for one in weights.gc().removed] == [theirs.path]


def test_a_project_whose_weights_were_fetched_into_this_cache_is_remembered(
    hub: HubServer, record: Make, data: bytes, elsewhere: Path, sha: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = lock(elsewhere, sha)
    installed = weights.get(record(hub.file("w", data)))
    monkeypatch.chdir("/")
    found = weights.gc(0)
    assert (found.locks, found.removed, installed.path.exists()) == ((project,), (), True)


def test_a_lock_names_the_served_file_and_what_was_made_of_it_stays(hub: HubServer, record: Make, data: bytes, elsewhere: Path) -> None:
    served = b"PK\x03\x04 a pickle"
    row = record(hub.file("w.pth", served), format="pytorch")
    installed = weights.get(row, to_safetensors=lambda source, destination, row: destination.write_bytes(data) and None)
    lock(elsewhere, hashlib.sha256(served).hexdigest())
    assert weights.gc(0).locked == 1
    assert installed.path.exists()


@pytest.mark.parametrize("text", ["weights = 3", "[[weights]\n", "weights = [1]", "\xff"])
def test_a_lock_that_can_not_be_read_stops_everything(three: list[Installed], elsewhere: Path, text: str) -> None:
    (elsewhere / "weights.lock").write_text(text, encoding="latin-1")
    with pytest.raises(BadLock, match=r"weights\.lock can't be read .* Nothing was removed"):
        weights.gc(0)
    assert all(one.path.exists() for one in three)


def test_the_only_copy_of_what_was_added_stays(three: list[Installed], tmp_path: Path, data: bytes) -> None:
    (tmp_path / "mine.safetensors").write_bytes(data)
    row = weights.add(tmp_path / "mine.safetensors", "ResNet20", "mine", num_classes=10)
    (tmp_path / "mine.safetensors").unlink()
    assert len(weights.gc(0).removed) == 3
    assert bytes(weights.open_weights(row)) == data


def test_a_source_that_was_collected_must_give_the_same_again(hub: HubServer, record: Make, safetensors: Bytes) -> None:
    row = record(hub.file("w", safetensors(seed=1)))
    first = weights.get(row)
    weights.gc(0)
    hub.file("w", safetensors(seed=2))
    with pytest.raises(weights.HashMismatch, match=f"sha256 {first.sha256}"):
        weights.get(row)
    hub.file("w", safetensors(seed=1))
    assert weights.get(row) == first


def test_what_an_older_converter_made_goes_when_a_later_one_has_made_it_anew(
    hub: HubServer, record: Make, safetensors: Bytes, own_cache: Path
) -> None:
    row = record(hub.file("w.pth", b"PK\x03\x04 a pickle"), format="pytorch", sha256=hashlib.sha256(b"PK\x03\x04 a pickle").hexdigest())
    made = []
    for version in (9, 10):

        def convert(source: Path, destination: Path, row: Checkpoint, version: int = version) -> None:
            destination.write_bytes(safetensors(500, version))

        convert.version = version  # pyright: ignore[reportFunctionMemberAccess]
        for note in (own_cache / "refs").glob("*"):
            note.unlink()
        if made:
            made[0].path.rename(own_cache / "aside")
        made.append(weights.get(row, to_safetensors=convert))
    (own_cache / "aside").rename(made[0].path)
    for note in (own_cache / "refs").glob("*"):
        note.unlink()
    assert weights.get(row) == made[1]  # 10 is later than 9
    os.utime(own_cache / "derived" / f"{row.sha256}.9.json", (1, 1))
    found = weights.gc()
    assert [(one.path, one.why) for one in found.removed] == [(made[0].path, "a later version of the converter has made it anew")]
    assert [note.name.split(".")[1] for note in (own_cache / "derived").iterdir()] == ["10"]


def test_parts_of_the_dead_go_at_once_and_of_unknown_machines_after_an_hour(own_cache: Path, three: list[Installed]) -> None:
    mine = part.Part(own_cache / "partial", "0" * 64, "u")
    mine.write(b"x" * 10)
    mine.remember('"e"', 20)
    foreign = own_cache / "partial" / f"{'1' * 64}.{'a' * 12}.1.1.{'b' * 8}.part"
    foreign.write_bytes(b"x")
    stray = own_cache / "partial" / "somebody's notes.txt"
    stray.write_text("")
    assert weights.gc().removed == ()
    os.utime(foreign, (time.time() - 3700,) * 2)
    assert [one.path for one in weights.gc().removed] == [foreign]
    mine.release()
    assert {one.kind for one in weights.gc().removed} == {"part"}
    assert list((own_cache / "partial").iterdir()) == [stray]


def test_quarantine_is_kept_for_a_week(three: list[Installed], own_cache: Path, later: Callable[[float], None]) -> None:
    Cache().quarantine(three[0].path, "for the test")
    three[1].path.unlink()
    three[1].path.mkdir()
    Cache().quarantine(three[1].path, "for the test")
    later(6)
    assert weights.gc().removed == ()
    later(8)
    assert [one.kind for one in weights.gc().removed] == ["quarantine"] * 2
    assert list((own_cache / "quarantine").iterdir()) == []


def test_a_cache_that_is_not_there_or_not_ours_is_no_traceback(monkeypatch: pytest.MonkeyPatch, three: list[Installed]) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(CacheNotWritable, match=r"can't be removed \(Permission denied\)"):
            weights.gc(0)
    monkeypatch.setenv("ZOO_CACHE", "/nowhere/at/all")
    assert weights.gc(0).removed == ()
    with pytest.raises(ValueError, match="keep_days is at least 0"):
        weights.gc(-1)


def test_a_cache_that_can_not_be_written_loads_though_no_use_can_be_noted(
    three: list[Installed], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for note in (own_cache / "used").iterdir():
        note.unlink()
    for name in ("touch", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "utime", refuse)
    assert len(weights.load(three[0])) == three[0].size_bytes


@pytest.mark.parametrize("grace_s", [0, 60])
@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_collecting_while_others_load_costs_them_a_download_at_most(
    hub: HubServer,
    record: Make,
    data: bytes,
    rounds: int,
    grace_s: float,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setattr(collecting, "GRACE_S", grace_s)
    row, ended = record(hub.file("w", data), sha256=hashlib.sha256(data).hexdigest()), threading.Event()

    def collect() -> None:
        while not ended.is_set():
            weights.gc(0)

    thread = threading.Thread(target=collect)
    thread.start()
    right = 0
    try:
        for _ in range(rounds):
            try:
                assert bytes(weights.open_weights(row, progress=False)) == data
                right += 1
            except CorruptCache as error:  # collected twice between the look and the opening
                assert "can't be opened" in str(error)  # noqa: PT017
    finally:
        ended.set()
        thread.join()
    record_property(f"right with a grace of {grace_s} s:", f"{right}, {len(hub.gets())} downloads")
    if grace_s:  # without it, every file may be gone again before it is opened: never wrong, and told
        assert (right, len(hub.gets())) == (rounds, 1)
    assert bytes(weights.open_weights(row)) == data


def test_the_command_shows_what_goes(three: list[Installed], capsys: pytest.CaptureFixture[str], elsewhere: Path) -> None:
    from zoo.commands.app import main

    lock(elsewhere, three[0].sha256)
    assert main(["gc", "--keep-days", "0", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert three[2].path.name in shown
    assert "MB would be freed" in shown
    assert "1 locked or your own" in shown
    assert main(["gc", "--keep-days", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [Path(one["path"]).name for one in told["removed"]] == [three[2].sha256, three[1].sha256]
    assert told["freed_bytes"] == three[1].size_bytes + three[2].size_bytes
    assert main(["gc", "--keep-days", "0"]) == 0
    assert "0.0 MB freed" in capsys.readouterr().out


def test_a_warm_use_is_enough_for_a_project_to_be_remembered(
    hub: HubServer, record: Make, data: bytes, elsewhere: Path, sha: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(hub.file("w", data))
    installed = weights.get(row)
    project = lock(elsewhere, sha)
    weights.get(row)
    monkeypatch.chdir("/")
    found = weights.gc(0)
    assert (found.locks, installed.path.exists()) == ((project,), True)
