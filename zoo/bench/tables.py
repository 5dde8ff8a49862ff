"""What the sections of inference and of training share: figures of a cell as text, and Markdown tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zoo.bench.peers import OURS
from zoo.bench.record import Record


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first column is text and whose others are numbers."""
    titles = "".join(f" {head} |" if head else " |" for head in heads)
    return [f"|{titles}", "|---|" + "--:|" * (len(heads) - 1), *(f"| {' | '.join(row)} |" for row in rows)]


def rates(record: Record, cells: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of images a second: every way, the fastest peer in italics, and our ratio to it."""
    ways = [way for way in record.ways if any(way in cell["ways"] for cell in cells)]
    rows = []
    for cell in cells:
        found = [(way, number(cell, way, "images_s", ",.0f")) for way in ways]
        rows.append([cell["model"], *(f"*{rate}*" if way == cell.get("fastest_peer") else rate for way, rate in found), over(cell)])
    return ["images/s", *map(record.label, ways), "over the fastest"], rows


def number(cell: dict[str, Any], way: str, key: str, form: str) -> str:
    """Return a way's figure as text, "-" where there is none."""
    value = cell["ways"].get(way, {}).get(key)
    return "-" if value is None else format(value, form)


def error(value: float | None) -> str:
    """Return a relative error as text, "-" where there is none."""
    return "-" if value is None else f"{value:.1e}"


def over(cell: dict[str, Any]) -> str:
    """Return our ratio to the fastest peer, in bold where we are no slower."""
    if "ratio" not in cell:
        return "-"
    ratio = f"{cell['ratio']:.2f}x"
    return f"**{ratio}**" if cell["ratio"] >= 0.995 else ratio


def spread(cell: dict[str, Any]) -> str:
    """Return the 10th and 90th percentile of our images a second as text."""
    row = cell["ways"].get(OURS, {})
    if "us" not in row:
        return "-"
    fast, slow = (1e6 * cell["batch"] / row[key] for key in ("us_low", "us_high"))
    return f"{slow:,.0f}-{fast:,.0f}"


def failures(record: Record) -> list[str]:
    """Return a line for each way that has no figure."""
    lines = []
    for c in record.cells:
        for way in record.ways:
            if "failed" in c["ways"].get(way, {}):
                words = c["ways"][way]["failed"].replace("`", "'")
                lines.append(f"- {c['model']}, batch {c['batch']}, {record.label(way)}: `{words}`")
    return lines


def ops(record: Record) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of what each op wins; no rows where the record doesn't say it."""
    rows = []
    for op, one in record.ops().items():
        us, pytorch_us = one["us"], one["pytorch_us"]
        times = [f"{value / 1000:,.2f}" for value in (us, pytorch_us, pytorch_us - us)] if pytorch_us else ["-"] * 3
        rows.append([op, f"{one['networks']:.0f}", f"{one['steps']:.0f}", *times])
    return ["op", "networks", "steps", "ms", "PyTorch's ms", "saves ms"], rows


def twins(record: Record) -> str:
    """Name the libraries whose modules the peers ran, "" where there are none."""
    return " and ".join(sorted({cell["twin"] for cell in record.cells if cell.get("twin") not in (None, "zoo")}))


def samples(record: Record) -> str:
    """Return how many samples each way had, from cell to cell."""
    rounds = sorted({cell["rounds"] for cell in record.cells if "rounds" in cell})
    return "no" if not rounds else f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
