"""zoo/data/speeds.json: how fast networks were measured, for the page of all checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from zoo.browsing.measured import TABLE, Measured, merged, of_record, table
from zoo.commands.speeds import speeds
from zoo.variants import variants

DOCS = Path(__file__).parents[1]
RECORDS = ("benchmarks-h200.json", "benchmarks-h100.json", "benchmarks-cpu.json")
"""Records of inference, in the order in which the page offers them."""


def measurements() -> Iterator[Measured]:
    """Yield what was measured, GPUs first; of networks that the catalogue has."""
    known = variants()
    for name in RECORDS:
        for one in of_record(json.loads((DOCS / name).read_text(encoding="utf-8")), name):
            rates = {network: rate for network, rate in one.rates.items() if network in known}
            yield Measured(one.machine, one.how, one.batch, one.when, one.versions, rates)
    plain = speeds()
    threads, _, machine = plain.machine.partition(" of ")
    machine, _, versions = machine.partition(", ")
    rates = {name: (known[name].input_size, float(f"{1000 / ms:.4g}")) for name, ms in plain.plain.items() if name in known}
    yield Measured(f"{machine}, {threads}", "plain PyTorch, float32", 1, plain.date, versions, rates)


def write() -> dict[str, str]:
    """Return the table by its path from docs/."""
    return {f"../zoo/data/{TABLE.name}": table(merged(measurements()))}
