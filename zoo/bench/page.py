"""The section of a document that a record fills: tables, pictures, and how it was measured; the rest of the document stays as it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from weights.whole import write_whole
from zoo.bench import chart, inference_page, tables, training_page
from zoo.bench.peers import OURS, TRAINING, WAYS
from zoo.bench.record import Record, trains
from zoo.bench.tables import failures


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
    after = replaced(before, *marks(record), section(record, [(words, file.name) for words, file in pictures]))
    write_whole(path, after)
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


def section(record: Record, pictures: Sequence[tuple[str, str]]) -> str:
    """Return the section as Markdown.

    Args:
        record: what was measured.
        pictures: (description, file name beside the document).
    """
    training = trains(record)
    matter = training_page if training else inference_page
    title = f"## {'Training' if training else 'Inference'}, {record.about['device']}, {record.about['dtype']}"
    lines = [title, "", "```console", f"$ {_command(record)}", "```", "", f"{record.caption()}.", ""]
    for words, name in pictures:
        lines += [f"![{words}]({name})", ""]
    for batch in record.batches:
        cells = [cell for cell in record.cells if cell["batch"] == batch]
        heading = f"### {'Training at batch' if training else 'Batch'} {batch}"
        lines += [heading, "", *matter.rates(record, cells), "", *matter.details(record, cells), ""]
    heads, rows = tables.ops(record)
    if rows:
        about = (
            "Times are summed up over the steps that each op won in all networks and batches above. PyTorch's are those of its own "
            "operators in the same steps. An op that saves nothing is not worth its code."
        )
        lines += [f"### What each op wins{' in training' if training else ''}", "", about, "", *tables.table(heads, rows), ""]
    if failed := failures(record):
        lines += [f"### {'Training without' if training else 'Without'} a figure", "", *failed, ""]
    table = TRAINING if training else WAYS
    ways = [f"- {record.label(way)}: {table[way].says.format(dtype=record.about['dtype'])}." for way in record.ways if way in table]
    return "\n".join([*lines, f"### How {'training' if training else 'it'} was measured", "", *matter.how(record), *ways])


def _command(record: Record) -> str:
    about, models = record.about, record.models
    what = "--what train " if trains(record) else ""
    named = "all" if len(models) > 12 else ",".join(models)
    peers = ",".join(name for name in record.ways if name != OURS)
    return (
        f"zoo bench {what}--models {named} --batches {','.join(map(str, record.batches))} --dtype {about['dtype']} "
        f"--device {about['type']} --tune {about['tune']} --peers {peers}"
    )
