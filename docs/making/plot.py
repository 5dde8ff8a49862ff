"""A scatter plot as SVG: plain shapes in a fixed order with rounded numbers, so that the same figures give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 980, 620
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 20, 64
FONT, LETTER = 13, 8.4
"""Size of the letters, and how much room one takes at most in the fonts that browsers have."""
INK, FAINT, GRID, FRONT, DOT = "#1b1f23", "#59636e", "#e6e9ec", "#1a7f4b", "#4f8fcb"
RADIUS = 5
AROUND = ((1, 0), (-1, 0), (1, -1), (-1, 1), (0, -1), (0, 1), (-1, -1), (1, 1))
ABOVE = ((1, -1), (-1, 1), *AROUND)
"""Directions in which a name may stand from its dot, the liked ones first; y points down. The second are for dots on the line, which
falls."""

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Point:
    """A dot with its name: `x` on a logarithmic axis, `y` on a plain one."""

    name: str
    x: float
    y: float


def plot(points: Sequence[Point], x_title: str, y_title: str) -> str:
    """Draw points with their names, and the line of those that no other one beats in both directions.

    Args:
        points: at least one, each `x` above 0.
        x_title: what the horizontal axis shows.
        y_title: what the vertical axis shows.

    Returns:
        The picture as SVG.
    """
    points = sorted(points, key=lambda point: (-point.y, point.name))
    low_x, high_x = math.log10(min(p.x for p in points)) - 0.08, math.log10(max(p.x for p in points)) + 0.08
    low_y, high_y = math.floor(min(p.y for p in points)) - 1, math.ceil(max(p.y for p in points)) + 1

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low_x) / (high_x - low_x)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    front = [p for p in points if not any(q.x >= p.x and q.y >= p.y and q != p for q in points)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="{FONT}" role="img">',
        f"<title>{escape(y_title)} over {escape(x_title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for x in _decades(low_x, high_x):
        at, _ = place(x, low_y)
        lines.append(_line(at, TOP, at, HEIGHT - BOTTOM, GRID))
        lines.append(_text(at, HEIGHT - BOTTOM + 20, f"{x:,.0f}", FAINT, "middle"))
    step = 2 if high_y - low_y <= 20 else 5
    for y in range(math.ceil(low_y / step) * step, high_y + 1, step):
        _, at = place(10**low_x, y)
        lines.append(_line(LEFT, at, WIDTH - RIGHT, at, GRID))
        lines.append(_text(LEFT - 8, at + 4, str(y), FAINT, "end"))
    lines.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, x_title, INK, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 20 {middle:.1f})"'
    lines.append(f'<text x="20" y="{middle:.1f}" fill="{INK}" text-anchor="middle" {turned}>{escape(y_title)}</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(p.x, p.y) for p in front))
    lines.append(f'<polyline points="{path}" fill="none" stroke="{FRONT}" stroke-width="1.5" stroke-dasharray="5 4"/>')
    places = {point: place(point.x, point.y) for point in points}
    for point, (x, y) in places.items():
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{FRONT if point in front else DOT}"/>')
    for point, (left, top, right, bottom) in _labels(places, front).items():
        x, y = places[point]
        near_x, near_y = min(max(x, left), right), min(max(y, top), bottom)
        if math.hypot(near_x - x, near_y - y) > RADIUS + 8:
            lines.append(_line(x, y, near_x, near_y, FAINT))
        at, anchor = (left, "start") if left >= x else (right, "end") if right <= x else ((left + right) / 2, "middle")
        lines.append(_text(at, bottom - 4, point.name, FRONT if point in front else INK, anchor))
    return "\n".join([*lines, "</svg>", ""])


def _labels(places: dict[Point, tuple[float, float]], front: Sequence[Point]) -> dict[Point, Box]:
    """Find room for each name beside its dot: as near as no other name, dot or border allows nearer."""
    dots = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in places.values()]
    frame = (LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    taken: dict[Point, Box] = {}
    for point, (x, y) in places.items():
        width, height = LETTER * len(point.name), FONT + 4
        around = ABOVE if point in front else AROUND
        tried = [_beside(x, y, width, height, dx, dy, away) for away in range(3, 120, 6) for dx, dy in around]
        free = (box for box in tried if _within(box, frame) and not any(_overlap(box, other) for other in (*dots, *taken.values())))
        taken[point] = next(free, tried[0])
    return taken


def _beside(x: float, y: float, width: float, height: float, dx: int, dy: int, away: float) -> Box:
    gap = RADIUS + away - (3 if dx and dy else 0)
    left = x + dx * gap - (width if dx < 0 else width / 2 if dx == 0 else 0)
    top = y + dy * gap - (height if dy < 0 else height / 2 if dy == 0 else 0)
    return left, top, left + width, top + height


def _within(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _decades(low: float, high: float) -> list[float]:
    """List 1, 2, 5, 10, 20 … between two powers of ten."""
    marks = [first * 10**power for power in range(math.floor(low), math.ceil(high) + 1) for first in (1, 2, 5)]
    return [mark for mark in marks if low <= math.log10(mark) <= high]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, words: str, colour: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'
