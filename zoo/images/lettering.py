"""Text in pictures: every picture that the project draws writes through here.

The font that ships has Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic and Georgian. Other characters come from a system font with
Chinese, Japanese and Korean, where there is one. A character that no font has is written as its code, `\\u4e2d`, so names that differ
look different.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

SHIPPED = Path(__file__).parents[1] / "data" / "fonts" / "DejaVuSansCondensed.ttf"
SYSTEM = (
    "notosanscjk-regular", "notosanscjksc-regular", "notosanscjkjp-regular", "notosanscjkkr-regular", "notosanscjk-vf",
    "sourcehansans-regular", "sourcehansanssc-regular", "wqy-microhei", "wqy-zenhei", "droidsansfallbackfull", "droidsansfallback",
    "pingfang", "hiragino sans gb", "stheiti light", "applesdgothicneo", "arial unicode",
    "msyh", "yugothm", "malgun", "msgothic", "simsun", "ipagp", "ipag", "takaopgothic", "nanumgothic", "unifont",
)  # fmt: skip
"""File names without their ending, in lower case, of fonts with Chinese, Japanese or Korean; the first found is asked first."""
PROBE = 24
"""Pixels at which it is looked whether a font has a character."""
ABSENT = "\uffff"
"""No character: what a font draws for it is its box for what it lacks."""
RIGHT = ("R", "AL")
"""Unicode's bidirectional classes of letters that run from right to left."""
KINDS = dict.fromkeys(RIGHT, "R") | dict.fromkeys(("L", "EN", "AN"), "L") | {"NSM": "m"}
"""Unicode's bidirectional class -> from the right, from the left, or a mark on the letter before; all others stand between."""
MIRRORED = str.maketrans("()[]{}<>«»", ")(][}{><»«")


def write(draw: ImageDraw, x: float, y: float, text: str, size: int, ink: str, anchor: str = "l") -> None:
    """Write a line of text into a picture.

    Args:
        draw: what draws on the picture.
        x: pixels from the left, of the text's left edge, middle or right edge, as `anchor` says.
        y: pixels from the top, of the line's middle.
        text: any characters; line breaks and tabs become spaces.
        size: of the font in pixels.
        ink: the colour.
        anchor: "l", "m" or "r".

    Example:
        page = Image.new("RGB", (300, 40), "white")
        write(ImageDraw.Draw(page), 10, 20, "Łódź, Αθήνα, Київ", 16, "black")
    """
    ascent, descent = _font(SHIPPED, size).getmetrics()
    x -= {"l": 0.0, "m": 0.5, "r": 1.0}[anchor] * length(text, size)
    for path, part in _runs(text):
        letters = _font(path, size, _is_complex(part))
        draw.text((x, y + (ascent - descent) / 2), part, ink, letters, anchor="ls")
        x += letters.getlength(part)


def length(text: str, size: int) -> float:
    """Return how many pixels a line of text takes in a font of `size` pixels."""
    return sum(_font(path, size, _is_complex(part)).getlength(part) for path, part in _runs(text))


def shortened(text: str, size: int, room: float) -> str:
    """Return the text if it takes no more than `room` pixels, else as much of its beginning as fits, with an ellipsis.

    Example:
        shortened("a very long name", 13, 60) == "a very lo…"
    """
    if length(text, size) <= room:
        return text
    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if length(f"{text[:middle].rstrip()}…", size) <= room:
            fits = middle
        else:
            too_long = middle
    return f"{text[:fits].rstrip()}…"


@lru_cache(256)
def _runs(text: str) -> tuple[tuple[Path, str], ...]:
    """Divide a text into parts that one font each can draw, in the order in which they stand from left to right."""
    runs: list[tuple[Path, str]] = []
    for letter in unicodedata.normalize("NFC", re.sub(r"\s", " ", text)):
        path, drawn = _drawn(letter, runs[-1][0] if runs else SHIPPED)
        if runs and runs[-1][0] == path:
            runs[-1] = path, runs[-1][1] + drawn
        elif drawn:
            runs.append((path, drawn))
    if _begins_right(text):
        runs.reverse()
    return tuple((path, part if _shapes() else _visual(part)) for path, part in runs)


def _drawn(letter: str, before: Path) -> tuple[Path, str]:
    """Choose the font of a character, and what is drawn for it: itself, nothing, or its code where no font has it."""
    if "\ufe00" <= letter <= "\ufe0f":  # chooses between forms of the character before it
        return before, ""
    if "\udc80" <= letter <= "\udcff":  # a byte of a file's name that is no UTF-8
        return SHIPPED, f"\\x{ord(letter) - 0xDC00:02x}"
    if letter in "\u200c\u200d" or unicodedata.category(letter)[0] != "C":
        places = (before, SHIPPED) if unicodedata.combining(letter) or letter == " " else (SHIPPED,)
        for path in places:
            if _has(path, letter):
                return path, letter
        for path in system_fonts():
            if _has(path, letter):
                return path, letter
    return SHIPPED, letter.encode("unicode_escape").decode("ascii")


@lru_cache(1 << 14)
def _has(path: Path, letter: str) -> bool:
    """Tell whether a font has a character: it draws another picture than for what it lacks."""
    return letter == " " or _picture(path, letter) != _picture(path, ABSENT)


def _picture(path: Path, letter: str) -> bytes:
    from PIL import Image, ImageDraw

    page = Image.new("L", (4 * PROBE, 3 * PROBE))
    ImageDraw.Draw(page).text((PROBE, 2 * PROBE), letter, 255, _font(path, PROBE), anchor="ls")
    return page.tobytes()


@cache
def _font(path: Path, size: int, is_complex: bool = False) -> FreeTypeFont:
    """Open a font; only scripts that need it are laid out by Raqm, so that other text looks the same on every machine."""
    from PIL.ImageFont import Layout, truetype

    return truetype(str(path), size, layout_engine=Layout.RAQM if is_complex and _shapes() else Layout.BASIC)


@cache
def system_fonts() -> tuple[Path, ...]:
    """Find the system's fonts with Chinese, Japanese and Korean, the best first; none are opened that FreeType can't read."""
    found: dict[str, Path] = {}
    for folder in font_folders():
        for here, _, names in os.walk(folder):
            for name in names:
                stem, ending = os.path.splitext(name.lower())  # noqa: PTH122  (thousands of names)
                if ending in (".ttf", ".ttc", ".otf", ".otc") and stem in SYSTEM:
                    found.setdefault(stem, Path(here, name))
    return tuple(found[stem] for stem in SYSTEM if stem in found and _opens(found[stem]))


def _opens(path: Path) -> bool:
    try:
        _picture(path, ABSENT)
    except OSError:
        return False
    return True


def font_folders() -> list[Path]:
    """Name the folders in which this system keeps fonts."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  (it does not fail where there is no home)
    if sys.platform == "darwin":
        return [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
    if sys.platform == "win32":
        folders = [Path(os.environ.get("WINDIR", "C:/Windows"), "Fonts")]
        return folders + [Path(local, "Microsoft/Windows/Fonts") for local in [os.environ.get("LOCALAPPDATA")] if local]
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    own = os.environ.get("XDG_DATA_HOME") or home / ".local/share"
    return [*(Path(place, "fonts") for place in shared.split(":") if place), Path(own, "fonts"), home / ".fonts"]


@cache
def _shapes() -> bool:
    """Tell whether this Pillow joins Arabic letters and orders text that runs from right to left: it needs FriBiDi for that."""
    from PIL import features

    return bool(features.check("raqm"))


def _is_complex(text: str) -> bool:
    return any(unicodedata.combining(letter) or unicodedata.bidirectional(letter) in RIGHT for letter in text)


def _begins_right(text: str) -> bool:
    strong = (unicodedata.bidirectional(letter) for letter in text)
    return next((kind in RIGHT for kind in strong if kind in (*RIGHT, "L")), False)


def _visual(text: str) -> str:
    """Order a text for a Pillow that draws from left to right only: words from the right are turned round, their letters stay unjoined."""
    kinds = "".join(KINDS.get(unicodedata.bidirectional(letter), " ") for letter in text)
    right, parts, start = _begins_right(text), [], 0
    for stretch in re.finditer(r"R(?:[Rm ]*[Rm])?|L(?:[Lm ]*[Lm])?|$", kinds):
        between, words = text[start : stretch.start()], text[stretch.start() : stretch.end()]
        parts += [_turned(between) if right else between, _turned(words) if stretch[0].startswith("R") else words]
        start = stretch.end()
    return "".join(reversed(parts) if right else parts)


def _turned(text: str) -> str:
    """Turn a text round; marks stay behind the letters that they stand on, and brackets open where they did."""
    clusters: list[str] = []
    for letter in text:
        if clusters and unicodedata.bidirectional(letter) == "NSM":
            clusters[-1] += letter
        else:
            clusters.append(letter.translate(MIRRORED))
    return "".join(reversed(clusters))
