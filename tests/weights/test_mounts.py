"""A disk of a megabyte that fills, one that is mounted read-only, one without inodes, one that follows no links: real ones, of the kernel.

Mounting needs a name space of its own, which not every machine lets one have, so `make faults-long` runs these:

    unshare --user --map-root-user --mount python -m pytest -m mounts tests/weights/test_mounts.py
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint, collecting
from weights.bundle import bundle
from weights.errors import CacheNotWritable, NoSpace
from weights.lock import Entry, Lock

pytestmark = pytest.mark.mounts
Make = Callable[..., Checkpoint]
Bytes = Callable[..., bytes]
Remount = Callable[[str], None]
SIZE = 1 << 20


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place))
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def cache(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZOO_CACHE", str(disk / "cache"))
    return disk / "cache"


def left(cache: Path) -> list[str]:
    kinds = ("blobs", "partial", "quarantine")
    return [path.name for kind in kinds for path in (cache / kind).rglob("*") if path.is_file()]


@pytest.mark.parametrize("free", [0, 4096, 3 * 4096, SIZE // 2, SIZE - 30 * 4096])
def test_a_disk_that_fills_leaves_nothing_and_with_room_again_the_next_call_succeeds(
    hub: HubServer, record: Make, safetensors: Bytes, disk: Path, cache: Path, free: int
) -> None:
    data = safetensors(SIZE)
    row = record(hub.file("w", data))
    (disk / "others").write_bytes(bytes(SIZE - free))
    for _ in range(2):
        with pytest.raises(NoSpace, match="set ZOO_CACHE"):
            weights.get(row, progress=False)
        assert left(cache) == []
    mount("-o", f"remount,size={8 * SIZE}", str(disk))
    assert bytes(weights.open_weights(row, progress=False)) == data
    assert left(cache) == [hashlib.sha256(data).hexdigest()]


def test_a_disk_that_announces_too_little_room_is_not_begun(hub: HubServer, record: Make, safetensors: Bytes, cache: Path) -> None:
    data = safetensors(SIZE)
    with pytest.raises(NoSpace, match=r"bytes are needed in .*, [\d,]+ are free"):
        weights.get(record(hub.file("w", data), size_bytes=len(data)), progress=False)
    assert hub.gets() == []


@pytest.mark.parametrize("inodes", [2, 6, 14, 16, 18])
def test_a_disk_without_inodes_is_full(hub: HubServer, record: Make, data: bytes, disk: Path, cache: Path, inodes: int) -> None:
    mount("-o", f"remount,nr_inodes={inodes}", str(disk))
    row = record(hub.file("w", data))
    with pytest.raises(NoSpace):
        weights.get(row, progress=False)
    assert set(left(cache)) <= {hashlib.sha256(data).hexdigest()}  # it is whole, and only its note is missing
    mount("-o", "remount,nr_inodes=1000", str(disk))
    assert bytes(weights.open_weights(row, progress=False)) == data


def test_a_disk_that_is_mounted_read_only_serves_what_it_has(
    hub: HubServer, record: Make, data: bytes, disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, cold = record(hub.file("w", data)), record(hub.file("cold", data))
    weights.get(warm, progress=False)
    mount("-o", "remount,ro", str(disk))
    for mode in ("load", "stamp"):
        assert bytes(weights.open_weights(warm, verify=mode)) == data
    with pytest.raises(CacheNotWritable, match=r"Read-only file system.*set ZOO_CACHE to a folder that can"):
        weights.get(cold, progress=False)
    monkeypatch.setattr(collecting, "GRACE_S", 0)
    with pytest.raises(CacheNotWritable):
        weights.gc(0)
    mount("-o", "remount,rw", str(disk))
    assert bytes(weights.open_weights(cold, progress=False)) == data


def test_a_disk_on_which_no_link_leads_anywhere_is_as_good_as_any(
    hub: HubServer, record: Make, data: bytes, disk: Path, cache: Path
) -> None:
    mount("-o", "remount,nosymfollow", str(disk))
    (disk / "link").symlink_to("cache")
    with pytest.raises(OSError, match="symbolic"):
        (disk / "link").stat()
    row = record(hub.file("w", data))
    for mode in ("load", "stamp", "load"):
        assert bytes(weights.open_weights(row, verify=mode)) == data


def test_a_disk_that_fills_under_a_load_costs_a_loader_nothing(hub: HubServer, record: Make, data: bytes, disk: Path, cache: Path) -> None:
    row = record(hub.file("w", data))
    weights.get(row, progress=False)
    with contextlib.suppress(OSError), (disk / "others").open("wb") as file:
        while file.write(bytes(4096)):
            pass
    for mode in ("load", "stamp", "load"):
        assert bytes(weights.open_weights(row, verify=mode)) == data


def test_a_bundle_and_a_lock_on_a_full_disk_leave_what_was_there(hub: HubServer, record: Make, safetensors: Bytes, disk: Path) -> None:
    data = safetensors(SIZE)
    row = record(hub.file("w", data), num_classes=10)
    installed = weights.get(row, progress=False)
    assert installed.path == Cache().blob(hashlib.sha256(data).hexdigest())  # on another disk
    (disk / "zoo.tar").write_bytes(b"as it was")
    lock = Lock({"ResNet20:a": Entry("ResNet20:a", "safetensors", ("https://o/f",), "MIT", sha256=installed.sha256)}, serial=1)
    lock.write(disk / "weights.lock")
    before = (disk / "weights.lock").read_bytes()
    with pytest.raises(NoSpace):
        bundle([row], disk / "zoo.tar")
    (disk / "others").write_bytes(bytes(SIZE - 2 * 4096))
    more = {f"ResNet20:{n}": Entry(f"ResNet20:{n}", "safetensors", ("https://o/f",), "MIT", sha256=installed.sha256) for n in range(99)}
    with pytest.raises(OSError, match="No space left"):
        Lock(more, serial=2).write(disk / "weights.lock")
    assert {path.name for path in disk.iterdir()} == {"zoo.tar", "weights.lock", "others"}
    assert (disk / "zoo.tar").read_bytes() == b"as it was"
    assert (disk / "weights.lock").read_bytes() == before
