"""`weights.lock`: which bytes a name means. One form of writing it, and a reader that takes no other.

    version = 2
    serial = 7                          # grows with every change, so that an older lock is noticed
    checksum = "…"                      # of all rows: notices one that is gone
    [[weights]]                         # sorted by key
    key = "ResNet50:imagenet1k_v2"      # or a source that was named: "hf://org/repo"
    sha256 = "…"                        # of the file that the sources serve; or sha256_prefix
    check = "…"                         # of this row: notices an edited digit, and in which row

The sums are no signatures: whoever may write the file can write them too. They stop a slip of the editor and a merge that lost a row.
Three locks are asked: the project's (the nearest `weights.lock` upwards of the working folder), the user's own (beside the user's
registry), and the one that ships.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast

from weights.digests import WEAK, in_words
from weights.documents import read_toml
from weights.errors import BadLock, NoSuchFile
from weights.part import fresh, sweep
from weights.registry import user_folder
from weights.regular import read_regular
from weights.whole import write_whole

NAME = "weights.lock"
SHIPPED_LOCK = Path(__file__).parent / NAME
VERSION = 2
MOST_BYTES = 16 << 20
HEAD = "# Which bytes a name means. Written by `zoo lock`, checked at every reading; an edit by hand is refused.\n"
FULL = "full hash"
PREFIX = "prefix; full hash pinned on first sight in your lock"
ANNOUNCED = "no hash recorded, the Hub announces it when asked; pinned on first sight in your lock"
NOTHING = "no hash recorded; pinned on first sight in your lock"
DIGEST = "{}, weaker than a SHA-256; full hash pinned on first sight in your lock"
REPORTED = "full hash that others reported; pinned on first sight in your lock"
UNSEEN = ", tensors not seen yet"
_KINDS: dict[str, tuple[type, str]] = {
    "key": (str, r"\S(.*\S)?"),
    "sha256": (str, r"[0-9a-f]{64}"),
    "sha256_prefix": (str, r"[0-9a-f]{6,63}"),
    "sha256_reported": (str, r"[0-9a-f]{64}"),
    "digest": (str, WEAK),
    "size_bytes": (int, ""),
    "format": (str, r"\w+"),
    "sources": (list, ""),
    "license": (str, ".+"),
    "tensors": (int, ""),
    "fingerprint": (str, r"[0-9a-f]{64}"),
    "status": (str, ".+"),
    "check": (str, r"[0-9a-f]{16}"),
}
"""Of each value, in the order in which they are written: its type, and the pattern of a text."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a lock knows of one name.

    Attributes:
        key: "ResNet50:imagenet1k_v2", or the source that was named.
        format: of the file that the sources serve.
        sources: URLs in the order in which they are tried; of the Hub with its commit, where that is known.
        license: SPDX identifier, or "unstated".
        sha256: of the file that the sources serve, where all of it is known.
        sha256_prefix: its first hex digits, where only those are.
        sha256_reported: what others found who had the file; in the lock that ships alone.
        size_bytes: of that file.
        tensors: how many the safetensors file has, that was made of it or that it is.
        fingerprint: of those tensors, see `weights.fingerprint`.
        digest: "md5:…" or "sha1:…" that its publisher states of that file.
    """

    key: str
    format: str
    sources: tuple[str, ...]
    license: str
    sha256: str | None = None
    sha256_prefix: str | None = None
    size_bytes: int | None = None
    tensors: int | None = None
    fingerprint: str | None = None
    sha256_reported: str | None = None
    digest: str | None = None

    @property
    def known(self) -> str | None:
        """What is known of the bytes, the strongest of it: the full hash, its first digits, or a digest that is no SHA-256."""
        return self.sha256 or self.sha256_prefix or self.digest

    @property
    def status(self) -> str:
        """Say in words what is known of the bytes; only a full hash proves any."""
        if self.sha256 or self.sha256_reported or self.sha256_prefix:
            known = FULL if self.sha256 else REPORTED if self.sha256_reported else PREFIX
        elif self.digest:
            known = DIGEST.format(in_words(self.digest))
        else:
            known = ANNOUNCED if any(source.startswith("hf://") for source in self.sources) else NOTHING
        return known + (UNSEEN if self.sha256 and not self.fingerprint else "")

    @property
    def commit(self) -> str | None:
        """The commit of the Hub's repository, where one of the sources names it."""
        found = (re.match(r"hf://[^@]+@([0-9a-f]{40})(/|$)", source) for source in self.sources)
        return next((match[1] for match in found if match), None)


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock file as it was read.

    Attributes:
        entries: by key.
        serial: grows with every change.
        path: where it lies; None of one that is not written yet.
    """

    entries: Mapping[str, Entry]
    serial: int = 0
    path: Path | None = None

    @staticmethod
    def read(path: Path) -> Lock:
        """Read a lock file.

        Raises:
            BadLock: it is not as `render` writes it; the message names file and line.
            NoSuchFile: there is none.
        """
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NoSuchFile(f"there is no lock {path}: check the path; zoo lock NAME writes one.") from error
        except OSError as error:
            raise _unreadable(path, error) from error
        return _read(path, status.st_mtime_ns, status.st_size, status.st_ino)

    def render(self) -> str:
        """Write it in its one form."""
        bodies = [_body(self.entries[key]) for key in sorted(self.entries)]
        rows = [f'{body}check = "{_check(body)}"\n' for body in bodies]
        checksum = _digest(f"{VERSION} {self.serial}\n" + "\n".join(rows))
        top = f'version = {VERSION}\nserial = {self.serial}\nchecksum = "{checksum}"\n'
        return f"{HEAD}{top}" + "".join(f"\n{row}" for row in rows)

    def write(self, path: Path) -> None:
        """Replace the file at once or not at all.

        Raises:
            BadLock: what would be written could not be read again.
            OSError: the folder can't be written.
        """
        path, text = path.resolve(), self.render()
        try:
            parse(text, path)
        except BadLock as error:
            raise BadLock(f"{path} stays as it is, what would be written can't be read again: {str(error).removesuffix(_TODO)}") from error
        sweep(path.parent)
        write_whole(path, text, sync=True, by=fresh(path.parent, _digest(str(path)), "json"))


def parse(text: str, path: Path) -> Lock:
    """Read the text of a lock.

    Raises:
        BadLock: it is not as `Lock.render` writes it; the message names the line.
    """
    if text.startswith("\ufeff"):
        raise _bad(path, 1, "it begins with a byte order mark; save it as plain UTF-8")
    table = read_toml(text, path, _TODO, refuse=BadLock, most_bytes=MOST_BYTES)
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line == "[[weights]]"]
    if (version := table.get("version")) != VERSION:
        why = f"version is {VERSION}, got {version!r}"
        if version in range(VERSION):  # from before the first release
            raise BadLock(f"{path}: {why}. Keep it aside, let `zoo lock` write the same names anew, and compare the hashes of both.")
        raise _bad(path, _line(lines, "version", 0), f"{why}; a later kernelzoo may read it")
    for name in table:
        if name not in ("version", "serial", "checksum", "weights"):
            raise _bad(path, _line(lines, name, 0), f"unknown key {name!r}")
    serial, tables = table.get("serial"), table.get("weights", [])
    if not isinstance(serial, int) or isinstance(serial, bool) or serial < 1:
        raise _bad(path, _line(lines, "serial", 0), f"serial is a number of at least 1, got {serial!r}")
    rows = cast("list[Any]", tables) if isinstance(tables, list) else None
    if rows is None or len(rows) != len(starts):
        raise _bad(path, 1, "the rows are not written as [[weights]], each on a line of its own")
    entries: dict[str, Entry] = {}
    previous = ("", 0)
    for row, start in zip(rows, starts, strict=True):
        entry = _entry(row, path, lines, start)
        if entry.key == previous[0]:
            raise _bad(path, start, f"{entry.key} stands twice, first in line {previous[1]}")
        if entry.key < previous[0]:
            raise _bad(path, start, f"{entry.key} stands behind {previous[0]}; rows are sorted by their keys")
        previous = entry.key, start
        entries[entry.key] = entry
    lock = Lock(entries, serial, path)
    _compare(lock, lines, table.get("checksum"))
    return lock


def project_lock(folder: Path | None = None) -> Path | None:
    """Find the nearest `weights.lock` upwards of the working folder; the user's own and the shipped one are no project's."""
    try:
        above = os.path.abspath(folder or os.getcwd())  # noqa: PTH100, PTH109, asked at every load, and Path is slow
    except FileNotFoundError:  # the working folder was deleted
        return None
    while True:
        if os.path.isfile(found := os.path.join(above, NAME)) and Path(found) not in (SHIPPED_LOCK, user_lock()):  # noqa: PTH113, PTH118
            return Path(found)
        below, above = above, os.path.dirname(above)  # noqa: PTH120
        if above == below:
            return None


def user_lock() -> Path:
    """Name the user's own lock, which need not exist: it lies beside the folder that `zoo add` writes to."""
    return user_folder().parent / NAME


def find_locks() -> list[Path]:
    """List the locks that exist, in the order in which they are asked: the project's, the user's, the shipped one."""
    found = [project_lock(), user_lock(), SHIPPED_LOCK]
    return [path for path in found if path is not None and path.is_file()]


_TODO = "Restore it from version control, or delete it and let `zoo lock` write it anew."


def _unreadable(path: Path, error: OSError) -> BadLock:
    todo = "a lock is a file that zoo lock NAME writes; look who may read it, and whether its disk is well"
    return BadLock(f"{path} can't be read ({error.strerror}): {todo}.")


def _bad(path: Path, line: int, what: str) -> BadLock:
    return BadLock(f"{path}, line {line}: {what}. {_TODO}")


@lru_cache(maxsize=16)
def _read(path: Path, mtime_ns: int, size_bytes: int, inode: int) -> Lock:
    del mtime_ns, inode  # in the key: a file that changed is read again
    if size_bytes > MOST_BYTES:
        raise BadLock(f"{path} has {size_bytes:,} bytes, and no lock more than {MOST_BYTES:,}. {_TODO}")
    try:
        data = read_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(path, 1 + data[: error.start].count(b"\n"), "it is not UTF-8") from error
    return parse(text.replace("\r\n", "\n"), path)  # git writes the ends of lines as it pleases


def _entry(row: Any, path: Path, lines: list[str], start: int) -> Entry:
    for name, value in row.items():
        if wrong := _wrong(name, value):
            raise _bad(path, _line(lines, name, start), wrong)
    if absent := [name for name in ("key", "format", "sources", "license") if name not in row]:
        raise _bad(path, start, f"{', '.join(absent)} missing")
    if "sha256" in row and "sha256_prefix" in row:
        raise _bad(path, start, f"{row['key']} has a full hash and a prefix; one of them says enough")
    if "fingerprint" in row and "sha256" not in row:
        raise _bad(path, start, f"{row['key']} has a fingerprint and no sha256; the tensors are compared where the file's hash is known")
    facts: dict[str, Any] = {f.name: row[f.name] for f in fields(Entry) if f.name in row}
    facts["sources"] = tuple(row["sources"])
    entry = Entry(**facts)
    if row.get("status") != entry.status:
        raise _bad(path, _line(lines, "status", start), f"status is {entry.status!r}, got {row.get('status')!r}")
    if (check := _check(_body(entry))) != row.get("check"):
        raise _bad(path, start, f"the row {entry.key} was edited: its check says {row.get('check')}, what stands there gives {check}")
    return entry


def _wrong(name: str, value: Any) -> str | None:
    """Say what is wrong with one value of a row."""
    if name not in _KINDS:
        return f"unknown key {name!r}"
    kind, pattern = _KINDS[name]
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        return f"{name} is a {kind.__name__}, got {value!r}"
    if kind is list and not _are_texts(value):
        return f"{name} is a list of at least one URL, got {value!r}"
    if isinstance(value, str) and not re.fullmatch(pattern, value):
        if name not in ("sha256", "fingerprint"):
            return f"{name} can't be {value[:70]!r}"
        hint = "; a prefix is called sha256_prefix, and proves nothing" if name == "sha256" else ""
        return f"{name} is 64 lower-case hex digits, got {len(value)} characters, {value[:70]!r}{hint}"
    return None


def _are_texts(values: Any) -> bool:
    return bool(values) and all(isinstance(one, str) for one in values)


def _compare(lock: Lock, lines: list[str], checksum: object) -> None:
    """See that the text is the one that the writer makes of its content; the first line that differs is named."""
    assert lock.path is not None
    wanted = lock.render().splitlines()
    if (line := _line(wanted, "checksum", 0)) and wanted[line - 1] != f'checksum = "{checksum}"':
        what = "the checksum is not that of the serial and the rows that stand here: a row was removed or added, or the serial changed"
        raise _bad(lock.path, _line(lines, "checksum", 0), what)
    if lines != wanted:
        number = next((n for n, (a, b) in enumerate(zip(lines, wanted, strict=False)) if a != b), min(len(lines), len(wanted)))
        got, should = (these[number] if number < len(these) else "the end" for these in (lines, wanted))
        raise _bad(lock.path, number + 1, f"expected {should[:90]!r}, got {got[:90]!r}")


def _line(lines: list[str], name: str, start: int) -> int:
    """Find the line of a key in the row that begins at `start`, or above all rows; the row's own line, if it has none."""
    for number, line in enumerate(islice(lines, start, None), start + 1):
        if line == "[[weights]]":
            break
        if line.partition("=")[0].strip().strip("\"'") == name:
            return number
    return start or 1


def _body(entry: Entry) -> str:
    facts = ((name, getattr(entry, name)) for name in _KINDS if name != "check")
    return "[[weights]]\n" + "".join(f"{name} = {_value(value)}\n" for name, value in facts if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[\n" + "".join(f"    {_value(one)},\n" for one in cast("tuple[Any, ...]", value)) + "]"
    return str(value) if isinstance(value, int) else quoted(value)


def quoted(text: str) -> str:
    """Quote as JSON does, which TOML reads the same but for the delete character, that it wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check(body: str) -> str:
    return _digest(body)[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
