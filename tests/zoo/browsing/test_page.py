"""The page as text: valid, whole, and asking nobody for anything. What it does is tested in a browser, by `test_in_browser.py`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from zoo.browsing.measured import Measured, shipped
from zoo.browsing.page import MADE_BY, METRICS, data, in_html, page
from zoo.browsing.rows import rows

ROWS = rows()
TEXT = page(ROWS, shipped(), version="0.1.0")
VOID = {"meta", "link", "input", "br"}


class Read(HTMLParser):
    """Elements with their attributes, and what is wrong with how they lie in each other."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        self.wrong += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if len(dict(attrs)) != len(attrs):
            self.wrong.append(f"an attribute of {tag} is there twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data


READ = Read(TEXT)


def embedded(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_elements_lie_in_each_other_as_they_should() -> None:
    assert READ.wrong == []
    assert TEXT.startswith("<!doctype html>\n")
    assert {tag for tag, _ in READ.elements} >= {"html", "head", "title", "main", "form", "footer", "noscript"}
    assert not re.search(r"@[A-Z]+@", TEXT.partition('id="data">')[0])


def test_names_are_unique_and_what_is_pointed_at_is_there() -> None:
    ids = [at["id"] for _, at in READ.elements if "id" in at]
    assert len(ids) == len(set(ids))
    pointed = [at[key] for _, at in READ.elements for key in ("for", "aria-labelledby") if key in at]
    pointed += [at["href"][1:] for tag, at in READ.elements if tag == "a" and at["href"].startswith("#")]
    assert set(pointed) <= {*ids, "card-title"}  # the card writes its own heading
    program = READ.text["script"].partition('"use strict"')[2]
    assert set(re.findall(r'\$\("([a-z-]+)"\)', program)) <= {*ids, "tip", "keep"}


def test_what_is_used_has_a_name() -> None:
    labelled = {at["for"] for tag, at in READ.elements if tag == "label" and "for" in at}
    inside = re.findall(r"<label>[^<]+<select id=\"(\w+)\"", TEXT)
    for tag, at in READ.elements:
        if tag in ("input", "select"):
            assert at["id"] in {*labelled, *inside}
        if tag in ("section", "form"):
            assert at.get("aria-label") or at.get("aria-labelledby")
    assert dict(READ.elements)["html"]["lang"] == "en"
    assert READ.text["title"]


def test_nothing_is_fetched() -> None:
    """No element names another file, the style imports none, and the policy lets nothing through whatever the program does."""
    for tag, at in READ.elements:
        assert "src" not in at
        if tag == "link":
            assert at == {"rel": "icon", "href": "data:,"}
    style, program = READ.text["style"], READ.text["script"].partition('"use strict"')[2]
    assert not re.search(r"url\(|@import|@font-face", style)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts|import)\b\s*\(", program)
    policy = next(at["content"] for tag, at in READ.elements if at.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert {name for name, allowed in rules.items() if "'sha256-" in allowed} == {"style-src", "script-src"}
    assert "unsafe" not in policy


@pytest.mark.parametrize("tag", ["style", "script"])
def test_the_policy_allows_the_style_and_the_program_as_they_are(tag: str) -> None:
    inner = re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.DOTALL)
    assert len(inner) == 1
    digest = base64.b64encode(hashlib.sha256(inner[0].encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}'" in TEXT.replace("&#x27;", "'")


def test_the_style_has_dark_print_and_narrow_screens_and_every_colour_in_each() -> None:
    style = READ.text["style"]
    for wanted in ("prefers-color-scheme: dark", "@media print", "max-width", "forced-colors"):
        assert wanted in style
    assert [len(re.findall(rf"--c{n}: #", style)) for n in range(7)] == [3] * 7


def test_colours_differ_for_the_colour_blind_and_stand_out_from_the_paper() -> None:
    """Okabe and Ito's, or lighter ones on dark; shapes tell apart what colours can't, and each colour is at least 2 to 1 on its paper."""

    def light(colour: str) -> float:
        colour = colour[1:] if len(colour) == 7 else "".join(2 * sign for sign in colour[1:])
        parts = (int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for block in re.findall(r":root \{(.*?)\}", READ.text["style"], re.DOTALL):
        found = dict(re.findall(r"--(\w+): (#\w+)", block))
        paper = light(found["paper"])

        def contrast(name: str, found: dict[str, str] = found, paper: float = paper) -> float:
            dim, bright = sorted((light(found[name]), paper))
            return (bright + 0.05) / (dim + 0.05)

        assert contrast("ink") > 7
        assert contrast("soft") > 4.5
        assert contrast("accent") > 4.5
        assert min(contrast(f"c{n}") for n in range(7)) > 2
        assert len({found[f"c{n}"] for n in range(7)}) == 7


def test_the_data_are_those_of_the_rows() -> None:
    there = embedded(TEXT)
    assert there == json.loads(json.dumps(data(ROWS, shipped())))
    texts, lines = there["texts"], there["rows"]
    assert len(lines) == len(ROWS)
    assert len(texts) == len(set(texts))
    for row, line in zip(ROWS, lines, strict=True):
        assert (line["network"], line["params"], line["side"]) == (row.variant.name, row.variant.params, row.side)
        assert line["metrics"] == dict(row.checkpoint.metrics if row.checkpoint else {})
        assert texts[line["values"]["family"][0]] == row.variant.family
    facets = {facet["key"]: {texts[at] for at in facet["values"]} for facet in there["facets"]}
    for line in lines:
        for key, values in line["values"].items():
            assert {texts[at] for at in values} <= facets[key]


def test_the_heading_counts_as_many_as_there_are_rows() -> None:
    bare = sum(row.checkpoint is None for row in ROWS)
    assert f"{len(ROWS) - bare:,} checkpoints of " in TEXT
    assert f" networks; {bare:,} have no checkpoint yet. Choose" in TEXT
    assert "networks. Choose" in page([row for row in ROWS if row.checkpoint is not None], shipped())


def test_accuracies_that_do_not_compare_are_not_on_one_axis() -> None:
    axes = embedded(TEXT)["accuracies"]
    assert (axes[0]["metric"], axes[0]["on"]) == ("top1", "ImageNet-1k validation")
    assert {one["on"] for one in axes} >= {"ImageNet-1k validation", "CIFAR-10 test, JPEG copies", "COCO val2017"}
    assert len({one["label"] for one in axes}) == len(axes)
    assert {one["metric"] for one in axes} <= METRICS.keys()


def test_speeds_say_machine_and_date_and_the_users_come_first() -> None:
    mine = Measured("Here", "fast(), float32", 1, "2026-11-24", "torch 2.14.1", {"ResNet50": (224, 9.0), "nobody": (224, 1.0)}, mine=True)
    speeds = data(ROWS, [*shipped(), mine])["speeds"]
    assert (speeds[0]["machine"], speeds[0]["mine"], speeds[0]["rates"]) == ("Here", True, {"ResNet50": (224, 9.0)})
    assert all(one["when"] and one["machine"] and one["versions"] for one in speeds)
    assert len(speeds) == len(shipped()) + 1


def test_a_hostile_record_stays_a_text() -> None:
    attack = "</script><script>alert(1)</script><!--\u2028"
    row = next(row for row in ROWS if row.checkpoint)
    hostile = replace(row, checkpoint=replace(row.checkpoint, tag=attack, license=attack, provenance=attack))
    text = page([hostile], shipped(), version=attack)
    assert "<script>alert" not in text
    assert Read(text).wrong == []
    assert embedded(text)["rows"][0]["tag"] == attack
    assert "<" not in in_html(attack)


def test_the_page_is_the_same_each_time_and_says_who_made_it() -> None:
    assert page(ROWS, shipped(), version="0.1.0") == TEXT
    assert MADE_BY in TEXT[:1000]
    assert "2026" not in TEXT.partition('id="data">')[0]


def test_the_page_is_no_larger_than_a_photograph() -> None:
    assert len(TEXT.encode()) < 1_500_000
