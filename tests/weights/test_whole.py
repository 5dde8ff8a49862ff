"""A file is there whole or not at all, and nothing is left beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weights.whole import whole, write_whole


@pytest.mark.parametrize("sync", [False, True])
def test_a_text_takes_the_place_of_the_old_one(sync: bool, tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    for text in ("one", "zwei\näöü"):
        write_whole(file, text, sync=sync)
        assert file.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [file]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    write_whole(file, "one")

    def interrupted() -> None:
        with whole(file) as unfinished:
            unfinished.write_text("half")
            assert unfinished.parent == tmp_path
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_text() == "one"
    assert list(tmp_path.iterdir()) == [file]


def test_a_body_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole(tmp_path / "note.txt"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named_and_what_to_do(tmp_path: Path) -> None:
    place = tmp_path / "none" / "figures.json"
    with pytest.raises(FileNotFoundError, match=re.escape(f"there is no folder '{place.parent}'; make it first")) as caught:
        write_whole(place, "{}")
    assert caught.value.filename == str(place)
    assert list(tmp_path.iterdir()) == []


def test_two_writers_at_once_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    with whole(file) as first, whole(file) as second:
        first.write_text("first")
        second.write_text("second")
    assert file.read_text() == "first"  # the last one to end
    assert list(tmp_path.iterdir()) == [file]
