"""What a section says of training; `zoo.bench.page` puts the section together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.bench import tables
from zoo.bench.learner import MOMENTUM
from zoo.bench.peers import OURS
from zoo.bench.record import Record
from zoo.bench.tables import error, number, samples, spread, twins
from zoo.bench.training import EXACT_LIMIT, LIMIT


def rates(record: Record, cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of images a second; its last column is our memory over torch.compile's."""
    heads, rows = tables.rates(record, cells)
    for cell, row in zip(cells, rows, strict=True):
        row.append(f"{cell['memory_ratio']:.2f}x" if "memory_ratio" in cell else "-")
    return tables.table([*heads, "memory over compile's"], rows)


def details(record: Record, cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of each way's peak of memory, and of ours the spread, a step's error beside autocast's, and seconds to build."""
    ways = [way for way in record.ways if record.about["type"] == "cuda" and any(way in cell["ways"] for cell in cells)]
    heads = ["", *(f"{record.label(way)}, MiB" for way in ways)]
    heads += ["ours: 10-90 %", "error of a step", "plain autocast's", "ready after s", "fastest peer's"]
    rows = []
    for c in cells:
        row = [c["model"], *(number(c, way, "memory_mib", ",.0f") for way in ways), spread(c), number(c, OURS, "error", ".1e")]
        row += [error(c.get("plain_error")), number(c, OURS, "build_s", ",.1f"), number(c, c.get("fastest_peer", ""), "build_s", ",.1f")]
        rows.append(row)
    return tables.table(heads, rows)


def how(record: Record) -> list[str]:
    """Return how training was measured, a line a point."""
    dtype, named = record.about["dtype"], twins(record)
    peers = f"The peers train {named}'s module where there is one, from the same weights." if named else ""
    near = f"within {LIMIT:g} times the relative error of plain {dtype} autocast"
    if dtype == "float32":
        near = f"within {EXACT_LIMIT:g}, for its sums have another order"
    lines = [
        f"- A step is forward, cross-entropy, backward and SGD with momentum {MOMENTUM:g} and weight decay, fused on a GPU, on the same "
        f"random images, which lie on the device. {peers}".rstrip(),
        f"- A way's figures count when what a first step changes of all weights is near to float32 eager's (without TF32): {near}. "
        "Dropout is 0, which no two ways would draw alike. In half precision that error is about 1 in deep networks with random weights, "
        "for every way: this shows that a way trains the same network, and no more. `fast` itself compares each chain of layers with "
        "PyTorch's, on the values that reach it.",
        f"- A cell, one network and batch, is measured in one process: all ways are built, then timed in turns, {samples(record)} samples "
        "each. Images/s is the median of steps behind each other.",
    ]
    if record.about["type"] == "cuda":
        lines += [
            "- Memory is what a way holds (weights, gradients, momentum, its CUDA graph's pool) and the peak of a step on top.",
            "- `torch.backends.cudnn.benchmark` is on for all.",
        ]
    return lines
