"""A small read-only web server for a mirror or for the cache: GET and HEAD of the files of its index, and nothing else.

A request never becomes a path: its text is looked up among the names, and the file behind a name was found before anybody asked. The server
believes nobody and need not be believed: clients compare what arrives with the hash that they know.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from weights.cache import Cache
from weights.errors import BadRecord, NoSuchFile, SourceUnavailable
from weights.mirror import INDEX, VERSION, index
from weights.places import at_home
from weights.regular import open_regular
from weights.wording import printable

log = logging.getLogger("weights")
CHUNK = 1 << 20
SILENT_S = 30.0
"""How long a connection may stand still."""
AT_ONCE = 64
"""Requests that are answered at a time; the others are told to come back."""
EACH = 32
"""Connections that an address may hold at a time, idle ones too: nobody takes the places of all others."""
CONNECTIONS = 256
"""Connections of all addresses together, each of which is a thread."""
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nConnection: close\r\nContent-Length: 5\r\n\r\nbusy\n"
_HASH = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


@dataclass(frozen=True, slots=True)
class Served:
    """A file that may be asked for."""

    path: Path
    size_bytes: int
    sha256: str
    about: Mapping[str, Any]


def files_of(folder: str | Path | None) -> Callable[[], Mapping[str, Served]]:
    """List what is served; asked at every request, so that files that are added later are served too.

    Args:
        folder: of a mirror; None serves the blobs of the cache, by their SHA-256.

    Raises:
        NoSuchFile: there is no such folder, or it has no index.
        CacheNotWritable: the cache can't be read.
    """
    if folder is None:
        Cache().check_folder()
        return _blobs
    place = at_home(folder).absolute()
    if not (place / INDEX).is_file():
        raise NoSuchFile(f"{place} is no mirror, it has no {INDEX}: zoo mirror {folder} MODEL... makes one.")
    known: list[Any] = [None, {}]

    def listed() -> Mapping[str, Served]:
        with contextlib.suppress(OSError, BadRecord):  # while it is being replaced, the one before holds
            status = (place / INDEX).stat()
            if (seen := (status.st_mtime_ns, status.st_size, status.st_ino)) != known[0]:
                files = [(one.name, Served(place / one.name, one.size_bytes, one.sha256, asdict(one))) for one in index(place)]
                known[1] = {name: served for one, served in files for name in (one, served.sha256)}  # a lock knows a file by its hash
                known[0] = seen
        return known[1]

    index(place)
    return listed


def _blobs() -> Mapping[str, Served]:
    found: dict[str, Served] = {}
    for path in (Cache().root / "blobs" / "sha256").glob("*/*"):
        with contextlib.suppress(OSError):
            if _HASH.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
                size = path.stat().st_size
                found[path.name] = Served(path, size, path.name, {"name": path.name, "size_bytes": size, "sha256": path.name})
    return found


class Server(ThreadingHTTPServer):
    """Serves files on an address; `serve_forever` until `shutdown`.

    Args:
        files: as `files_of` gives them.
        host: 127.0.0.1 is this machine only, 0.0.0.0 every network that it is in.
        port: 0 takes a free one.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, files: Callable[[], Mapping[str, Served]], host: str = "127.0.0.1", port: int = 0) -> None:
        self.files = files
        self.free = threading.BoundedSemaphore(AT_ONCE)
        self.held: Counter[str] = Counter()
        """Connections by the address at their other end."""
        self.counting = threading.Lock()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise SourceUnavailable(
                f"{host}:{port} can't be listened on ({error.strerror or error}): choose another --host or --port."
            ) from error
        self.url = f"http://{host}:{self.server_address[1]}"

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Count a connection in, or answer it at once where there are too many."""
        with self.counting:
            if self.held[client_address[0]] < EACH and self.held.total() < CONNECTIONS:
                self.held[client_address[0]] += 1
                return True
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(BUSY)
        return False

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and count it out."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.counting:
                self.held[client_address[0]] -= 1
                self.held += Counter()  # forgets those at zero

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write one line for a client that went away, or for a fault of ours."""
        log.info("%s: the request ended early", client_address[0], exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "kernelzoo", ""
    timeout = SILENT_S
    server: Any  # a Server; the base class says less of it

    def log_message(self, format: str, *args: Any) -> None:
        log.info("%s %s", self.address_string(), printable(re.sub(r"\?\S*", "?…", format % args)))  # a query is nobody's business

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:  # or it would be the next request
            return self._answer(HTTPStatus.BAD_REQUEST, b"a request has no body here\n", close=True)
        if not self.server.free.acquire(blocking=False):
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"busy\n", {"Retry-After": "2"}, close=True)
        try:
            return self._get()
        finally:
            self.server.free.release()

    def _get(self) -> None:
        name = unquote(self.path.partition("?")[0]).removeprefix("/")
        files = self.server.files()
        if name in ("", INDEX):
            listed = [dict(one.about) for name, one in sorted(files.items()) if name == one.about["name"]]
            text = json.dumps({"kernelzoo_mirror": VERSION, "files": listed}, indent=1).encode()
            return self._answer(HTTPStatus.OK, text + b"\n", {"Content-Type": "application/json"})
        if (one := files.get(name)) is None:
            return self._answer(HTTPStatus.NOT_FOUND, b"not in the index\n")
        with _opened(one) as fd:
            if fd is None:
                log.warning("%s is not the file of the index any more: zoo mirror verifies it", one.path)
                return self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the file changed\n")
            return self._file(fd, one)

    def _file(self, fd: int, one: Served) -> None:
        headers = {"ETag": f'"{one.sha256}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        headers |= {"X-Content-Type-Options": "nosniff", "Cache-Control": "public, max-age=31536000, immutable"}
        start, end, status = 0, one.size_bytes, HTTPStatus.OK
        if self.headers.get("If-Range", headers["ETag"]) == headers["ETag"] and (
            part := _part(self.headers.get("Range", ""), one.size_bytes)
        ):
            start, end = part
            status, headers["Content-Range"] = HTTPStatus.PARTIAL_CONTENT, f"bytes {start}-{end - 1}/{one.size_bytes}"
        if start >= end:
            self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", {"Content-Range": f"bytes */{one.size_bytes}"})
            return
        self._head(status, headers | {"Content-Length": str(end - start)})
        os.lseek(fd, start, os.SEEK_SET)
        while start < end and self.command != "HEAD":
            if not (data := os.read(fd, min(CHUNK, end - start))):
                self.close_connection = True  # it was cut under our hands; the client sees an end that is too early
                return
            self.wfile.write(data)
            start += len(data)

    def _answer(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str] | None = None, close: bool = False) -> None:
        more = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))} | dict(headers or {})
        self._head(status, more | ({"Connection": "close"} if close else {}))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _part(asked: str, size: int) -> tuple[int, int] | None:
    """Read a Range of one piece as (start, end), start at or behind the end if nothing is there; None for any other, which is ignored."""
    found = _RANGE.fullmatch(asked.strip())
    if not found or not (found[1] or found[2]):
        return None
    if not found[1]:
        return (max(0, size - int(found[2])), size)
    start, end = int(found[1]), int(found[2]) + 1 if found[2] else size
    return (start, min(end, size)) if start < end or start >= size else None


@contextlib.contextmanager
def _opened(one: Served) -> Generator[int | None]:
    """Open a regular file of the size in the index; None if it is anything else."""
    try:
        fd = open_regular(one.path)
    except OSError:
        yield None
        return
    try:
        yield fd if os.fstat(fd).st_size == one.size_bytes else None
    finally:
        os.close(fd)
