"""The documents as the tests read them: pages, their blocks of code, their headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
NOTES = sorted(DOCS.glob("notes/*.md"))
"""How things were measured and what was tried: out of the index, and held to the same but for its prose."""
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)(?:\s[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: `words` are those behind the language, ```python gpu."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str = "") -> list[Block]:
    """The blocks of a page in order, of one language or of all."""
    text = read(page)
    found = []
    for match in FENCE.finditer(text):
        first, *words = match[1].split() or [""]
        found.append(Block(page, text.count("\n", 0, match.start()) + 2, first, tuple(words), match[2]))
    return [block for block in found if language in ("", block.language)]


def prose(page: Path) -> str:
    """A page without its blocks and without code in its lines."""
    return re.sub(r"`[^`\n]*`", "``", FENCE.sub("", read(page)))


def links(page: Path) -> list[str]:
    return LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as forges make it: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """What stands behind a prompt in console blocks, without settings before it or a comment behind, and where."""
    for block in blocks(page, "console"):
        for line in block.text.splitlines():
            if line.startswith("$ "):
                yield re.sub(r"\s#\s.*$|\s{2,}#.*$", "", line[2:]), str(block)
