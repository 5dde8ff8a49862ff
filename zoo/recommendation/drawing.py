"""The picture of a recommendation: what each candidate reaches, over what it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.images.canvas import FAINT, GRID, INK, PAGE, SCALE, blank, length, save, shortened, write
from zoo.recommendation.result import Ranked, Recommendation

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDE, HIGH = 900, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 40, 84, 84
BEST, TIED, OTHER, OVER = "#1a7f4b", "#4f8fcb", "#59636e", "#b3261e"
SMALL = 11
LINE = 14
"""Layout pixels from one name to the next at least."""


def draw(found: Recommendation, path: Path) -> Path:
    """Draw score over milliseconds, see `Recommendation.picture`."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"a picture is a PNG file, not '{path.name}'; name it '{path.stem}.png'")
    shown = [one for one in found.ranking if one.ms is not None]
    if not shown:
        raise ValueError("there is nothing to draw: no candidate was timed")
    page, pen = blank(WIDE, HIGH)
    times = [one.ms or 0.0 for one in shown] + ([found.budget.max_ms] if found.budget.max_ms else [])
    low_x, high_x = _widened(math.log10(min(times)), math.log10(max(times)), 0.12)
    low_y, high_y, step = _scale([one.score - one.error for one in shown], [one.score + one.error for one in shown])

    def place(ms: float, score: float) -> tuple[float, float]:
        x = LEFT + (math.log10(ms) - low_x) / (high_x - low_x) * (WIDE - LEFT - RIGHT)
        return x, HIGH - BOTTOM - (score - low_y) / (high_y - low_y) * (HIGH - TOP - BOTTOM)

    _axes(pen, found, place, (low_x, high_x), (low_y, high_y, step))
    corners: list[tuple[float, float]] = []
    for one in found.pareto():
        x, y = place(one.ms or 1.0, one.score)
        corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
    _line(pen, corners, "#a9b4be", 2)
    if found.budget.max_ms:
        x = place(found.budget.max_ms, low_y)[0]
        _line(pen, [(x, TOP), (x, HIGH - BOTTOM)], OVER, 1)
        write(pen, x - 4, TOP + 8, f"budget: {found.budget.max_ms:g} ms", SMALL, OVER, "r")
    points = {one.name: place(one.ms or 1.0, one.score) for one in shown}
    for one in shown:
        _point(pen, one, place)
    _names(pen, shown, points)
    return save(page, path)


def _axes(pen: ImageDraw, found: Recommendation, place, across: tuple[float, float], up: tuple[float, float, float]) -> None:
    (low_x, high_x), (low_y, high_y, step) = across, up
    what = "Linear probe, % of images named rightly" if found.labelled else "Neighbourhood consistency, %: weaker than labels"
    write(pen, 16, 20, f"{what}; bars: one standard error", 15, INK)
    chance = f", guessing has {found.chance:.0f} %" if found.chance is not None else ""
    write(pen, 16, 42, f"{found.images:,} images{chance}; milliseconds of one image on {found.device}, by fast()", 12, FAINT)
    x = 16.0
    for colour, label in ((BEST, "recommended"), (TIED, "tied with the best"), (OTHER, "behind"), (OVER, "over the budget")):
        pen.ellipse([round(SCALE * v) for v in (x, 57, x + 8, 65)], fill=colour)
        write(pen, x + 13, 61, label, 12, INK)
        x += 13 + length(label, 12) + 18
    _line(pen, [(x, 61), (x + 18, 61)], "#a9b4be", 2)
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
    best = f"recommended: {found.best.trained}" if found.best else f"nothing is within the budget; nearest: {found.nearest}"
    write(pen, 16, HIGH - 22, shortened(best, 13, WIDE - 32), 13, BEST if found.best else OVER)


def _point(pen: ImageDraw, one: Ranked, place) -> None:
    ms, colour = one.ms or 1.0, _colour(one)
    (x, y), top, bottom = place(ms, one.score), place(ms, one.score + one.error)[1], place(ms, one.score - one.error)[1]
    _line(pen, [(x, top), (x, bottom)], colour, 1)
    for end in (top, bottom):
        _line(pen, [(x - 3, end), (x + 3, end)], colour, 1)
    radius = 6 if one.recommended else 4
    pen.ellipse(
        [round(SCALE * v) for v in (x - radius, y - radius, x + radius, y + radius)],
        fill=PAGE if one.over else colour,
        outline=colour,
        width=2 * SCALE,
    )


def _names(pen: ImageDraw, shown: Sequence[Ranked], points: dict[str, tuple[float, float]]) -> None:
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
        write(pen, span[0], at, text, SMALL, _colour(one))
        if at != y:
            _line(pen, [(x, y), (span[0] - 2 if span[0] > x else span[1] + 2, at)], GRID, 1)


def _colour(one: Ranked) -> str:
    return OVER if one.over else BEST if one.recommended else TIED if one.tied else OTHER


def _scale(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float, float]:
    """Choose where an axis of percentages begins and ends, and its step."""
    low, high = max(0.0, min(lows)), min(100.0, max(highs))
    step = next(s for s in (1, 2, 5, 10, 20) if (high - low) / s <= 8 or s == 20)
    return step * math.floor(low / step), step * math.ceil(high / step + 1e-9), step


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    more = max(0.05, (high - low) * share)
    return low - more, high + more


def _log_ticks(low: float, high: float) -> list[float]:
    ticks = [scale * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for scale in (1, 2, 5)]
    return [round(tick, 10) for tick in ticks if low <= math.log10(tick) <= high]


def _line(pen: ImageDraw, points: Sequence[tuple[float, float]], colour: str, width: int) -> None:
    if len(points) > 1:
        pen.line([(round(SCALE * x), round(SCALE * y)) for x, y in points], fill=colour, width=width * SCALE)
