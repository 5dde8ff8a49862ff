"""The report is one page that needs nothing else, tells the verdict first, and lets no file's words into its markup."""

from __future__ import annotations

import base64
import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convert.certificate import Certificate, Evidence, LayerError
from convert.report import Facts, Sample, Transform, filter_sheet, render

VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Check that tags close in order, and collect them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def certificate(relative: float = 1e-7, proven: bool = True) -> dict[str, Any]:
    layers = [LayerError("conv1", "features.0", (1, 8, 5, 5), 1e-6, relative), LayerError("(output)", "(output)", (1, 10), 2e-6, relative)]
    return Certificate([Evidence("float64 execution", proven, relative, "2 values compared", layers)]).to_json()


def facts(**changes: Any) -> Facts:
    kernels = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    made = Facts(
        title="MobileNetV1_025 from mobile.h5",
        source={"path": "mobile.h5", "sha256": "ab" * 32, "framework": "Keras 2.4.0", "nothing": ""},
        certificate=certificate(),
        transforms=[
            Transform("features.0.weight", "conv1/kernel:0", (8, 3, 3, 3), (3, 3, 3, 8), ["transpose(3,2,0,1)", "flip(2,3)"], "convolution")
        ],
        filters=(kernels, kernels[:, :, ::-1, ::-1]),
        samples=[Sample("dog.jpg", np.full((20, 30, 3), 200, np.uint8), [("Samoyed", 0.75), ("Pomeranian", 0.1)], "Samoyed")],
        notes=["the optimizer's state is left out"],
    )
    return replace(made, **changes)


def test_the_page_tells_all_and_needs_nothing_else() -> None:
    page = render(facts())
    reader = read(page)
    for words in (
        "MobileNetV1_025",
        "Keras 2.4.0",
        "PROVEN by float64 execution",
        "features.0",
        "1.00e-07",
        "conv1/kernel:0",
        "flip(2,3)",
        "Samoyed",
    ):
        assert words in reader.text, words
    assert "nothing" not in reader.text
    assert {tag for tag, _ in reader.tags}.isdisjoint({"script", "link", "iframe", "object", "form", "a"})
    sources = [value for _, attrs in reader.tags for name, value in attrs.items() if name in ("src", "href", "srcset", "action")]
    assert len(sources) == 3
    assert all(value is not None and value.startswith("data:image/png;base64,") for value in sources)
    assert "url(" not in page
    assert "@import" not in page
    assert reader.text.index("PROVEN") < reader.text.index("Keras 2.4.0")


def test_the_same_facts_give_the_same_bytes() -> None:
    assert render(facts()) == render(facts())


EVIL = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>&amp;"


def test_a_files_words_stay_words() -> None:
    evil = facts(
        title=EVIL,
        source={EVIL: EVIL, "list": [EVIL, {EVIL: EVIL}]},
        certificate={
            "verdict": EVIL,
            "evidence": [{"kind": EVIL, "detail": EVIL, "layers": [{"theirs": EVIL, "ours": EVIL, "shape": [EVIL]}]}],
        },
        transforms=[Transform(EVIL, EVIL, (1,), (1,), [EVIL], EVIL)],
        samples=[Sample(EVIL, np.zeros((2, 2, 3), np.uint8), [(EVIL, 0.5)], EVIL)],
        decision=EVIL,
        diagnosis={EVIL: EVIL},
        notes=[EVIL],
    )
    reader = read(render(evil))
    assert {tag for tag, _ in reader.tags}.isdisjoint({"script"})
    assert not any(name.startswith("on") for _, attrs in reader.tags for name in attrs)
    assert reader.text.count("<script>alert(1)</script>") >= 15


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "proven"),
        ({"certificate": Certificate([Evidence("structure only", True, None, "all tensors found")]).to_json()}, "unproven"),
        ({"certificate": certificate(0.4, proven=False)}, "failed"),
        ({"diagnosis": {"cause": "kernels flipped"}}, "failed"),
    ],
)
def test_the_verdict_has_the_colour_of_what_it_says(changes: dict[str, Any], state: str) -> None:
    assert f'class="verdict {state}"' in render(facts(**changes))


def bars(page: str) -> list[tuple[str, float]]:
    found = re.findall(r'<span class="errors bar" title="[^"]*"><i class="(\w+)" style="width:([\d.]+)%">', page)
    return [(colour, float(width)) for colour, width in found]


def test_a_bar_grows_with_the_logarithm_of_the_error() -> None:
    errors = (0.0, 1e-8, 1e-3, 0.5, 30.0, math.inf)
    drawn = [bars(render(facts(certificate=certificate(error))))[0] for error in errors]
    assert [colour for colour, _ in drawn] == ["good", "good", "fair", "poor", "poor", "poor"]
    widths = [width for _, width in drawn]
    assert widths[0] == 0
    assert widths[1] == 50
    assert widths == sorted(widths)
    assert widths[-1] == 100
    assert "∞" in render(facts(certificate=certificate(math.inf)))


def test_the_bars_have_an_axis_and_each_mark_stands_where_a_bar_of_that_error_ends() -> None:
    page = render(facts(certificate=certificate(1e-8)))
    marks = re.findall(r'<span style="left:([\d.]+)%">([^<]+)</span>', re.findall(r'<span class="axis">(.*?)</th>', page)[0])
    assert [error for _, error in marks] == ["1e-16", "1e-12", "1e-08", "0.0001", "1"]
    for place, error in marks:
        assert bars(render(facts(certificate=certificate(float(error)))))[0][1] == float(place)
    assert "green up to 0.0001, red above 0.01" in page


def picture(page: str, number: int) -> np.ndarray:
    encoded = re.findall(r"data:image/png;base64,([^\"]+)", page)[number]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))


def test_filters_are_drawn_before_and_after() -> None:
    page = render(facts())
    before, after = picture(page, 0), picture(page, 1)
    tile = (slice(2, 2 + 18), slice(2, 2 + 18))
    assert np.array_equal(before[tile], after[tile][::-1, ::-1])
    assert not np.array_equal(before, after)
    assert "differ by the steps" in page
    same = facts().filters
    assert same is not None
    assert "nothing had to be turned" in render(facts(filters=(same[0], same[0])))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 3, 7, 2), (70, 4, 3, 3)])
def test_any_first_layer_can_be_drawn(shape: tuple[int, ...]) -> None:
    kernels = np.linspace(-1, 1, math.prod(shape)).reshape(shape)
    sheet = filter_sheet(kernels)
    assert sheet.dtype == np.uint8
    assert sheet.ndim == 3
    kernels.flat[0] = np.nan
    assert filter_sheet(kernels).shape == sheet.shape


def test_what_is_empty_is_left_out() -> None:
    page = render(Facts("bare", {}, {"verdict": "UNPROVEN: structure only", "proven": False, "evidence": []}))
    assert read(page).text.count("UNPROVEN") == 1
    assert "<h2>" not in page
