"""The table of rooms in docs/design.md: what each holds, by its own docstring, and what it may import, by the law that a test holds."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

from making.tables import table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design.md"
BLOCK = re.compile(r"(?<=<!-- law: written by docs/generate.py -->\n).*?(?=<!-- end of law -->)", re.DOTALL)


def holds(room: str) -> str:
    """Return the first sentence of a room's docstring."""
    place = ROOT.joinpath(*room.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(words.partition("\n\n")[0].split())


def rows() -> str:
    """Return the table: a row a room, from the top of the house down."""
    sys.path.insert(0, str(ROOT / "tests"))
    arrows: Any = importlib.import_module("arrows")

    levels = arrows.floors(arrows.LAW)
    order = sorted(arrows.LAW, key=lambda room: (-levels[room], room))
    cells = [
        [f"`{room}`", str(levels[room]), holds(room), ", ".join(f"`{o}`" for o in sorted(arrows.LAW[room])) or "nothing"] for room in order
    ]
    return table(["room", "floor", "holds", "may import"], cells, right=(1,))


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    return {PAGE.name: BLOCK.sub(lambda _: rows().rstrip() + "\n", PAGE.read_text(encoding="utf-8"))}
