"""One cache for two users, and masks for the modes of files: each serves what it may, and says what it may not."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import weights
from weights import Cache
from weights.errors import WeightsError
from weights.inventory import inventory

Bytes = Callable[..., bytes]
ADA, BOB = 65531, 65532
"""Users that nobody else is."""
needs_root = pytest.mark.skipif(
    os.name != "posix" or os.getuid() != 0 or any(not folder.stat().st_mode & 0o001 for folder in Path(weights.__file__).resolve().parents),
    reason="only root can be two users, and both have to reach this package",
)


def as_user(user: int, mask: int, action: Callable[[], object]) -> int:
    """Do something as another user, in a process of its own: 0, 3 if it was refused in words of ours, 9 if anything else went wrong."""
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
        except WeightsError as error:
            code = 3 if "ZOO_" in str(error) else 9
            os.write(2, f"{error}\n".encode())
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
def place() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are shut again whenever another of its processes begins."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def shared(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of both users."""
    monkeypatch.setenv("ZOO_CACHE", str(place / "cache"))
    for name, variable in (("own", "ZOO_USER_REGISTRY"), ("hf", "HF_HOME"), ("torch", "TORCH_HOME")):
        monkeypatch.setenv(variable, str(place / name))
    (place / "cache").mkdir()
    return place / "cache"


@pytest.fixture
def files(safetensors: Bytes, place: Path) -> list[Path]:
    """Two files that everybody may read."""
    paths = [place / "one.safetensors", place / "two.safetensors"]
    for seed, path in enumerate(paths):
        path.write_bytes(safetensors(5000, seed))
        path.chmod(0o644)
    return paths


@needs_root
def test_a_cache_that_two_users_may_write_serves_both(files: list[Path], shared: Path) -> None:
    shared.chmod(0o777)
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
    assert not list((shared / "partial").iterdir())


@needs_root
def test_a_cache_of_one_user_serves_others_what_it_has_and_says_what_they_may_not(files: list[Path], shared: Path) -> None:
    os.chown(shared, ADA, ADA)
    shared.chmod(0o755)
    one, two = map(loads, files)
    assert as_user(ADA, 0o022, one) == 0
    assert as_user(BOB, 0o022, one) == 0
    assert as_user(BOB, 0o022, two) == 3
    assert as_user(ADA, 0o022, two) == 0
    assert as_user(BOB, 0o022, two) == 0


@needs_root
def test_a_private_cache_is_refused_to_others_in_words(files: list[Path], shared: Path) -> None:
    os.chown(shared, ADA, ADA)
    shared.chmod(0o755)
    one, _ = map(loads, files)
    assert as_user(ADA, 0o077, one) == 0
    assert as_user(BOB, 0o077, one) == 3


KEEPING: dict[str, Callable[[], object]] = {
    "gc": lambda: weights.gc(keep_days=0),
    "verify": lambda: weights.verify_all(),
    "list": lambda: inventory(),
}


@needs_root
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (first, second)
        if (first, second) in ((0o000, 0o077), (0o022, 0o000), (0o077, 0o022))
        else pytest.param(first, second, marks=pytest.mark.long)
        for first in (0o000, 0o022, 0o077)
        for second in (0o000, 0o022, 0o077)
    ],
    ids="{:03o}".format,
)
def test_whatever_the_masks_each_call_of_each_user_is_done_or_refused_in_words(
    first: int, second: int, files: list[Path], shared: Path
) -> None:
    """In a folder that both may write; what one user's mask keeps from the other is refused, and nothing else goes wrong."""
    shared.chmod(0o777)
    one, two = map(loads, files)
    assert as_user(ADA, first, one) == 0
    for name, action in {"load": one, "load another": two, **KEEPING}.items():
        assert as_user(BOB, second, action) == (3 if first == 0o077 or (first and name == "load another") else 0), name
    for name, action in {"load": one, "load another": two, **KEEPING}.items():
        assert as_user(ADA, first, action) in ((0,) if second == 0 else (0, 3)), name


@needs_root
@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.long)], ids=["below one that is closed", "closed itself"])
@pytest.mark.parametrize("variable", ["ZOO_CACHE", "ZOO_USER_REGISTRY", "ZOO_REGISTRY", "ZOO_MIRROR", "HF_HOME", "TORCH_HOME"])
def test_a_folder_that_a_variable_names_and_the_user_may_not_read_is_said_or_done_without(
    variable: str, inside: bool, files: list[Path], shared: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.chmod(0o777)
    (place / "closed").mkdir(mode=0o700)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    monkeypatch.setenv(variable, str(place / "closed" / "in" if inside else place / "closed"))
    of_hub = weights.adhoc("ResNet20", "hf://acme/wheels")
    calls: dict[str, Callable[[], object]] = {"load": loads(files[0]), "of the hub": lambda: weights.get(of_hub, progress=False)}
    calls |= {**KEEPING, "find": lambda: weights.find("ResNet20"), "all": lambda: weights.checkpoints()}
    done = {name: as_user(BOB, 0o022, action) for name, action in calls.items()}
    refusing = {"ZOO_CACHE": {"load", *KEEPING}, "ZOO_USER_REGISTRY": {*calls}, "ZOO_REGISTRY": {"find", "all", *KEEPING}}
    assert 9 not in done.values(), done
    assert {name for name, code in done.items() if code == 3} >= refusing.get(variable, set()), done


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_files_of_the_cache_have_the_modes_that_the_mask_leaves(mask: int, files: list[Path], shared: Path) -> None:
    before = os.umask(mask)
    try:
        loads(files[0])()
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in shared.rglob("*")}
    blobs = [path for path in found if path.is_file() and path.parent.parent.name == "sha256"]
    assert blobs
    assert all(found[path] == 0o444 for path in blobs), "nobody writes a blob, and who may enter the folder may read it"
    assert all(mode & mask == 0 for path, mode in found.items() if path not in blobs)
