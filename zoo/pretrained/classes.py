"""A classifier chosen by meaning: rows of a trained one by WordNet id or name, their means for what stands above, new ones for the rest."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weights.arguments import python_scalar
from zoo.labels import Label, Origin, labels
from zoo.networks.model import Model
from zoo.pretrained.heads import fresh_head

log = logging.getLogger("zoo")

WORDNET = Path(__file__).parents[1] / "data" / "wordnet" / "imagenet1k_synsets.tsv"
WNID = re.compile(r"n\d{8}")
SHOWN = 10


class AmbiguousClass(ValueError):
    """A name means several classes; the message gives the WordNet id of each."""


@dataclass(frozen=True, slots=True)
class Synset:
    """A meaning in WordNet: its names, the headword first, and the ids of the meanings above it."""

    names: tuple[str, ...]
    parents: tuple[str, ...]


@cache
def synsets() -> dict[str, Synset]:
    """Read ImageNet's 1000 synsets and all that stand above them, by WordNet id."""
    rows = (line.split("\t") for line in WORDNET.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {wnid: Synset(tuple(names.split(", ")), tuple(parents.split())) for wnid, names, parents in rows}


@cache
def rows_below(table: tuple[Label, ...]) -> dict[str, tuple[int, ...]]:
    """Tell for every synset which rows of a table of labels lie below it, or are it."""
    below: dict[str, list[int]] = {}
    for row, label in enumerate(table):
        if label.wnid is None:
            continue
        above, todo = {label.wnid}, [label.wnid]
        while todo:
            known = synsets().get(todo.pop())
            fresh = set(known.parents if known else ()) - above
            above |= fresh
            todo += fresh
        for wnid in above:
            below.setdefault(wnid, []).append(row)
    return {wnid: tuple(rows) for wnid, rows in below.items()}


def origin(wanted: str, table: tuple[Label, ...]) -> Origin:
    """Tell which rows of a classifier mean what `wanted` says.

    A WordNet id is taken as it is. A name is one of the table's, or the headword of a synset above its classes ("dog"); only where
    there is none of these, another name of such a synset ("automobile"). Case and underscores make no difference.

    Args:
        wanted: a WordNet id, "n02084071", or a name.
        table: the labels of the classifier's rows.

    Raises:
        AmbiguousClass: the name means several of these.
    """
    below = rows_below(table)
    if WNID.fullmatch(wanted):
        rows = below.get(wanted, ())
        known = synsets().get(wanted)
        own = next((table[row].name for row in rows if table[row].wnid == wanted), known.names[0] if known else wanted)
        return Origin(Label(own, wanted), rows)
    word = _plain(wanted)
    found = {label.wnid or str(row): (row,) for row, label in enumerate(table) if _plain(label.name) == word}
    found |= {wnid: rows for wnid, rows in below.items() if (known := synsets().get(wnid)) and _plain(known.names[0]) == word}
    if not found:
        found = {wnid: rows for wnid, rows in below.items() if (known := synsets().get(wnid)) and word in map(_plain, known.names)}
    if len(set(found.values())) > 1:
        meanings = [f"{key} ({_meaning(key, rows, table)})" for key, rows in sorted(found.items())]
        raise AmbiguousClass(f"{wanted!r} means {len(found)} things: {', '.join(meanings)}. Give the WordNet id of the one that you mean")
    for key, rows in found.items():
        return Origin(Label(wanted, key if WNID.fullmatch(key) else None), rows)
    return Origin(Label(wanted), ())


def class_list(wanted: Iterable[str]) -> list[str]:
    """List the classes that are wanted: of a list, a generator, or an array of NumPy's.

    Raises:
        TypeError: these are no words, or have no order, as those of a set have none.
        ValueError: it names none.
    """
    given = wanted
    if not isinstance(wanted, str | bytes | Set | Mapping) and isinstance(wanted, Iterable):
        given = [python_scalar(name) for name in wanted]
        if all(isinstance(name, str) for name in given):
            if not given:
                raise ValueError("classes names none; leave it out to keep the checkpoint's")
            return given
    raise TypeError(f'classes are a list of WordNet ids and names, ["n02123045", "dog"], not {given!r:.80}')


def choose_classes(network: Model, wanted: Iterable[str]) -> None:
    """Give a trained network a classifier of the classes that are `wanted`, in place and in their order; auxiliary heads likewise.

    `network.classes` then says where each row comes from, and the log does.

    Args:
        network: with a checkpoint whose classes have names.
        wanted: WordNet ids and names, see `origin`.

    Raises:
        AmbiguousClass: a name means several classes.
        ValueError: nothing is wanted, or the same word twice; or the checkpoint's classes have no names.
        TypeError: something that is wanted is no string.
    """
    kind, record = type(network).__name__, network.checkpoint
    wanted = class_list(wanted)
    if record is None or not record.labels:
        raise ValueError(f"this {kind} has no checkpoint whose classes have names, so none can be found; num_classes=… puts a new head on")
    table = labels(record.labels)
    chosen = [origin(name.strip(), table) for name in wanted]
    seen: dict[object, str] = {}
    for name, found in zip(wanted, chosen, strict=True):
        key = found.rows or _plain(found.label.name)
        if key in seen and _plain(seen[key]) == _plain(name):
            raise ValueError(f"classes has the same class twice: {seen[key]!r} and {name!r}")
        if key in seen:
            log.warning("%s: %r and %r mean the same; both get the same row", kind, seen[key], name)
        seen[key] = name
    old = {name: _parameters(network, name) for name in network.classifiers}
    fresh_head(network, len(chosen))
    with torch.no_grad():
        for name, before in old.items():
            for leaf, values in before.items():
                new = _parameters(network, name)[leaf]
                for row, found in enumerate(chosen):
                    if found.rows:
                        new[row] = values[list(found.rows)].mean(0)
    network.classes = tuple(chosen)
    log.warning("%s: %s has %s", kind, network.classifiers[0], said(chosen))


def said(chosen: Sequence[Origin]) -> str:
    """Say in a sentence which classes were reused, averaged and drawn anew."""
    parts: list[str] = []
    for how, more in (("reused", ""), ("averaged", ""), ("new", " and untrained")):
        names = [f"{o.label.name} (of {len(o.rows)})" if how == "averaged" else o.label.name for o in chosen if o.how == how]
        if names:
            rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            parts.append(f"{len(names)} {how}{more}: {', '.join(names[:SHOWN])}{rest}")
    return f"{len(chosen)} classes; {'; '.join(parts)}"


def _parameters(network: Model, layer: str) -> dict[str, Tensor]:
    """Return the tensors of a classifier; none of an auxiliary head that the network was built without."""
    try:
        return {name: parameter.detach() for name, parameter in network.get_submodule(layer).named_parameters()}
    except AttributeError:
        return {}


def _meaning(key: str, rows: tuple[int, ...], table: tuple[Label, ...]) -> str:
    names = ", ".join(synsets()[key].names) if key in synsets() else table[rows[0]].name
    return names if len(rows) == 1 else f"{names}; {len(rows)} classes"


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").casefold().split())
