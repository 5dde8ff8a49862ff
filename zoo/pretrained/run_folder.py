"""What a run leaves behind: weights, their record, and the names of the classes; the folder is weights that `trained` knows."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from weights import BadRecord, Checkpoint, Preprocessing
from weights.adding import to_toml
from weights.documents import misread, toml_file
from weights.record import record
from weights.whole import whole, write_whole
from zoo.labels import labels

CONFIG = "settings.json"
"""What a run writes down when it begins."""
ROW, WEIGHTS, LABELS = "weights.toml", "model.safetensors", "labels.tsv"
WNID = re.compile(r"n\d{8}")


def is_run(folder: Path) -> bool:
    """Tell whether a folder holds the result of a run."""
    return (folder / ROW).is_file() and (folder / WEIGHTS).is_file()


def unfinished(folder: Path) -> str:
    """Say of a folder that holds a run without a result what to do; "" of any other folder."""
    if is_run(folder) or not (folder / CONFIG).is_file():
        return ""
    return f"{folder} is a run that is not finished, so it has no weights yet: zoo finetune --resume {folder} goes on with it"


def place_of(record: Checkpoint) -> str:
    """Say where a record's weights are: a run's folder, a file's path, or a URL."""
    source = record.sources[0]
    if not source.startswith("file://"):
        return source
    path = Path(url2pathname(urlsplit(source).path))
    return str(path.parent if path.name == WEIGHTS and is_run(path.parent) else path)


def read_row(folder: Path) -> Checkpoint:
    """Read the record of a run's result; its places are those where the folder lies now.

    Raises:
        BadRecord: there is none, or it is damaged.
    """
    path = folder / ROW
    what, todo = f"{path} is no record of one run", f"Write it again with: zoo finetune --resume {folder}"
    try:
        tables = toml_file(path, todo, refuse=BadRecord)
    except OSError as error:
        raise BadRecord(f"{what} ({error.strerror}). {todo}.") from error
    with misread(what, todo, BadRecord):
        ((model, rows),) = tables.items()
        ((tag, table),) = rows.items()
        table = dict(table)
    place = folder.absolute()
    table |= {"sources": [(place / WEIGHTS).as_uri()]} | ({"labels": str(place / LABELS)} if "labels" in table else {})
    return record(model, tag, table, str(path))


def write_result(
    folder: Path,
    tensors: Mapping[str, Any],
    *,
    model: str,
    options: Mapping[str, Any],
    classes: Sequence[str],
    preprocessing: Preprocessing,
    base: Mapping[str, str | None] | None,
    metrics: Mapping[str, float],
    metrics_data: str | None,
) -> Checkpoint:
    """Write weights, the names of the classes and the record into a run's folder, each whole or not at all, the record last.

    Args:
        folder: of the run.
        tensors: the network's, by name.
        model: the class's name.
        options: its constructor keywords, without the number of classes and channels.
        classes: their names, in the order of the logits.
        preprocessing: of the images.
        base: name, sha256 and licence of the weights that the run began with, or None.
        metrics: percentages.
        metrics_data: what they were measured on.

    Returns:
        The record.
    """
    (folder / ROW).unlink(missing_ok=True)  # it must never stand beside other weights
    with whole(folder / WEIGHTS) as path:
        save_tensors(tensors, path, {"format": "pt"})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    write_whole(folder / LABELS, "".join(f"{_wnid(name)}\t{_named(name)}\n" for name in classes))
    began = f"{base['name']}" + (f", sha256 {base['sha256']}" if base["sha256"] else "") if base else "fresh weights"
    place = folder.absolute()
    row = Checkpoint(
        model=model,
        tag=re.sub(r"[^A-Za-z0-9_.+-]", "-", place.name).lstrip("_.+-") or "run",
        sources=((place / WEIGHTS).as_uri(),),
        format="safetensors",
        names="torchvision",
        num_classes=len(classes),
        preprocessing=preprocessing,
        license=(base["license"] if base else None) or "unstated",
        provenance=f"{'fine-tuned from' if base else 'trained from'} {began}",
        sha256=digest,
        size_bytes=(folder / WEIGHTS).stat().st_size,
        labels=str(place / LABELS),
        metrics=metrics if metrics_data else {},
        metrics_data=metrics_data,
        options=dict(options),
        recipe="settings.json",
    )
    write_whole(folder / ROW, to_toml(row))
    return row


def save_tensors(tensors: Mapping[str, Any], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file that whoever may read the folder's other files may read too: the library makes it private.

    Raises:
        OSError: it can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:  # of the system's errors it keeps the words and the number
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _wnid(name: str) -> str:
    return name if WNID.fullmatch(name) else ""


def _named(name: str) -> str:
    """Return what a class is called: ImageNet's folders have WordNet ids for names."""
    if WNID.fullmatch(name):
        return next((label.name for label in labels("imagenet1k") if label.wnid == name), name)
    return re.sub(r"\s", " ", name)
