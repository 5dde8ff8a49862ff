"""The section of a document that a record fills: tables, pictures, and how it was measured; the rest of the document stays as it is."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.bench import chart
from zoo.bench.peers import OURS, SHORT, WAYS, label
from zoo.bench.record import Record, trains
from zoo.bench.subject import OFF


def write(record: Record, path: str | os.PathLike[str], models: Sequence[str]) -> list[Path]:
    """Put a record's section into a document, between its marks, and the pictures beside it.

    A document without the marks, which name the device's type and the dtype, gets them at its end.

    Args:
        record: what was measured.
        path: of the document, Markdown.
        models: networks of the grouped picture.

    Returns:
        The files that were written.

    Raises:
        ValueError: the record has no cells, or the document has one of the marks and not the other.
    """
    if not record.cells:
        raise ValueError("the record has no cells yet, so there is nothing to write about")
    path = Path(path)
    stem = f"{path.stem}-{'training-' if trains(record) else ''}{record.about['type']}-{record.about['dtype']}"
    pictures = []
    if any(model in record.models for model in models):
        pictures.append(("images a second of every way", chart.save(chart.grouped(record, models), path.with_name(f"{stem}.png"))))
    if any("ratio" in cell for cell in record.cells):
        pictures.append(("every network over the fastest peer", chart.save(chart.overview(record), path.with_name(f"{stem}-zoo.png"))))
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    make = training_section if trains(record) else section
    after = replaced(before, *marks(record), make(record, [(words, file.name) for words, file in pictures]))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(after, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return [path, *(file for _, file in pictures)]


def marks(record: Record) -> tuple[str, str]:
    """Return the comments that a record's section stands between."""
    name = f"{'training' if trains(record) else 'inference'} {record.about['type']} {record.about['dtype']}"
    return f"<!-- zoo bench: {name}: generated, edit elsewhere -->", f"<!-- zoo bench: end of {name} -->"


def replaced(text: str, begin: str, end: str, section: str) -> str:
    """Return a text with another section between two marks, each on a line of its own; at the end where the marks are missing.

    Raises:
        ValueError: one mark is there without the other, twice, or in the other order.
    """
    counts = text.count(begin), text.count(end)
    body = f"{begin}\n\n{section.strip()}\n\n{end}"
    if counts == (0, 0):
        return f"{text.rstrip()}\n\n{body}\n".lstrip("\n")
    first, last = text.find(begin), text.find(end)
    if counts != (1, 1) or first > last:
        raise ValueError(f"the marks {begin} and {end} must stand once each and in this order; found {counts[0]} and {counts[1]}")
    return text[:first] + body + text[last + len(end) :]


def training_section(record: Record, pictures: Sequence[tuple[str, str]]) -> str:
    """Return the section of a record of training; see `zoo.bench.training_page`."""
    from zoo.bench import training_page

    return training_page.section(record, pictures)


def section(record: Record, pictures: Sequence[tuple[str, str]]) -> str:
    """Return the section as Markdown.

    Args:
        record: what was measured.
        pictures: (description, file name beside the document).
    """
    about, dtype = record.about, record.about["dtype"]
    lines = [f"## Inference, {about['device']}, {dtype}", "", "```console", f"$ {_command(record)}", "```", "", f"{record.caption()}.", ""]
    for words, name in pictures:
        lines += [f"![{words}]({name})", ""]
    for batch in record.batches:
        cells = [c for c in record.cells if c["batch"] == batch]
        lines += [f"### Batch {batch}", "", *_rates(record, cells), "", *_details(record, cells), ""]
    if failed := failures(record):
        lines += ["### Without a figure", "", *failed, ""]
    lines += ["### How it was measured", "", *_how(record)]
    return "\n".join(lines)


def _command(record: Record) -> str:
    models = record.models
    named = "all" if len(models) > 12 else ",".join(models)
    peers = ",".join(name for name in record.ways if name != OURS)
    return (
        f"zoo bench --models {named} --batches {','.join(map(str, record.batches))} --dtype {record.about['dtype']} "
        f"--device {record.about['type']} --tune {record.about['tune']} --peers {peers}"
    )


def _rates(record: Record, cells: list[dict[str, Any]]) -> list[str]:
    """Images a second, the fastest peer in italics, and our ratio to it."""
    ways, dtype = [w for w in record.ways if any(w in c["ways"] for c in cells)], record.about["dtype"]
    table = ["| images/s | " + " | ".join(label(w, dtype) for w in ways) + " | over the fastest | over eager fp32 |"]
    table.append("|---|" + "--:|" * (len(ways) + 2))
    for c in cells:
        row = []
        for way in ways:
            rate = number(c, way, "images_s", ",.0f")
            row.append(f"*{rate}*" if way == c.get("fastest_peer") else rate)
        ratio = over(c)
        ours, plain = (c["ways"].get(way, {}).get("images_s") for way in (OURS, "eager-fp32"))
        row += [ratio, f"{ours / plain:.1f}x" if ours and plain else "-"]
        table.append(f"| {c['model']} | " + " | ".join(row) + " |")
    return table


def _details(record: Record, cells: list[dict[str, Any]]) -> list[str]:
    """Ours beside plain eager and the fastest peer: spread, latency, memory, share of the roofline, error, seconds to build."""
    gpu = record.about["type"] == "cuda"
    heads = ["fast(): 10-90 %", "latency ms", "fastest peer's", "error", f"eager {SHORT_NAMES.get(record.about['dtype'], '')}'s"]
    heads += ["memory MiB", "eager's", "of the roofline", "fastest peer's"] if gpu else []
    heads += ["ready after s", "fastest peer's"]
    table = ["| | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for c in cells:
        peer = c.get("fastest_peer", "")
        row = [spread(c), _latency(c, OURS), _latency(c, peer), number(c, OURS, "error", ".1e"), _plain(c)]
        if gpu:
            row += [number(c, OURS, "memory_mib", ",.0f"), _eagers_least(c)]
            row += [number(c, OURS, "roofline", ".0%"), number(c, peer, "roofline", ".0%")]
        row += [number(c, OURS, "build_s", ",.1f"), number(c, peer, "build_s", ",.1f")]
        table.append(f"| {c['model']} | " + " | ".join(row) + " |")
    return table


def _eagers_least(cell: dict[str, Any]) -> str:
    """Return the memory of the eager way that takes least: which were measured differs from cell to cell."""
    ways = [way for way in cell["ways"] if way.startswith("eager") and cell["ways"][way].get("memory_mib") is not None]
    return number(cell, min(ways, key=lambda way: cell["ways"][way]["memory_mib"], default=""), "memory_mib", ",.0f")


SHORT_NAMES = {str(dtype).removeprefix("torch."): short for dtype, short in SHORT.items()}


def number(cell: dict[str, Any], way: str, key: str, form: str) -> str:
    """Return a way's figure as text, "-" where there is none."""
    value = cell["ways"].get(way, {}).get(key)
    return "-" if value is None else format(value, form)


def over(cell: dict[str, Any]) -> str:
    """Return our ratio to the fastest peer, in bold where we are no slower."""
    if "ratio" not in cell:
        return "-"
    ratio = f"{cell['ratio']:.2f}x"
    return f"**{ratio}**" if cell["ratio"] >= 0.995 else ratio


def _latency(cell: dict[str, Any], way: str) -> str:
    value = cell["ways"].get(way, {}).get("latency_us")
    return "-" if value is None else f"{value / 1000:,.2f}" if value < 1e5 else f"{value / 1000:,.0f}"


def _plain(cell: dict[str, Any]) -> str:
    value = cell.get("plain_error")
    return "-" if value is None else f"{value:.1e}"


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
                lines.append(f"- {c['model']}, batch {c['batch']}, {label(way, record.about['dtype'])}: `{words}`")
    return lines


def _how(record: Record) -> list[str]:
    about = record.about
    dtype, gpu = about["dtype"], about["type"] == "cuda"
    twins = sorted({c["twin"] for c in record.cells if c.get("twin") not in (None, "zoo")})
    peers = f"The peers run {' and '.join(twins)}'s module where there is one, with the same weights, else the zoo's own." if twins else ""
    rounds = sorted({c["rounds"] for c in record.cells if "rounds" in c})
    samples = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}" if rounds else "no"
    lines = [
        f"- Weights are random, and BatchNorms have statistics of their own, {_off(record)}. {peers}".rstrip(),
        "- A way's figures count when its output is near float32 eager's (without TF32): ours within 1.1 times the relative error of plain "
        f"eager in {dtype}, a peer within 2 times; float32 within 1e-4. Error is the norm of the difference over the reference's norm.",
        f"- A cell, one network and batch, is measured in one process: all ways are built, then timed in turns, {samples} samples each. "
        "Images/s is the median of calls behind each other, with its 10th and 90th percentile; latency that of a call and the wait for it.",
    ]
    if gpu:
        lines += [
            "- Memory is what a way holds (weights, its CUDA graph's pool) and the peak of a call on top; the images and the other ways "
            "don't count. Eager's is that of the eager way that takes least.",
            "- The roofline: every convolution, product and pool at the larger of its arithmetic and its memory traffic "
            f"({dtype}, weights and maps once, shortcuts read), at the device's ceilings as measured with a matrix product and a copy.",
            "- `torch.backends.cudnn.benchmark` is on for all.",
        ]
    lines += [f"- {label(way, dtype)}: {WAYS[way].says.format(dtype=dtype)}." for way in record.ways if way in WAYS]
    return lines


def _off(record: Record) -> str:
    """Say how far BatchNorms' means are off; cells of a time before that was theirs to say, by a tenth of a deviation."""
    offs = Counter(c.get("means_off", 0.1) for c in record.cells)
    (most, _), *rest = offs.most_common() or [(OFF, 0)]
    others = "".join(f", in {count} cell{'s' * (count > 1)} {off:g}" for off, count in rest)
    return f"with means that are {most:g} deviations off what a picture gives{others}"
