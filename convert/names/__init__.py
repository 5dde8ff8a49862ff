"""A file per foreign naming: which of their modules is which of ours. Ours are torchvision's names. Adding a naming is adding its file.

A naming has ``rows(family, ours)``; the way back is derived (`convert.writing.parts`). It may have

- ``FORMATS``: the formats in which it occurs; in all, if absent;
- ``BY_NAME``: formats whose files may carry its names, though nobody's own tool writes them so: arrays that a user named and saved;
- ``mend(name)``: turns an older spelling of its own into today's;
- ``align(theirs, mapping)``: gives the modules of a file the names that its rows have, where only all of them together tell;
- ``options(family)``: the constructor keywords with which our network computes what theirs does;
- ``preprocessing(family)``: fields of `weights.Preprocessing`, how its images are prepared;
- ``order(family, ours)``: our modules in the order of a file that keeps only an order;
- ``BESIDE`` and ``told(files, family)``: names of JSON files that lie beside its checkpoints, and what they say, by any of these keys:
  ``options`` and ``preprocessing`` as above, ``classes`` (their names in order), ``labels`` (the name of a list of them), ``embedding`` and
  ``num_classes`` as of `weights.Checkpoint`. None where the files are of another network, a ValueError where no network here does what
  they say;
- ``IGNORED``: prefixes of their modules that have no counterpart here, as they are no part of the network;
- ``UNREAD``: prefixes of their modules by which of ours they are, ignored for a network that was built without those.

Example:
    >>> "timm" in names.NAMINGS
    True
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from convert.core import Report, Row, Shape, apply, no_bias, strip_wrappers

T = TypeVar("T")
Family = type | str | tuple[str, ...]
"""A class of the zoo, the name of a family, or the names of a class and of its bases."""

log = logging.getLogger("convert")

LIKELIEST = ("torchvision", "timm")
"""Namings that are tried before the others; those are tried by the alphabet."""

COMPUTED = ("relative_position_index", "relative_coords_table", "attn_mask")
"""Buffers that Swin's other implementations keep in their files; they follow from the size of a window, and networks here compute them."""


def _discovered() -> dict[str, ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    ordered = sorted(names, key=lambda name: (LIKELIEST.index(name) if name in LIKELIEST else len(LIKELIEST), name))
    return {name: importlib.import_module(f"convert.names.{name}") for name in ordered}


NAMINGS: dict[str, ModuleType] = _discovered()
"""Every naming by the name that a checkpoint's record uses, the likelier first."""

AUXILIARY = {name: name for name in ("aux1.", "aux2.", "AuxLogits.")}
"""Heads that only training needs; files carry them along, and a network built without them ignores them."""


def rows(naming: str, family: Family, ours: Mapping[str, Shape]) -> list[Row]:
    """List which of `naming`'s modules is which of our network's.

    Args:
        naming: a name in `NAMINGS`.
        family: a class of the zoo, the name of a family ("VGG", "MobileNetV2"), or the names of a class and of its bases.
        ours: the shapes of our network's state dict.

    Raises:
        LookupError: no naming of this name.
    """
    if naming not in NAMINGS:
        raise LookupError(f"no naming {naming!r}; there are {', '.join(NAMINGS)}")
    return NAMINGS[naming].rows(lineage(family), ours)


def customs(naming: str, format: str) -> str:
    """Name the naming whose habits a file has, as how it pads or what its images are: its own, else that which its format is called after.

    A Keras file that was paired without a table of names was made by Keras all the same.
    """
    return naming if naming in NAMINGS else format if format in NAMINGS else ""


def fact(naming: str, what: str, family: Family) -> dict[str, Any]:
    """Ask a naming for its ``options`` or ``preprocessing`` of a network; {} where it has nothing to say."""
    ask = getattr(NAMINGS[naming], what, None)
    return dict(ask(lineage(family))) if ask is not None else {}


def beside() -> list[str]:
    """List the files beside checkpoints that any naming reads."""
    return list(dict.fromkeys(name for module in NAMINGS.values() for name in getattr(module, "BESIDE", ())))


def told(files: Mapping[str, Any], family: Family) -> tuple[str, dict[str, Any]] | None:
    """Ask every naming what the files beside a checkpoint say: the first that knows them, and what it read.

    Args:
        files: what JSON files hold, by their names.
        family: the network's class, or the name of its family.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: they are not what they seem, or describe what no network here computes.
    """
    for naming, module in NAMINGS.items():
        found = module.told(files, lineage(family)) if hasattr(module, "told") else None
        if found is not None:
            return naming, found
    return None


def of_format(format: str) -> list[str]:
    """List the namings that occur in files of this format, the likelier first."""
    own = [name for name, module in NAMINGS.items() if format in getattr(module, "FORMATS", (format,))]
    return own + [name for name, module in NAMINGS.items() if format in getattr(module, "BY_NAME", ()) and name not in own]


def orders(format: str) -> list[str]:
    """List the namings that know the order of files of this format that keep nothing else."""
    return [name for name, module in NAMINGS.items() if format in getattr(module, "FORMATS", (format,)) and hasattr(module, "order")]


def recognise(theirs: Mapping[str, Any], family: Family, ours: Mapping[str, Any], format: str = "pytorch") -> str | None:
    """Find the first naming whose rows give every tensor of `theirs` a place and leave none of `ours` empty.

    Args:
        theirs: a file's tensors.
        family: a class of the zoo, or the name of a family.
        ours: our network's state dict, or its shapes.
        format: of the file; only namings that occur in such files are tried.
    """
    return next((naming for naming in of_format(format) if _tried(naming, theirs, family, ours)[1].complete), None)


def to_ours(tensors: Mapping[str, T], ours: Mapping[str, Any], *, naming: str, family: Family) -> dict[str, T]:
    """Give the tensors of a file our names, and old layouts their present form.

    Args:
        tensors: by the file's names.
        ours: our network's state dict; only names and shapes count.
        naming: a name in `NAMINGS`, tried first; "auto" leaves it to `recognise`.
        family: the network's class, or the name of its family.

    Returns:
        The tensors by our names, as the naming that explains most has them. What none explains keeps the file's name, for the
        caller to complain about. Misshaped tensors come through, as another number of classes gives, and `num_batches_tracked`
        may be missing. A bias that the naming says their layers lack is zeros.

    Raises:
        LookupError: no naming of this name.
    """
    carried, report, left = _tried("torchvision" if naming == "auto" else naming, tensors, family, ours)
    if not report.complete:
        tried = {other: _tried(other, tensors, family, ours) for other in of_format("pytorch")}
        best = min(tried, key=lambda other: len(tried[other][1].missing) + len(tried[other][1].unmatched))
        if naming != "auto" and tried[best][1].complete:
            log.warning("the tensors are named as %s names them, not %s", best, naming)
        if naming == "auto" or tried[best][1].complete:
            carried, report, left = tried[best]
    return {**{name: left[name] for name in report.unmatched}, **carried}


def _with_zeros(mapping: Sequence[Row], carried: dict[str, T], report: Report, shapes: Mapping[str, Shape]) -> dict[str, T]:
    """Give zeros to the biases of ours that rows say their layers lack, where the weight is there; they are not missing any more."""
    made: dict[str, T] = {}
    for row in mapping:
        name, weight = f"{row.ours}.bias", carried.get(f"{row.ours}.weight")
        if "bias" in row.lacks and row.kind != "norm" and weight is not None and name in shapes and name not in carried:
            made[name] = no_bias(weight)
    report.missing[:] = [(ours, theirs) for ours, theirs in report.missing if ours not in made]
    return {**carried, **made}


def carry(
    naming: str, tensors: Mapping[str, T], mapping: Sequence[Row], ours: Mapping[str, Any]
) -> tuple[dict[str, T], Report, dict[str, T]]:
    """Apply rows of a naming, or of nobody's: what was carried over, what did not fit, and the tensors as the rows saw them."""
    shapes = {name: tuple(getattr(tensor, "shape", tensor)) for name, tensor in ours.items()}
    seen = {name: tensors[own] for name, own in spelt(naming, tensors, mapping, shapes).items()}
    carried, report = apply(mapping, seen, shapes)
    return carried, report, seen


def spelt(naming: str, tensors: Mapping[str, Any], mapping: Sequence[Row], ours: Mapping[str, Any]) -> dict[str, str]:
    """Spell a file's names as the rows of a naming do, wrappers and what is no part of the network left out: to the file's own."""
    module = NAMINGS.get(naming)
    optional = AUXILIARY | getattr(module, "UNREAD", {})
    unused = tuple(there for there, here in optional.items() if not any(name.startswith(here) for name in ours))
    unused += tuple(getattr(module, "IGNORED", ()))
    mend, align = getattr(module, "mend", str), getattr(module, "align", None)
    plain = _unprefixed(strip_wrappers({name: name for name in tensors}), {row.theirs for row in mapping}, mend)
    mended = {name: mend(name) for name in plain if not name.startswith(unused) and not name.endswith(COMPUTED)}
    found = {now: plain[name] for name, now in mended.items() if not now.startswith(unused)}
    if align is None:
        return found
    aligned = align(list(dict.fromkeys(name.rpartition(".")[0] for name in found)), mapping)
    places = {name: name.rpartition(".") for name in found}
    return {".".join(filter(None, (aligned[places[name][0]], places[name][2]))): own for name, own in found.items()}


def _unprefixed(names: Mapping[str, str], modules: set[str], mend: Callable[[str], str]) -> dict[str, str]:
    """Take a prefix from the names that have it, "model." or "backbone.", where a naming knows most of its modules only then."""

    def known(prefix: str) -> int:
        return len({mend(name.removeprefix(prefix)).rpartition(".")[0] for name in names if name.startswith(prefix)} & modules)

    if not modules or 2 * known("") >= len(modules):
        return dict(names)
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        counts.update(".".join([*parts[:depth], ""]) for depth in range(1, min(len(parts), 4)))
    shared = [prefix for prefix, count in counts.items() if 2 * count > len(names)]
    prefix = max(shared, key=known, default="")
    if 2 * known(prefix) < len(modules):
        return dict(names)
    short = {name.removeprefix(prefix): own for name, own in names.items() if name.startswith(prefix)}
    return {**{name: own for name, own in names.items() if not name.startswith(prefix) and name not in short}, **short}


def lineage(family: Family) -> tuple[str, ...]:
    """Name a class and all its bases, as namings want it: VGG19, VGG, Model …"""
    if isinstance(family, tuple):
        return family
    return (family,) if isinstance(family, str) else tuple(base.__name__ for base in family.__mro__)


def _tried(naming: str, tensors: Mapping[str, T], family: Family, ours: Mapping[str, Any]) -> tuple[dict[str, T], Report, dict[str, T]]:
    shapes = {name: tuple(getattr(tensor, "shape", tensor)) for name, tensor in ours.items()}
    mapping = rows(naming, family, shapes)
    carried, report, left = carry(naming, tensors, mapping, shapes)
    return _with_zeros(mapping, carried, report, shapes), report, left
