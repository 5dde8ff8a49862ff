"""The section of a document that a record of training fills; `zoo.bench.page` puts it between its marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.bench import page
from zoo.bench.peers import OURS, label
from zoo.bench.record import Record
from zoo.bench.training import EXACT_LIMIT, LIMIT, MOMENTUM, WAYS


def section(record: Record, pictures: Sequence[tuple[str, str]]) -> str:
    """Return the section as Markdown.

    Args:
        record: what was measured.
        pictures: (description, file name beside the document).
    """
    about, dtype = record.about, record.about["dtype"]
    lines = [f"## Training, {about['device']}, {dtype}", "", "```console", f"$ {_command(record)}", "```", "", f"{record.caption()}.", ""]
    for words, name in pictures:
        lines += [f"![{words}]({name})", ""]
    for batch in record.batches:
        cells = [c for c in record.cells if c["batch"] == batch]
        lines += [f"### Training at batch {batch}", "", *_rates(record, cells), "", *_details(record, cells), ""]
    if failures := page.failures(record):
        lines += ["### Training without a figure", "", *failures, ""]
    lines += ["### How training was measured", "", *_how(record)]
    return "\n".join(lines)


def _command(record: Record) -> str:
    batches, dtype, kind = ",".join(map(str, record.batches)), record.about["dtype"], record.about["type"]
    peers = ",".join(name for name in record.ways if name != OURS)
    asked = f"--models {','.join(record.models)} --batches {batches} --dtype {dtype} --device {kind}"
    return f"zoo bench --what train {asked} --tune {record.about['tune']} --peers {peers}"


def _rates(record: Record, cells: list[dict[str, Any]]) -> list[str]:
    """Images a second, the fastest peer in italics, our ratio to it, and our memory over torch.compile's."""
    ways, dtype = [w for w in record.ways if any(w in c["ways"] for c in cells)], record.about["dtype"]
    table = ["| images/s | " + " | ".join(label(w, dtype, WAYS) for w in ways) + " | over the fastest | memory over compile's |"]
    table.append("|---|" + "--:|" * (len(ways) + 2))
    for c in cells:
        row = []
        for way in ways:
            rate = page.number(c, way, "images_s", ",.0f")
            row.append(f"*{rate}*" if way == c.get("fastest_peer") else rate)
        row.append(page.over(c))
        row.append(f"{c['memory_ratio']:.2f}x" if "memory_ratio" in c else "-")
        table.append(f"| {c['model']} | " + " | ".join(row) + " |")
    return table


def _details(record: Record, cells: list[dict[str, Any]]) -> list[str]:
    """Of each way the peak of memory; of ours the spread, the error of a step beside plain autocast's, the seconds to build."""
    ways, dtype = [w for w in record.ways if any(w in c["ways"] for c in cells)], record.about["dtype"]
    heads = [f"{label(w, dtype, WAYS)}, MiB" for w in ways] if record.about["type"] == "cuda" else []
    heads += ["ours: 10-90 %", "error of a step", "plain autocast's", "ready after s", "fastest peer's"]
    table = ["| | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for c in cells:
        row = [page.number(c, w, "memory_mib", ",.0f") for w in ways] if record.about["type"] == "cuda" else []
        row += [page.spread(c), page.number(c, OURS, "error", ".1e"), f"{c['plain_error']:.1e}" if "plain_error" in c else "-"]
        row += [page.number(c, OURS, "build_s", ",.1f"), page.number(c, c.get("fastest_peer", ""), "build_s", ",.1f")]
        table.append(f"| {c['model']} | " + " | ".join(row) + " |")
    return table


def _how(record: Record) -> list[str]:
    dtype = record.about["dtype"]
    twins = sorted({c["twin"] for c in record.cells if c.get("twin") not in (None, "zoo")})
    peers = f"The peers train {' and '.join(twins)}'s module where there is one, from the same weights." if twins else ""
    rounds = sorted({c["rounds"] for c in record.cells if "rounds" in c})
    samples = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}" if rounds else "no"
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
        f"- A cell, one network and batch, is measured in one process: all ways are built, then timed in turns, {samples} samples each. "
        "Images/s is the median of steps behind each other.",
    ]
    if record.about["type"] == "cuda":
        lines += [
            "- Memory is what a way holds (weights, gradients, momentum, its CUDA graph's pool) and the peak of a step on top.",
            "- `torch.backends.cudnn.benchmark` is on for all.",
        ]
    lines += [f"- {label(way, dtype, WAYS)}: {WAYS[way].says.format(dtype=dtype)}." for way in record.ways if way in WAYS]
    return lines
