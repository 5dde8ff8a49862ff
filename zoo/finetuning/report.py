"""What a run shows when it is done: figures as JSON, pictures as PNG, and one page that holds all of it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from weights.documents import MISREAD, read_json, table
from weights.whole import write_whole
from weights.wording import counted
from zoo.finetuning.drawing import Curve, chart, matrix, stacked
from zoo.finetuning.evaluating import Measured
from zoo.images import BadImage, Source, decode
from zoo.images.canvas import save

MISTAKES = 24
"""How many of the surest mistakes are shown."""
THUMB = 128
STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b1f23}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #e6e9ec}
td:first-child,th:first-child{text-align:left}img{max-width:100%;height:auto}h2{margin-top:2.5rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.5rem,1fr));gap:1rem;font-size:12px}
.grid img{width:100%;image-rendering:auto}code{background:#f3f4f6;padding:.1rem .3rem}small{color:#59636e}"""


def history(folder: Path) -> list[dict[str, Any]]:
    """Read a run's log."""
    path = folder / "log.jsonl"
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with suppress(*MISREAD):  # a line that a kill cut, or somebody edited
            found.append(table(read_json(line, path), {"kind": str, "epoch": (int, float)}))
    return found


def curves(folder: Path) -> list[Path]:
    """Draw a run's log into `curves.png`: loss, accuracy and learning rate over its epochs; nothing where the log is empty."""
    rows = history(folder)
    train, measured = ([row for row in rows if row["kind"] == kind] for kind in ("train", "eval"))
    of = {
        "loss": [Curve("training", _points(train, "loss")), Curve("measured", _points(measured, "loss"))],
        "accuracy": [Curve(name.replace("_", " "), _points(measured, name)) for name in ("accuracy", "balanced_accuracy", "f1")],
        "rate": [Curve("highest group", _points(train, "lr"))],
    }
    titles = {"loss": "Loss in nats", "accuracy": "Measured, %", "rate": "Learning rate"}
    panels = [chart(titles[name], lines, "epoch") for name, lines in of.items() if any(curve.points for curve in lines)]
    return [save(stacked(panels), folder / "curves.png")] if panels else []


def write(folder: Path, about: Mapping[str, Any], classes: Sequence[str], measured: Measured | None, source: Source | None) -> Path:
    """Write `metrics.json`, the pictures and `report.html`, which needs no other file.

    Args:
        folder: of the run.
        about: the run's settings, as in `settings.json`, and what there is to say of the result.
        classes: names, in the order of the logits.
        measured: the figures of the kept weights, or None where nothing was set aside to measure on.
        source: where the measured images come from, for the pictures of mistakes.

    Returns:
        The page.
    """
    pictures = curves(folder)
    parts = [f"<h1>{escape(about['model'])} on {escape(about['data'])}</h1>", _facts(about)]
    if measured is not None:
        metrics = measured.metrics
        table = {**metrics.summary(), "classes": metrics.rows(list(classes)), "confusion": metrics.confusion.tolist()}
        write_whole(folder / "metrics.json", json.dumps(table, indent=1) + "\n")
        pictures.append(save(matrix(metrics.confusion, classes), folder / "confusion.png"))
        parts += [_summary(metrics.summary()), _per_class(metrics.rows(list(classes)))]
    parts += [f'<h2>{escape(p.stem.capitalize())}</h2><img alt="{escape(p.stem)}" src="{_data(p.read_bytes())}">' for p in pictures]
    if measured is not None and source is not None:
        parts.append(_mistakes(measured, classes, source))
    parts.append(_folded("Settings", "all options", json.dumps(about["settings"], indent=1)))
    if about.get("kernels"):
        parts.append(_folded("Kernels", "what each layer ran on", about["kernels"]))
    page = folder / "report.html"
    head = f'<meta charset="utf-8"><title>{escape(about["model"])}</title><style>{STYLE}</style>'
    write_whole(page, f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n")
    return page


def _folded(heading: str, what: str, text: str) -> str:
    return f"<h2>{heading}</h2><details><summary>{what}</summary><pre>{escape(text)}</pre></details>"


def _facts(about: Mapping[str, Any]) -> str:
    lines = [f"{escape(name)}: {escape(str(value))}" for name, value in about["result"].items()]
    bad = about.get("unreadable") or {}
    if bad:
        listed = "".join(f"<li>{escape(reason)}</li>" for reason in bad.values())
        lines.append(f"<details><summary>{counted(len(bad), 'image')} could not be read, and left out</summary><ul>{listed}</ul></details>")
    return f"<p>{'<br>'.join(lines)}</p>"


def _summary(figures: Mapping[str, Any]) -> str:
    cells = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in figures)
    values = "".join(f"<td>{value if isinstance(value, int) else f'{value:.4g}'}</td>" for value in figures.values())
    return f"<table><tr>{cells}</tr><tr>{values}</tr></table>"


def _per_class(rows: Sequence[Mapping[str, Any]]) -> str:
    body = "".join(
        f"<tr><td>{escape(row['class'])}</td><td>{row['images']}</td>"
        + "".join(f"<td>{100 * row[name]:.1f}</td>" for name in ("precision", "recall", "f1"))
        + "</tr>"
        for row in rows
    )
    head = "<tr><th>class</th><th>measured</th><th>precision %</th><th>recall %</th><th>F1 %</th></tr>"
    return f"<h2>Classes</h2><table>{head}{body}</table>"


def _mistakes(measured: Measured, classes: Sequence[str], source: Source) -> str:
    decided = measured.probabilities.argmax(1)
    sure = measured.probabilities.max(1)
    wrong = [int(i) for i in np.argsort(-sure, kind="stable") if decided[i] != measured.targets[i]][:MISTAKES]
    if not wrong:
        return "<h2>Mistakes</h2><p>None.</p>"
    index = {item.key: number for number, item in enumerate(source)}
    figures = []
    for i in wrong:
        name = measured.names[i]
        number = index.get(name)
        try:
            picture = "" if number is None else f'<img alt="" src="{_thumbnail(source.read(number), name)}">'
        except (BadImage, OSError):
            picture = ""
        words = f"{escape(classes[int(measured.targets[i])])}, taken for {escape(classes[int(decided[i])])} ({sure[i]:.0%})"
        figures.append(f"<div>{picture}{words}<br><small>{escape(name)}</small></div>")
    return f'<h2>Mistakes it is surest of</h2><div class="grid">{"".join(figures)}</div>'


def _thumbnail(data: bytes, name: str) -> str:
    image = decode(data, name)
    image.thumbnail((THUMB, THUMB))
    file = BytesIO()
    image.save(file, "JPEG", quality=85)
    return _data(file.getvalue(), "jpeg")


def _data(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    points = ((row["epoch"], row.get(name)) for row in rows)
    return [(x, y) for x, y in points if isinstance(y, int | float) and math.isfinite(x) and math.isfinite(y)]
