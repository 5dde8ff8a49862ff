"""The record of a measurement: one JSON file, written whole after every cell, readable without us."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weights.documents import json_file
from weights.whole import write_whole
from zoo.bench.peers import OURS, TRAINING, WAYS, label

FORMAT = 1
SAME = ("what", "type", "device", "dtype", "tune")
"""What cells of one record have in common, besides the versions of `LIBRARIES`."""
UNSAID = {"what": "infer"}
"""What a record means that doesn't say it."""
LIBRARIES = ("torch", "torchvision", "triton", "onnxruntime", "openvino")


@dataclass
class Record:
    """What was measured, on what.

    Attributes:
        about: type and name of the device, driver, versions, dtype, tune, date of the first cell.
        cells: one a network and batch, as `measure` makes them.
    """

    about: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Record:
        """Read a record.

        Raises:
            ValueError: the file is no record of this format.
        """
        value = json_file(Path(path), "Measure again into another file")
        if not isinstance(value, dict) or value.get("format") != FORMAT or not {"about", "cells"} <= value.keys():
            raise ValueError(f"{path} is no record of `zoo bench` in format {FORMAT}; measure again into another file")
        return cls(value["about"], value["cells"])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the record; the file appears whole or stays as it was."""
        write_whole(Path(path), self.text())

    def text(self) -> str:
        """Return the record as JSON."""
        return json.dumps({"format": FORMAT, "about": self.about, "cells": self.cells}, indent=1, allow_nan=False) + "\n"

    def cell(self, model: str, batch: int) -> dict[str, Any] | None:
        """Return the cell of a network and batch, None where it is not measured yet."""
        return next((c for c in self.cells if (c["model"], c["batch"]) == (model, batch)), None)

    def put(self, cell: dict[str, Any]) -> None:
        """Add a cell, in place of one of the same network and batch."""
        for index, old in enumerate(self.cells):
            if (old["model"], old["batch"]) == (cell["model"], cell["batch"]):
                self.cells[index] = cell
                return
        self.cells.append(cell)

    @classmethod
    def resumed(cls, path: str | os.PathLike[str], about: dict[str, Any]) -> Record:
        """Read a record to go on with.

        Raises:
            ValueError: it is damaged, or was measured differently from `about`; the message says how.
        """
        record = cls.read(path)
        if other := record.differs(about):
            raise ValueError(f"{path} holds measurements of {other}; write to another file")
        return record

    def differs(self, about: dict[str, Any]) -> str:
        """Say in what this record was measured differently from `about`, "" where both may share a file."""
        for key in SAME:
            old, new = (one.get(key, UNSAID.get(key)) for one in (self.about, about))
            if old != new:
                return f"{key} {old}, not {new}"
        had, has = self.about.get("versions", {}), about.get("versions", {})
        for library in LIBRARIES:
            if had.get(library) != has.get(library):
                return f"{library} {had.get(library)}, not {has.get(library)}"
        return ""

    @property
    def batches(self) -> list[int]:
        """The batches that have cells, ascending."""
        return sorted({c["batch"] for c in self.cells})

    @property
    def models(self) -> list[str]:
        """The networks that have cells, in the order of measurement."""
        return list(dict.fromkeys(c["model"] for c in self.cells))

    @property
    def ways(self) -> list[str]:
        """The ways that any cell has, peers in the table's order and ours last."""
        found = dict.fromkeys(name for c in self.cells for name in c["ways"])
        known = [name for name in WAYS if name in found and name != OURS]
        return [*known, *(name for name in found if name not in WAYS), *([OURS] if OURS in found else [])]

    def label(self, way: str) -> str:
        """Return what tables and pictures call a way: of those that train where they do."""
        return label(way, self.about["dtype"], TRAINING if trains(self) else WAYS)

    def ops(self, way: str = OURS) -> dict[str, dict[str, float]]:
        """Sum up which op wins which steps of a way, over all cells that say it.

        Returns:
            By op `networks`, `steps`, `us` and `pytorch_us`, the op that saves most first; {} where no cell says it, as in older records.
            Times are microseconds of those steps that were timed.
        """
        found: dict[str, dict[str, float]] = {}
        networks: dict[str, set[str]] = {}
        for cell in self.cells:
            for op, one in cell["ways"].get(way, {}).get("ops", {}).items():
                total = found.setdefault(op, {"networks": 0, "steps": 0, "us": 0.0, "pytorch_us": 0.0})
                networks.setdefault(op, set()).add(cell["model"])
                for key, value in one.items():
                    total[key] += value or 0
                total["networks"] = len(networks[op])
        return dict(sorted(found.items(), key=lambda entry: entry[1]["us"] - entry[1]["pytorch_us"]))

    def dates(self) -> str:
        """Return the day of the cells, or the first and the last."""
        days = sorted({c["date"] for c in self.cells})
        return "" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"

    def caption(self) -> str:
        """Return dates, device, driver and versions in a line."""
        about, versions = self.about, self.about.get("versions", {})
        parts = [self.dates(), str(about.get("device", ""))]
        parts += [f"driver {about['driver']}"] if about.get("driver") else []
        parts += [f"{about['threads']} threads"] if about.get("threads") else []
        parts += [f"{name} {version}" for name, version in versions.items() if name != "timm" and self._used(name)]
        return ", ".join(part for part in parts if part)

    def _used(self, library: str) -> bool:
        """Whether a version says anything about these cells: Triton's on a GPU only, an engine's where it ran."""
        if library in ("triton", "cudnn"):
            return self.about.get("type") == "cuda"
        return library in self.ways if library in ("onnxruntime", "openvino") else True


def _is_cell(cell: Any) -> bool:
    """Tell whether a cell says what it is of, and its ways, or why they failed, with their figures."""
    named = isinstance(cell, dict) and isinstance(cell.get("model"), str) and isinstance(cell.get("batch"), int)
    if not named or not isinstance(cell.get("date"), str) or not isinstance(cell.get("ways"), dict):
        return False
    return all(isinstance(row, dict) and ("failed" in row or _is_row(row)) for row in cell["ways"].values())


def _is_row(row: dict[str, Any]) -> bool:
    """Tell whether a way has all figures; until it was ready no time was taken where its kernels had been compiled beforehand."""
    if not all(isinstance(row.get(key), int | float) for key in ("us", "us_low", "us_high", "images_s", "error")):
        return False
    ops = row.get("ops", {})  # older records have none
    if not isinstance(ops, dict) or not all(isinstance(one, dict) and _is_op(one) for one in ops.values()):
        return False
    return "build_s" in row and isinstance(row["build_s"], int | float | None)


def trains(record: Record) -> bool:
    """Tell a record of training from one of inference."""
    return record.about.get("what") == "train"


def _is_op(one: dict[str, Any]) -> bool:
    """Tell whether an op has its steps, and its times or None."""
    return one.keys() == {"steps", "us", "pytorch_us"} and all(isinstance(value, int | float | None) for value in one.values())


def merged(paths: Sequence[str | os.PathLike[str]]) -> Record:
    """Read records that were measured alike, say on the GPUs of one machine, as one; of a cell that several have, the last one's.

    Raises:
        ValueError: a file is no record, or a damaged one, or was measured otherwise than the first.
    """
    first, *others = records = [Record.read(path) for path in paths]
    for path, one in zip(paths, records, strict=True):
        if not isinstance(one.about, dict) or not isinstance(one.cells, list) or not all(map(_is_cell, one.cells)):
            raise ValueError(f"{path} is a damaged record of `zoo bench`; measure again into another file")
    for path, other in zip(paths[1:], others, strict=True):
        if different := first.differs(other.about):
            raise ValueError(f"{paths[0]} and {path} can't be shown together: measured with {different}")
        for cell in other.cells:
            first.put(cell)
    return first
