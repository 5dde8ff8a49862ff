"""The rows that the page is timed with."""

from __future__ import annotations

from recipes.browse_page import repeated
from zoo.browsing.rows import rows


def test_rows_are_repeated_under_other_names() -> None:
    known = rows()
    many = repeated(known, 1500)
    assert len(many) == 1500
    assert many[: len(known)] == known
    named = [row.name for row in many if row.checkpoint is not None]
    assert len(set(named)) == len(named)
    assert not any(row.checkpoint.default for row in many[len(known) :] if row.checkpoint)
    assert len(repeated(known, 5)) == 5
