"""Charts and confusion matrices: what is written on their axes, and that names of any script can be told apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from zoo.finetuning import drawing
from zoo.finetuning.drawing import Curve, chart, matrix


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, float]]:
    """Collect what is written, with its place."""
    found: list[tuple[str, float, float]] = []
    whole = drawing.write

    def write(draw: Any, x: float, y: float, text: str, *rest: Any) -> None:
        found.append((text, x, y))
        whole(draw, x, y, text, *rest)

    monkeypatch.setattr(drawing, "write", write)
    return found


def axis(texts: list[tuple[str, float, float]]) -> list[tuple[str, float]]:
    return [(text, x) for text, x, y in texts if y == drawing.HIGH - drawing.BOTTOM + 14]


@pytest.mark.parametrize(
    ("name", "values", "ticks"),
    [
        ("GPUs", [1, 2], ["1", "2"]),
        ("GPUs", [1, 2, 4], ["1", "2", "3", "4"]),
        ("epoch", [1, 2, 3], ["1", "2", "3"]),
        ("epoch", [1], ["0", "1"]),
        ("epoch", [0.1, 0.3, 0.6], ["0", "1"]),
        ("epoch", [0.5, 1.0, 1.5], ["0", "1", "2"]),
        ("step", [10, 1_000_000], ["200,000", "400,000", "600,000", "800,000", "1,000,000"]),
    ],
)
def test_what_is_counted_has_no_halves(texts: list[tuple[str, float, float]], name: str, values: list[float], ticks: list[str]) -> None:
    chart("any", [Curve("curve", [(x, 1 / (1 + x)) for x in values])], name)
    shown = axis(texts)
    assert [text for text, _ in shown if text != "0" or "0" in ticks] == ticks
    assert all(drawing.LEFT <= x <= drawing.WIDE - drawing.RIGHT for _, x in shown)
    assert [x for _, x in shown] == sorted({x for _, x in shown})


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1e-6, 3.0], ["1e-06", "1e-05", "0.0001", "0.001", "0.01", "0.1", "1"]),
        ([1.2e-4, 6e-4], ["0.0002", "0.0005"]),
        ([1e-3], ["0.0005", "0.001", "0.002"]),
    ],
)
def test_a_rate_has_ticks_however_short_its_axis(texts: list[tuple[str, float, float]], values: list[float], ticks: list[str]) -> None:
    chart("any", [Curve("curve", [(x, x) for x in values])], "learning rate", log_x=True)
    assert [text for text, _ in axis(texts)] == ticks


def test_what_is_no_number_is_left_out() -> None:
    page = chart("any", [Curve("curve", [(1, math.nan), (2, 1.0)])], "epoch")
    assert page.width == 2 * drawing.WIDE


@pytest.mark.parametrize(
    ("one", "other"), [("ü", "u"), ("ß", "b"), ("Ł", "L"), ("Σ", "E"), ("Ж", "K"), ("ש", "ב"), ("ق", "ف"), ("猫", "犬")]
)
def test_classes_that_differ_look_different_on_both_sides(one: str, other: str) -> None:
    pages = [np.asarray(matrix(np.eye(2, dtype=int), [name, "ABCDEF"])) for name in (one, other)]
    middle = 2 * drawing.CELL
    margin = pages[0].shape[0] - 2 * middle - 48
    assert pages[0].shape == pages[1].shape
    assert not np.array_equal(pages[0][margin:, :margin], pages[1][margin:, :margin])  # rows
    assert not np.array_equal(pages[0][40:margin, margin:], pages[1][40:margin, margin:])  # columns


def test_long_names_take_no_more_than_their_room() -> None:
    short, long = (matrix(np.eye(2, dtype=int), [name * 3, "b"]) for name in ("a very long name", "a very long name" * 20))
    assert short.size == long.size
