"""Digests that publishers state of a file, whole or begun: SHA-256, or the older MD5 and SHA-1 where they state no other.

MD5 and SHA-1 find damage and a file that was exchanged. They are no proof against whoever made the file: two can be made with one digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

WEAK = r"md5:[0-9a-f]{6,32}|sha1:[0-9a-f]{6,40}"
"""How a record writes a digest that is no SHA-256."""
NAMES = {"sha256": "SHA-256", "sha1": "SHA-1", "md5": "MD5"}
_LENGTHS = {"sha256": 64, "sha1": 40, "md5": 32}
_MAKERS: dict[str, Callable[[], Any]] = {
    "sha256": hashlib.sha256,
    "sha1": partial(hashlib.sha1, usedforsecurity=False),
    "md5": partial(hashlib.md5, usedforsecurity=False),
}


def hasher(digest: str) -> Any:
    """Begin to hash by a digest's algorithm."""
    return _MAKERS[_algorithm(digest)]()


def written(digest: str, hashed: Any) -> str:
    """Write what a `hasher` found as the digest is written: "sha1:0b5a…"."""
    return f"{_algorithm(digest)}:{hashed.hexdigest()}"


def of_file(path: Path, digest: str) -> str:
    """Hash a file by a digest's algorithm, and write it so."""
    with path.open("rb") as file:
        return written(digest, hashlib.file_digest(file, lambda: hasher(digest)))


def of_bytes(data: Buffer, digest: str) -> str:
    """Hash bytes by a digest's algorithm, and write it so."""
    hashed = hasher(digest)
    hashed.update(data)
    return written(digest, hashed)


def published(sha256_prefix: str | None, digest: str | None) -> Iterator[str]:
    """List what a record says of bytes whose whole SHA-256 it does not have, each as a digest."""
    if sha256_prefix:
        yield f"sha256:{sha256_prefix}"
    if digest:
        yield digest


def in_words(digest: str) -> str:
    """Say what a digest is: "MD5", or "first 8 digits of the SHA-1".

    Example:
        >>> in_words("sha1:0b5a71c2")
        'first 8 digits of the SHA-1'
    """
    algorithm, _, digits = digest.partition(":")
    name = NAMES[algorithm]
    return name if len(digits) == _LENGTHS[algorithm] else f"first {len(digits)} digits of the {name}"


def unlike(digest: str, found: str) -> str:
    """Say that a digest was found instead of the published one; "" where it is that one, or begins as that does."""
    if found.startswith(digest):
        return ""
    algorithm, _, digits = digest.partition(":")
    begun = len(digits) < _LENGTHS[algorithm]
    return f"expected {f'a {algorithm} that begins with' if begun else algorithm} {digits}, got {found.partition(':')[2]}"


def contradict(one: str | None, other: str | None) -> bool:
    """Tell two digests of which neither is the other, nor its beginning; of two algorithms nothing can be told."""
    if one is None or other is None or _algorithm(one) != _algorithm(other):
        return False
    return not (one.startswith(other) or other.startswith(one))


def _algorithm(digest: str) -> str:
    return digest.partition(":")[0]


def is_weak(text: str) -> bool:
    """Whether a text is a digest as `WEAK` has it."""
    return re.fullmatch(WEAK, text) is not None
