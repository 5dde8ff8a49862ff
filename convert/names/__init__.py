"""A file per foreign naming: which of their modules is which of ours. Ours are torchvision's names.

A naming has ``rows(family, ours)``; the way back is derived (`convert.core.invert`). It may have ``mend(name)``, which turns
an older spelling of its own into today's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar

from convert.core import Report, Row, Shape, apply, strip_wrappers
from convert.names import akamaster, biubug6, timm, torchvision

T = TypeVar("T")

log = logging.getLogger("convert")

NAMINGS: dict[str, ModuleType] = {"torchvision": torchvision, "timm": timm, "akamaster": akamaster, "biubug6": biubug6}
"""Every naming by the name that a checkpoint's record uses, the likelier first."""

AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""Heads that only training needs; files carry them along, and a network built without them ignores them."""


def rows(naming: str, family: type | str, ours: Mapping[str, Shape]) -> list[Row]:
    """List which of `naming`'s modules is which of our network's.

    Args:
        naming: a name in `NAMINGS`.
        family: a class of the zoo, or the name of a family: "VGG", "MobileNetV2".
        ours: the shapes of our network's state dict.

    Raises:
        LookupError: no naming of this name.
    """
    if naming not in NAMINGS:
        raise LookupError(f"no naming {naming!r}; there are {', '.join(NAMINGS)}")
    return NAMINGS[naming].rows(_lineage(family), ours)


def recognise(theirs: Mapping[str, Any], family: type | str, ours: Mapping[str, Any]) -> str | None:
    """Find the first naming whose rows give every tensor of `theirs` a place and leave none of `ours` empty."""
    return next((naming for naming in NAMINGS if _carry(naming, theirs, family, ours)[1].complete), None)


def to_ours(tensors: Mapping[str, T], ours: Mapping[str, Any], *, naming: str, family: type | str) -> dict[str, T]:
    """Give the tensors of a file our names, and old layouts their present form.

    Args:
        tensors: by the file's names.
        ours: our network's state dict; only names and shapes count.
        naming: a name in `NAMINGS`, tried first; "auto" leaves it to `recognise`.
        family: the network's class, or the name of its family.

    Returns:
        The tensors by our names, as the naming that explains most has them. What none explains keeps the file's name, for the
        caller to complain about. Misshaped tensors come through, as another number of classes gives, and `num_batches_tracked`
        may be missing.

    Raises:
        LookupError: no naming of this name.
    """
    carried, report, left = _carry("torchvision" if naming == "auto" else naming, tensors, family, ours)
    if not report.complete:
        tried = {other: _carry(other, tensors, family, ours) for other in NAMINGS}
        best = min(tried, key=lambda other: len(tried[other][1].missing) + len(tried[other][1].unmatched))
        if naming != "auto" and tried[best][1].complete:
            log.warning("the tensors are named as %s names them, not %s", best, naming)
        if naming == "auto" or tried[best][1].complete:
            carried, report, left = tried[best]
    return {**{name: left[name] for name in report.unmatched}, **carried}


def _carry(naming: str, tensors: Mapping[str, T], family: type | str, ours: Mapping[str, Any]) -> tuple[dict[str, T], Report, dict[str, T]]:
    """Apply one naming: what was carried over, what did not fit, and the tensors as the rows saw them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    mapping = rows(naming, family, shapes)
    unused = tuple(head for head in AUXILIARY if not any(name.startswith(head) for name in shapes))
    mend = getattr(NAMINGS[naming], "mend", str)
    seen = {mend(name): tensor for name, tensor in strip_wrappers(tensors).items() if not name.startswith(unused)}
    carried, report = apply(mapping, seen, shapes)
    return carried, report, seen


def _lineage(family: type | str) -> tuple[str, ...]:
    return (family,) if isinstance(family, str) else tuple(base.__name__ for base in family.__mro__)
