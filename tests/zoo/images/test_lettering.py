"""Text in pictures, looked at glyph by glyph; two_glyphs.ttf has boxes of our own for 中 and 文 and stands for a system's font."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from PIL.ImageFont import Layout, truetype

from zoo.images import lettering
from zoo.images.lettering import SHIPPED, length, shortened, write

SCRIPTS = {
    "Latin": "KühestraßeŁódźÑandúşİřžæøåœñçðþ",
    "Greek": "ΑθήναγάταΣσςϊΐ",
    "Cyrillic": "КиївЁжЩъѝЂћ",
    "Hebrew": "חתולשחבר",
    "Arabic": "قطةسوداء",
    "Armenian": "Հայերեն",
    "Georgian": "ქართული",
}
CACHES = (lettering._runs, lettering._has, lettering._font, lettering.system_fonts)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a system whose fonts lie in an empty folder."""
    monkeypatch.setattr(lettering, "font_folders", lambda: [tmp_path / "fonts"])
    for cached in CACHES:
        cached.cache_clear()
    yield tmp_path / "fonts"
    for cached in CACHES:
        cached.cache_clear()


def install(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(Path(__file__).with_name("two_glyphs.ttf"), folder / name))


def drawn(text: str, size: int = 24, anchor: str = "l", width: int = 400) -> np.ndarray:
    page = Image.new("L", (width, 2 * size), 255)
    write(ImageDraw.Draw(page), {"l": 0, "m": width / 2, "r": width}[anchor], size, text, size, "black", anchor)
    return np.asarray(page)


def columns(pixels: np.ndarray) -> tuple[int, int]:
    found = np.nonzero((pixels < 255).any(0))[0]
    return int(found[0]), int(found[-1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_letter_of_a_script_is_drawn_as_no_other_and_as_no_box(script: str) -> None:
    box = np.asarray(truetype(str(SHIPPED), 24, layout_engine=Layout.BASIC).getmask("\uffff")).tobytes()
    glyphs = {letter: drawn(letter).tobytes() for letter in set(SCRIPTS[script])}
    assert len(set(glyphs.values())) == len(glyphs)
    for letter in glyphs:
        assert unicodedata.name(letter).startswith(script.upper())
        assert np.asarray(truetype(str(SHIPPED), 24, layout_engine=Layout.BASIC).getmask(letter)).tobytes() != box
        assert lettering._runs(letter) == ((SHIPPED, letter),)


@pytest.mark.parametrize("text", ["中文", "ねこ", "고양이", "😀", "\u202e", "\x07", "\ue000"])
def test_a_character_that_no_font_has_is_written_as_its_code(text: str) -> None:
    code = text.encode("unicode_escape").decode()
    assert np.array_equal(drawn(text), drawn(code))
    assert lettering._runs(text) == ((SHIPPED, code),)


def test_names_that_differ_look_different_without_a_font_for_them() -> None:
    assert not np.array_equal(drawn("中"), drawn("文"))


@pytest.mark.parametrize("name", ["NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "PingFang.ttc", "msyh.ttc"])
def test_a_system_font_draws_chinese_beside_ours(folder: Path, name: str) -> None:
    there = install(folder, name)
    assert lettering._runs("Łódź 中文, 犬") == ((SHIPPED, "Łódź "), (there, "中文"), (SHIPPED, ", \\u72ac"))
    assert not np.array_equal(drawn("中"), drawn("文"))
    assert length("中文", 24) == 48
    assert columns(drawn("中文"))[1] in (44, 45)  # the second square ends a tenth before the line does


def test_fonts_are_asked_in_the_order_of_the_list_and_damaged_ones_never(folder: Path) -> None:
    second, first = install(folder, "unifont.ttf"), install(folder, "notosanscjk-regular.ttc")
    install(folder, "comic.ttf")
    assert lettering.system_fonts() == (first, second)
    first.write_bytes(b"no font")
    lettering.system_fonts.cache_clear()
    lettering._font.cache_clear()
    assert lettering.system_fonts() == (second,)


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_every_system_keeps_its_fonts_somewhere(platform: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    folders = lettering.font_folders()
    assert len(folders) >= 2
    assert platform == "darwin" or any(folder.is_relative_to(tmp_path) for folder in folders)


def test_letters_from_the_right_stand_in_the_order_of_their_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_raqm(text: str) -> str:
        for cached in CACHES:
            cached.cache_clear()
        monkeypatch.setattr(lettering, "_shapes", lambda: False)
        return lettering._runs(text)[0][1]

    assert without_raqm("חתול") == "לותח"
    assert without_raqm("חתול (שחבר) 12") == "12 (רבחש) לותח"
    assert without_raqm("cat חתול 7 dog") == "cat לותח 7 dog"
    assert without_raqm("בָּא") == "אבָּ"  # marks stay on their letter
    assert without_raqm("Łódź (12)") == "Łódź (12)"


def test_with_raqm_arabic_letters_are_joined() -> None:
    if not lettering._shapes():
        pytest.skip("this Pillow has no FriBiDi")
    apart = sum(length(letter, 24) for letter in "سوداء")
    assert length("سوداء", 24) < apart


def test_the_first_letter_of_a_hebrew_word_stands_on_the_right() -> None:
    first, second = drawn("ש"), drawn("ב")
    width = columns(second)[1] + 1
    assert np.array_equal(drawn("שב")[:, :width], second[:, :width])
    assert not np.array_equal(drawn("שב")[:, :width], first[:, :width])


def test_a_letter_and_its_mark_are_one_however_they_are_stored() -> None:
    for text in ("Küche", "й", "ΐ"):
        assert np.array_equal(drawn(unicodedata.normalize("NFD", text)), drawn(unicodedata.normalize("NFC", text)))


def test_bytes_that_are_no_text_are_escaped_and_breaks_are_spaces() -> None:
    assert np.array_equal(drawn("a\udce9b"), drawn("a\\xe9b"))
    assert np.array_equal(drawn("a\n\tb"), drawn("a  b"))


@pytest.mark.parametrize("text", ["Kühe", "中文", "חתול", "Łódź 中 12"])
def test_a_line_is_as_long_as_it_says_and_stands_where_its_anchor_says(folder: Path, text: str) -> None:
    install(folder, "simsun.ttc")
    wide = length(text, 24)
    for anchor, left in (("l", 0.0), ("m", 200 - wide / 2), ("r", 400 - wide)):
        first, last = columns(drawn(text, anchor=anchor))
        assert left - 1 <= first <= left + 5
        assert left + wide - 6 <= last <= left + wide + 1


@pytest.mark.parametrize("room", [20, 50, 100, 200])
@pytest.mark.parametrize("text", ["ptarmigan and other birds of the north", "中文名字中文名字", "ж" * 300])
def test_what_is_shortened_fits_and_no_letter_more_would(text: str, room: float) -> None:
    short = shortened(text, 13, room)
    assert length(short, 13) <= room
    kept = len(short) - 1
    assert short == text or (short[-1] == "…" and text.startswith(short[:-1]) and length(f"{text[: kept + 2]}…", 13) > room)
    assert shortened("ab", 13, 200) == "ab"


def test_the_font_ships_with_its_licence() -> None:
    assert "DejaVu changes are in public domain" in SHIPPED.with_name("LICENSE").read_text(encoding="utf-8")
    assert SHIPPED.stat().st_size < 300_000
    assert truetype(str(SHIPPED), 12).getname() == ("DejaVu Sans", "Condensed")
