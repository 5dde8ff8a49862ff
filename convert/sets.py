"""Several sets of weights in one file: raw ones, and those that were averaged while training; told apart by the names before them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from convert.core import AVERAGED, COUNTER, WRAPPERS

T = TypeVar("T")

log = logging.getLogger("convert")

WORDS = re.compile(r"ema|swa|averag|avg", re.IGNORECASE)
"""What the name of an averaged set has in it."""
ALL = "all"


def is_averaged(name: str) -> bool:
    """Tell by a part of a name whether it is that of averaged weights, "model_ema"; only a twin beside them proves it."""
    return WORDS.search(name) is not None


def suffixes(names: Iterable[str]) -> dict[str, str]:
    """Take wrappers' prefixes and counters from names: what is left, to the name."""
    found = {name: name for name in names if name.rpartition(".")[2] not in (AVERAGED, COUNTER)}
    while found and (wrapper := next((w for w in WRAPPERS if all(name.startswith(w) for name in found)), None)):
        found = {name.removeprefix(wrapper): own for name, own in found.items()}
    return found


def averaged(shapes: Mapping[str, Any]) -> dict[str, str]:
    """Find the averaged sets of a file: the prefix of each, to the prefix of its raw twin, which has the same names and shapes.

    Example:
        >>> averaged({"model.fc.weight": (2, 3), "ema.module.fc.weight": (2, 3)})
        {'ema.': 'model.'}
    """
    groups: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts[:-1]) if is_averaged(part)), None)
        if at is not None:
            groups.setdefault(".".join([*parts[: at + 1], ""]), []).append(name)
    twins: dict[str, str] = {}
    for prefix, members in groups.items():
        found = suffixes(name.removeprefix(prefix) for name in members)
        first = next(iter(found), "")
        for name in shapes:
            raw = name.removesuffix(first)
            if not first or raw == name or name.startswith(prefix) or (raw and not raw.endswith(".")):
                continue
            pairs = [(raw + suffix, prefix + own) for suffix, own in found.items()]
            if all(theirs in shapes and tuple(shapes[theirs]) == tuple(shapes[mine]) for theirs, mine in pairs):
                twins[prefix] = raw
                break
    return twins


def chosen(tensors: Mapping[str, T], which: str | None, file: Path | str) -> dict[str, T]:
    """Keep one of the sets of weights that a file has; where it has raw and averaged ones and nobody chose, the raw ones, with a warning.

    Args:
        tensors: by the file's names; anything with a shape.
        which: "raw", "ema", or the name of a set, "model_ema"; None leaves it to this function, "all" keeps all.
        file: for messages.

    Raises:
        ValueError: the file has no such set; the message says which it has.
    """
    twins = {} if which == ALL else averaged({name: getattr(tensor, "shape", tensor) for name, tensor in tensors.items()})
    if not twins:
        if which not in (None, ALL, "raw"):
            raise ValueError(f"{file} holds one set of weights alone, so there is no {which!r} in it; leave weights_of out")
        return dict(tensors)
    sets = {_called(prefix): prefix for prefix in dict.fromkeys([*twins.values(), *twins])}
    means = {_called(prefix): prefix for prefix in twins}
    raw = _called(next(iter(twins.values())))
    if which is None:
        told = '%s holds several sets of weights, %s: %s is taken, and weights_of="ema" takes %s'
        log.warning(told, file, " and ".join(sets), raw, next(iter(means)))
    key = raw if which in (None, "raw") else next(iter(means)) if which == "ema" and len(means) == 1 else which
    if key not in sets:
        raise ValueError(f"{file} has no weights {which!r}; it has {', '.join(sets)}: weights_of={list(sets)[-1]!r}")
    others = tuple(prefix for prefix in sets.values() if prefix and prefix != sets[key])
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(others) and name.rpartition(".")[2] != AVERAGED}
    if sets[key] and "" in sets.values():  # the raw names have no prefix to be known by
        rest = set(suffixes(name.removeprefix(sets[key]) for name in kept if name.startswith(sets[key])))
        kept = {name: tensor for name, tensor in kept.items() if name not in rest}
    return kept


def chosen_of_each(files: Sequence[tuple[Path, Mapping[str, T]]], which: str | None) -> list[dict[str, T]]:
    """Keep one set of each file as `chosen` does; a file that has but one keeps it, if another has several.

    Args:
        files: the path of each, and its tensors, all sets of them.
        which: as for `chosen`.

    Raises:
        ValueError: a file with several sets has no such one, or none has several.
    """
    several = [bool(averaged({name: getattr(one, "shape", one) for name, one in tensors.items()})) for _, tensors in files]
    return [chosen(tensors, which if has or not any(several) else None, path) for (path, tensors), has in zip(files, several, strict=True)]


def _called(prefix: str) -> str:
    return prefix.rstrip(".") or "those without a prefix"
