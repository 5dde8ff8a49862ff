"""The pictures that a command is given: files, folders, shards and lists, as names and what reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from weights import checkpoints
from weights.wording import counted, escape
from zoo.commands.console import fail, out, spares_inputs
from zoo.images import BadImage, Source, decode, open_source
from zoo.images.files import is_url
from zoo.images.opening import LISTS, PARQUET, TAR
from zoo.images.reading import opened_file
from zoo.prediction.predict import Prediction, predict

if TYPE_CHECKING:
    from zoo.networks.model import Model


class Picture(NamedTuple):
    """One picture.

    Attributes:
        name: what the output calls it; an error adds the list or the shard that it is in.
        read: returns what `predict` takes.
    """

    name: str
    read: Callable[[], Any]


def pictures(named: Sequence[str], output: Path | None = None) -> tuple[list[Picture], int]:
    """List the pictures that are named, those of folders, shards and lists one by one.

    Args:
        named: files, folders, shards, lists and addresses.
        output: a file that is written, which may be none of the pictures.

    Returns:
        The pictures, and how many more were left out when their folder was opened, each of which a warning tells.

    Raises:
        FileNotFoundError, ValueError: a folder, shard or list can't be used, see `open_source`.
        NoSuchImage: none of the files is there.
        CannotWrite: the output is one of them.
    """
    found: list[Picture] = []
    left_out = 0
    for name in named:
        if not _is_source(name):
            found.append(Picture(name, partial(Path, name)))
            continue
        source = open_source(name)
        left_out += len(source.left_out)
        inside = Path(name) if not is_url(name) and Path(name).is_dir() else None
        for index, item in enumerate(source):
            shown = item.key if inside is None else str(inside / item.key)
            told = f"{shown} in {name}" if inside is None else shown  # a list's, or a shard's
            found.append(Picture(shown, partial(_read, source, index, told)))
    if named and all(not _is_source(name) and not is_url(name) and not Path(name).exists() for name in named):
        for name in named:  # before a network is fetched for nothing
            with opened_file(Path(name), name):
                pass
    spares_inputs(output, (one.name for one in found))
    return found, left_out


def classified(network: Any, given: Sequence[Picture], top: int, batch_size: int) -> Iterator[tuple[Picture, list[Prediction] | BadImage]]:
    """Classify pictures batch by batch; one that can't be used has its error, and spoils no other."""
    for start in range(0, len(given), batch_size):
        batch = given[start : start + batch_size]
        try:
            rows: list[Any] = predict(network, [picture.read() for picture in batch], top, batch_size)
        except BadImage:
            rows = [_one(network, picture, top) for picture in batch]
        yield from zip(batch, rows, strict=True)


def called(network: Any) -> str:
    """Name a network and its weights as they can be asked for again, ResNet50:imagenet1k_v1; or the file or run they came from."""
    record, name = network.checkpoint, type(network).__name__
    if record is None:
        return name
    known = any(record.tag == row.tag for row in checkpoints(record.model))
    return f"{name}:{record.tag}" if known else f"{name} with the weights of {record.sources[0].removeprefix('file://')}"


def tell_by(network: Any, knows: str = "") -> None:
    """Say which network has answered, and how to ask another; `knows` says why this one, if nobody named it."""
    knows = knows or f"which knows {counted(network.num_classes, 'class', 'classes')}"
    out.print(f"[dim]by {escape(f'{called(network)}, {knows}')}; another: --model NETWORK[/dim]", soft_wrap=True)


def tell_drawn(saved: Path | None, part: str, otherwise: str = "") -> None:
    """Say where a picture was drawn, and of what `part` of the images where not of all; else how to have one."""
    told = f"drawn in '{escape(str(saved))}'{f', {part}' if part else ''}" if saved is not None else otherwise
    if told:
        out.print(f"[dim]{told}[/dim]", soft_wrap=True)


def end(used: int, asked: int, failed: Sequence[BadImage], done: str, as_json: bool) -> None:
    """Tell which images could not be used, and how many could.

    Args:
        used: images that could.
        asked: images that were named, with those that were left out when their folder was opened.
        failed: the errors of the others.
        done: what was done with the images, "classified".
        as_json: whether stdout is for machines.

    Raises:
        typer.Exit: with the lowest of the errors' codes, if there are errors.
    """
    codes = {fail(error, 3 if isinstance(error, FileNotFoundError) else 1) for error in failed}
    if asked > 1 and used and not as_json:
        out.print(f"[dim]{used:,} of {counted(asked, 'image')} {done}[/dim]")
    if codes:
        raise typer.Exit(min(codes))


def _one(network: Model, picture: Picture, top: int) -> list[Prediction] | BadImage:
    try:
        return predict(network, picture.read(), top)
    except BadImage as error:
        return error


def _is_source(name: str) -> bool:
    several = any(sign in name for sign in "*{") and not Path(name).exists()
    return is_url(name) or several or os.path.isdir(os.path.expanduser(name)) or name.lower().endswith((*PARQUET, *TAR, *LISTS))  # noqa: PTH111, PTH112


def _read(source: Source, index: int, name: str) -> Any:
    try:
        return decode(source.read(index), name)
    except BadImage:
        raise
    except OSError as error:
        raise BadImage(f"{name}: it can't be read ({error.strerror or error}); look whether it is still there") from error
