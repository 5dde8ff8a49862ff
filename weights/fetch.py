"""The one downloader: every byte of every source comes through here, is hashed on the way, and is proven before it counts."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from weights import patience as limits
from weights.errors import HashMismatch, ProtocolError, SizeMismatch, SourceUnavailable, WeightsError
from weights.patience import Again, check_status, patiently
from weights.sources import LOOPBACK, Remote, check_url, local_path, transport_error

if TYPE_CHECKING:
    import httpx2

    from weights.part import Part

log = logging.getLogger("weights")
REDIRECTS = 5
Progress = Callable[[int, "int | None"], None]
"""Called with the bytes that have arrived and the bytes that are expected."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a file before it comes: by its record, or by its first install."""

    sha256: str | None = None
    prefix: str | None = None
    size_bytes: int | None = None
    installed: str | None = None


def fetch(remote: Remote, part: Part, expected: Expected, progress: Progress = lambda done, total: None) -> None:
    """Receive a file into a part and prove it; after wrong bytes it is fetched once more from the start.

    Raises:
        HashMismatch: the bytes are others than the record, the first install or the server's own hash says.
        SizeMismatch: more or fewer bytes than announced.
        ProtocolError: an answer makes no sense.
        InsecureSource: a redirect leaves https.
        SourceUnavailable: it can't be reached, or stops for too long; RateLimited, if the server asks for too long a wait.
        NoSpace, CacheNotWritable: the part can't be written.
    """
    judged = expected.sha256 or expected.prefix or expected.installed or remote.sha256
    if part.url != remote.url or (part.foreign and not judged):
        part.restart()
    for last in (False, True):
        if remote.url.startswith("file:"):
            _copy(remote, part, progress)
        else:
            _download(remote, part, expected, progress)
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
    by = {"its record": expected.sha256, "its first install here": expected.installed, "its own server": remote.sha256}
    for who, sha256 in by.items():
        if sha256 and part.sha256 != sha256:
            raise HashMismatch(
                f"{remote.source}: {who} says sha256 {sha256}, got {part.sha256} ({part.size:,} bytes). Nothing was installed."
            )
    if expected.prefix and not part.sha256.startswith(expected.prefix):
        raise HashMismatch(
            f"{remote.source}: expected a sha256 that begins with {expected.prefix}, got {part.sha256}. Nothing was installed."
        )


def _copy(remote: Remote, part: Part, progress: Progress) -> None:
    path = local_path(remote.url)
    part.restart()
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SourceUnavailable(f"{path} is no regular file.")
            while data := os.read(fd, 1 << 20):
                part.write(data)
                progress(part.size, status.st_size)
        finally:
            os.close(fd)
    except WeightsError:
        raise
    except OSError as error:
        raise SourceUnavailable(f"{path} can't be read: {error.strerror}.") from error


def _download(remote: Remote, part: Part, expected: Expected, progress: Progress) -> None:
    import httpx2

    patience = limits.PATIENCE
    deadline = time.monotonic() + patience.deadline_s
    timeout = httpx2.Timeout(patience.read_s, connect=patience.connect_s)
    with httpx2.Client(follow_redirects=False, timeout=timeout, trust_env=True) as client:

        def attempt() -> None:
            try:
                _receive(client, remote, part, expected, progress, deadline)
            except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
                raise transport_error(error, remote.source) from error

        patiently(attempt, remote.source, lambda: part.size)


def _receive(client: httpx2.Client, remote: Remote, part: Part, expected: Expected, progress: Progress, deadline: float) -> None:
    if part.total is not None and part.size == part.total:
        return
    if part.etag is None:
        part.restart()
    with _open(client, remote, part) as answer:
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
                raise ProtocolError(
                    f"{remote.source}: expected weights, got a web page; it looks like a login page. Log in to the network first."
                )
        total = _announced(remote, part, expected, answer)
        part.remember(remote.url, answer.headers.get("etag"), total)
        _stream(answer, remote, part, total, progress, deadline)
    if total is not None and part.size != total:
        raise Again(f"the answer ended after {part.size:,} of {total:,} bytes")


def _check_range(part: Part, answer: httpx2.Response) -> None:
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("content-range", ""))
    same = found and int(found[1]) == part.size and found[3] in ("*", str(part.total))
    if not same or answer.headers.get("etag", part.etag) != part.etag:
        part.restart()
        raise Again("the server continued at another place or with another file", wait_s=0)


def _announced(remote: Remote, part: Part, expected: Expected, answer: httpx2.Response) -> int | None:
    """Agree on the length of the file among the record, the Hub and this answer."""
    length = answer.headers.get("content-length")
    announced = part.size + int(length) if length and length.isdigit() else None
    known = {"its record": expected.size_bytes, "the Hub": remote.size_bytes, "its answer": announced, "the first answer": part.total}
    sizes = {who: size for who, size in known.items() if size is not None}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{who} says {size:,} bytes" for who, size in sizes.items())
        raise SizeMismatch(f"{remote.source}: {said}. Nothing was installed.")
    total = next(iter(sizes.values()), None)
    hashed = expected.sha256 or expected.prefix or expected.installed or remote.sha256
    if total is None and not hashed and answer.headers.get("transfer-encoding", "").lower() != "chunked":
        raise ProtocolError(f"{remote.source}: neither its length nor its hash is known, so a file cut short would pass for whole.")
    return total


def _stream(answer: httpx2.Response, remote: Remote, part: Part, total: int | None, progress: Progress, deadline: float) -> None:
    patience = limits.PATIENCE
    limit = patience.most_bytes if total is None else total
    window_end, window_from = time.monotonic() + patience.window_s, part.size
    if limit > patience.most_bytes:
        raise SizeMismatch(f"{remote.source}: announces {limit:,} bytes, more than the {patience.most_bytes:,} that are accepted.")
    for data in answer.iter_raw():
        if not part.size and data.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
            raise ProtocolError(
                f"{remote.source}: expected weights, got a web page; it looks like a login page. Log in to the network first."
            )
        if part.size + len(data) > limit:
            raise SizeMismatch(f"{remote.source}: sends more than the {limit:,} bytes that were expected. Nothing was installed.")
        part.write(data)
        progress(part.size, total)
        now = time.monotonic()
        if now > deadline:
            raise SourceUnavailable(
                f"{remote.source}: {part.size:,} bytes in {patience.deadline_s:.0f} s is too slow; call again to go on."
            )
        if now > window_end:
            if part.size - window_from < patience.least_bytes:
                raise Again(f"only {part.size - window_from:,} bytes in {patience.window_s:.0f} s")
            window_end, window_from = now + patience.window_s, part.size


@contextlib.contextmanager
def _open(client: httpx2.Client, remote: Remote, part: Part) -> Iterator[httpx2.Response]:
    """Follow redirects ourselves: never out of https, never with the token to another origin, never for ever."""
    url, secrets = remote.url, dict(remote.headers)
    plain = {"accept-encoding": "identity", "user-agent": secrets.pop("user-agent", "kernelzoo")}
    if part.size and part.etag:
        plain |= {"range": f"bytes={part.size}-", "if-range": part.etag}
    loopback = urlsplit(url).scheme == "http"
    for _ in range(REDIRECTS + 1):
        check_url(url, insecure_ok=loopback)
        with client.stream("GET", url, headers=plain | secrets) as answer:
            if answer.status_code not in (301, 302, 303, 307, 308):
                yield answer
                return
            location = answer.headers.get("location")
        if not location:
            raise ProtocolError(f"{remote.source}: HTTP {answer.status_code} leads nowhere.")
        try:
            target = urljoin(url, location)
            left = urlsplit(target)[:2] != urlsplit(url)[:2]
        except ValueError as error:
            raise ProtocolError(f"{remote.source}: redirects to {location!r}, which is no URL.") from error
        url, secrets = target, {} if left else secrets
        loopback = loopback and urlsplit(remote.url).hostname in LOOPBACK  # a mirror's http:// leads to no other
    raise ProtocolError(f"{remote.source}: more than {REDIRECTS} redirects, the last to {url}.")
