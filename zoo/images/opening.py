"""Telling what kind of source a path or URL is."""

from __future__ import annotations

import logging
import os
from collections import Counter

from weights.places import at_home
from weights.wording import counted
from zoo.images import files
from zoo.images.folder import Folder, sorted_out
from zoo.images.kinds import SUFFIXES, endings
from zoo.images.listing import Listing
from zoo.images.parquet import Parquet
from zoo.images.source import Source
from zoo.images.tar import Tar

log = logging.getLogger("zoo")

PARQUET, TAR, LISTS = (".parquet", ".pq"), (".tar",), (".txt", ".lst", ".jsonl", ".ndjson")
SHOWN = 3
"""Names that are left out which a message tells."""
KINDS = "a folder of images, .tar shards, .parquet files with images' bytes, or a list (.txt, .jsonl) of paths or URLs"


def open_source(where: str | os.PathLike[str]) -> Source:
    """Open many images, wherever they are, in an order that is always the same.

    Args:
        where: a folder of image files, whose top folders are the classes; a tar file as WebDataset writes it, a Parquet file with images'
            bytes, or a folder of these; several of either as `shard-{0000..0009}.tar` or `part-*.parquet`; a list of paths or
            URLs, one a line, or JSON lines with "url" and "label". Each may be a URL that fsspec opens: `s3://bucket/folder`.

    Returns:
        The source; its images are read when they are asked for.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: what is there is damaged, empty or no source; the message says what to do.
    """
    where = os.fspath(where)
    if not files.is_url(where):
        where = str(at_home(where))
    named = files.expand(where)
    if not named or (len(named) == 1 and files.kind(named[0]) == "nothing"):
        raise FileNotFoundError(f"'{where}' is not there; a source is {KINDS}")
    source = _folder(where) if len(named) == 1 and files.kind(named[0]) == "folder" else _files(where, named)
    told = _left_out(source)
    if not len(source):
        raise ValueError(f"'{where}' holds no images{' that can be used' if told else ''}; {told or f'a source is {KINDS}'}")
    if told:
        log.warning("%s: %s", where, told)
    return source


def _folder(where: str) -> Source:
    refused: list[tuple[str, str]] = []
    found = list(files.walk(where, refused))
    images, left_out, others = sorted_out(found, refused)
    shards = [f.name for f in found if f.name.lower().endswith((*PARQUET, *TAR))]
    if images or (left_out and not shards):
        _alone(where, len(images), shards)
        return Folder(where, found, refused)
    for suffixes, kind in ((PARQUET, Parquet), (TAR, Tar)):
        parts = sorted((f for f in found if f.name.lower().endswith(suffixes)), key=lambda f: f.name.split("/"))
        if parts:
            source = kind(where, [f.where for f in parts])
            source.left_out = [*left_out, *source.left_out]
            source.others = Counter({end: n for end, n in others.items() if end not in suffixes}) + Counter(source.others)
            return source
    beside = f", but {endings(others)}" if others else ""
    raise ValueError(f"'{where}' holds no images ({', '.join(SUFFIXES)}), no .parquet and no .tar{beside}")


def _left_out(source: Source) -> str:
    """Name the first of what a source leaves out, with the reasons; "" where it leaves out nothing."""
    first = ", ".join(f"{key} ({why})" for key, why in source.left_out[:SHOWN])
    count = len(source.left_out)
    return f"left out {counted(count, 'name')}: {first}{', …' if count > SHOWN else ''}" if count else ""


def _alone(where: str, images: int, shards: list[str]) -> None:
    """Say which files of a mixed folder are left alone; refuse where these may be what is meant.

    Raises:
        ValueError: there are as many shards as images.
    """
    if not shards:
        return
    some = f"{len(shards)} .tar or .parquet files ({', '.join(sorted(shards)[:3])}{', …' if len(shards) > 3 else ''})"
    suffix = f"**/*{os.path.splitext(shards[0])[1]}"  # noqa: PTH122  (a name, which may be in a bucket)
    if len(shards) >= images:
        raise ValueError(
            f"'{where}' holds {images} image files and {some}, and only one kind is read: name the shards, '{where}/{suffix}', or move "
            "one of the kinds elsewhere"
        )
    log.warning("%s holds %d images beside %s, which are left alone; '%s/%s' reads them", where, images, some, where, suffix)


def _files(where: str, named: list[str]) -> Source:
    for file in named:
        if files.kind(file) != "file":
            raise FileNotFoundError(f"{file}, one of {where}, is no file")
    for suffixes, kind in ((PARQUET, Parquet), (TAR, Tar)):
        if all(file.lower().endswith(suffixes) for file in named):
            return kind(where, named)
    if len(named) == 1 and named[0].lower().endswith(LISTS):
        return Listing(named[0])
    if len(named) == 1 and named[0].lower().endswith(SUFFIXES):
        raise ValueError(f"{where} is one image; a source is {KINDS}")
    raise ValueError(f"{where} is no source: {KINDS}; compressed tars are unpacked once before")
