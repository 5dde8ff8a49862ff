"""What an image is: one list, by which folders and tar files are searched and by which bytes are decoded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from weights.wording import counted


class Kind(NamedTuple):
    """A kind of image file.

    Attributes:
        name: what messages call it.
        format: Pillow's name of it.
        endings: of its files, in lower case.
        feature: what Pillow may have been built without, "" where it always can.
    """

    name: str
    format: str
    endings: tuple[str, ...]
    feature: str = ""


KINDS = (
    Kind("JPEG", "JPEG", (".jpg", ".jpeg", ".jpe", ".jfif")),
    Kind("PNG", "PNG", (".png",)),
    Kind("WebP", "WEBP", (".webp",), "webp"),
    Kind("BMP", "BMP", (".bmp",)),
    Kind("GIF", "GIF", (".gif",)),
    Kind("PPM", "PPM", (".ppm", ".pgm", ".pbm", ".pnm")),
    Kind("TIFF", "TIFF", (".tif", ".tiff")),
    Kind("AVIF", "AVIF", (".avif",), "avif"),
    Kind("JPEG 2000", "JPEG2000", (".jp2", ".j2k", ".jpx"), "jpg_2000"),
    Kind("HEIC", "HEIF", (".heic", ".heif", ".hif"), "pillow_heif"),
)
"""All kinds that are ever decoded. What is on no line is no image: its decoders are not reached, whatever the file is called."""
SUFFIXES = tuple(ending for kind in KINDS for ending in kind.endings)
"""Of files that are taken for images, in any case."""
WRITTEN = {
    ending: name for name in ("PNG", "JPEG", "WEBP", "BMP", "TIFF") for kind in KINDS if kind.format == name for ending in kind.endings
}
"""Endings of pictures that are written for people to keep, and Pillow's word for each."""
MOVING = {".gif": "GIF", ".webp": "WEBP", ".apng": "PNG"}
"""Endings of pictures that may have frames, and Pillow's word for each."""
OPAQUE = ("JPEG", "BMP")
"""Of those that are written, the formats that hold no transparency."""
HEIC = ("heic", "heix", "heim", "heis", "hevc", "hevx", "mif1", "msf1")
AVIF = ("avif", "avis")
"""Brands that the file type box of such a file begins with or lists; MIF is the container of both."""
OTHERS = {
    b"%!PS": "EPS or PostScript",
    b"\xc5\xd0\xd3\xc6": "EPS",
    b"%PDF": "PDF",
    b"8BPS": "Photoshop",
    b"<svg": "SVG",
    b"<?xml": "XML or SVG",
}
"""First bytes of files that are often called images."""


def is_image(name: str) -> bool:
    """Tell by its name whether a file is taken for an image.

    Example:
        is_image("cat/IMG_1.HEIC") is True
    """
    return name.lower().endswith(SUFFIXES)


def kind_of_names(names: Iterable[str]) -> str:
    """Name the one kind that all of these names have, "JPEG"; "image" where there are several kinds, or a name tells none.

    Example:
        kind_of_names(["a.jpg", "b.JPEG"]) == "JPEG"
    """
    by_ending = {ending: kind.name for kind in KINDS for ending in kind.endings}
    found = {by_ending.get(f".{ending.lower()}", "image") for ending in {name.rpartition(".")[2] for name in names}}
    return found.pop() if len(found) == 1 else "image"


def unreadable(name: str) -> str:
    """Say why images with such a name can't be decoded here, and what helps; "" where they can."""
    kind = next((kind for kind in KINDS if name.lower().endswith(kind.endings)), None)
    return "" if kind is None else missing(kind)


@cache
def missing(kind: Kind) -> str:
    """Say what is missing to decode a kind of image here; "" where nothing is."""
    from PIL import features

    if kind.format == "HEIF":
        return "" if find_spec("pillow_heif") else "HEIC is read with pillow-heif, which is not installed: pip install 'kernelzoo[heic]'"
    if not kind.feature or features.check(kind.feature):
        return ""
    return f"{kind.name} is read by Pillow 11.3 or later with {kind.name} built in: pip install --upgrade pillow"


@cache
def formats() -> tuple[str, ...]:
    """List Pillow's names of the kinds that it decodes here by itself, the usual ones first; HEIC is another library's."""
    return tuple(kind.format for kind in KINDS if kind.format != "HEIF" and not missing(kind))


def kind_of(head: bytes) -> Kind | None:
    """Recognise the kinds that may be missing here by a file's first 64 bytes; None for all others."""
    brands = [head[i : i + 4].decode("latin-1") for i in (8, *range(16, min(len(head), 64) - 3, 4))] if head[4:8] == b"ftyp" else []
    named = {kind.format: kind for kind in KINDS}
    if any(brand in AVIF for brand in brands):
        return named["AVIF"]
    if any(brand in HEIC for brand in brands):
        return named["HEIF"]
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return named["WEBP"]
    return named["JPEG2000"] if head.startswith((b"\x00\x00\x00\x0cjP  ", b"\xff\x4f\xff\x51")) else None


def refusal(head: bytes) -> str:
    """Say why a file that begins with these 64 bytes is not decoded, and what to do."""
    kind = kind_of(head)
    if kind is not None:
        lacking = missing(kind)
        return f"the file can't be decoded here: {lacking}" if lacking else f"the file is {kind.name}, cut off or damaged: get it again"
    other = next((name for start, name in OTHERS.items() if head.lstrip().startswith(start)), None)
    what = f"is {other}, which is not decoded" if other else "is no image that Pillow can read"
    return f"the file {what}; convert it to PNG or JPEG"


def endings(others: dict[str, int]) -> str:
    """Word how many other files there are of each ending, the most frequent first.

    Example:
        endings({".txt": 10, "": 1}) == "11 other files: 10 .txt, 1 without an ending"
    """
    each = sorted(others.items(), key=lambda one: (-one[1], one[0]))
    words = ", ".join(f"{count:,} {ending or 'without an ending'}" for ending, count in each)
    return f"{counted(sum(others.values()), 'other file')}: {words}"
