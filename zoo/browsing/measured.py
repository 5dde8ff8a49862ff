"""How many images a second networks compute, by machine: the table that ships, and what `zoo bench --save` wrote on this machine."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weights import Cache
from weights.cache import key, read_json
from weights.documents import json_file

TABLE = Path(__file__).parents[1] / "data" / "speeds.json"
"""`make docs-pages` writes it from the records in docs/ and from cpu.json; a test compares."""
FORMAT = 1
"""Of records; `zoo.bench.record` writes them."""
OURS = "fast"
NOTES = "bench"
"""The folder of the cache with a note for each record that was saved."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Networks that were measured alike on one machine.

    Attributes:
        machine: "NVIDIA H200", or a CPU with its threads.
        how: how they ran, "fast, bfloat16".
        batch: images in a call.
        when: the day, or the first and the last.
        versions: of what ran them, "torch 2.11.0+cu130".
        rates: by network the side of its images in pixels, and images a second.
        mine: whether it was measured by the user, and not for the table that ships.
    """

    machine: str
    how: str
    batch: int
    when: str
    versions: str
    rates: dict[str, tuple[int, float]]
    mine: bool = False

    @property
    def label(self) -> str:
        """Say what was measured in a line."""
        return f"{self.machine}: {self.how}, {'one image' if self.batch == 1 else f'{self.batch} images at once'}"


def of_record(document: Any, place: object, *, mine: bool = False) -> list[Measured]:
    """Take what the page shows out of a record of `zoo bench`: for each batch, how fast `fast` was.

    Args:
        document: the record, as JSON has it.
        place: where it lies, for the message.
        mine: whether the user measured it.

    Raises:
        ValueError: it is no record, a damaged one, or one of training; the message says what to do.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT or not {"about", "cells"} <= document.keys():
        raise ValueError(f"'{place}' is no record of `zoo bench` in format {FORMAT}; measure again into another file")
    about, cells = document["about"], document["cells"]
    damaged = ValueError(f"'{place}' is a damaged record of `zoo bench`; measure again into another file")
    if not isinstance(about, dict) or not isinstance(cells, list) or not all(isinstance(about.get(k), str) for k in ("device", "dtype")):
        raise damaged
    if about.get("what") == "train":
        raise ValueError(f"'{place}' is a record of training; the page shows inference: measure that with `zoo bench --save FILE`")
    rates: dict[int, dict[str, tuple[int, float]]] = {}
    days: dict[int, set[str]] = {}
    for cell in cells:
        try:
            model, batch, side, day = cell["model"], cell["batch"], cell["size"], cell["date"]
            ours = cell["ways"].get(OURS, {"failed": ""})
            speed = None if "failed" in ours else float(ours["images_s"])
        except (KeyError, TypeError, AttributeError, ValueError):
            raise damaged from None
        if not (isinstance(model, str) and isinstance(day, str) and _count(batch) and _count(side)):
            raise damaged
        if speed is None:
            continue
        if not (math.isfinite(speed) and speed > 0):
            raise damaged
        rates.setdefault(batch, {})[model] = side, _rounded(speed)
        days.setdefault(batch, set()).add(day)
    threads = about.get("threads")
    machine = f"{about['device']}, {threads} threads" if threads else about["device"]
    versions = about.get("versions")
    torch = f"torch {versions['torch']}" if isinstance(versions, dict) and "torch" in versions else ""
    driver = f"driver {about['driver']}" if about.get("driver") else ""
    told = ", ".join(filter(None, (torch, driver)))
    how = f"{OURS}(), {about['dtype']}"
    return [Measured(machine, how, batch, _days(days[batch]), told, rates[batch], mine) for batch in sorted(rates)]


def read_record(path: Path) -> list[Measured]:
    """Read a record that the user measured.

    Raises:
        ValueError: as `of_record` does, and for a file that is no JSON.
        OSError: it can't be read.
    """
    return of_record(json_file(path, "Measure again into another file"), path, mine=True)


def merged(found: Iterable[Measured]) -> list[Measured]:
    """Put together what was measured alike; of a network that several have, the last one's figure."""
    kept: dict[tuple[object, ...], Measured] = {}
    for one in found:
        same = one.machine, one.how, one.batch, one.versions, one.mine
        if (old := kept.get(same)) is None:
            kept[same] = one
        else:
            when = _days({*old.when.split(" to "), *one.when.split(" to ")})
            kept[same] = Measured(one.machine, one.how, one.batch, when, one.versions, old.rates | one.rates, one.mine)
    return list(kept.values())


@cache
def shipped() -> list[Measured]:
    """Read the table that ships."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    return [Measured(**row | {"rates": {name: (side, speed) for name, (side, speed) in row["rates"].items()}}) for row in rows]


def table(found: Iterable[Measured]) -> str:
    """Write measurements as the table that ships has them, one a line."""
    rows = ({k: v for k, v in asdict(one).items() if k != "mine"} for one in found)
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"


def remember(record: Path) -> None:
    """Note in the cache where a record was saved, so that `zoo browse --mine` finds it; a cache that can't be written remembers nothing."""
    path = record.absolute()
    cache = Cache()
    with contextlib.suppress(OSError):
        cache.prepare()
        note = cache.root / NOTES / f"{key(str(path))}.json"
        note.parent.mkdir(exist_ok=True)
        cache.write_json(note, {"path": str(path)})


def remembered() -> list[Path]:
    """List the records that were saved with this cache, whether they are there or not; a cache that can't be read has none.

    One that is gone is listed once more and then forgotten; one in a folder that is gone may lie on a disk that comes back.
    """
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for note in sorted((Cache().root / NOTES).glob("*.json")):
            told = (read_json(note) or {}).get("path")
            if not isinstance(told, str) or not told or "\0" in told:
                continue
            found.append(path := Path(told))
            if not path.exists() and path.parent.is_dir():
                with contextlib.suppress(OSError):
                    note.unlink()
    return found


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rounded(speed: float) -> float:
    """Keep four digits, which is more than a measurement repeats."""
    return float(f"{speed:.4g}")


def _days(days: Iterable[str]) -> str:
    found = sorted(set(days))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
