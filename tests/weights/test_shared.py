"""One cache for two users, and masks for the modes of files: each serves what it may, and says what it may not."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import weights
from weights import Cache
from weights.errors import CacheNotWritable

Bytes = Callable[..., bytes]
ADA, BOB = 65531, 65532
"""Users that nobody else is."""
needs_root = pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can be two users")


def as_user(user: int, mask: int, action: Callable[[], object]) -> int:
    """Do something as another user, in a process of its own: 0, 3 if the cache refused, 9 if anything else went wrong."""
    child = os.fork()
    if not child:
        code = 9
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.umask(mask)
            os.environ["HOME"] = "/nonexistent"
            action()
            code = 0
        except CacheNotWritable as error:
            code = 3 if "set ZOO_CACHE" in str(error) else 9
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def loads(path: Path) -> Callable[[], object]:
    """What reads the weights of a file through the cache, and compares them."""
    data = path.read_bytes()

    def action() -> None:
        assert bytes(weights.open_weights(weights.adhoc("ResNet20", path.as_uri()), progress=False)) == data

    return action


@pytest.fixture
def files(safetensors: Bytes, tmp_path: Path, own_cache: Path) -> list[Path]:
    """Two files that everybody may read, below folders that everybody may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    own_cache.mkdir(parents=True, exist_ok=True)
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for seed, path in enumerate(paths):
        path.write_bytes(safetensors(5000, seed))
        path.chmod(0o644)
    return paths


@needs_root
def test_a_cache_that_two_users_may_write_serves_both(files: list[Path], own_cache: Path) -> None:
    own_cache.chmod(0o777)
    one, two = map(loads, files)
    assert as_user(ADA, 0o000, one) == 0
    assert as_user(BOB, 0o000, one) == 0
    assert as_user(BOB, 0o000, two) == 0
    assert as_user(ADA, 0o000, two) == 0
    blob = Cache().blob(hashlib.sha256(files[0].read_bytes()).hexdigest())
    blob.chmod(0o644)
    blob.write_bytes(b"damaged")
    os.chown(blob, ADA, ADA)
    assert as_user(BOB, 0o000, one) == 0, "what one user's process damaged, another's mends"
    assert not list((own_cache / "partial").iterdir())


@needs_root
def test_a_cache_of_one_user_serves_others_what_it_has_and_says_what_they_may_not(files: list[Path], own_cache: Path) -> None:
    os.chown(own_cache, ADA, ADA)
    own_cache.chmod(0o755)
    one, two = map(loads, files)
    assert as_user(ADA, 0o022, one) == 0
    assert as_user(BOB, 0o022, one) == 0
    assert as_user(BOB, 0o022, two) == 3
    assert as_user(ADA, 0o022, two) == 0
    assert as_user(BOB, 0o022, two) == 0


@needs_root
def test_a_private_cache_is_refused_to_others_in_words(files: list[Path], own_cache: Path) -> None:
    os.chown(own_cache, ADA, ADA)
    own_cache.chmod(0o755)
    one, _ = map(loads, files)
    assert as_user(ADA, 0o077, one) == 0
    assert as_user(BOB, 0o077, one) == 3


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_files_of_the_cache_have_the_modes_that_the_mask_leaves(mask: int, files: list[Path], own_cache: Path) -> None:
    before = os.umask(mask)
    try:
        loads(files[0])()
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in own_cache.rglob("*")}
    blobs = [path for path in found if path.is_file() and path.parent.parent.name == "sha256"]
    assert blobs
    assert all(found[path] == 0o444 for path in blobs), "nobody writes a blob, and who may enter the folder may read it"
    assert all(mode & mask == 0 for path, mode in found.items() if path not in blobs)
