"""What the page does, in Chromium: every test fails too if anything is written to the console or asked of the network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import chromium

from zoo.browsing.measured import Measured, shipped
from zoo.browsing.page import page as written
from zoo.browsing.rows import Row, rows

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
ROWS = rows()
IMAGENET = "ImageNet-1k validation"
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium())
        yield started
        started.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "zoo.html"
    place.write_text(written(ROWS, shipped(), version="0.1.0"), encoding="utf-8")
    return place


@pytest.fixture
def open_page(browser: Browser, place: Path) -> Iterator[Open]:
    """Opens the page, and sees to it that it says nothing and asks for nothing."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def opened(file: Path = place, anchor: str = "", **how: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1400, "height": 1000}} | how))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda request: None if request.url.startswith((file.as_uri(), "data:")) else wrong.append(request.url))
        page.goto(file.as_uri() + anchor)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def points(page: Page) -> list[str]:
    return page.eval_on_selector_all("#chart .point", "all => all.map(one => one.getAttribute('aria-label').split(': ')[0])")


def column(page: Page, key: str) -> list[str]:
    keys = page.eval_on_selector_all("#table th", "all => all.map(one => one.dataset.key)")
    return page.eval_on_selector_all(f"#table tbody td:nth-child({keys.index(key) + 1})", "all => all.map(one => one.textContent)")


def listed(page: Page) -> list[str]:
    """The names of all rows that are left."""
    if page.locator("#all").is_visible():
        page.click("#all")
    return page.eval_on_selector_all("#table tbody button", "all => all.map(one => one.getAttribute('aria-label'))")


def tick(page: Page, facet: str, value: str, *, on: bool = True) -> None:
    box = page.locator(".facet", has=page.locator("summary", has_text=re.compile(f"^{facet}$")))
    if not box.evaluate("one => one.open"):
        box.locator("summary").click()
    box.get_by_label(re.compile(rf"^\s*{re.escape(value)}\s*\d*$")).set_checked(on)


def names(wanted: Callable[[Row], bool]) -> set[str]:
    return {row.name for row in ROWS if wanted(row)}


def accurate(row: Row) -> bool:
    return row.checkpoint is not None and row.checkpoint.metrics_data == IMAGENET and "top1" in row.checkpoint.metrics


def test_every_row_is_there_and_every_point_that_has_both_figures(open_page: Open) -> None:
    page = open_page()
    assert set(listed(page)) == {row.name for row in ROWS}
    page.select_option("#x", label="GMACs for one image")
    assert sorted(points(page)) == sorted(names(accurate))
    for number, one in enumerate(shipped()):
        page.select_option("#x", label=f"Images/s, {one.label}")
        known = {row.name for row in ROWS if accurate(row) and one.rates.get(row.variant.name, (0, 0))[0] == row.side}
        assert set(points(page)) == known, number
        assert one.when in page.locator("#caption").inner_text()
        assert one.machine in page.locator("#caption").inner_text()
    page.select_option("#y", label="box mAP %, COCO val2017")
    assert "No point to show" in page.locator("#chart").inner_html()
    page.select_option("#x", label="Parameters, millions")
    assert set(points(page)) == names(
        lambda row: row.checkpoint is not None and row.checkpoint.metrics_data == "COCO val2017" and "box_map" in row.checkpoint.metrics
    )


def test_filters_leave_what_meets_all_of_them(open_page: Open) -> None:
    page = open_page()
    tick(page, "Family", "VGG")
    assert set(listed(page)) == names(lambda row: row.variant.family == "VGG")
    tick(page, "Family", "DenseNet")
    assert set(listed(page)) == names(lambda row: row.variant.family in ("VGG", "DenseNet"))
    tick(page, "Licence", "BSD-3-Clause")
    both = names(
        lambda row: row.variant.family in ("VGG", "DenseNet") and row.checkpoint is not None and row.checkpoint.license == "BSD-3-Clause"
    )
    assert set(listed(page)) == both
    assert both
    assert "(2 in use)" in page.locator("#fold summary").first.inner_text()
    assert page.locator("#status").inner_text().startswith(f"{len(both)} of {len(ROWS):,} rows match.")
    tick(page, "Family", "VGG", on=False)
    assert set(listed(page)) < both
    page.click("#reset")
    assert len(listed(page)) == len(ROWS)
    assert page.locator("#facets input:checked").count() == 0


@pytest.mark.parametrize(
    ("facet", "value", "wanted"),
    [
        ("Task", "segmentation", lambda row: row.variant.task == "segmentation"),
        ("Input size, px", "384", lambda row: row.side == 384),
        ("Accuracy measured on", "COCO val2017", lambda row: row.checkpoint is not None and row.checkpoint.metrics_data == "COCO val2017"),
        ("Without the internet", "in this package", lambda row: row.name == "ResNet20:cifar10"),
        ("Hash", "full", lambda row: row.checkpoint is not None and row.checkpoint.sha256 is not None),
        ("Licence allows", "not for commercial use", lambda row: row.use == "not for commercial use"),
    ],
)
def test_each_filter_means_what_it_says(open_page: Open, facet: str, value: str, wanted: Callable[[Row], bool]) -> None:
    page = open_page()
    tick(page, facet, value)
    assert set(listed(page)) == names(wanted) != set()


def test_counts_say_what_ticking_would_give(open_page: Open) -> None:
    page = open_page()
    tick(page, "Family", "VGG")
    counts = page.eval_on_selector_all(
        "#facets label", "all => all.map(one => [one.querySelector('span').textContent, Number(one.querySelector('output').textContent)])"
    )
    families = {row.variant.family for row in ROWS}
    for value, count in counts:
        if value in families:  # the same facet: its other values would be added
            assert count == len(names(lambda row, value=value: row.variant.family == value))
    licences = [(value, count) for value, count in counts if value in ("BSD-3-Clause", "CC-BY-NC-4.0")]
    for value, count in licences:
        assert count == len(names(lambda row, value=value: row.variant.family == "VGG" and row.checkpoint.license == value))
    assert len(licences) == 2


def test_words_are_searched_in_all_that_is_known(open_page: Open) -> None:
    page = open_page()
    page.fill("#search", "resnet50 A1_in1k")
    assert {"ResNet50:a1_in1k", "SEResNet50:a1_in1k"} <= set(listed(page))
    assert all("a1_in1k" in name and "resnet50" in name.lower() for name in listed(page) if "T:" not in name)
    record = next(row.checkpoint for row in ROWS if row.name == "ResNet20:cifar10")
    page.fill("#search", record.sha256[:20])
    assert listed(page) == ["ResNet20:cifar10"]
    page.fill("#search", "no such network at all")
    assert listed(page) == []
    assert "No checkpoint meets all of these filters." in page.locator("#table").inner_text()
    assert "No point to show" in page.locator("#chart").inner_html()
    page.fill("#search", "")
    assert len(listed(page)) == len(ROWS)


def test_columns_sort_both_ways_and_what_is_empty_stays_last(open_page: Open) -> None:
    page = open_page()
    page.click("#all")
    for key in ("network", "tag", "accuracy", "speed", "params", "gmacs", "mb", "side", "license", "on", "hash"):
        head = page.locator(f'#table th[data-key="{key}"]')
        seen = set()
        for _ in range(2):
            head.locator("button").click()
            way = head.get_attribute("aria-sort")
            seen.add(way)
            cells = column(page, key)
            filled = [cell for cell in cells if cell]
            assert cells == filled + [""] * (len(cells) - len(filled)), key
            if key in ("accuracy", "speed", "params", "gmacs", "mb", "side"):
                numbers = [float(cell.lstrip("~").replace(",", "")) for cell in filled]
                assert numbers == sorted(numbers, reverse=way == "descending"), key
            else:
                ordered = page.evaluate("(all) => [...all].sort(new Intl.Collator('en', { numeric: true }).compare)", filled)
                assert [one.lower() for one in filled] == [one.lower() for one in (ordered if way == "ascending" else ordered[::-1])], key
        assert page.locator("#table th[aria-sort]").count() == 1
        assert seen == {"ascending", "descending"}


def test_the_card_says_what_the_record_knows_and_copies_it(open_page: Open) -> None:
    from playwright.sync_api import expect

    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.fill("#search", "resnet20 cifar10")
    page.locator("#table tbody button").first.click()
    row = next(row for row in ROWS if row.name == "ResNet20:cifar10")
    card = page.locator("#card")
    text = card.inner_text()
    for wanted in (row.checkpoint.sha256, row.checkpoint.license, row.checkpoint.sources[0], f"{row.variant.params:,}", "32 x 32 px"):
        assert wanted in text
    for label, copied in (("the Python lines", row.code), ("the command", row.command), ("the SHA-256", row.checkpoint.sha256)):
        card.get_by_role("button", name=re.compile(f"Copy {label}")).click()
        expect(page.locator("#said")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == copied
        page.evaluate("document.getElementById('said').textContent = ''")


def test_copying_works_where_the_page_gets_no_clipboard(open_page: Open) -> None:
    from playwright.sync_api import expect

    page = open_page(permissions=["clipboard-read"])
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page.locator("#table tbody button").first.click()
    button = page.get_by_role("button", name=re.compile("Copy the Python lines"))
    button.click()
    expect(page.locator("#said")).to_have_text("Copied")
    assert button.evaluate("one => one === document.activeElement")


def test_the_card_shows_speeds_with_machine_and_date(open_page: Open) -> None:
    page = open_page(anchor="#ResNet50%3Aimagenet1k_v1")
    text = page.locator("#card").inner_text()
    assert "ResNet50:imagenet1k_v1" in text
    known = [one for one in shipped() if "ResNet50" in one.rates]
    assert len(known) > 5
    for one in known:
        (line,) = (line for line in text.splitlines() if f"{one.machine}, {one.how}: " in line)
        rate = f"{one.rates['ResNet50'][1]:,.0f}" if one.rates["ResNet50"][1] >= 1000 else f"{one.rates['ResNet50'][1]:g}"
        assert f"{rate} images/s at batch {one.batch}" in line
        assert f"{one.when}, {one.versions}" in line


def test_two_checkpoints_stand_side_by_side(open_page: Open) -> None:
    page = open_page()
    page.fill("#search", "resnet50 imagenet1k_v")
    page.get_by_role("button", name="ResNet50:imagenet1k_v1", exact=True).first.click()
    page.get_by_role("button", name="Compare with another").click()
    assert "choose another" in page.locator("#card").inner_text()
    page.locator("#table").get_by_role("button", name="ResNet50:imagenet1k_v2", exact=True).click()
    assert page.locator("#card-title").inner_text() == "ResNet50:imagenet1k_v1 and ResNet50:imagenet1k_v2"
    differs = page.eval_on_selector_all("#card tr.differs th", "all => all.map(one => one.firstChild.textContent)")
    assert {"accuracy", "preprocessing"} <= set(differs)
    assert not {"GMACs", "parameters", "network", "speed"} & set(differs)
    assert page.locator("#table tr.chosen").count() == 2
    page.get_by_role("button", name="Stop comparing").click()
    assert page.locator("#card-title").inner_text() == "ResNet50:imagenet1k_v2"
    page.get_by_role("button", name="Close").click()
    assert page.locator("#card").is_hidden()
    assert page.locator(".chosen").count() == 0


def test_all_of_it_goes_by_keyboard(open_page: Open) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    page.keyboard.type("vgg")
    assert page.input_value("#search") == "vgg"
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('point')"):
            break
    at = "Number(document.activeElement.dataset.at)"
    first = page.evaluate(at)
    page.keyboard.press("ArrowRight")
    second = page.evaluate(at)
    assert first != second
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(at) == first
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")  # nothing lies beyond it
    last = page.evaluate(at)
    x = "one => Number(/translate\\(([\\d.]+)/.exec(one.getAttribute('transform'))[1])"
    assert page.locator(f'[data-at="{last}"].point').evaluate(x) == max(page.eval_on_selector_all(".point", f"all => all.map({x})"))
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Enter")
    assert page.locator("#card").is_visible()
    assert page.evaluate("document.activeElement.id") == "card"
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()
    assert page.evaluate(at) == last
    assert page.locator('#chart [tabindex="0"]').count() == 1  # one stop of Tab, however many points
    page.locator("#table tbody button").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#card").is_visible()


def test_whatever_can_be_used_has_a_name_that_a_screen_reader_says(open_page: Open) -> None:
    page = open_page(anchor="#ResNet20%3Acifar10")
    for facet in page.locator(".facet").all():
        facet.evaluate("one => { one.open = true; }")
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    used = {"button", "checkbox", "combobox", "searchbox", "link", "region", "form", "group", "img", "columnheader", "rowheader", "table"}
    found: dict[str, list[str]] = {}
    for node in tree:
        role = node.get("role", {}).get("value")
        if role in used and not node.get("ignored"):
            found.setdefault(role, []).append(node.get("name", {}).get("value", "").strip())
    found["table"] = [name for name in found["table"] if name] or ["nobody"]  # the card's stands under its heading
    found.pop("group")
    unnamed = {role: len([name for name in many if not name]) for role, many in found.items()}
    assert {role: count for role, count in unnamed.items() if count} == {}
    assert {"button", "checkbox", "combobox", "searchbox", "region", "columnheader", "rowheader"} <= found.keys()
    spoken = page.locator(".point").first.get_attribute("aria-label")
    assert re.fullmatch(r"\w+:[\w.-]+: [\d.]+ top-1 %, [\d.,]+ images/s", spoken)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_scrolls_down_only(open_page: Open, scheme: str) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    assert page.locator("#facets").is_hidden()
    page.locator("#table tbody button").first.click()
    page.click("#keep")
    page.locator("#table tbody button").nth(3).click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#fold > summary").click()
    assert page.locator("#facets").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_dark_is_dark_and_print_is_on_white_without_controls(open_page: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page = open_page(color_scheme="dark")
    assert max(map(int, re.findall(r"\d+", page.evaluate(ground))[:3])) < 60
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert page.locator("#filters").is_hidden()
    assert page.locator("#chart").is_visible()
    assert page.locator("#table").is_visible()


def test_a_smaller_window_draws_the_chart_anew(open_page: Open) -> None:
    from playwright.sync_api import expect

    page = open_page()
    box = "document.querySelector('#chart svg').viewBox.baseVal.width"
    before = page.evaluate(box)
    page.set_viewport_size({"width": 1000, "height": 900})
    expect(page.locator("#chart svg")).not_to_have_attribute("viewBox", f"0 0 {before} 500")
    assert page.evaluate(box) < before


def test_a_name_in_the_address_opens_its_card_and_a_choice_is_kept_there(open_page: Open, place: Path) -> None:
    page = open_page(anchor="#VGG19%3Aimagenet1k_v1")
    assert page.locator("#card-title").inner_text() == "VGG19:imagenet1k_v1"
    page.locator("#table tbody button").nth(1).click()
    assert page.evaluate("decodeURIComponent(location.hash.slice(1))") == page.locator("#card-title").inner_text()
    for anchor in ("#nobody", "#%E0%A4%A"):
        assert open_page(anchor=anchor).locator("#card").is_hidden()


def test_what_this_machine_has_is_ringed_and_its_speeds_are_first(open_page: Open, tmp_path: Path) -> None:
    mine = Measured("My laptop", "fast(), float32", 1, "2026-11-24", "torch 2.14.1", {"ResNet50": (224, 31.0)}, mine=True)
    marked = [replace(row, here=("measured",) if row.variant.name == "ResNet50" and row.side == 224 else ()) for row in ROWS]
    (file := tmp_path / "mine.html").write_text(written(marked, [*shipped(), mine], mine=True), encoding="utf-8")
    page = open_page(file)
    assert "My laptop" in page.locator("#x option:checked").inner_text()
    assert page.locator("#x optgroup").first.get_attribute("label") == "Measured by you"
    assert page.locator("#chart circle.here").count() == page.locator("#chart .point").count() > 5
    assert "Measured by you on My laptop, 2026-11-24" in page.locator("#caption").inner_text()
    tick(page, "On this machine", "measured")
    assert set(listed(page)) == {row.name for row in marked if row.here}
    assert set(column(page, "here")) == {"measured"}


def test_a_hostile_record_is_shown_as_text(open_page: Open, tmp_path: Path) -> None:
    attack = "<img src=x onerror=alert(1)>\"'&</script>"
    row = next(row for row in ROWS if row.name == "ResNet20:cifar10")
    record = replace(row.checkpoint, tag=attack, license=attack, provenance=attack, metrics={"top1": 90.0}, metrics_data=attack)
    (file := tmp_path / "hostile.html").write_text(written([replace(row, checkpoint=record)], shipped()), encoding="utf-8")
    page = open_page(file)
    page.select_option("#x", label="Parameters, millions")
    page.locator("#chart .point").hover()
    page.locator("#table tbody button").click()
    assert attack in page.locator("#card-title").inner_text()
    assert page.locator("img").count() == 0


def test_without_javascript_the_page_says_what_to_do(browser: Browser, place: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(place.as_uri())
    assert "zoo list --checkpoints" in page.locator("noscript").inner_text()
    context.close()


def test_fifteen_hundred_rows_are_all_there(open_page: Open, tmp_path: Path) -> None:
    """How long they take is measured by recipes/browse_page.py, where nothing else runs."""
    more = [replace(row, checkpoint=replace(row.checkpoint, tag=f"{row.checkpoint.tag}_2")) for row in ROWS if row.checkpoint]
    many = [*ROWS, *more][:1500]
    (file := tmp_path / "many.html").write_text(written(many, shipped()), encoding="utf-8")
    page = open_page(file)
    assert page.locator("#status").inner_text().startswith("1,500 of 1,500 rows match.")
    assert len(listed(page)) == 1500
    assert json.loads(page.locator("#data").text_content() or "")["rows"][0]["network"] == many[0].variant.name
