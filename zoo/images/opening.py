"""Telling what kind of source a path or URL is."""

from __future__ import annotations

import logging
import os

from weights.places import at_home
from zoo.images import files
from zoo.images.folder import Folder
from zoo.images.listing import Listing
from zoo.images.parquet import Parquet
from zoo.images.source import SUFFIXES, Source
from zoo.images.tar import Tar

log = logging.getLogger("zoo")

PARQUET, TAR, LISTS = (".parquet", ".pq"), (".tar",), (".txt", ".lst", ".jsonl", ".ndjson")
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
        raise FileNotFoundError(f"{where} is not there; a source is {KINDS}")
    source = _folder(where) if len(named) == 1 and files.kind(named[0]) == "folder" else _files(where, named)
    if not len(source):
        raise ValueError(f"{where} holds no images; a source is {KINDS}")
    return source


def _folder(where: str) -> Source:
    found = list(files.walk(where))
    if images := sum(f.name.lower().endswith(SUFFIXES) for f in found):
        _alone(where, images, [f.name for f in found if f.name.lower().endswith((*PARQUET, *TAR))])
        return Folder(where, found)
    for suffixes, kind in ((PARQUET, Parquet), (TAR, Tar)):
        parts = sorted((f for f in found if f.name.lower().endswith(suffixes)), key=lambda f: f.name.split("/"))
        if parts:
            return kind(where, [f.where for f in parts])
    raise ValueError(f"{where} holds no images ({', '.join(SUFFIXES)}), no .parquet and no .tar")


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
            f"{where} holds {images} image files and {some}, and only one kind is read: name the shards, '{where}/{suffix}', or move "
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
