"""docs/models.md and its picture: every network of the catalogue, its default checkpoint, and how fast it was measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from making.networks import OTHERS, multiply_adds
from making.plot import Point, plot
from making.tables import generated, page, table
from weights import Checkpoint
from weights.registry import SHIPPED, located
from zoo import CATALOGUE, Model
from zoo.bench.peers import OURS
from zoo.bench.record import Record

RECORD = Path(__file__).parents[1] / "benchmarks-h200.json"
PICTURE = "accuracy-speed.svg"
IMAGENET = "ImageNet-1k validation"
NOTHING = "-"

HEAD = """\
# Networks and checkpoints

{networks} networks for classification with {checkpoints} checkpoints, then networks for other tasks. This page has a line per network.
[`zoo browse`](browse.md) has every checkpoint, with filters, sources, licences and hashes. `zoo list` and `zoo info` show the same on
the command line.

- **GMACs** are 10⁹ multiply-adds of convolutions and products for one image of the size in the next column. A test compares the count
  with what torchvision publishes.
- **Top-1** is what the publisher states of the default checkpoint, which `trained(NETWORK)` loads. It is in percent, for the checkpoint's
  own preprocessing, on ImageNet-1k's validation images unless another set is named.
- **Licence** is what the publisher states for the file, *unstated* where nobody does.
- **Images/s** is the throughput of `fast(network)` at batch 1, 32 and 256: {device}, {dtype}, torch {torch}, from
  [the record](benchmarks.md). A dash means that nothing was measured.
"""
PLOT = """\
## Accuracy against speed

![Top-1 accuracy over images a second of every network that was measured]({picture})

Images a second at batch {batch}, as above. A network's accuracy is the best of its checkpoints at the timed image size. No other network
beats those on the line in both. {shown} of {networks} networks are shown. The others have no measured speed, or no such accuracy.
"""


@dataclass(frozen=True)
class Variant:
    """What the page says of a network.

    Attributes:
        cls: the network.
        gmacs: 10^9 multiply-adds for one image.
        rows: its checkpoints.
        speed: images a second of `fast` by batch.
    """

    cls: type[Model]
    gmacs: float
    rows: tuple[Checkpoint, ...]
    speed: dict[int, float]

    @property
    def default(self) -> Checkpoint | None:
        """The checkpoint that `trained` takes."""
        return next((row for row in self.rows if row.default), self.rows[0] if len(self.rows) == 1 else None)

    def best(self) -> float | None:
        """Return the best accuracy on ImageNet at the size that speeds are measured at."""
        sized = [row for row in self.rows if row.metrics_data == IMAGENET and row.preprocessing.crop == self.cls.input_size]
        return max((row.metrics["top1"] for row in sized if "top1" in row.metrics), default=None)


def gmacs(cls: type[Model]) -> float:
    """Count a network's multiply-adds for one image of its size, in 10^9."""
    return multiply_adds(cls) / 1e9


def variants(record: Record, count: Callable[[type[Model]], float] = gmacs) -> list[Variant]:
    """Gather what is known of each network, in the catalogue's order; of the registry only what ships."""
    found: dict[str, list[Checkpoint]] = {}
    for one in located():
        if one.path.parent == SHIPPED:
            found.setdefault(one.row.model, []).append(one.row)
    return [Variant(cls, count(cls), tuple(found.get(name, ())), _speeds(record, name)) for name, cls in CATALOGUE.items()]


def write(record: Record, count: Callable[[type[Model]], float] = gmacs) -> dict[str, str]:
    """Return the texts of the page and its picture by their names in docs/.

    Args:
        record: what was measured.
        count: gives a network's multiply-adds in 10^9; counting all of them takes ten seconds.
    """
    known = variants(record, count)
    about = record.about
    head = HEAD.format(
        networks=len(known),
        checkpoints=sum(len(one.rows) for one in known),
        device=about["device"],
        dtype=about["dtype"],
        torch=about["versions"]["torch"],
    )
    batch, points = _points(known)
    families: dict[type[Model], list[Variant]] = {}
    for one in known:
        families.setdefault(one.cls.family(), []).append(one)
    seen = PLOT.format(picture=PICTURE, batch=batch, shown=len(points), networks=len(known))
    parts = [generated("zoo/catalogue.py, weights/registry and benchmarks-h200.json"), head, seen]
    for family, members in families.items():
        says = f"{(inspect.getdoc(family) or '').splitlines()[0]} [Paper]({family.paper})."
        parts += [f"## {family.__name__}", says, _networks(members)]
    parts += other_tasks()
    picture = plot(
        points, f"images a second, fast() at batch {batch}, {about['device']}, {about['dtype']}", "top-1 %, ImageNet-1k validation"
    )
    return {"models.md": page(*filter(None, parts)), PICTURE: picture}


def other_tasks() -> list[str]:
    """Return a section for each task other than classification: its networks, with what their publishers measured."""
    rows = {one.row.model: one.row for one in located() if one.path.parent == SHIPPED and one.row.default}
    parts: list[str] = []
    for task in dict.fromkeys(cls.task for catalogue in OTHERS for cls in catalogue.values()):
        lines: list[list[str]] = []
        for cls in (cls for catalogue in OTHERS for cls in catalogue.values() if cls.task == task):
            row = rows.get(cls.__name__)
            metrics = ", ".join(f"{name} {value:g}" for name, value in row.metrics.items()) if row is not None else ""
            facts = f"{cls.params:,}", str(cls.input_size), str(cls.usual_classes()), row.tag if row is not None else NOTHING
            lines.append([f"[{cls.__name__}]({cls.paper})", *facts, metrics or NOTHING])
        heads = ["network, paper", "parameters", "px", "classes", "default checkpoint", "published, %"]
        parts += [f"## For {task}", f"`zoo list --task {task}` shows them.", table(heads, lines)]
    return parts


def _speeds(record: Record, name: str) -> dict[int, float]:
    ours = {cell["batch"]: cell["ways"].get(OURS, {}) for cell in record.cells if cell["model"] == name}
    return {batch: way["images_s"] for batch, way in ours.items() if "images_s" in way}


def _points(known: list[Variant]) -> tuple[int, list[Point]]:
    """Choose the batch at which most networks can be shown, the largest of several, and return it with their points."""
    by_batch: dict[int, list[Point]] = {}
    for one in known:
        top1 = one.best()
        for batch, speed in one.speed.items():
            if top1 is not None:
                by_batch.setdefault(batch, []).append(Point(one.cls.__name__, speed, top1))
    batch = max(by_batch, key=lambda size: (len(by_batch[size]), size))
    return batch, by_batch[batch]


def _networks(members: list[Variant]) -> str:
    headings = ["network", "parameters", "GMACs", "px", "checkpoints", "default", "top-1", "licence", "images/s at 1", "at 32", "at 256"]
    rows = []
    for one in members:
        cls, row = one.cls, one.default
        facts = [f"`{row.tag}`", _top1(row), row.license] if row else [NOTHING if not one.rows else "none is the default", NOTHING, NOTHING]
        speeds = [f"{one.speed[batch]:,.0f}" if batch in one.speed else NOTHING for batch in (1, 32, 256)]
        rows.append(
            [
                cls.__name__,
                f"{cls.params:,}",
                f"{one.gmacs:,.0f}" if one.gmacs >= 100 else f"{one.gmacs:.3g}",
                str(cls.input_size),
                str(len(one.rows) or NOTHING),
                *facts,
                *speeds,
            ]
        )
    return table(headings, rows, right=(1, 2, 3, 4, 6, 8, 9, 10))


def _top1(row: Checkpoint) -> str:
    if "top1" not in row.metrics:
        return NOTHING
    return f"{row.metrics['top1']:.2f}{'' if row.metrics_data == IMAGENET else f' on {row.metrics_data}'}"


def record() -> Record:
    """Read the measurements that the page shows."""
    return Record.read(RECORD)
