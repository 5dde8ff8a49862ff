"""Processes that die, disks that fill, clocks that jump, locks that lie: the cache stays right, and the next call needs no help."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint, cache, part, reading
from weights.cache import key
from weights.errors import CacheNotWritable, CorruptCache, NoSpace, WeightsError
from weights.lock import Lock, user_lock

Make = Callable[..., Checkpoint]
Cached = Callable[[], dict[str, bytes]]
Bytes = Callable[..., bytes]
GET = "import sys, weights; print(weights.get(weights.adhoc('ResNet20', sys.argv[1]), progress=False).sha256)"
LOAD = """
import hashlib, sys, weights
from concurrent.futures import ThreadPoolExecutor
def load(_):
    return hashlib.sha256(weights.open_weights(weights.adhoc("ResNet20", sys.argv[1]), progress=False)).hexdigest()
with ThreadPoolExecutor(int(sys.argv[2])) as pool:
    print(*set(pool.map(load, range(int(sys.argv[2])))))
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], text=True, stdout=-1, stderr=-1)


def check_blobs(cached: Cached) -> None:
    assert all(hashlib.sha256(content).hexdigest() == name[-64:] for name, content in cached().items() if name.startswith("blobs"))


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.long)])
def test_processes_killed_at_random_moments_leave_what_the_next_one_resumes(
    hub: HubServer, safetensors: Bytes, cached: Cached, own_cache: Path, kills: int, record_property: Callable[[str, object], None]
) -> None:
    seed = int(os.environ.get("ZOO_FAULT_SEED", "1"))
    draw, data = random.Random(seed), safetensors(400_000)
    url = hub.file("w.safetensors", data)
    signals, resumed, interrupted = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 0, 0
    for turn in range(kills):
        hub.heal()
        at = draw.choice([0, draw.randrange(len(data)), draw.randrange(len(data))])
        hub.fail("stall", after=at, seconds=60)
        run = start(GET, url)
        until = time.monotonic() + 300
        while not hub.log or hub.log[0].fault != "stall" or hub.log[0].sent < at:  # no late request of a dead one takes the stall away
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(draw.random() * 0.05)
        run.send_signal(draw.choice(signals))
        run.communicate(timeout=300)
        check_blobs(cached)
        parts = [path for path in (own_cache / "partial").iterdir() if path.suffix == ".part"]
        assert len(parts) <= 1, turn
        there = sum(path.stat().st_size for path in parts)
        hub.heal()
        assert bytes(weights.open_weights(weights.adhoc("ResNet20", url), progress=False)) == data
        assert not [name for name in cached() if name.startswith(("partial/", "quarantine/"))]
        assert hub.gets(), f"turn {turn}: the process that was killed at {at} had finished, with exit code {run.returncode}"
        asked = hub.gets()[0].range
        interrupted += there > 0
        resumed += there > 0 and asked == f"bytes={there}-"
        weights.Cache().blob(hashlib.sha256(data).hexdigest()).unlink()
    record_property("resumed", f"{resumed} of {interrupted} that had begun")
    assert resumed >= 0.95 * interrupted


@pytest.mark.parametrize("lock", ["works", "does nothing"])
@pytest.mark.parametrize(("processes", "threads"), [(4, 2), pytest.param(50, 8, marks=pytest.mark.long)])
def test_many_processes_on_one_cold_cache(
    hub: HubServer,
    data: bytes,
    sha: str,
    cached: Cached,
    lock: str,
    processes: int,
    threads: int,
    record_property: Callable[[str, object], None],
) -> None:
    deaf = "import fcntl\nfcntl.flock = lambda fd, how: None\n" if lock != "works" else ""
    url = hub.file("w.safetensors", data)
    runs = [start(deaf + LOAD, url, threads) for _ in range(processes)]
    for run in runs:
        shown, complaint = run.communicate(timeout=300)
        assert (run.returncode, shown.strip()) == (0, sha), complaint
    record_property(f"downloads where the lock {lock}:", len(hub.gets()))
    assert len(hub.gets()) == 1 if lock == "works" else 1 <= len(hub.gets()) <= processes
    assert cached() == {f"blobs/sha256/{sha[:2]}/{sha}": data}


@pytest.mark.parametrize(("processes", "killed"), [(5, 2), pytest.param(50, 10, marks=pytest.mark.long)])
def test_the_living_are_served_while_others_are_killed(
    hub: HubServer, safetensors: Bytes, cached: Cached, processes: int, killed: int
) -> None:
    draw = random.Random(int(os.environ.get("ZOO_FAULT_SEED", "1")))
    files = [safetensors(200_000, seed) for seed in range(3 if processes < 50 else 20)]
    urls = [hub.file(f"w{number}.safetensors", data) for number, data in enumerate(files)]
    runs = [(start(GET, urls[number % len(urls)]), files[number % len(urls)]) for number in range(processes)]
    doomed = draw.sample(range(processes), killed)
    for number in doomed:
        time.sleep(draw.random() * 0.2)
        runs[number][0].kill()
    for number, (run, data) in enumerate(runs):
        shown, complaint = run.communicate(timeout=300)
        if number not in doomed:
            assert shown.strip() == hashlib.sha256(data).hexdigest(), complaint
    check_blobs(cached)
    for url, data in zip(urls, files, strict=True):
        assert bytes(weights.open_weights(weights.adhoc("ResNet20", url), progress=False)) == data
    assert not [name for name in cached() if name.startswith(("partial/", "quarantine/"))]


@pytest.mark.parametrize("how", ["no-op", errno.ENOLCK, errno.EACCES, errno.ENOSYS, errno.EIO])
def test_a_lock_that_fails_or_lies_is_done_without(
    hub: HubServer, record: Make, data: bytes, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        if how != "no-op":
            raise OSError(how, os.strerror(how))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(cache, "LOCK_IDLE_S", 0.5)
    assert bytes(weights.open_weights(record(hub.file("w", data)))) == data


@pytest.mark.parametrize("years", [-10, 0, 10])
def test_a_lock_that_is_held_for_ever_is_waited_for_by_a_clock_that_does_not_jump(
    hub: HubServer, record: Make, data: bytes, years: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_IDLE_S", 0.5)
    row, store, real = record(hub.file("w", data)), cache.Cache(), time.time
    store.prepare()
    left = store.partial / f"{key(row.sources[0])}.{'a' * 12}.1.1.{'b' * 8}.part"
    left.write_bytes(b"x")
    os.utime(left, (real() + 3e8,) * 2)  # of a server whose clock is years ahead
    calls = iter(range(10**6))
    with store.lock(key(row.sources[0])):
        monkeypatch.setattr(time, "time", lambda: real() + (years * 3e7 if next(calls) > 3 else 0))
        began = time.monotonic()
        assert bytes(weights.open_weights(row)) == data
    assert time.monotonic() - began < 300  # by the clock that jumped it would be years


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_jumps_changes_nothing(hub: HubServer, record: Make, data: bytes, years: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row, real = record(hub.file("w", data)), time.time
    for offset in (0, years * 3.15e7, 0):
        monkeypatch.setattr(time, "time", lambda offset=offset: real() + offset)
        for mode in ("load", "stamp", "stamp"):
            assert bytes(weights.open_weights(row, verify=mode)) == data
    assert len(hub.gets()) == 1


def test_times_that_say_nothing_change_nothing(hub: HubServer, record: Make, data: bytes, own_cache: Path) -> None:
    row = record(hub.file("w", data))
    weights.get(row)
    for path in own_cache.rglob("*"):
        os.utime(path, (0, 0))
    for mode in ("load", "stamp"):
        assert bytes(weights.open_weights(row, verify=mode)) == data
    assert weights.gc().removed == ()
    assert len(hub.gets()) == 1


ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int, int], Callable[[], None]]]:
    """Let the nth call of an operation on files fail: (operation, n, errno) -> what mends it."""

    def fail(step: str, nth: int, code: int) -> Callable[[], None]:
        owner: Any = Path if step in ("replace", "mkdir", "chmod", "open", "rename") else os
        real, calls = getattr(owner, step), [0]

        def failing(*arguments: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] >= nth and (step != "open" or "w" in str(arguments[1:])):
                raise OSError(code, os.strerror(code))
            return real(*arguments, **more)

        patch = pytest.MonkeyPatch()
        patch.setattr(owner, step, failing)
        patches.append(patch)
        return patch.undo

    patches: list[pytest.MonkeyPatch] = []
    yield fail
    for patch in patches:
        patch.undo()


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["write", "fsync", "replace", "mkdir", "chmod", "ftruncate", "open"])
def test_a_disk_that_fails_at_any_step_leaves_nothing_half_done(
    hub: HubServer, record: Make, data: bytes, sha: str, cached: Cached, own_cache: Path, step: str, code: int, failing: Any
) -> None:
    row = record(hub.file("w", data))
    for nth in (1, 2, 3):
        mend = failing(step, nth, code)
        try:
            weights.get(row, progress=False)
        except (NoSpace, CacheNotWritable) as error:
            assert ("full" in str(error)) == (code in part.FULL)  # noqa: PT017
            assert "ZOO_CACHE" in str(error)  # noqa: PT017
        mend()
        check_blobs(cached)
        assert not list(own_cache.glob("partial/*"))
    assert bytes(weights.open_weights(row)) == data
    assert cached() == {f"blobs/sha256/{sha[:2]}/{sha}": data}


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be older than they are, for only then a stamp tells that nothing has changed."""
    monkeypatch.setattr(reading, "now", lambda: time.time() + 2 * reading.SETTLED_S)


def test_a_full_disk_does_not_keep_a_warm_cache_from_loading(
    hub: HubServer, record: Make, data: bytes, failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(hub.file("w", data))
    weights.get(row)
    settled(monkeypatch)
    mend = failing("fsync", 1, errno.ENOSPC)
    assert bytes(weights.open_weights(row, verify="stamp")) == data
    mend()


def test_a_full_disk_keeps_no_warm_load_from_its_project_lock_or_pin(
    hub: HubServer, record: Make, data: bytes, sha: str, failing: Any, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = record(hub.file("w", data), sha256_prefix=sha[:8])
    weights.get(row)
    monkeypatch.chdir(tmp_path)
    settled(monkeypatch)
    for step in ("write", "fsync", "mkdir", "utime", "replace", "open"):
        for name in ("used", "seen", "projects", "tensors"):
            rmtree(own_cache / name, ignore_errors=True)
        user_lock().unlink(missing_ok=True)
        Lock({}, 1).write(tmp_path / "weights.lock")  # there is something to write: the pin, notes of project, serial and last use
        mend = failing(step, 1, errno.ENOSPC)
        for mode in ("load", "stamp"):
            assert bytes(weights.open_weights(row, verify=mode)) == data
        mend()
        Lock.read(tmp_path / "weights.lock")
        assert list(own_cache.glob("partial/*")) == []


def test_a_disk_that_fills_while_it_converts_is_no_fault_of_the_file(hub: HubServer, record: Make, data: bytes, cached: Cached) -> None:
    def convert(source: Path, destination: Path, row: Checkpoint) -> None:
        destination.write_bytes(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    row = record(hub.file("w.pth", b"PK\x03\x04 a pickle"), format="pytorch")
    with pytest.raises(NoSpace, match="is full"):
        weights.get(row, to_safetensors=convert)
    assert cached() == {}


def test_a_cache_that_can_not_be_written_serves_what_it_has_and_says_what_it_lacks(
    hub: HubServer, record: Make, data: bytes, failing: Any, own_cache: Path
) -> None:
    warm, cold = record(hub.file("w", data)), record(hub.file("x", data))
    weights.get(warm)
    mends = [failing(step, 1, errno.EROFS) for step in ("mkdir", "replace", "rename", "open", "utime")]
    assert bytes(weights.open_weights(warm)) == data
    with pytest.raises(CacheNotWritable, match=r"can't be written .*Read-only.* set ZOO_CACHE to a folder that can"):
        weights.get(cold)
    for mend in mends:
        mend()


@pytest.mark.parametrize("name", ["with space", "Ünïcödé", "new\nline", "-rf", "a" * 200, "%2e%2e", "[x]*?", "link", "relative"])
def test_a_cache_of_any_name_works(
    hub: HubServer, record: Make, data: bytes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "link":
        (tmp_path / "target").mkdir()
        (tmp_path / "link").symlink_to("target")
    monkeypatch.setenv("ZOO_CACHE", name if name == "relative" else str(tmp_path / name))
    row = record(hub.file("w", data))
    for _ in range(2):
        assert bytes(weights.open_weights(row)) == data
    assert len(hub.gets()) == 1
    assert weights.get(row).path.is_relative_to(tmp_path / name)
    assert weights.gc().removed == ()


def test_a_cache_below_a_home_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, record: Make) -> None:
    monkeypatch.setenv("ZOO_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(CacheNotWritable, match=r"ZOO_CACHE names ~nobody-of-this-name/cache, and there is no such home"):
        weights.get(record("https://weights.invalid/w"))


@pytest.mark.parametrize("bits", [20, pytest.param(200, marks=pytest.mark.long)])
def test_flipped_bits_are_found_and_mended(
    hub: HubServer, record: Make, safetensors: Bytes, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, data = random.Random(3), safetensors(3000)
    row = record(hub.file("w", data))
    path = weights.get(row).path
    for turn in range(bits):
        at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        path.chmod(0o644)
        path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        with monkeypatch.context() as patched:
            if turn % 10 == 0:
                patched.setenv("ZOO_OFFLINE", "1")
                with pytest.raises(CorruptCache):
                    weights.open_weights(row, progress=False)
        assert bytes(weights.open_weights(row, progress=False)) == data


@pytest.mark.parametrize("rounds", [20, pytest.param(500, marks=pytest.mark.long)])
def test_a_blob_that_is_cut_swapped_or_rewritten_while_it_loads_is_right_or_refused(
    hub: HubServer, record: Make, safetensors: Bytes, rounds: int
) -> None:
    data = safetensors(reading.CHUNK + 100_000)
    row, stop = record(hub.file("w", data)), threading.Event()
    path = weights.get(row).path

    def disturb() -> None:
        draw = random.Random(5)
        while not stop.is_set():
            try:
                path.chmod(0o644)
                if (kind := draw.randrange(3)) == 0:
                    os.truncate(path, draw.randrange(len(data)))
                elif kind == 1:
                    other = path.with_name("other")
                    other.write_bytes(data[:-1] + b"?")
                    other.replace(path)
                else:
                    with path.open("r+b") as file:
                        file.seek(draw.randrange(len(data)))
                        file.write(b"\0" * 64)
            except OSError:
                continue  # it is being fetched again
            time.sleep(0.003)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(rounds):
            try:
                assert bytes(weights.open_weights(row, progress=False)) == data
            except WeightsError as error:
                assert str(path) in str(error)  # noqa: PT017
    finally:
        stop.set()
        thread.join()
    path.with_name("other").unlink(missing_ok=True)
    assert bytes(weights.open_weights(row, progress=False)) == data


def test_what_was_loaded_does_not_change_and_does_not_kill_when_its_file_is_cut(hub: HubServer, data: bytes) -> None:
    code = """
import hashlib, os, sys, weights
row = weights.adhoc("ResNet20", sys.argv[1])
found = weights.open_weights(row, progress=False)
path = weights.get(row).path
path.chmod(0o644)
with path.open("r+b") as file:
    file.write(b"overwritten")
os.truncate(path, 1)
print(hashlib.sha256(found).hexdigest())
"""
    run = start(code, hub.file("w.safetensors", data))
    shown, complaint = run.communicate(timeout=300)
    assert (run.returncode, shown.strip()) == (0, hashlib.sha256(data).hexdigest()), complaint


def test_a_cache_of_a_later_layout_is_read_and_never_written(hub: HubServer, record: Make, data: bytes, own_cache: Path) -> None:
    warm = record(hub.file("w", data))
    weights.get(warm)
    (own_cache / "layout.json").write_text('{"version": 2}')
    before = {path: path.stat().st_mtime_ns for path in own_cache.rglob("*") if path.is_file()}
    for mode in ("load", "stamp"):
        assert bytes(weights.open_weights(warm, verify=mode)) == data
    with pytest.raises(CacheNotWritable, match="has layout 2 and this version writes 1"):
        weights.get(record(hub.file("x", data)))
    assert {path: path.stat().st_mtime_ns for path in own_cache.rglob("*") if path.is_file()} == before


def test_a_bad_sector_below_what_a_dead_process_left_costs_only_a_new_start(
    hub: HubServer, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, real = record(hub.file("w", data)), os.read
    store = Cache()
    store.prepare()
    left = part.Part(store.partial, key(row.sources[0]), row.sources[0])
    left.write(data[:1000])
    left.remember(f'"{hashlib.sha256(data).hexdigest()}"', len(data))
    left.release()
    bad = [True]

    def read(fd: int, count: int) -> bytes:
        if bad[0] and count == part.CHUNK:
            bad[0] = False
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, count)

    monkeypatch.setattr(os, "read", read)
    assert bytes(weights.open_weights(row)) == data
    assert [r.range for r in hub.gets()] == [None]
