"""Addresses that keep their secrets: shown, written or logged, one says where something is, and never what opens it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
from collections.abc import Generator
from typing import SupportsIndex
from urllib.parse import SplitResult, urlsplit

from weights.errors import InsecureSource

_PARTS = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*:)?//|https?:/)([^/?#\\]*)([^?#]*)(\?[^#]*)?(#.*)?", re.DOTALL)
_HOST = re.compile(r"(?:[\w.=!~+%-]*|\[[0-9A-Fa-f:.%\w]*\])(?::[0-9]{0,5})?")
_HASHED = re.compile(r"sha256-[0-9a-f]{12}")
"""What `Address.noted` puts in place of a query."""
_INNER = re.compile(r"#[\w.%+/ -]+")
"""The fragment of a zip's address that names a file in it."""
_NAME = re.compile(r"[A-Za-z][\w.\[\]-]{0,39}")
_WITHIN = re.compile(r"""(?:[A-Za-z][A-Za-z0-9+.-]*://|https?:/)[^\s"'<>`]+""")
_LIBRARIES = re.compile(r"(httpx2?|httpcore2?|huggingface_hub|urllib3|requests)(\..+)?")
_hushing = threading.local()


class Address(str):
    """A URL whose text has neither name and password, nor the values of its query, nor a fragment: "https://host/path?token=…".

    A fragment that names a file in a zip, "https://host/x.zip#inner.pth", is part of where that file is, and stays.

    Whatever takes a text gets that: a message, a log line, `repr`, JSON, TOML, a pickle. `reveal` alone returns what was given, for the
    request. Two are equal where all of what was given is. A text that is no URL stays as it is.

    Example:
        >>> Address("https://ada:pw@example.org/w.safetensors?token=abc")
        'https://example.org/w.safetensors?token=…'
    """

    __slots__ = ("_raw",)
    _raw: str

    def __new__(cls, raw: str) -> Address:
        """Take a URL as a user, a record or a server wrote it; another address is returned as it is."""
        if isinstance(raw, Address):
            return raw
        made = super().__new__(cls, _shown(raw))
        made._raw = raw
        return made

    def __eq__(self, other: object) -> bool:
        return self._raw == (other._raw if isinstance(other, Address) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._raw)

    def __copy__(self) -> Address:
        return self

    def __deepcopy__(self, memo: object) -> Address:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[Address], tuple[str]]:
        return Address, (str(self),)

    def reveal(self) -> str:
        """Return what was given, secrets and all: for a request and for nothing else."""
        return self._raw

    @property
    def noted(self) -> str:
        """As notes and locks have it: a hash of the query stands for the query, so that two of them are told apart."""
        if not _PARTS.fullmatch(self._raw):
            return str(self)
        base, query, secret = self._raw.partition("#")[0].partition("?")
        if self.endswith("//…"):  # of what can't be taken apart nothing is shown
            base, query, secret = str(self), "?", self._raw
        if query and not _HASHED.fullmatch(secret):
            secret = f"sha256-{hashlib.sha256(secret.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
        return f"{Address(base)}{query}{secret}{self._inner}"

    @property
    def bare(self) -> str:
        """Without any query or fragment, for what goes to strangers: even a hash of a short secret could be guessed."""
        return f"{re.split(r'[?#]', self, maxsplit=1)[0]}{self._inner}" if _PARTS.fullmatch(self._raw) else str(self)

    @property
    def _inner(self) -> str:
        found = _PARTS.fullmatch(self._raw)
        return _inner(found[3], found[5]) if found else ""

    @property
    def parts(self) -> SplitResult:
        """Its parts as `urlsplit` returns them, host and port proven to be readable; never to be shown.

        Raises:
            InsecureSource: they can't be read.
        """
        try:
            parts = urlsplit(self._raw)
            _ = parts.hostname, parts.port
        except ValueError:
            raise InsecureSource(f"{self} is no address: its host or its port can't be read. Check how it is written.") from None
        return parts

    def inside(self, name: str) -> Address:
        """Return the address of a file in the folder that this one names; its query goes along."""
        base, mark, query = self._raw.partition("?")
        return Address(f"{base.rstrip('/')}/{name}{mark}{query}")


def _shown(raw: str) -> str:
    if not ("?" in raw or "@" in raw or "#" in raw or raw.count(":") > 1) or raw.startswith("file:///"):
        return raw
    if not (found := _PARTS.fullmatch(raw)):
        return redacted(raw)
    scheme, host, path, query, fragment = (part or "" for part in found.groups())
    host = host.rpartition("@")[2]
    if not _HOST.fullmatch(host) or path.startswith("\\"):  # of a password with a slash or a question mark in it
        return f"{scheme}…"
    pairs = (pair.partition("=") for pair in re.split("[&;]", query[1:]))
    names = "&".join(f"{name}=…" if sign and _NAME.fullmatch(name) else "…" for name, sign, _ in pairs)
    names = query[1:] if _HASHED.fullmatch(query[1:]) else names
    return f"{scheme}{host}{path}{f'?{names}' if query else ''}{_inner(path, fragment) or ('#…' if fragment else '')}"


def _inner(path: str, fragment: str | None) -> str:
    """Return the fragment that names a file in a zip; "" of any other, which may be a secret."""
    return fragment if fragment and path.lower().endswith(".zip") and _INNER.fullmatch(fragment) else ""


def redacted(text: object) -> str:
    """Show the addresses in a text that another program wrote as `Address` does."""
    return _WITHIN.sub(lambda found: str(Address(found[0])), str(text))


@contextlib.contextmanager
def hushed() -> Generator[None]:
    """Keep the libraries of HTTP from logging this thread's requests meanwhile: they write addresses and headers out in full."""
    for name in list(logging.root.manager.loggerDict):
        if _LIBRARIES.fullmatch(name) and _silent not in (logger := logging.getLogger(name)).filters:
            logger.addFilter(_silent)
    before, _hushing.on = getattr(_hushing, "on", False), True
    try:
        yield
    finally:
        _hushing.on = before


def _silent(record: logging.LogRecord) -> bool:
    del record
    return not getattr(_hushing, "on", False)
