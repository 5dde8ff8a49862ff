"""The pictures of a record."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.bench.peers import OURS
from zoo.bench.record import Record, trains
from zoo.images import canvas
from zoo.images.canvas import FAINT, GRID, INK, SCALE, blank, length, write

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

WIDTH, MARGIN = 1080, 28
PLOT, UNDER, HEAD, LEGEND, GAP = 210, 50, 66, 24, 30
"""Height of a panel's bars and of the names under them; of the heading, of a legend's line, between panels."""
LINE, BAD = "#8c97a3", "#b3261e"
OURS_COLOUR = "#1a7f4b"
COLOURS = {
    "eager-fp32": "#d3d9de",
    "eager-tf32": "#b4bdc6",
    "eager": "#9cc3e6",
    "eager-cl": "#4f8fcb",
    "compile": "#f2c14e",
    "max-autotune": "#e08e2b",
    "recipe": "#8d6bb8",
    "onnxruntime": "#8d6bb8",
    "openvino": "#e08e2b",
    OURS: OURS_COLOUR,
    "fast-recompute": "#8fc7a8",
}
OTHER = "#c58aa5"


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the grouped chart, in the layout's pixels from the top left.

    Attributes:
        model: the network.
        batch: images in a call.
        way: how it ran.
        value: images a second, None where it failed.
        left: of the bar, as the next two.
        right: its other side.
        top: of the bar; on the base line where there is no value.
        base: the line that all bars of a panel stand on.
    """

    model: str
    batch: int
    way: str
    value: float | None
    left: float
    right: float
    top: float
    base: float


def grouped(record: Record, models: Sequence[str]) -> Image:
    """Draw images a second as bars, one panel a batch, one group a network, one bar a way.

    Args:
        record: what was measured.
        models: the networks, in order; those without cells are left out.

    Returns:
        The picture, `SCALE` times `WIDTH` pixels wide.

    Raises:
        ValueError: none of the networks is measured.
    """
    bars, panels, top = layout(record, models)
    legend = _legend_rows(record)
    caption = _wrapped(_caption(record, models), WIDTH - 2 * MARGIN, 11)
    height = top + len(caption) * 16 + 14
    page, draw = blank(WIDTH, height)
    write(draw, MARGIN, 24, f"Images a second{' of training' if trains(record) else ''}, {_title(record)}", 20, INK)
    write(draw, MARGIN, 48, "higher is better; no bar where a way was not measured; x: it failed, or computed something else", 12, FAINT)
    for row, names in enumerate(legend):
        for x, name in names:
            y = HEAD + row * LEGEND + LEGEND / 2
            _box(draw, x, y - 6, x + 12, y + 6, _colour(name))
            write(draw, x + 18, y, record.label(name), 12, INK)
    for batch, (panel_top, ceiling) in panels.items():
        base = panel_top + PLOT
        for step in _ticks(ceiling):
            y = base - PLOT * step / ceiling
            _box(draw, MARGIN + 50, y, WIDTH - MARGIN, y + 0.5, LINE if step == 0 else GRID)
            write(draw, MARGIN + 44, y, f"{step:,.10g}", 11, FAINT, "r")
        write(draw, MARGIN + 50, panel_top - 18, f"batch {batch}", 14, INK)
    for bar in bars:
        middle = (bar.left + bar.right) / 2
        if bar.value is None:
            if bar.way in (record.cell(bar.model, bar.batch) or {}).get("ways", {}):
                write(draw, middle, bar.base - 8, "x", 13, BAD, "m")
            continue
        _box(draw, bar.left, bar.top, bar.right, bar.base, _colour(bar.way))
        write(draw, middle, bar.top - 7, _short(bar.value), 11 if bar.right - bar.left > 24 else 9, INK, "m")
    for (model, batch), mine in _groups(bars).items():
        middle, base = (mine[0].left + mine[-1].right) / 2, mine[0].base
        write(draw, middle, base + 14, model, 13, INK, "m")
        cell = record.cell(model, batch) or {}
        if "failed" in cell.get("ways", {}).get(OURS, {}):
            write(draw, middle, base + 31, "fast() failed", 11, BAD, "m")
        elif "ratio" in cell:
            words = f"{cell['ratio']:.2f}x the fastest peer ({record.label(cell['fastest_peer'])})"
            write(draw, middle, base + 31, words, 11, OURS_COLOUR if cell["ratio"] >= 1 else BAD, "m")
    for index, line in enumerate(caption):
        write(draw, MARGIN, top + 8 + 16 * index, line, 11, FAINT)
    return page


def layout(record: Record, models: Sequence[str]) -> tuple[list[Bar], dict[int, tuple[float, float]], float]:
    """Place the bars of `grouped`.

    Args:
        record: what was measured.
        models: the networks, in order.

    Returns:
        The bars; by batch the top of its panel and the images a second that its height stands for; the end of the last panel.

    Raises:
        ValueError: none of the networks is measured.
    """
    shown = [m for m in models if m in record.models]
    if not shown:
        raise ValueError(f"none of {', '.join(models)} is in the record; it has {', '.join(record.models) or 'no cells'}")
    ways, bars = record.ways, []
    panels: dict[int, tuple[float, float]] = {}
    top = HEAD + LEGEND * len(_legend_rows(record)) + GAP
    for batch in record.batches:
        cells = {m: cell for m in shown if (cell := record.cell(m, batch))}
        values = [row["images_s"] for cell in cells.values() for row in cell["ways"].values() if "images_s" in row]
        if not cells:
            continue
        ceiling = _ceiling(1.06 * max(values, default=1.0))
        panels[batch] = (top, ceiling)
        room = (WIDTH - 2 * MARGIN - 50) / len(shown)
        thick = min(46.0, 0.9 * room / len(ways))
        for model, cell in cells.items():
            left = MARGIN + 50 + room * shown.index(model) + (room - thick * len(ways)) / 2
            for place, way in enumerate(ways):
                value = cell["ways"].get(way, {}).get("images_s")
                x = left + place * thick
                high = 0.0 if value is None else PLOT * value / ceiling
                bars.append(Bar(model, batch, way, value, x + 1, x + thick - 1, top + PLOT - high, top + PLOT))
        top += PLOT + UNDER + GAP
    return bars, panels, top - GAP + 12


def overview(record: Record) -> Image:
    """Draw our images a second over the fastest peer's for every network, a column a batch, the best network first, a line at 1.

    Args:
        record: what was measured.

    Returns:
        The picture, `SCALE` times `WIDTH` pixels wide.

    Raises:
        ValueError: no cell has a ratio.
    """
    order, line = ranking(record), 17
    ratios = [c["ratio"] for c in record.cells if "ratio" in c]
    if not ratios:
        raise ValueError("no network of the record has both ours and a peer, so there is no ratio to draw")
    caption = _wrapped(_caption(record, order), WIDTH - 2 * MARGIN, 11)
    top = HEAD + 26
    bottom = top + line * len(order) + 10
    page, draw = blank(WIDTH, bottom + 16 * len(caption) + 22)
    write(draw, MARGIN, 24, f"fast() over the fastest peer, {_title(record)}", 20, INK)
    write(draw, MARGIN, 48, "images a second over those of the fastest way that PyTorch offers; the line is 1", 12, FAINT)
    batches, names = record.batches, 150
    low, high = min(0.8, *ratios), max(1.2, *ratios)
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    room = (WIDTH - 2 * MARGIN - names) / len(batches)
    wide = room - 64  # a figure stands behind the bar
    for column, batch in enumerate(batches):
        left = MARGIN + names + column * room + 12
        write(draw, left + wide * (1 - low) / (high - low), top - 14, f"batch {batch}", 14, INK, "m")
        one = left + wide * (1 - low) / (high - low)
        for row, model in enumerate(order):
            y = top + row * line
            cell = record.cell(model, batch) or {}
            _box(draw, left, y + line - 0.5, left + wide + 46, y + line, GRID)
            if "ratio" not in cell:
                words = "not measured" if not cell else "fast() failed" if "failed" in cell["ways"].get(OURS, {"failed": ""}) else "no peer"
                write(draw, one + 6, y + line / 2, words, 10, BAD if cell else FAINT)
                continue
            end = left + wide * (cell["ratio"] - low) / (high - low)
            _box(draw, min(one, end), y + 3, max(one, end), y + line - 3, OURS_COLOUR if cell["ratio"] >= 1 else BAD)
            write(draw, max(one, end) + 6, y + line / 2, f"{cell['ratio']:.2f}", 11, INK)
        _box(draw, one - 0.75, top - 4, one + 0.75, top + line * len(order), INK)
    for row, model in enumerate(order):
        write(draw, MARGIN + names, top + row * line + line / 2, model, 12, INK, "r")
    for index, words in enumerate(caption):
        write(draw, MARGIN, bottom + 12 + 16 * index, words, 11, FAINT)
    return page


def ranking(record: Record) -> list[str]:
    """Return the networks by the geometric mean of their ratios, the largest first, and last those where ours has failed everywhere."""
    means: dict[str, float] = {}
    for model in record.models:
        logs = [math.log(c["ratio"]) for c in record.cells if c["model"] == model and c.get("ratio")]
        if logs:
            means[model] = sum(logs) / len(logs)
    failed = {c["model"] for c in record.cells if "failed" in c["ways"].get(OURS, {})}
    return [*sorted(means, key=lambda model: -means[model]), *(m for m in record.models if m in failed and m not in means)]


def save(page: Image, path: str | os.PathLike[str]) -> Path:
    """Save a picture as a PNG, whole or not at all.

    Raises:
        ValueError: the path doesn't end in .png.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"a picture is a PNG file, got {path.name}; name it {path.stem}.png")
    return canvas.save(page, path)


def _title(record: Record) -> str:
    return f"{record.about['device']}, {record.about['dtype']}"


def _caption(record: Record, models: Sequence[str]) -> str:
    sizes = sorted({c["size"] for c in record.cells if c["model"] in models})
    pixels = f"Images of {sizes[0]} px" if len(sizes) == 1 else f"Images of {sizes[0]} to {sizes[-1]} px"
    if trains(record):
        return (
            f"{record.caption()}. {pixels}; a step is forward, cross-entropy, backward and SGD; random weights, the same on all "
            "sides; medians of steps in turns in one process; the first step's change of the weights was compared "
            "with float32 eager's. cl = channels_last."
        )
    graph = " fast() copies its input and output, the CUDA graph of fold+compile+graph doesn't." if record.about["type"] == "cuda" else ""
    return (
        f"{record.caption()}. {pixels}; random weights, the same on all sides; medians of calls in turns in one process; parity with "
        f"float32 eager first.{graph} cl = channels_last."
    )


def _legend_rows(record: Record) -> list[list[tuple[float, str]]]:
    rows: list[list[tuple[float, str]]] = [[]]
    x = float(MARGIN)
    for name in record.ways:
        wide = 18 + length(record.label(name), 12) + 22
        if x + wide > WIDTH - MARGIN and rows[-1]:
            rows.append([])
            x = float(MARGIN)
        rows[-1].append((x, name))
        x += wide
    return rows


def _groups(bars: list[Bar]) -> dict[tuple[str, int], list[Bar]]:
    groups: dict[tuple[str, int], list[Bar]] = {}
    for bar in bars:
        groups.setdefault((bar.model, bar.batch), []).append(bar)
    return groups


def _ceiling(value: float) -> float:
    """Return the next number with two digits that is no smaller."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return unit * math.ceil(value / unit)


def _ticks(ceiling: float) -> list[float]:
    """Choose round steps, four to nine of them."""
    unit = 10.0 ** math.floor(math.log10(ceiling))
    step = next(s for s in (0.1 * unit, 0.2 * unit, 0.5 * unit, unit, 2 * unit) if ceiling / s <= 8)
    return [step * index for index in range(int(ceiling / step) + 1)]


def _short(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.0f}k" if value >= 99_500 else f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _colour(name: str) -> str:
    return COLOURS.get(name, OTHER)


def _box(draw: ImageDraw, left: float, top: float, right: float, bottom: float, colour: str) -> None:
    """Fill a box; at least a pixel is seen of it."""
    x0, y0, x1, y1 = (round(SCALE * value) for value in (left, top, right, bottom))
    draw.rectangle((x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), fill=colour)


def _wrapped(text: str, room: float, size: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and length(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
