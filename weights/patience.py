"""How long we wait and how often we try again."""

from __future__ import annotations

import email.utils
import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar, cast

from weights.addresses import Address
from weights.errors import InsecureSource, ProtocolError, RateLimited, SourceUnavailable

log = logging.getLogger("weights")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of one download, in seconds and bytes.

    Attributes:
        connect_s: until a connection stands.
        read_s: between two pieces of an answer.
        tries: attempts in a row that bring less than `least_bytes`.
        backoff_s: the first wait, doubled each time and jittered.
        longest_wait_s: the longest wait that a server may ask for.
        window_s: in each of these, `least_bytes` must arrive.
        least_bytes: what counts as progress.
        deadline_s: for one file, from all its sources together.
        most_bytes: the largest file that is accepted when nobody says how large it is.
        metadata_s: for one answer of the Hub about a file or a repository.
        metadata_bytes: the longest such answer.
    """

    connect_s: float = 10.0
    read_s: float = 30.0
    tries: int = 6
    backoff_s: float = 0.5
    longest_wait_s: float = 60.0
    window_s: float = 60.0
    least_bytes: int = 1 << 16
    deadline_s: float = 6 * 3600.0
    most_bytes: int = 32 << 30
    metadata_s: float = 60.0
    metadata_bytes: int = 16 << 20


PATIENCE = Patience()


def within(limit_s: float, work: Callable[[], T], what: str) -> T:
    """Wait for work on the network whose own timeouts begin anew with every byte that a server drips.

    Raises:
        Again: it isn't done after `limit_s`; it goes on in a thread of its own, where it ends with the process at the latest.
        Exception: whatever `work` raises.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = done.get(timeout=limit_s)
    except queue.Empty:
        raise Again(f"{what} took more than {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return cast("T", result)


class Again(Exception):
    """An attempt failed in a way that another may not; `wait_s` is what the server asked for, `tries` are worth it at most."""

    def __init__(self, why: str, wait_s: float | None = None, tries: float = math.inf) -> None:
        super().__init__(why)
        self.wait_s, self.tries = wait_s, tries


def patiently(attempt: Callable[[], T], source: str, received: Callable[[], int] = lambda: 0, deadline: float | None = None) -> T:
    """Repeat an attempt while it raises `Again`, with growing, jittered waits.

    Args:
        attempt: what to do.
        source: for the messages.
        received: bytes that arrived so far; an attempt that adds to them does not count as failed.
        deadline: on the monotonic clock; `deadline_s` from now if left out.

    Raises:
        RateLimited: the server asks to wait longer than `longest_wait_s`.
        SourceUnavailable: `tries` attempts in a row without progress, or the deadline.
    """
    patience = PATIENCE
    deadline = time.monotonic() + patience.deadline_s if deadline is None else deadline
    fails, most = 0, received()
    while True:
        try:
            return attempt()
        except Again as again:
            progressed = received() - most >= patience.least_bytes
            most = max(most, received())
            fails = 1 if progressed else fails + 1
            jittered = patience.backoff_s * 2 ** (fails - 1) * random.uniform(0.5, 1.5)
            wait_s = min(jittered, patience.longest_wait_s) if again.wait_s is None else again.wait_s
            if wait_s > patience.longest_wait_s:
                limit = patience.longest_wait_s
                limited = RateLimited(f"{source}: {again}; it asks to wait {wait_s:.0f} s, more than {limit:.0f} s. Try again later.")
                limited.retry_at = _in(wait_s)
                raise limited from again
            if fails >= min(patience.tries, again.tries) or time.monotonic() + wait_s > deadline:
                kept = f" after {received():,} bytes; call again to go on" if received() else ""
                raise SourceUnavailable(f"{source}: {again}, {fails} times in a row{kept}. Check the network{proxies()}") from again
            log.info("%s: %s; again in %.1f s", source, again, wait_s)
            time.sleep(wait_s)


def check_status(status: int, headers: Mapping[str, str], source: str) -> None:
    """Raise what an HTTP status means: nothing for 200 and 206.

    Raises:
        Again: 408, 416, 429 or 5xx.
        SourceUnavailable: the server refuses, or has no such file.
        ProtocolError: any other status.
    """
    if status in (200, 206):
        return
    if status in (408, 416, 429) or status >= 500:
        raise Again(f"HTTP {status}", _retry_after(headers.get("retry-after")))
    if status in (401, 403):
        raise SourceUnavailable(
            f"{source}: HTTP {status}, not allowed. If it is private or gated, ask for access and log in with `hf auth login`."
        )
    if status in (404, 410, 451):
        raise SourceUnavailable(f"{source}: HTTP {status}, there is no such file. Check the name and the revision.")
    if status == 407:
        raise SourceUnavailable(f"{source}: HTTP 407, the proxy wants a login{proxies()}")
    raise ProtocolError(f"{source}: expected the file, got HTTP {status}.")


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _in(wait_s: float) -> datetime:
    """Name the moment after so many seconds; one that no calendar has is the last that it has."""
    try:
        return datetime.now(UTC) + timedelta(seconds=wait_s)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def _host(proxy: str) -> str:
    """Name a proxy without the password that may stand before it."""
    return Address(proxy if "://" in proxy else f"http://{proxy}").bare.partition("://")[2].partition("/")[0] or "?"


def check_proxies(source: str) -> None:
    """Refuse to go through a proxy whose address makes no sense: what libraries say of one has its password in it.

    Raises:
        SourceUnavailable: one of the variables names such a proxy.
    """
    from urllib.request import getproxies

    for name, proxy in getproxies().items():
        try:
            _ = name == "no" or Address(proxy if "://" in proxy else f"http://{proxy}").parts
        except InsecureSource:
            raise unreadable_proxy(source) from None


def unreadable_proxy(source: str) -> SourceUnavailable:
    """Make the error of a proxy whose address makes no sense."""
    return SourceUnavailable(f"{source}: a proxy's host or port can't be read{proxies()} Mend or unset its variable.")


def proxies() -> str:
    """Name the proxy variables that are set: a wrong one looks like a dead network."""
    names = [name for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy") if os.environ.get(name)]
    hosts = ", ".join(f"{name}={_host(os.environ[name])}" for name in names)
    return f", and the proxy in {hosts}." if names else "."
