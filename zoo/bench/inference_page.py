"""What a section says of inference; `zoo.bench.page` puts the section together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from zoo.bench import tables
from zoo.bench.peers import OURS, SHORT
from zoo.bench.record import Record
from zoo.bench.subject import OFF
from zoo.bench.tables import error, number, samples, spread, twins


def rates(record: Record, cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of images a second; its last column is our ratio to float32 eager."""
    heads, rows = tables.rates(record, cells)
    for cell, row in zip(cells, rows, strict=True):
        ours, plain = (cell["ways"].get(way, {}).get("images_s") for way in (OURS, "eager-fp32"))
        row.append(f"{ours / plain:.1f}x" if ours and plain else "-")
    return tables.table([*heads, "over eager fp32"], rows)


def details(record: Record, cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of ours beside plain eager and the fastest peer.

    It has spread, latency, error, memory, share of the roofline and seconds to build.
    """
    gpu = record.about["type"] == "cuda"
    dtype = {str(dtype).removeprefix("torch."): short for dtype, short in SHORT.items()}.get(record.about["dtype"], "")
    heads = ["", "fast(): 10-90 %", "latency ms", "fastest peer's", "error", f"eager {dtype}'s"]
    heads += ["memory MiB", "eager's", "of the roofline", "fastest peer's"] if gpu else []
    rows = []
    for c in cells:
        peer = c.get("fastest_peer", "")
        row = [c["model"], spread(c), _latency(c, OURS), _latency(c, peer), number(c, OURS, "error", ".1e"), error(c.get("plain_error"))]
        if gpu:
            row += [number(c, OURS, "memory_mib", ",.0f"), _eagers_least(c)]
            row += [number(c, OURS, "roofline", ".0%"), number(c, peer, "roofline", ".0%")]
        rows.append([*row, number(c, OURS, "build_s", ",.1f"), number(c, peer, "build_s", ",.1f")])
    return tables.table([*heads, "ready after s", "fastest peer's"], rows)


def _eagers_least(cell: dict[str, Any]) -> str:
    """Return the memory of the eager way that takes least: which were measured differs from cell to cell."""
    ways = [way for way in cell["ways"] if way.startswith("eager") and cell["ways"][way].get("memory_mib") is not None]
    return number(cell, min(ways, key=lambda way: cell["ways"][way]["memory_mib"], default=""), "memory_mib", ",.0f")


def _latency(cell: dict[str, Any], way: str) -> str:
    value = cell["ways"].get(way, {}).get("latency_us")
    return "-" if value is None else f"{value / 1000:,.2f}" if value < 1e5 else f"{value / 1000:,.0f}"


def how(record: Record) -> list[str]:
    """Return how it was measured, a line a point."""
    dtype = record.about["dtype"]
    named = twins(record)
    peers = f"The peers run {named}'s module where there is one, with the same weights, else the zoo's own." if named else ""
    lines = [
        f"- Weights are random, and BatchNorms have statistics of their own, {_off(record)}. {peers}".rstrip(),
        "- A way's figures count when its output is near float32 eager's (without TF32): ours within 1.1 times the relative error of plain "
        f"eager in {dtype}, a peer within 2 times; float32 within 1e-4. Error is the norm of the difference over the reference's norm.",
        f"- A cell, one network and batch, is measured in one process: all ways are built, then timed in turns, {samples(record)} samples "
        "each. Images/s is the median of calls behind each other, with its 10th and 90th percentile; latency that of a call and the "
        "wait for it.",
    ]
    if record.about["type"] == "cuda":
        lines += [
            "- Memory is what a way holds (weights, its CUDA graph's pool) and the peak of a call on top; the images and the other ways "
            "don't count. Eager's is that of the eager way that takes least.",
            "- The roofline: every convolution, product and pool at the larger of its arithmetic and its memory traffic "
            f"({dtype}, weights and maps once, shortcuts read), at the device's ceilings as measured with a matrix product and a copy.",
            "- `torch.backends.cudnn.benchmark` is on for all.",
        ]
    return lines


def _off(record: Record) -> str:
    """Say how far BatchNorms' means are off; cells of a time before that was theirs to say, by a tenth of a deviation."""
    offs = Counter(c.get("means_off", 0.1) for c in record.cells)
    (most, _), *rest = offs.most_common() or [(OFF, 0)]
    others = "".join(f", in {count} cell{'s' * (count > 1)} {off:g}" for off, count in rest)
    return f"with means that are {most:g} deviations off what a picture gives{others}"
