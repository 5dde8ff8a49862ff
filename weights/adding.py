"""A user's own checkpoint: its bytes go to the cache, its record to the user's registry."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from weights.addresses import Address
from weights.arguments import did_you_mean
from weights.cache import Cache
from weights.errors import BadRecord, NotLocked, UnknownWeights
from weights.install import Converter, get, renew
from weights.lock import quoted
from weights.part import disk
from weights.pinning import frozen_by
from weights.places import at_home
from weights.record import Alternative, Checkpoint, Preprocessing
from weights.registry import TAG, adhoc, checkpoints, located, named_folder, user_folder
from weights.whole import write_whole


def add(
    source: str | Path,
    model: str,
    tag: str,
    *,
    to_safetensors: Converter | None = None,
    replace: bool = False,
    origin: Path | None = None,
    **facts: Any,
) -> Checkpoint:
    """Install a file of the user's own and write its record, so that `find(model, tag)` knows it from now on.

    Args:
        source: a path, or any source that `adhoc` takes; the cache keeps a copy, so it may be moved or deleted afterwards.
        model: the variant's class name.
        tag: the checkpoint's name among the variant's.
        to_safetensors: converts it, as for `get`, if it is not safetensors.
        replace: whether an existing record of the user's own with this name may go; one that ships may not.
        origin: what a file was made of that itself won't stay; the record then names this.
        **facts: fields of `Checkpoint`, as for `adhoc`, `num_classes` among them; `default` is true if no other checkpoint of the
            model is the default, and may be set although one that ships is.

    Raises:
        BadRecord: the name is taken, a fact is of the wrong name, type or value, or another of the user's own is the default.
        SourceUnavailable: the file does not exist.
        NotLocked: ZOO_FROZEN is set.
        WeightsError: whatever `get` raises.

    Example:
        >>> add("mine.safetensors", "MobileNetV1", "mine", num_classes=3, labels="imagenet1k")  # doctest: +SKIP
    """
    path = check_new(model, tag, replace=replace)
    others = [row for row in checkpoints(model) if row.tag != tag]
    row = adhoc(model, str(source), **{"tag": tag, "default": not any(other.default for other in others)} | facts)
    if not row.num_classes:
        raise BadRecord(f"say num_classes, how many {model}:{tag} tells apart.")
    if row.default and (taken := [one for one in located(model) if one.rank == 0 and one.row.default and one.row.tag != tag]):
        raise BadRecord(f"{taken[0]} is your default of {model}; take default = true away there before giving it to {tag}.")
    local = all(source.startswith("file:") for source in row.sources)  # what it has now is meant, whatever a lock pins of it
    if local and (switch := frozen_by()):
        raise NotLocked(f"{source} is not added: its bytes are in no lock, and {switch} admits nothing new. Add it once without.")
    installed = (renew if local else get)(row, to_safetensors=to_safetensors)
    row = row.hashed(installed.source_sha256)
    if origin is not None:
        row = dataclasses.replace(row, sources=(at_home(origin).absolute().as_uri(),))
        Cache().rename(installed, row.sources[0])
    with disk(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_toml(row))
    return row


def check_new(model: str, tag: str, *, replace: bool = False) -> Path:
    """Return the file that the record of a checkpoint of the user's own will have, before anything is read for it.

    Raises:
        BadRecord: the tag is none, or it is taken; `replace` lets one of the user's own go.
    """
    if not re.fullmatch(TAG, tag):
        raise BadRecord(f"a tag is letters, digits and _ . + -, got {tag!r}")
    path = user_folder() / f"{model}.{tag}.toml"
    if any(row.tag == tag for row in checkpoints(model)) and not (replace and path.exists()):
        todo = "choose another tag" + (f"; or replace=True replaces it, your own in {path}" if path.exists() else "")
        raise BadRecord(f"{model}:{tag} exists: {todo}")
    if alike := [one.row.tag for one in located(model) if one.rank == 0 and one.row.tag != tag and one.row.tag.lower() == tag.lower()]:
        raise BadRecord(f"{model}:{alike[0]} exists, and {tag} would have its file on a disk that is blind to case: choose another tag.")
    return path


def remove(model: str, tag: str) -> Path:
    """Delete a record of the user's own; its bytes stay in the cache, where `recognise` does not know them any more.

    Args:
        model: the variant's class name.
        tag: the checkpoint's name among the variant's.

    Returns:
        The file that was deleted.

    Raises:
        UnknownWeights: no record has this name.
        BadRecord: the record is not the user's own, or its file has other tables too; the message says where it stands.
        CacheNotWritable: the user's registry folder can't be written.

    Example:
        >>> remove("MobileNetV1", "mine")  # doctest: +SKIP
    """
    rows = located(model)
    same = [one for one in rows if one.row.tag == tag] or [one for one in rows if one.row.tag.lower() == tag.lower()]
    if not same:
        own = [one.row.tag for one in rows if one.rank == 0]
        raise UnknownWeights(
            f"{model} has no checkpoint {tag!r}{did_you_mean(tag, own) or '.'} Of your own it has: {', '.join(own) or 'none'}."
        )
    mine = [one for one in same if one.rank == 0]
    if not mine:
        raise BadRecord(f"{same[0]} is not your own: only what is in {named_folder()} can be removed.")
    path = mine[0].path
    if len(mine) > 1 or sum(one.path == path for one in located()) > 1:
        raise BadRecord(f"{' and '.join(map(str, mine))} can't be removed alone: delete that table in an editor.")
    with disk(path.parent):
        path.unlink()
    return path


def to_toml(row: Checkpoint) -> str:
    """Write a record as the table that the registry reads back as the same record; of a query it has what `Address.noted` has."""
    facts = {f.name: getattr(row, f.name) for f in fields(row) if f.name not in ("model", "tag")}
    lines = [
        f"{name} = {_value(value)}" for name, value in facts.items() if value is not None and value is not False and value not in ({}, ())
    ]
    return "\n".join([f"[{quoted(row.model)}.{quoted(row.tag)}]", *lines, ""])


def _value(value: Any) -> str:
    if isinstance(value, Address):
        return quoted(value.noted)
    if isinstance(value, (Preprocessing, Alternative)):
        return _value({f.name: v for f in fields(value) if (v := getattr(value, f.name)) is not None})
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)  # of options or metrics, whose keys are names
        return "{ " + ", ".join(f"{quoted(name)} = {_value(v)}" for name, v in table.items()) + " }"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, cast('Iterable[Any]', value)))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return quoted(value) if isinstance(value, str) else repr(value)
