"""The names of classes: a table in `zoo/data` each, one line per class in class order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLES = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Label:
    """What a class is called.

    Attributes:
        name: short English name. It is no key: most lists have two "crane" (a bird, a machine) and two "maillot".
        wnid: WordNet id, which tells those apart, or None where the data set has none.
    """

    name: str
    wnid: str | None = None


@cache
def labels(name: str) -> tuple[Label, ...]:
    """Read the labels of a data set.

    Args:
        name: as in `Checkpoint.labels`, "imagenet1k" or "cifar10".

    Returns:
        One label per class: ``labels("imagenet1k")[i]`` is what logit i means.

    Raises:
        ValueError: there is no table of that name.
    """
    tables = {table.stem: table for table in sorted(TABLES.glob("*.tsv"))}
    if name not in tables:
        raise ValueError(f"there are no labels named {name!r}; there are {', '.join(tables)}. A record without labels has labels = None.")
    rows = (line.split("\t") for line in tables[name].read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return tuple(Label(text, wnid or None) for wnid, text in rows)
