"""`zoo browse`: where the page goes, what is refused, and what needs no torch."""

from __future__ import annotations

import json
import shutil
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from zoo.bench.record import Record
from zoo.browsing.measured import remember
from zoo.browsing.page import MADE_BY
from zoo.commands.app import main

DOCS = Path(__file__).parents[3] / "docs"
CPU = DOCS / "benchmarks-cpu.json"


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A screen and a browser that only notes what it is asked to open."""
    found: list[str] = []
    monkeypatch.setenv("DISPLAY", ":7")
    monkeypatch.setattr(webbrowser, "open", lambda url: found.append(url) or True)
    return found


def embedded(place: Path) -> dict[str, Any]:
    text = place.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_the_page_is_written_into_the_cache_and_opened(own_cache: Path, opened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["browse"]) == 0
    place = own_cache / "pages" / "zoo.html"
    assert opened == [place.as_uri()]
    assert capsys.readouterr().out == f"wrote '{place}'\n"
    assert MADE_BY in place.read_text(encoding="utf-8")
    assert embedded(place)["mine"] is False
    assert main(["browse"]) == 0  # again, over the old one


def test_the_page_goes_where_it_is_asked_for_and_stays_closed(
    tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["browse", "--out", str(tmp_path / "zoo.html"), "--no-open"]) == 0
    assert main(["browse", "--out", str(tmp_path / "zoo.html"), "--no-open"]) == 0
    assert opened == []
    assert len(embedded(tmp_path / "zoo.html")["rows"]) > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["zoo.html"]
    capsys.readouterr()
    assert main(["browse", "--out", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "zoo.html").read_text(encoding="utf-8")
    assert opened == []


def test_what_this_machine_has_is_marked(own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CPU, tmp_path / "mine.json")
    remember(tmp_path / "mine.json")
    assert main(["browse", "--mine"]) == 0
    assert "4 networks measured by you." in capsys.readouterr().err
    there = embedded(own_cache / "pages" / "mine.html")
    assert there["mine"] is True
    assert there["facets"][0]["key"] == "here"
    assert there["speeds"][0]["mine"] is True
    assert set(there["speeds"][0]["rates"]) == set(Record.read(CPU).models)
    marks = {row["network"]: [there["texts"][at] for at in row["values"]["here"]] for row in there["rows"] if row["tag"] == "imagenet1k_v1"}
    assert marks["MobileNetV2"] == ["measured"]
    assert marks["VGG11"] == ["nothing"]


def test_a_machine_that_measured_nothing_is_told_how(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["browse", "--mine"]) == 0
    assert "No measurement of this machine is at hand: zoo bench --save FILE makes one." in capsys.readouterr().err
    assert not (own_cache / "blobs").exists()


def test_bench_remembers_where_it_saved(own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--from-json", str(CPU), "--save", str(tmp_path / "mine.json")]) == 0
    train = DOCS / "benchmarks-train-h100.json"
    assert main(["bench", "--what", "train", "--from-json", str(train), "--save", str(tmp_path / "train.json")]) == 0
    capsys.readouterr()
    assert main(["browse", "--mine", "--no-open"]) == 0
    assert "4 networks measured by you." in capsys.readouterr().err


def test_a_record_that_is_named_is_offered(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["browse", "--bench", str(CPU)]) == 0
    assert embedded(own_cache / "pages" / "mine.html")["speeds"][0]["mine"] is True


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--out", "nowhere/zoo.html"], "there is no folder", 1),
        (["--out", "."], "a page is an HTML file", 2),
        (["--out", "zoo.txt"], "a page is an HTML file, not 'zoo.txt'; name it 'zoo.html'", 2),
        (["--out", "notes.html"], "'notes.html' is there already and is no page of `zoo browse`; name another file", 1),
        (["--out", "folder.html"], "it is a folder", 1),
        (["--bench", "gone.json"], "'gone.json': no such file", 3),
        (["--bench", "notes.html"], "notes.html is no JSON that can be read", 1),
        (["--bench", "damaged.json"], "'damaged.json' is a damaged record of `zoo bench`; measure again into another file", 1),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    arguments: list[str],
    said: str,
    code: int,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.html").write_text("<p>mine</p>")
    Path("folder.html").mkdir()
    Path("damaged.json").write_text('{"format": 1, "about": {"device": "A", "dtype": "float32"}, "cells": [{}]}')
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["browse", *arguments]) == code
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert Path("notes.html").read_text() == "<p>mine</p>"
    assert not (own_cache / "pages").exists()


def test_a_damaged_record_of_long_ago_is_told_and_left_out(own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CPU, tmp_path / "good.json")
    (tmp_path / "bad.json").write_text("{")
    for name in ("good.json", "bad.json"):
        remember(tmp_path / name)
    assert main(["browse", "--mine"]) == 0
    told = capsys.readouterr().err
    assert "bad.json is no JSON" in told
    assert "its speeds are left out" in told
    assert "4 networks measured by you." in told


def test_a_record_that_is_gone_is_told_once(own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CPU, gone := tmp_path / "gone.json")
    remember(gone)
    gone.unlink()
    assert main(["browse", "--mine"]) == 0
    assert f"'{gone}': no such file or directory; check the path; its speeds are left out" in capsys.readouterr().err
    assert main(["browse", "--mine"]) == 0
    assert "gone.json" not in capsys.readouterr().err


def test_a_cache_that_takes_no_file_is_told_and_the_page_is_temporary(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    assert main(["browse", "--mine"]) == 0
    assert "so the page is a temporary file" in capsys.readouterr().err
    (folder,) = (tmp_path / "tmp").iterdir()
    assert opened == [(folder / "mine.html").as_uri()]


def nobody(url: str) -> bool:
    raise webbrowser.Error("could not locate runnable browser")


@pytest.mark.parametrize("answer", [lambda url: False, nobody])
def test_without_a_browser_the_file_is_named(
    answer: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", answer)
    assert main(["browse"]) == 0
    told = capsys.readouterr()
    assert str(own_cache / "pages" / "zoo.html") in told.out
    assert "No browser can be opened here" in told.err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a screen has no variable")
def test_a_terminal_without_a_screen_opens_no_browser_of_text(
    opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert main(["browse"]) == 0
    assert opened == []
    assert "No browser can be opened here" in capsys.readouterr().err
