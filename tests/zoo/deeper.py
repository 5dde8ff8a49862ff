"""Networks that a short run leaves to the long one: of each kind the smallest variant is tried always, all of them by `-m long`."""

from __future__ import annotations

from typing import Any

import pytest

from zoo import CATALOGUE, Model


def kind(cls: type[Model]) -> tuple[Any, ...]:
    """Return what a variant computes otherwise than its siblings, which are deeper, wider, or read larger images."""
    switches = tuple(getattr(cls, name, False) for name in ("block", "squeeze_excite", "batch_norm", "table"))
    return cls.family(), getattr(cls, "groups", 1) > 1, *map(str, switches)


SMALLEST = {kind(cls): cls for cls in sorted(CATALOGUE.values(), key=lambda cls: -cls.params)}
UNBOUND = {name: cls for name, cls in CATALOGUE.items() if not cls.fixed_size}

every_size = pytest.mark.parametrize(
    "cls",
    [cls if SMALLEST[kind(cls)] is cls else pytest.param(cls, marks=pytest.mark.long) for cls in UNBOUND.values()],
    ids=UNBOUND,
)
