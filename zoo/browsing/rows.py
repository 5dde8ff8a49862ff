"""What the page says of each checkpoint: a row each, and by what rows are filtered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import weights
from weights import Cache, Checkpoint
from weights.addresses import redacted
from weights.registry import SHIPPED, located
from weights.sources import is_here
from zoo.browsing.facts import facts, hash_state
from zoo.browsing.measured import Measured
from zoo.pretrained.records import restriction
from zoo.variants import CLASSIFICATION, Variant, of_all_tasks

NO_WEIGHTS = "no weights"
NOT_STATED = "nobody states it"
EVERY_USE = "every use"
COMMANDS = {
    CLASSIFICATION: "zoo predict PHOTO --model {}",
    "detection": "zoo detect PHOTO --model {}",
    "segmentation": "zoo segment PHOTO --model {}",
}
"""How a checkpoint is used on the command line, by its network's task."""


@dataclass(frozen=True, slots=True)
class Row:
    """One point and one line of the table.

    Attributes:
        variant: the network.
        checkpoint: its weights; None of a network that nobody published any of.
        here: what this machine has of it: "cached", "installed by pip", "your own record", "measured".
    """

    variant: Variant
    checkpoint: Checkpoint | None
    here: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How commands and locks call it, "ResNet50:imagenet1k_v2"."""
        return self.variant.name if self.checkpoint is None else f"{self.variant.name}:{self.checkpoint.tag}"

    @property
    def side(self) -> int:
        """The side in pixels of the images that the checkpoint was measured with."""
        pixels = None if self.checkpoint is None else self.checkpoint.preprocessing
        return (pixels and (pixels.crop or pixels.resize)) or self.variant.input_size

    @property
    def gmacs(self) -> tuple[float, bool] | None:
        """10^9 multiply-adds of an image of `side`, and whether they are counted; at another side they are scaled by its area."""
        if self.variant.multiply_adds is None:
            return None
        side, published = self.side, self.variant.input_size
        return self.variant.multiply_adds * (side / published) ** 2 / 1e9, side == published

    @property
    def megabytes(self) -> tuple[float, bool]:
        """The size of the file, and whether it is known; else that of the parameters in float32."""
        known = self.checkpoint.size_bytes if self.checkpoint is not None else None
        return (known or 4 * self.variant.params) / 1e6, known is not None

    @property
    def code(self) -> str:
        """The lines of Python that give it."""
        name, c = self.variant.name, self.checkpoint
        if c is None:
            return f"from zoo import {name}\n\nmodel = {name}()  # untrained"
        return f'from zoo import {name}, trained\n\nmodel = trained({name}, "{c.tag}")'

    @property
    def command(self) -> str:
        """How it is used on the command line; "" of a network without weights."""
        if self.checkpoint is None or self.variant.task not in COMMANDS:
            return ""
        if self.checkpoint.embedding:
            return f"zoo embed PHOTOS -o vectors.parquet --model {self.name}"
        return COMMANDS[self.variant.task].format(self.name)

    @property
    def use(self) -> str:
        """What the licence allows."""
        c = self.checkpoint
        if c is None:
            return NO_WEIGHTS
        return NOT_STATED if c.license == "unstated" else restriction(c) or EVERY_USE

    @property
    def comes(self) -> tuple[str, ...]:
        """How it gets to a machine without the internet."""
        if self.checkpoint is None:
            return (NO_WEIGHTS,)
        schemes = {source.partition(":")[0] for one in self.checkpoint.containers() for source in one.sources}
        found = [word for scheme, word in WITHOUT_INTERNET.items() if scheme in schemes]
        return tuple(found) or ("by download only",)


WITHOUT_INTERNET = {"package": "in this package", "file": "a file of yours", "pypi": "by pip, from any package index"}
"""By scheme of a source: how it comes without the internet."""


@dataclass(frozen=True, slots=True)
class Facet:
    """By what rows are filtered.

    Attributes:
        key: its name in the page's data.
        label: its heading.
        of: gives a row's values.
        open: whether its values are shown at once.
        order: sorts the values; left out, the most frequent comes first.
    """

    key: str
    label: str
    of: Callable[[Row], Iterable[str]]
    open: bool = False
    order: Callable[[str], object] | None = field(default=None, repr=False)


def _of_weights(value: Callable[[Checkpoint], str]) -> Callable[[Row], Iterable[str]]:
    return lambda row: (NO_WEIGHTS if row.checkpoint is None else value(row.checkpoint),)


HERE = Facet("here", "On this machine", lambda row: row.here or ("nothing",), open=True)
FACETS = (
    Facet("task", "Task", lambda row: (row.variant.task,), open=True),
    Facet("family", "Family", lambda row: (row.variant.family,), open=True),
    Facet("use", "Licence allows", lambda row: (row.use,), open=True),
    Facet("license", "Licence", _of_weights(lambda c: c.license)),
    Facet("data", "Accuracy measured on", _of_weights(lambda c: c.metrics_data or NOT_STATED)),
    Facet("side", "Input size, px", lambda row: (str(row.side),), order=int),
    Facet("comes", "Without the internet", lambda row: row.comes),
    Facet("hash", "Hash", _of_weights(hash_state)),
    Facet("default", "Chosen by trained(NETWORK)", _of_weights(lambda c: "default" if c.default else "by its name")),
)
"""What the page filters by, in its order. `HERE` comes before them where the page is of one machine."""


def facets(rows: Iterable[Row], *, mine: bool) -> list[tuple[Facet, list[str]]]:
    """Return each facet with the values that rows have, in the order of the page."""
    rows, found = list(rows), []
    for facet in (HERE, *FACETS) if mine else FACETS:
        counted = Counter(value for row in rows for value in facet.of(row))
        by = facet.order
        values = sorted(counted, key=by) if by is not None else [value for value, _ in counted.most_common()]  # type: ignore[arg-type]
        found.append((facet, values))
    return found


def rows(*, mine: bool = False, measured: Iterable[Measured] = ()) -> list[Row]:
    """List every checkpoint, in the catalogue's order; networks without any stand for themselves.

    Args:
        mine: mark what this machine has, and list the user's own records too. Else only what ships is listed, and the cache is not read.
        measured: what the user measured; networks in it are marked with `mine`.

    Raises:
        BadRecord: a table of the registry is damaged, the user's own included.
    """
    there = located()
    shipped = {(one.row.model, one.row.tag) for one in there if one.path.parent == SHIPPED}
    known = weights.checkpoints() if mine else tuple(one.row for one in there if one.path.parent == SHIPPED)
    by_network: dict[str, list[Checkpoint]] = {}
    for c in known:
        by_network.setdefault(c.model, []).append(c)
    cache, timed = Cache(), {(name, side) for one in measured for name, (side, _) in one.rates.items()}
    found: list[Row] = []
    for name, variant in of_all_tasks().items():
        several = by_network.get(name, [])
        only = len(several) == 1
        for c in several:
            row = Row(variant, replace(c, default=True) if only and not mine else c)
            found.append(replace(row, here=_here(row, cache, shipped, timed)) if mine else row)
        if not several:
            row = Row(variant, None)
            found.append(replace(row, here=("measured",) if mine and (name, row.side) in timed else ()))
    return found


def _here(row: Row, cache: Cache, shipped: set[tuple[str, str]], timed: set[tuple[str, int]]) -> tuple[str, ...]:
    c = row.checkpoint
    assert c is not None
    marks = {
        "cached": any(cache.lookup(one) for one in c.containers()),
        "installed": any(is_here(source) for source in c.sources),
        "your own record": (c.model, c.tag) not in shipped,
        "measured": (c.model, row.side) in timed,
    }
    return tuple(word for word, true in marks.items() if true)


def told(row: Row) -> dict[str, str]:
    """Say all that is known of a row, without anybody's secrets."""
    v = row.variant
    network = {
        "network": v.about,
        "parameters": f"{v.params:,}" if v.params else "",
        "classes": str(row.checkpoint.num_classes if row.checkpoint is not None and row.checkpoint.num_classes else v.num_classes),
        "takes": f"images of {v.min_size} px and more" if v.min_size > 1 else "",
    }
    found = network | (facts(row.checkpoint) if row.checkpoint is not None else {"weights": "none are published"})
    return {name: redacted(value) for name, value in found.items() if value}
