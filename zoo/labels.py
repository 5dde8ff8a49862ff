"""The names of classes: a table in `zoo/data` each, one line per class in class order."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLES = Path(__file__).parent / "data"
SYNSETS = TABLES / "synsets.zip"
"""ImageNet's larger sets: the WordNet ids of each in class order, and `names.tsv` with what all of them are called."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a class is called.

    Attributes:
        name: short English name. It is no key: most lists have two "crane" (a bird, a machine) and two "maillot".
        wnid: WordNet id, which tells those apart, or None where the data set has none.
    """

    name: str
    wnid: str | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one row of a classifier comes from.

    Attributes:
        label: what the class is called, by the user's own word, and its WordNet id where it has one.
        rows: of the checkpoint's classifier: none for a new class, one that was reused, or several that were averaged.
    """

    label: Label
    rows: tuple[int, ...]

    @property
    def how(self) -> str:
        """Say it in a word: "new", "reused" or "averaged"."""
        return ("new", "reused", "averaged")[min(len(self.rows), 2)]


def labels(name: str) -> tuple[Label, ...]:
    """Read the labels of a data set.

    Args:
        name: as in `Checkpoint.labels`, "imagenet1k", "imagenet22k" or "cifar10", or the path of such a table, as `zoo finetune`
            writes one.

    Returns:
        One label per class: ``labels("imagenet1k")[i]`` is what logit i means.

    Raises:
        ValueError: there is no table of that name, or it is damaged.
    """
    path = Path(str(name))
    if path.suffix == ".tsv":
        try:
            stat = path.stat()
            return _read(path, stat.st_mtime_ns, stat.st_size)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name} is no table of labels ({error}); each line is a WordNet id or nothing, a tab, a name") from None
    return _shipped(str(name))


def lists_of(count: int) -> list[str]:
    """Name the lists that ship and have this many labels."""
    return [table.stem for table in sorted(TABLES.glob("*.tsv")) if len(_shipped(table.stem)) == count]


@cache
def _shipped(name: str) -> tuple[Label, ...]:
    tables = {table.stem: table for table in sorted(TABLES.glob("*.tsv"))}
    if name in tables:
        return _read(tables[name], 0, 0)
    with zipfile.ZipFile(SYNSETS) as packed:
        lists = [one for one in packed.namelist() if not one.endswith(".tsv")]
        if name in lists:
            called = dict(line.split("\t") for line in packed.read("names.tsv").decode().splitlines())
            return tuple(Label(called.get(wnid, wnid), wnid) for wnid in packed.read(name).decode().split())
    known = ", ".join([*tables, *lists])
    raise ValueError(f"there are no labels named {name!r}; there are {known}. A record without labels has labels = None.")


@cache
def _read(table: Path, mtime_ns: int, size_bytes: int) -> tuple[Label, ...]:
    del mtime_ns, size_bytes  # in the key: a file that changed is read again
    rows = (line.split("\t") for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return tuple(Label(text, wnid or None) for wnid, text in rows)
