"""Reading of JSON files that lie beside checkpoints: their tables, and sides in pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def table(held: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object that lies under a name; an empty one where nothing does.

    Raises:
        TypeError: something else lies there.
    """
    found = held.get(name)
    if not isinstance(found, dict | None):
        raise TypeError(f"{name} is {found!r:.60}, not an object")
    return cast("Mapping[str, Any]", found or {})


def side(size: Any) -> int:
    """Read a side in pixels: a number, or a table or a list of equal ones.

    Raises:
        ValueError: they differ.
    """
    sides = {int(each) for each in cast("Any", size.values() if isinstance(size, dict) else size if isinstance(size, list) else [size])}
    if len(sides) != 1:
        raise ValueError(f"its images are of {size}, and here they are square")
    return sides.pop()
