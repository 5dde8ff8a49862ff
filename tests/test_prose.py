"""The pages are written for readers in a hurry: short sentences, no dates, no figure without a record, no picture without a script."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import documents
import prose
import pytest
from documents import DOCS, PAGES, ROOT

SPEED = re.compile(r"\b\d[\d.,]* ?(?:ms|µs|us|images/s|MiB/s|GB/s|TB/s|TFLOPS?)\b")
MADE = re.compile(r"<!-- (\w+): written by docs/generate.py -->.*?<!-- end of \1 -->", re.DOTALL)
GENERATED = "<!-- written by `make docs-pages` from "
HELD_ELSEWHERE = {"README.md"}
"""Pages whose figures another test holds to the records: tests/test_readme_peers.py."""


def sentences_are_short(page: Path) -> list[str]:
    mean = prose.mean(documents.read(page))
    return [] if mean <= prose.MEAN else [f"the mean sentence has {mean:.1f} words"]


def no_sentence_is_too_long(page: Path) -> list[str]:
    return [f"{prose.count(sentence)} words: {sentence}" for sentence in prose.too_long(documents.read(page))]


def nothing_is_dated(page: Path) -> list[str]:
    return prose.dates(documents.read(page))


def speeds_are_written_from_records(page: Path) -> list[str]:
    """Speeds grow stale unnoticed: they stand where a program writes them."""
    text = documents.FENCE.sub("", documents.read(page))
    if GENERATED in text or page.name in HELD_ELSEWHERE:
        return []
    return [line for line in MADE.sub("", text).splitlines() if SPEED.search(line)]


CHECKS = (sentences_are_short, no_sentence_is_too_long, nothing_is_dated, speeds_are_written_from_records)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_written_for_its_readers(page: Path, check: Callable[[Path], list[str]]) -> None:
    """`python tests/prose.py docs/PAGE.md` shows what to mend."""
    assert check(page) == []


def test_every_picture_of_a_page_is_drawn_by_a_script() -> None:
    places = [path for folder in ("recipes", "docs/making", "zoo/bench", "zoo/commands") for path in (ROOT / folder).rglob("*.py")]
    scripts = "\n".join(documents.read(path) for path in places)
    drawn = []
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", documents.read(page)):
            file = page.parent / target
            assert file.is_file(), f"{page.name}: {target}"
            by_bench = f"--picture {file.relative_to(ROOT)}" in documents.read(page) or file.name.startswith("benchmarks-")
            named = file.name in scripts or (ROOT / "recipes" / f"{file.stem.replace('-', '_')}.py").is_file()
            drawn += [] if by_bench or named else [f"{page.name}: {target}"]
    assert drawn == []


def test_the_rules_are_those_of_the_house() -> None:
    assert (prose.MEAN, prose.LONGEST) == (18, 40)


# What is counted.

PAGE = """\
# A heading of many words that nobody counts

First sentence here. `zoo list --sort speed` is one word, and so is [a link](there.md)! "Quoted," he said (Rajpurkar et al. 2017).

- An item. With two.
1. Another
   that goes on.

```console
$ zoo this is not counted. At all.
```

| heading | of a table |
|---|---|
| a cell | another. And one more |
"""


def test_sentences_are_counted_outside_of_code_and_headings() -> None:
    found = [sentence for kind, sentence in prose.sentences(PAGE) if kind == "prose"]
    assert [prose.count(sentence) for sentence in found] == [3, 9, 7, 2, 2, 4]
    assert prose.mean(PAGE) == pytest.approx(27 / 6)
    assert [sentence for kind, sentence in prose.sentences(PAGE) if kind == "cell"][-2:] == ["another.", "And one more"]


def test_a_long_sentence_is_found_wherever_it_stands() -> None:
    long = "Word" + " word" * prose.LONGEST + "."
    assert prose.too_long(f"Short. {long} Short.") == [long]
    assert prose.too_long(f"| a |\n|---|\n| {long} |\n") == [long]
    assert prose.too_long(f"- {long}\n") == [long]
    assert prose.too_long(" ".join(["word"] * prose.LONGEST) + ".") == []


def test_dates_are_found_but_for_one_line_below_a_table() -> None:
    assert prose.dates("Measured on 2026-11-21, and again.\n") == ["Measured on 2026-11-21, and again."]
    assert prose.dates("Since November 2026 it is so.\n") != []
    assert prose.dates("`--since 2026-11-21` and Rajpurkar et al. (2017), VOC2007.\n") == []
    table = "| a |\n|---|\n| b |\n\n"
    assert prose.dates(f"{table}An H200, 2026-11-21.\n") == []
    assert prose.dates(f"{table}An H200, 2026-11-21.\n\n{table}Another, 2026-11-22.\n") == ["Another, 2026-11-22."]
    assert prose.dates("| a |\n|---|\n| 2026-11-21 |\n") != []


def test_a_speed_outside_of_what_a_program_writes_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = "<!-- speeds: written by docs/generate.py -->\nIt takes 3.2 ms.\n<!-- end of speeds -->\n"
    page.write_text(f"{block}\nIt makes 1,200 images/s.\n", encoding="utf-8")
    assert speeds_are_written_from_records(page) == ["It makes 1,200 images/s."]
    page.write_text(block, encoding="utf-8")
    assert speeds_are_written_from_records(page) == []
    page.write_text("It takes 10 s, 60 s at most, and 5 images.\n", encoding="utf-8")
    assert speeds_are_written_from_records(page) == []


def test_pages_are_there() -> None:
    assert {"weights.md", "convert.md", "install.md", "faq.md", "troubleshooting.md", "from-keras.md"} <= {page.name for page in PAGES}
    assert DOCS / "index.md" in PAGES
