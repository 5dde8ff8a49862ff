"""The page: one HTML file that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from zoo.browsing.measured import Measured
from zoo.browsing.rows import Row, facets, told

HERE = Path(__file__).parent
METRICS = {
    "top1": "top-1 %",
    "top5": "top-5 %",
    "box_map": "box mAP %",
    "mask_map": "mask mAP %",
    "kp_map": "keypoint mAP %",
    "map": "mAP %",
    "map50": "mAP at 50 %",
    "miou": "mean IoU %",
    "pixel_acc": "pixel accuracy %",
}
"""What accuracies are called."""
TITLE = "kernelzoo: every checkpoint"
MADE_BY = '<meta name="generator" content="zoo browse">'
"""What tells such a page from another one, in its first lines."""


def page(rows: Sequence[Row], measured: Iterable[Measured], *, mine: bool = False, version: str = "") -> str:
    """Write the page as HTML: style, program and data in one file, and a policy that lets nothing be fetched.

    Example:
        >>> from zoo.browsing.rows import rows
        >>> from zoo.browsing.measured import shipped
        >>> page(rows(), shipped()).partition("\\n")[0]
        '<!doctype html>'

    Args:
        rows: from `zoo.browsing.rows.rows`.
        measured: speeds to choose from; what is `mine` is offered first.
        mine: whether rows are marked with what this machine has.
        version: of the package, for the line at the end.
    """
    style, program, frame = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html"))
    style, program = f"\n{style}", f"\n{program}"
    policy = "; ".join(
        [
            "default-src 'none'",
            f"style-src {_allowed(style)}",
            f"script-src {_allowed(program)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    bare = sum(row.checkpoint is None for row in rows)
    parts = {
        "MADE": MADE_BY,
        "POLICY": escape(policy),
        "TITLE": escape(f"{TITLE}, with what this machine has" if mine else TITLE),
        "STYLE": style,
        "VERSION": escape(version),
        "COUNT": f"{sum(row.checkpoint is not None for row in rows):,}",
        "NETWORKS": f"{len({row.variant.name for row in rows}):,}",
        "BARE": f"; {bare:,} have no checkpoint yet" if bare else "",
        "DATA": in_html(data(rows, measured, mine=mine)),
        "PROGRAM": program,
    }
    return re.sub(r"@([A-Z]+)@", lambda mark: parts[mark[1]], frame)


def data(rows: Sequence[Row], measured: Iterable[Measured], *, mine: bool = False) -> dict[str, Any]:
    """Gather what the program shows. Texts that many checkpoints share stand there once, and rows have their numbers."""
    there = {row.variant.name for row in rows}
    speeds = sorted(measured, key=lambda one: not one.mine)
    shown = [one for one in speeds if one.rates.keys() & there]
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    lines = []
    chosen = facets(rows, mine=mine)
    for row in rows:
        c, gmacs, (megabytes, known) = row.checkpoint, row.gmacs, row.megabytes
        line: dict[str, Any] = {"network": row.variant.name, "tag": c.tag if c else "", "params": row.variant.params, "side": row.side}
        line |= {"metrics": dict(c.metrics) if c else {}, "on": (c.metrics_data or "") if c else "", "paper": number(row.variant.paper)}
        line |= {"gmacs": None if gmacs is None else _four(gmacs[0]), "scaled": gmacs is not None and not gmacs[1]}
        line |= {"mb": _four(megabytes), "guess": not known, "code": row.code, "command": row.command}
        line["facts"] = {name: number(text) for name, text in told(row).items()}
        line["values"] = {facet.key: [number(value) for value in facet.of(row)] for facet, _ in chosen}
        lines.append(line)
    return {
        "mine": mine,
        "facets": [
            {"key": facet.key, "label": facet.label, "open": facet.open, "values": [number(value) for value in values]}
            for facet, values in chosen
        ],
        "accuracies": accuracies(rows),
        "speeds": [
            {"label": one.label, "machine": one.machine, "how": one.how, "batch": one.batch, "when": one.when}
            | {"versions": one.versions, "mine": one.mine}
            | {"rates": {name: rate for name, rate in one.rates.items() if name in there}}
            for one in shown
        ],
        "rows": lines,
        "texts": list(texts),
    }


def accuracies(rows: Iterable[Row]) -> list[dict[str, str]]:
    """List the accuracies that rows have, the one that most have first: of a metric on certain images, for others don't compare."""
    counted: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.checkpoint is not None and row.checkpoint.metrics_data:
            for metric in row.checkpoint.metrics:
                same = metric, row.checkpoint.metrics_data
                counted[same] = counted.get(same, 0) + 1
    order = sorted(counted, key=lambda one: (-counted[one], list(METRICS).index(one[0]) if one[0] in METRICS else len(METRICS)))
    return [{"metric": metric, "on": on, "label": f"{METRICS.get(metric, metric)}, {on}"} for metric, on in order]


def in_html(value: Any) -> str:
    """Write JSON that can stand in a script of HTML, whatever strings are in it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _four(number: float) -> float:
    return float(f"{number:.4g}")


def _allowed(text: str) -> str:
    """Name an inline style or program for the policy, by its hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
