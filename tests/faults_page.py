"""docs/notes/faults.md: each campaign writes a section of its own, and leaves the others' alone."""

from __future__ import annotations

from pathlib import Path

HEAD = "# Injected faults: the report\n\nWhat was broken on purpose, and what came of it."


def write_section(page: Path, name: str, text: str) -> None:
    """Replace the section `name` ("Network") by `text`, or add it."""
    old = page.read_text(encoding="utf-8") if page.exists() else f"{HEAD}\n"
    begin, end = (f"<!-- faults-{name.partition(' ')[0].lower()} {edge} -->" for edge in ("begin", "end"))
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2].strip("\n") if found else ""
    sections = [before.rstrip(), f"{begin}\n## {name}\n\n{text.rstrip()}\n{end}", after]
    page.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")
