"""The sentences of a page, counted: `python tests/prose.py [PAGE...]` prints words, the mean, and what is too long."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import documents

MEAN, LONGEST = 18, 40
"""Words of a page's mean sentence, and of its longest."""
MONTHS = "January February March April May June July August September October November December"
DATE = re.compile(rf"\b(?:20\d\d-\d\d(?:-\d\d)?|(?:\d{{1,2}} )?(?:{MONTHS.replace(' ', '|')}) (?:\d{{1,2}}, )?20\d\d)\b")
END = re.compile(r"(?<=[.!?])[*_)\"]*\s+(?=[\"(*_`\[]*[A-Z0-9`\x00])|(?<=:)\s*$")
SHORT = re.compile(r"\b(e\.g|i\.e|et al|vs|Fig|No|cf|approx|Dr|St|Inc)\.")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """List the kinds and words of a page's paragraphs, list items and cells of tables, without code, headings and comments."""
    text = documents.FENCE.sub("\n\n", text)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``[^\n]+?``|`[^`]*`", "`code`", text)
    paragraph: list[str] = []

    def done() -> Iterator[tuple[str, str]]:
        if words := " ".join(paragraph).strip():
            yield "prose", words
        paragraph.clear()

    for line in text.splitlines():
        if not line.strip() or line.startswith(("#", "    ")):
            yield from done()
        elif line.lstrip().startswith("|"):
            yield from done()
            if not re.fullmatch(r"[|\s:-]+", line.strip()):
                yield from (("cell", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1] if cell.strip())
        else:
            if ITEM.match(line):
                yield from done()
            paragraph.append(ITEM.sub("", line).strip())
    yield from done()


def sentences(text: str) -> list[tuple[str, str]]:
    """Return each sentence of a page with its kind: "prose", or "cell" of a table, which the mean leaves out."""
    found = []
    for kind, words in blocks(text):
        guarded = SHORT.sub(lambda match: match[0].replace(".", "\x01"), words)
        found += [(kind, part.replace("\x01", ".").strip()) for part in END.split(guarded) if part and count(part)]
    return found


def count(words: str) -> int:
    """Count words; code in a line is one."""
    return sum(bool(re.search(r"\w", word)) for word in words.split())


def mean(text: str) -> float:
    """Return the words of a page's mean sentence, outside of tables; 0 where it has none."""
    counted = [count(sentence) for kind, sentence in sentences(text) if kind == "prose"]
    return sum(counted) / len(counted) if counted else 0.0


def too_long(text: str) -> list[str]:
    """Return the sentences that nobody can hold in mind, of tables too."""
    return [sentence for _, sentence in sentences(text) if count(sentence) > LONGEST]


def dates(text: str) -> list[str]:
    """Return what names a day or a month, but for one line directly below a table or a picture."""
    found, allowed, before = [], 1, ""
    for _, line in _lines(text):
        dated = DATE.findall(line)
        if dated and allowed and (before.startswith("|") or before.startswith("!")) and not line.startswith("|"):
            allowed -= 1
        elif dated:
            found.append(line)
        before = line if line else before
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """List the lines of a page outside of code, joined to paragraphs."""
    plain = re.sub(r"<!--.*?-->", "", documents.FENCE.sub("\n\n", text), flags=re.DOTALL)
    plain = re.sub(r"`[^`\n]*`", "`code`", plain)
    for number, paragraph in enumerate(re.split(r"\n\s*\n|\n(?=\s*[|!])|(?<=\|)\n", plain)):
        yield number, " ".join(paragraph.split())


def main(pages: list[str]) -> None:
    """Print a line for each page."""
    shown = [Path(page) for page in pages] or documents.PAGES
    total = 0
    for page in shown:
        text = documents.read(page)
        total += (words := len(text.split()))
        print(f"{page.name:24} {words:6} words, {mean(text):5.1f} a sentence, {len(too_long(text))} too long, {len(dates(text))} dated")
        if pages:
            for sentence in too_long(text):
                print(f"    {count(sentence)}: {sentence}")
            for line in dates(text):
                print(f"    date: {line[:150]}")
    print(f"{'together':24} {total:6} words")


if __name__ == "__main__":
    main(sys.argv[1:])
