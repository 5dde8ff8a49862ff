"""zoo/data/cpu.json: milliseconds of every network on a CPU, for `zoo list` and `zoo info`, from the record of one machine.

The record is written by:
zoo bench --device cpu --models all --batches 1 --peers eager-fp32 --save docs/benchmarks-cpu-networks.json --resume
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from zoo.bench.peers import OURS
from zoo.bench.record import Record
from zoo.commands.speeds import TABLE, Speeds

RECORD = Path(__file__).parents[1] / "benchmarks-cpu-networks.json"
PLAIN = "eager-fp32"


def table(record: Record) -> Speeds:
    """Return what a record says of one image at a time."""
    about = record.about
    ways = {cell["model"]: cell["ways"] for cell in record.cells if cell["batch"] == 1}
    plain, fast = ({name: way for name, of in ways.items() if (way := _milliseconds(of.get(kind, {})))} for kind in (PLAIN, OURS))
    machine = f"{about['threads']} threads of an {about['device']}"
    return Speeds(machine, max(cell["date"] for cell in record.cells), plain, fast)


def write() -> dict[str, str]:
    """Return the table's text by its path from docs/."""
    return {f"../zoo/data/{TABLE.name}": json.dumps(asdict(table(Record.read(RECORD))), indent=1) + "\n"}


def _milliseconds(way: dict[str, float]) -> float | None:
    return round(way["latency_us"] / 1000, 1) if "latency_us" in way else None
