"""Words of messages."""

from __future__ import annotations

import pytest

from weights.wording import clause, counted


@pytest.mark.parametrize(("count", "said"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1200, "1,200 files")])
def test_one_thing_is_one_thing(count: int, said: str) -> None:
    assert counted(count, "file") == said
    assert counted(count, "entry", "entries") == said.replace("files", "entries").replace("file", "entry")


def test_a_sentence_inside_of_another_does_not_end_it() -> None:
    assert clause(OSError("It is gone. Fetch it again.")) == "It is gone. Fetch it again"
    assert clause("no stop") == "no stop"
