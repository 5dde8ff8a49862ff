"""Which networks of the zoo a file is most like, by the shapes of its tensors."""

from __future__ import annotations

import math

from convert.inspect import SHOWN, WITH, Likely, likely
from convert.source import Source
from zoo.variants import optional, shapes, variants

SURE = 0.8
"""Confidence from which on a network is taken for the file's own; a file without its classifier reaches it, a sibling does not."""
NEAR = 0.25
"""How far a network's published number of parameters may lie from the file's to be looked at first."""

LEAST_BODY = 0.03
"""The least part of a network's numbers that a file without its dense layers holds; AlexNet's has 0.04."""


def recognise(source: Source) -> list[Likely]:
    """Name the networks whose shapes are most like the file's: first among those of its size, then among all."""
    count = sum(math.prod(stored.stored_shape) for stored in source.tensors.values())
    known = variants()
    near = {name: one.lineage for name, one in known.items() if abs(count - one.params) <= NEAR * one.params}
    near |= {name: known[name.partition(WITH)[0]].lineage for name in optional() if name.partition(WITH)[0] in near}
    found = likely(source, shapes(near), near)
    if not found or found[0].confidence < SURE:
        rest = {n: one.lineage for n, one in known.items() if n not in near and LEAST_BODY * one.params <= count <= 2 * one.params}
        found = sorted([*found, *likely(source, shapes(rest), rest)], key=lambda one: (-one.confidence, not one.naming, bool(one.options)))
    return found[:SHOWN]
