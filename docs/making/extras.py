"""The table of docs/install.md: every extra, what it gives by `zoo doctor`, and the packages that it installs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from making.tables import table
from zoo.commands.doctor import GIVES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "install.md"
BLOCK = re.compile(r"(?<=<!-- extras: written by docs/generate.py -->\n).*?(?=<!-- end of extras -->)", re.DOTALL)
MAKERS = {"docs": "building these pages", "dev": "running the tests", "browser": "testing the page of `zoo browse` in Chromium"}
"""Extras for those who work on the project, of which `zoo doctor` says nothing."""


def rows() -> str:
    """Return the table, in the order of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    gives = GIVES | MAKERS
    if wrong := sorted({*extras} ^ {*gives}):
        raise ValueError(f"{', '.join(wrong)} stand in pyproject.toml or in zoo/commands/doctor.py, not in both")
    cells = [[f"`{name}`", gives[name], "" if name == "dev" else ", ".join(map(_name, extras[name]))] for name in extras]
    return table(["extra", "for", "installs"], cells)


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    return {PAGE.name: BLOCK.sub(lambda _: rows() + "\n", PAGE.read_text(encoding="utf-8"))}


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~; ]", requirement)[0]
