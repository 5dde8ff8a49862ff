"""The picture of a recommendation: what each candidate reaches, over what it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from zoo.images.canvas import FAINT, GRID, INK, PAGE, SCALE, blank, length, save, shortened, write

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDE, HIGH = 900, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 40, 84, 84
COLOURS = {"recommended": "#1a7f4b", "tied": "#4f8fcb", "behind": "#59636e", "over": "#b3261e"}
FRONT = "#a9b4be"
SMALL = 11
LINE = 14
"""Layout pixels from one name to the next at least."""
Place: TypeAlias = Callable[[float, float], tuple[float, float]]
"""Takes milliseconds and a score, gives a place in layout pixels."""


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate of the picture.

    Attributes:
        name: beside its point.
        ms: milliseconds of one image.
        score: in percent.
        error: standard error of it, in points.
        kind: "recommended", "tied", "behind" or "over".
    """

    name: str
    ms: float
    score: float
    error: float
    kind: str


@dataclass(frozen=True, slots=True)
class Words:
    """What is written around the points.

    Attributes:
        heading: what is drawn.
        under: how it was measured.
        result: what to do, at the bottom.
        good: whether that is a recommendation.
        max_ms: the budget, None where there is none.
    """

    heading: str
    under: str
    result: str
    good: bool
    max_ms: float | None


def draw(points: Sequence[Point], front: Sequence[str], words: Words, path: Path) -> Path:
    """Draw score over milliseconds, see `Recommendation.picture`; `front` names the points that nothing beats, the fastest first."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"a picture is a PNG file, not '{path.name}'; name it '{path.stem}.png'")
    if not points:
        raise ValueError("there is nothing to draw: no candidate was timed")
    page, pen = blank(WIDE, HIGH)
    times = [one.ms for one in points] + ([words.max_ms] if words.max_ms else [])
    low_x, high_x = _widened(math.log10(min(times)), math.log10(max(times)), 0.12)
    low_y, high_y, step = _scale([one.score - one.error for one in points], [one.score + one.error for one in points])

    def place(ms: float, score: float) -> tuple[float, float]:
        x = LEFT + (math.log10(ms) - low_x) / (high_x - low_x) * (WIDE - LEFT - RIGHT)
        return x, HIGH - BOTTOM - (score - low_y) / (high_y - low_y) * (HIGH - TOP - BOTTOM)

    _axes(pen, words, place, (low_x, high_x), (low_y, high_y, step))
    corners: list[tuple[float, float]] = []
    named = {one.name: one for one in points}
    for name in front:
        x, y = place(named[name].ms, named[name].score)
        corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
    _line(pen, corners, FRONT, 2)
    if words.max_ms:
        x = place(words.max_ms, low_y)[0]
        _line(pen, [(x, TOP), (x, HIGH - BOTTOM)], COLOURS["over"], 1)
        write(pen, x - 4, TOP + 8, f"budget: {words.max_ms:g} ms", SMALL, COLOURS["over"], "r")
    for one in points:
        _point(pen, one, place)
    _names(pen, points, {one.name: place(one.ms, one.score) for one in points})
    return save(page, path)


def _axes(pen: ImageDraw, words: Words, place: Place, across: tuple[float, float], up: tuple[float, float, float]) -> None:
    (low_x, high_x), (low_y, high_y, step) = across, up
    write(pen, 16, 20, words.heading, 15, INK)
    write(pen, 16, 42, words.under, 12, FAINT)
    x = 16.0
    labels = {"recommended": "recommended", "tied": "tied with the best", "behind": "behind", "over": "over the budget"}
    for kind, label in labels.items():
        box = [round(SCALE * v) for v in (x, 57, x + 8, 65)]
        pen.ellipse(box, fill=PAGE if kind == "over" else COLOURS[kind], outline=COLOURS[kind], width=2 * SCALE)
        write(pen, x + 13, 61, label, 12, INK)
        x += 13 + length(label, 12) + 18
    _line(pen, [(x, 61), (x + 18, 61)], FRONT, 2)
    write(pen, x + 24, 61, "nothing is both quicker and better", 12, INK)
    tick = low_y
    while tick <= high_y + 1e-9:
        y = place(10**low_x, tick)[1]
        _line(pen, [(LEFT, y), (WIDE - RIGHT, y)], GRID, 1)
        write(pen, LEFT - 8, y, f"{tick:g}", SMALL, FAINT, "r")
        tick += step
    for ms in _log_ticks(low_x, high_x):
        x, y = place(ms, low_y)
        _line(pen, [(x, y), (x, y + 4)], FAINT, 1)
        write(pen, x, y + 14, f"{ms:g}", SMALL, FAINT, "m")
    write(pen, (LEFT + WIDE - RIGHT) / 2, HIGH - BOTTOM + 34, "milliseconds an image, logarithmic", 12, FAINT, "m")
    write(pen, 16, HIGH - 22, shortened(words.result, 13, WIDE - 32), 13, COLOURS["recommended" if words.good else "over"])


def _point(pen: ImageDraw, one: Point, place: Place) -> None:
    ms, colour = one.ms, COLOURS[one.kind]
    (x, y), top, bottom = place(ms, one.score), place(ms, one.score + one.error)[1], place(ms, one.score - one.error)[1]
    _line(pen, [(x, top), (x, bottom)], colour, 1)
    for end in (top, bottom):
        _line(pen, [(x - 3, end), (x + 3, end)], colour, 1)
    radius = 6 if one.kind == "recommended" else 4
    pen.ellipse(
        [round(SCALE * v) for v in (x - radius, y - radius, x + radius, y + radius)],
        fill=PAGE if one.kind == "over" else colour,
        outline=colour,
        width=2 * SCALE,
    )


def _names(pen: ImageDraw, shown: Sequence[Point], points: dict[str, tuple[float, float]]) -> None:
    """Write each name beside its point, moved up or down where another name is."""
    taken: list[tuple[float, float, float]] = [(x - 6, x + 6, y) for x, y in points.values()]
    for one in sorted(shown, key=lambda one: points[one.name][1]):
        x, y = points[one.name]
        text = shortened(one.name, SMALL, 230)
        wide = length(text, SMALL)
        left, right = (x + 10, x + 10 + wide), (x - 10 - wide, x - 10)
        options = [(span, y + LINE * step) for step in (0, -1, 1, -2, 2, -3, 3, -4, 4) for span in (left, right)]
        fits = [
            (span, at)
            for span, at in options
            if span[0] > 4 and span[1] < WIDE - 4 and TOP - 4 < at < HIGH - BOTTOM - 4
            and not any(a < span[1] and b > span[0] and abs(at - other) < LINE - 1 for a, b, other in taken)
        ]  # fmt: skip
        span, at = fits[0] if fits else (left if left[1] < WIDE - 4 else right, y)
        taken.append((span[0], span[1], at))
        pen.rectangle([round(SCALE * v) for v in (span[0] - 2, at - 6, span[1] + 2, at + 6)], fill=PAGE)
        write(pen, span[0], at, text, SMALL, COLOURS[one.kind])
        if at != y:
            _line(pen, [(x, y), (span[0] - 2 if span[0] > x else span[1] + 2, at)], GRID, 1)


def _scale(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float, float]:
    """Choose where an axis of percentages begins and ends, and its step."""
    low, high = max(0.0, min(lows)), min(100.0, max(highs))
    step = next(s for s in (1, 2, 5, 10, 20) if (high - low) / s <= 8 or s == 20)
    return step * math.floor(low / step), step * math.ceil(high / step + 1e-9), step


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    more = max(0.05, (high - low) * share)
    return low - more, high + more


def _log_ticks(low: float, high: float) -> list[float]:
    ticks = [scale * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for scale in (1, 2, 3, 5, 7)]
    return [round(tick, 10) for tick in ticks if low <= math.log10(tick) <= high]


def _line(pen: ImageDraw, points: Sequence[tuple[float, float]], colour: str, width: int) -> None:
    if len(points) > 1:
        pen.line([(round(SCALE * x), round(SCALE * y)) for x, y in points], fill=colour, width=width * SCALE)
