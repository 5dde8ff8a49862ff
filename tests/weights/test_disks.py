"""Disks as they are: full, read-only, blind to case, without links or modes. The kernel says no, not a patch; tmpfs is in `test_mounts`."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hubserver import HubServer

import weights
from weights import Cache, Checkpoint
from weights.errors import BadRecord, CacheNotWritable

Make = Callable[..., Checkpoint]
Cached = Callable[[], dict[str, bytes]]
ENTRY = re.compile(r"[0-9a-z][0-9a-z._-]*|CACHEDIR\.TAG")
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
"""Names that Windows has for devices."""
LIMITED = """
import resource, sys, weights
row = weights.adhoc("ResNet20", sys.argv[1])
for limit in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        print(limit, len(weights.open_weights(row, progress=False)), flush=True)
    except weights.WeightsError as error:
        print(limit, type(error).__name__, "set ZOO_CACHE to a folder on another disk" in str(error), flush=True)
"""
WITHOUT_PRIVILEGES = """
import ctypes, os, sys, weights
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0  # root may do what modes forbid
for url in sys.argv[1:]:
    try:
        print(len(weights.open_weights(weights.adhoc("ResNet20", url), progress=False)), flush=True)
    except weights.WeightsError as error:
        print(type(error).__name__, str(error), flush=True)
"""


def run(code: str, *arguments: object) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_disk_that_is_full_at_any_byte_leaves_nothing_half_done(hub: HubServer, data: bytes, cached: Cached, own_cache: Path) -> None:
    """The kernel refuses every byte beyond a limit, as a full disk does; with room again the next call needs no help."""
    url, limits = hub.file("w.safetensors", data), (0, 1, 60, 100_000, len(data) - 1)
    assert run(LIMITED, url, *limits) == [f"{limit} NoSpace True" for limit in limits]
    assert cached() == {}
    assert run(LIMITED, url, len(data)) == [f"{len(data)} {len(data)}"]
    assert list(cached().values()) == [data]
    assert (own_cache / "CACHEDIR.TAG").read_text().endswith(".\n")


def test_folders_that_may_not_be_written_serve_what_they_have(hub: HubServer, data: bytes, cached: Cached, own_cache: Path) -> None:
    warm, cold = hub.file("w.safetensors", data), hub.file("cold.safetensors", data)
    assert run(WITHOUT_PRIVILEGES, warm) == [str(len(data))]
    folders = [own_cache, *(path for path in own_cache.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        first, second = run(WITHOUT_PRIVILEGES, warm, cold)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert first == str(len(data))
    assert re.fullmatch(r"CacheNotWritable .* can't be written \(.*Permission denied.*set ZOO_CACHE to a folder that can\.", second)
    assert list(cached().values()) == [data]
    assert run(WITHOUT_PRIVILEGES, warm, cold) == [str(len(data))] * 2


def test_a_cache_whose_files_may_not_be_read_says_so(hub: HubServer, data: bytes, own_cache: Path) -> None:
    url = hub.file("w.safetensors", data)
    run(WITHOUT_PRIVILEGES, url)
    own_cache.chmod(0)
    try:
        (told,) = run(WITHOUT_PRIVILEGES, url)
    finally:
        own_cache.chmod(0o755)
    assert told.startswith("CacheNotWritable ")
    assert "set ZOO_CACHE" in told


@pytest.mark.parametrize("refused", ["chmod", "symlink", "link", "flock", "utime"])
def test_a_disk_without_links_modes_or_locks_is_as_good_as_any(
    hub: HubServer, record: Make, data: bytes, cached: Cached, sha: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAT has no links and refuses modes that it can't keep; shares of a network have no locks."""
    import fcntl

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for owner in {"chmod": (os, Path), "symlink": (os, Path), "link": (os,), "flock": (fcntl,), "utime": (os,)}[refused]:
        monkeypatch.setattr(owner, refused if owner is not Path or refused != "symlink" else "symlink_to", refuse)
    row = record(hub.file("w", data))
    for mode in ("load", "stamp", "load"):
        assert bytes(weights.open_weights(row, verify=mode)) == data
    assert cached() == {f"blobs/sha256/{sha[:2]}/{sha}": data}
    blob = Cache().blob(sha)
    os.truncate(blob, 5) if os.access(blob, os.W_OK) else (blob.unlink(), blob.write_bytes(data[:5]))
    assert bytes(weights.open_weights(row)) == data  # quarantine works there too


def test_no_name_in_a_cache_needs_a_disk_that_tells_case_or_takes_long_ones(
    hub: HubServer, record: Make, data: bytes, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a source is called: lower case, so that a disk that is blind to it sees the same names; short; no device of Windows."""
    made = {own_cache}
    real = Path.replace

    def seen(path: Path, target: Path) -> Path:
        made.update((path, target))
        return real(path, target)

    monkeypatch.setattr(Path, "replace", seen)
    for name in ("Con.SAFETENSORS", "con.safetensors", "w" * 200, "a b", "aux."):
        hub.fail("cut", after=1000, times=1)
        row = record(hub.file(name, data))
        assert bytes(weights.open_weights(row, progress=False)) == data
    blob = weights.get(row).path
    blob.chmod(0o644)
    blob.write_bytes(b"damaged")
    weights.open_weights(row, progress=False)
    made |= set(own_cache.rglob("*"))
    names = {str(path.relative_to(own_cache)) for path in made if path.is_relative_to(own_cache)}
    assert len({name.casefold() for name in names}) == len(names) > 20
    assert max(map(len, names)) < 200  # Windows takes 260 in all
    for part in {part for name in names for part in Path(name).parts}:
        assert ENTRY.fullmatch(part), part
        assert not RESERVED.fullmatch(part), part
        assert len(part) <= 143, part  # what an encrypting disk takes
    assert not [path for path in made if path.is_symlink()]


def test_two_tags_that_differ_by_case_alone_would_be_one_file_on_some_disks(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(data)
    first = weights.add(tmp_path / "w.safetensors", "ResNet20", "Mine", num_classes=10)
    with pytest.raises(BadRecord, match=r"ResNet20:Mine exists, and mine would have its file on a disk that is blind to case"):
        weights.add(tmp_path / "w.safetensors", "ResNet20", "mine", num_classes=10)
    with pytest.raises(BadRecord):
        weights.add(tmp_path / "w.safetensors", "ResNet20", "mine", num_classes=10, replace=True)
    assert weights.find("ResNet20", "Mine") == first


def test_a_registry_that_may_not_be_written_is_an_error_that_says_so(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.safetensors").write_bytes(data)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(tmp_path / "file" / "registry"))
    with pytest.raises(CacheNotWritable, match="can't be written"):
        weights.add(tmp_path / "w.safetensors", "ResNet20", "mine", num_classes=10)
