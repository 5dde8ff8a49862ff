"""Files by path or URL: local ones directly, every other through fsspec."""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple

from weights.addresses import redacted
from weights.regular import open_regular

ATTEMPTS = 4
"""Reads of a remote file before its error counts."""
PAUSE_S = 0.5
"""Before the second attempt; twice as long before each further one."""

PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
}
"""What fsspec needs to read URLs of a scheme."""
SCHEMES = {"file", "memory", "hf", "ftp", *PACKAGES}
"""Of URLs that are read. fsspec knows more, of which some open other files or run what a file says: `reference://` fills in templates."""
MOST_FILES = 100_000
"""That one name with braces may stand for."""


SPECIAL = "it is a pipe, a socket or a device, which is never opened"


class StoreFailed(OSError):
    """A remote store did not answer: the network's trouble, and no property of the file."""


class Found(NamedTuple):
    """A file of a folder: its path or URL, its name relative to the folder, and what changes when its content does."""

    where: str
    name: str
    stamp: tuple[object, ...]


def is_url(where: str) -> bool:
    """Tell what fsspec opens from a local path."""
    return "://" in where


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it.

    Raises:
        ValueError: its scheme is none of `SCHEMES`, or fsspec, or the package that knows the scheme, is not installed.
    """
    scheme = url.partition("://")[0].lower()
    if scheme not in SCHEMES or "::" in url:
        raise ValueError(
            f"{redacted(url)[:200]} is not read: a URL of images begins with one of {', '.join(f'{one}://' for one in sorted(SCHEMES))}"
        )
    try:
        import fsspec
    except ImportError:
        raise ValueError(f"{redacted(url)} is read through fsspec, which is not installed: pip install 'kernelzoo[embed]'") from None
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = PACKAGES.get(scheme, "")
        if not package:
            raise ValueError(redacted(f"fsspec can't open {url}: {error}")) from None
        raise ValueError(f"reading {redacted(url)} needs {package}, which is not installed: pip install {package}") from None
    except ValueError as error:
        raise ValueError(redacted(f"fsspec can't open {url}: {error}")) from None


def kind(where: str) -> str:
    """Say "file", "folder" or "nothing"."""
    if is_url(where):
        fs, path = filesystem(where)
        return "folder" if fs.isdir(path) else "file" if fs.exists(path) else "nothing"
    path = Path(where)
    return "folder" if path.is_dir() else "file" if path.exists() else "nothing"


def walk(folder: str, left_out: list[tuple[str, str]] | None = None) -> Iterator[Found]:
    """Give every regular file below a folder, hidden ones left out, in no particular order; links are followed, circles are not.

    Args:
        folder: its path or URL.
        left_out: gets the name of everything that can't be listed or may not be opened, with the reason: pipes and devices, links to
            themselves or to nothing, folders without permission, and what vanished meanwhile. Folders' names end with a slash.

    Raises:
        OSError: the folder itself can't be listed.
    """
    if is_url(folder):
        yield from _walk_remote(folder)
        return
    refused = [] if left_out is None else left_out
    todo: list[tuple[str, str, tuple[str, ...]]] = [(folder, "", (os.path.realpath(folder),))]
    while todo:
        here, prefix, above = todo.pop()
        try:
            with os.scandir(here) as listed:
                entries = [entry for entry in listed if not hidden(entry.name)]
        except OSError as error:
            if not prefix:
                raise
            refused.append((prefix, reason(error, "folder")))
            continue
        for entry in entries:
            name = prefix + entry.name
            try:
                state = entry.stat()
                if stat.S_ISDIR(state.st_mode):
                    real = os.path.realpath(entry.path)
                    if real in above:
                        refused.append((f"{name}/", "it is a link to a folder that it lies in"))
                    else:
                        todo.append((entry.path, f"{name}/", (*above, real)))
                elif stat.S_ISREG(state.st_mode):
                    yield Found(entry.path, name, (state.st_size, state.st_mtime_ns))
                else:
                    refused.append((name, SPECIAL))
            except OSError as error:
                refused.append((name, reason(error, "link" if entry.is_symlink() else "file")))


def _walk_remote(folder: str) -> Iterator[Found]:
    fs, root = filesystem(folder)
    root = root.rstrip("/")
    for path, info in fs.find(root, detail=True).items():
        name = path[len(root) :].lstrip("/") if path.startswith(root) else path
        if not any(hidden(part) for part in name.split("/")):
            yield Found(fs.unstrip_protocol(path), name, _remote_stamp(info))


def reason(error: OSError, what: str) -> str:
    """Say why a file, a link or a folder can't be used, after the system refused it."""
    if error.errno == errno.EINVAL:  # from `open_regular`
        return SPECIAL
    if error.errno == errno.ELOOP:
        return "it is a link to itself"
    if isinstance(error, FileNotFoundError):
        return "it is a link to nothing" if what == "link" else "it vanished while the folder above was listed"
    if isinstance(error, PermissionError):
        return f"the {what} may not be read: permission denied"
    return f"the {what} can't be read: {error.strerror or error}"


def folders(where: str) -> list[str]:
    """Name the folders at the top of a folder, those without files too, sorted; stores without folders of their own have no empty ones."""
    if is_url(where):
        fs, path = filesystem(where)
        found = [entry["name"].rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=True) if entry["type"] == "directory"]
    else:
        found = [name for name in os.listdir(where) if os.path.isdir(os.path.join(where, name))]  # noqa: PTH112, PTH118, PTH208
    return sorted(name for name in found if not hidden(name))


def hidden(name: str) -> bool:
    """Tell the name of a file or folder that is nobody's image: a hidden one, or what macOS adds to archives."""
    return name.startswith(".") or name == "__MACOSX"


def readable(name: str) -> str:
    """Return a name that is text whatever bytes the system took for it: what is no UTF-8 is escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def stamp(where: str) -> tuple[object, ...]:
    """Return what changes when a file's content does: its size, and its time or the store's own tag."""
    if is_url(where):
        fs, path = filesystem(where)
        return _remote_stamp(fs.info(path))
    state = Path(where).stat()
    return state.st_size, state.st_mtime_ns


def size(where: str) -> int:
    """Return the bytes of a file."""
    if is_url(where):
        fs, path = filesystem(where)
        return int(fs.size(path))
    return Path(where).stat().st_size


def read(where: str, start: int = 0, stop: int | None = None) -> bytes:
    """Read a file, or its bytes from `start` to `stop`; a remote read that fails is tried again.

    Raises:
        FileNotFoundError: there is none.
        OSError: it can't be read, is shorter, or is a pipe or a device.
    """
    data = _read_remote(where, start, stop) if is_url(where) else _read_local(where, start, stop)
    if stop is not None and len(data) != stop - start:
        raise (StoreFailed if is_url(where) else OSError)(
            f"{redacted(where)} ended {stop - start - len(data):,} bytes early; it was cut off since it was opened"
        )
    return data


def _read_local(where: str, start: int, stop: int | None) -> bytes:
    with os.fdopen(open_regular(Path(where), follow=True), "rb", buffering=0) as file:
        if start:
            file.seek(start)
        return file.read() if stop is None else file.read(stop - start)


def _read_remote(where: str, start: int, stop: int | None) -> bytes:
    fs, path = filesystem(where)
    for attempt in range(ATTEMPTS):
        try:
            return fs.cat_file(path) if stop is None and not start else fs.cat_file(path, start, stop)
        except (FileNotFoundError, IsADirectoryError):
            raise
        except PermissionError as error:
            raise StoreFailed(redacted(f"{where} may not be read with these credentials: {error}")) from error
        except Exception as error:  # every store has its own
            if attempt == ATTEMPTS - 1:
                raise StoreFailed(redacted(f"{where} can't be read after {ATTEMPTS} attempts: {error}")) from error
            time.sleep(PAUSE_S * 2**attempt)
    raise AssertionError("unreachable")


@contextmanager
def opened(where: str) -> Iterator[IO[bytes]]:
    """Open a file for reading here and there."""
    if is_url(where):
        fs, path = filesystem(where)
        with fs.open(path, "rb") as file:
            yield file
        return
    with os.fdopen(open_regular(Path(where), follow=True), "rb") as file:
        yield file


def expand(where: str) -> list[str]:
    """List the files that a name with `{0000..0009}`, `{a,b}`, `*` or `?` stands for, sorted; a plain name stands for itself.

    Raises:
        ValueError: braces stand for more than `MOST_FILES`, which is counted before any is made.
    """
    if (count := math.prod(count for _, count, _ in _braces(where))) > MOST_FILES:
        raise ValueError(f"'{where[:200]}' stands for {count:,} files, and at most {MOST_FILES:,} are taken: put the files in a folder")
    return [file for name in _named(where) for file in _matching(name)]


def _matching(where: str) -> list[str]:
    if not any(sign in where for sign in "*?[") or (not is_url(where) and Path(where).exists()):
        return [where]
    if is_url(where):
        fs, path = filesystem(where)
        return [fs.unstrip_protocol(found) for found in sorted(fs.glob(path))]
    path = Path(where)
    return sorted(str(found) for found in Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def _named(text: str) -> list[str]:
    """Write out the braces of a name, the first of them the slowest."""
    found = [""]
    end = 0
    for (begin, stop), _, options in _braces(text):
        found = [f"{before}{text[end:begin]}{option}" for before, option in product(found, options)]
        end = stop
    return [before + text[end:] for before in found]


def _braces(text: str) -> list[tuple[tuple[int, int], int, Iterable[str]]]:
    """Find the braces of a name, for how many texts each stands, and these, not made yet; other braces are letters like any."""
    found: list[tuple[tuple[int, int], int, Iterable[str]]] = []
    for match in re.finditer(r"\{([^{}]*)\}", text):
        if numbers := re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", match[1]):
            low, width = int(numbers[1]), len(numbers[1]) if numbers[1].startswith("0") else 0
            every = range(low, int(numbers[2]) + 1)
            found.append((match.span(), len(every), map(f"{{:0{width}d}}".format, every)))
        elif "," in match[1]:
            found.append((match.span(), match[1].count(",") + 1, match[1].split(",")))
    return found


def _remote_stamp(info: dict[str, Any]) -> tuple[object, ...]:
    tags = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "updated")
    return info.get("size"), next((str(info[tag]) for tag in tags if info.get(tag)), "")
