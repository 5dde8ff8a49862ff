"""What the documents say of the project is true of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import weights
import zoo

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


def test_the_readme_counts_right() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = weights.checkpoints()
    full = sum(row.sha256 is not None for row in rows)
    prefix = sum(row.sha256 is None and row.sha256_prefix is not None for row in rows)
    assert f"{len(zoo.CATALOGUE)} networks" in text
    assert f"({full} rows)" in text
    assert f"({prefix} rows)" in text
    assert f"({len(rows) - full - prefix} rows)" in text


def test_the_readmes_code_names_what_exists() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names = re.search(r"from zoo import (.*)", code[1])
    assert names is not None
    assert [name for name in names[1].split(", ") if not hasattr(zoo, name)] == []
    compile(code[1], "README.md", "exec")


def test_every_command_of_the_readme_exists() -> None:
    from zoo.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"^\$ zoo (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)) <= known
