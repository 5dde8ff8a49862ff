"""What files beside a checkpoint say of it, config.json and the like: options, how images are prepared, and what its classes are called."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import weights
from convert import names
from weights import Checkpoint
from weights.beside import files_beside, local_files_beside
from weights.cache import Cache
from weights.errors import BadRecord, CacheNotWritable, MalformedFile, NoSpace, WeightsMismatch
from zoo.conversion.notes import accepted
from zoo.labels import Label, labels, lists_of
from zoo.networks.model import Model

log = logging.getLogger("zoo")
ALIKE = 0.8
"""Share of a list's names that must be found for the list to be taken for it: spellings differ from publisher to publisher."""
LONGEST = 200
"""Characters of a class's name that are kept."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What was read.

    Attributes:
        options: constructor keywords without which the weights compute something else.
        preprocessing: fields of `weights.Preprocessing`, all that are told.
        labels: the name of a list of labels, or the path of a table in the cache.
        embedding, num_classes: as of `weights.Checkpoint`.
        files: their names, for the record.
    """

    options: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    labels: str | None = None
    embedding: bool = False
    num_classes: int = 0
    files: tuple[str, ...] = ()

    @property
    def headless(self) -> bool:
        """Whether the file has no classifier."""
        return self.embedding and not self.num_classes

    def record(self, record: Checkpoint, model: type[Model], options: Mapping[str, Any]) -> Checkpoint:
        """Complete the record of a source that no registry knows; `options` are the user's, and win.

        Raises:
            BadRecord: what is told contradicts itself.
        """
        steps = replace(record.preprocessing, **suited(self.preprocessing, model, {**self.options, **options}))
        said = f"named by the user; {' and '.join(self.files)} beside it say how it is used"
        facts: dict[str, Any] = {"preprocessing": steps, "options": self.options, "labels": self.labels, "provenance": said}
        return replace(record, embedding=self.embedding, num_classes=self.num_classes, **facts)


def beside_source(record: Checkpoint, model: type[Model], frozen: bool | None = None) -> Beside | None:
    """Read what lies beside installed weights of a repository of the Hub; None where nothing that any naming knows does.

    Raises:
        MalformedFile, WeightsMismatch: as of `read`.
    """
    return read(files_beside(record, names.beside(), frozen=frozen), model, record.sources[0])


def beside_file(path: Path, model: type[Model]) -> Beside | None:
    """Read what lies beside a file of weights on this machine; raises as `read` does."""
    return read(local_files_beside(path, names.beside()), model, str(path))


def read(files: Mapping[str, bytes], model: type[Model], place: str) -> Beside | None:
    """Read what the files beside weights say of them.

    Args:
        files: their bytes, by name.
        model: the class that the weights are said to be of.
        place: where the weights are, for messages.

    Returns:
        None where no naming knows the files, or they are of another network.

    Raises:
        WeightsMismatch: they describe what no network here computes.
        MalformedFile: they are damaged.
    """
    whole = ", ".join(files)
    try:
        held = {name: json.loads(data) for name, data in files.items()}
        found = names.told({name: value for name, value in held.items() if isinstance(value, dict)}, model)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MalformedFile(f"{place}: {whole} beside it can't be read: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise WeightsMismatch(f"{place}: by {whole} beside it, {error}") from error
    if found is None:
        return None
    _, told = found
    try:
        steps = {name: value for name, value in {**USUAL, **told.get("preprocessing", {})}.items() if value is not None}
        weights.adhoc(model.variant().__name__, "file:///none", preprocessing=steps)
    except BadRecord as error:
        raise MalformedFile(f"{place}: {whole} beside it can't be: {error}") from error
    taken = accepted(model)
    options = {name: value for name, value in told.get("options", {}).items() if name in taken}
    named = told.get("labels") or (_table(told["classes"]) if told.get("classes") else None)
    steps = {name: tuple(value) if isinstance(value, list) else value for name, value in told.get("preprocessing", {}).items()}
    return Beside(options, steps, named, told.get("embedding", False), told.get("num_classes", 0), tuple(files))


USUAL = {"interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.5] * 3}
"""Stands for what is not told, while the rest is checked."""


def suited(steps: Mapping[str, Any], model: type[Model], options: Mapping[str, Any]) -> dict[str, Any]:
    """Let images have the side that a network of one size takes; what surrounds the crop stays the same share of the image."""
    side, crop = options.get("image_size") or model.input_size, steps.get("crop")
    if not model.fixed_size or crop in (None, side):
        return dict(steps)
    log.info("%s takes images of %d pixels alone: the checkpoint's are prepared for %d", model.__name__, side, crop)
    wider = steps.get("resize")
    return {**steps, "crop": side, "resize": None if wider is None else round(wider * side / crop)}


def _table(classes: Sequence[str]) -> str | None:
    """Name the list of labels that these classes are, or write one into the cache; None where that can't be written."""
    background = len(classes) > 1 and classes[0].strip().lower() == "background"
    known = next((name for name in lists_of(len(classes) - background) if _alike(classes[background:], labels(name))), None)
    if known is not None and not background:
        return known
    rows = [Label(_clean(name)) for name in classes]
    if known is not None:
        rows[1:] = labels(known)
    text = "".join(f"{label.wnid or ''}\t{label.name}\n" for label in rows)
    cache = Cache()
    path = cache.root / "labels" / f"{hashlib.sha256(text.encode()).hexdigest()}.tsv"
    try:
        if not path.is_file():
            cache.prepare()
            path.parent.mkdir(exist_ok=True)
            cache.write_text(path, text)
    except (CacheNotWritable, NoSpace, OSError) as error:
        log.warning("the names of %d classes can't be kept: %s", len(classes), error)
        return None
    return str(path)


def _alike(classes: Sequence[str], known: Sequence[Label]) -> bool:
    """Tell whether classes are those of a list: named by a WordNet id, or by all names of a meaning, of which a list has one."""
    same = 0
    for theirs, ours in zip(classes, known, strict=True):
        words = {word.strip().casefold() for word in theirs.split(",")}
        same += ours.name.casefold() in words or ours.wnid in words
    return same >= ALIKE * len(known)


def _clean(name: str) -> str:
    """Keep of a name what a line of a table can hold and a terminal can show."""
    return "".join(letter if letter.isprintable() else " " for letter in name)[:LONGEST].strip() or "?"
