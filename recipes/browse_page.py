"""Measure how long a browser takes to load the page of `zoo browse`, and draw the picture of its document.

python recipes/browse_page.py                                  # 1,500 rows, 11 loads of each kind, about half a minute
python recipes/browse_page.py --picture docs/browse.png        # the page as it ships, as PNG
python recipes/browse_page.py --libraries                      # bytes of chart libraries, fetched by npm: what the page does without

It needs Chromium, a package of the system, and the extra `browser`. Each load has a new context, so nothing is cached. The time is counted
by the page itself, from the navigation's start until filters, chart and table stand.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import shutil
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from zoo.browsing.measured import shipped
from zoo.browsing.page import page
from zoo.browsing.rows import Row, rows

LIBRARIES = {
    "plotly.js-basic-dist-min@4.1.1": ("plotly-basic.min.js",),
    "@observablehq/plot@0.6.17": ("dist/plot.umd.min.js",),
    "d3@7.9.2": ("dist/d3.min.js",),
    "chart.js@4.6.1": ("dist/chart.umd.min.js", "dist/chart.umd.js"),
    "uplot@1.6.32": ("dist/uPlot.iife.min.js",),
}
"""npm's packages, and what a page would have to hold of each; Observable Plot needs d3 too."""
KINDS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1400, "height": 1000}},
    "phone's screen": {"viewport": {"width": 390, "height": 844}},
}


def repeated(known: Sequence[Row], count: int) -> list[Row]:
    """Return as many rows as were asked for: those that there are, and again under other names."""
    found: list[Row] = []
    for turn in range(count):
        row, again = known[turn % len(known)], turn // len(known)
        if again and row.checkpoint is not None:
            row = replace(row, checkpoint=replace(row.checkpoint, tag=f"{row.checkpoint.tag}_{again}", default=False))
        found.append(row)
    return found


def chromium() -> str:
    """Return the browser's program."""
    found = shutil.which(os.environ.get("ZOO_CHROMIUM", "chromium"))
    if found is None:
        raise SystemExit("there is no chromium: install the system's package, or name the program by ZOO_CHROMIUM")
    return found


def loads(text: str, rounds: int) -> dict[str, list[float]]:
    """Load a page again and again, and return the milliseconds until it is ready, by kind of screen."""
    sync_playwright: Any = importlib.import_module("playwright.sync_api").sync_playwright  # an extra, and not CI's

    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        place = Path(folder, "page.html")
        place.write_text(text, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=chromium())
        for _ in range(rounds + 1):
            for kind, screen in KINDS.items():
                context = browser.new_context(**screen)
                opened = context.new_page()
                opened.goto(place.as_uri())
                found[kind].append(opened.evaluate("performance.getEntriesByName('ready')[0].startTime"))
                context.close()
        browser.close()
    return {kind: times[1:] for kind, times in found.items()}  # the first warms the browser itself up


def draw(text: str, picture: Path) -> None:
    """Draw the page with a card open."""
    sync_playwright: Any = importlib.import_module("playwright.sync_api").sync_playwright  # an extra, and not CI's

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        place = Path(folder, "page.html")
        place.write_text(text, encoding="utf-8")
        browser = driver.chromium.launch(executable_path=chromium())
        opened = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        opened.goto(place.as_uri())
        opened.select_option("#x", label="GMACs for one image")
        seen = opened.screenshot()
        browser.close()
    Image.open(io.BytesIO(seen)).convert("RGB").quantize(128).save(picture, optimize=True)  # a third of the bytes


def libraries() -> dict[str, int]:
    """Fetch chart libraries and return the bytes of what a page would hold."""
    sizes: dict[str, int] = {}
    for package, files in LIBRARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(["npm", "pack", package, "--json"], cwd=folder, capture_output=True, check=True, text=True).stdout
            with tarfile.open(Path(folder, json.loads(packed)[0]["filename"])) as archive:
                there = {member.name.removeprefix("package/"): member.size for member in archive.getmembers()}
        sizes[package] = next(there[name] for name in files if name in there)
    return sizes


def main() -> None:
    """Measure, draw, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--libraries", action="store_true")
    options = parser.parse_args()
    known = rows()
    if options.picture:
        draw(page(known, shipped()), options.picture)
        return
    if options.libraries:
        here = Path(page.__code__.co_filename)
        own = {f"the page's own {name}": here.with_name(name).stat().st_size for name in ("page.js", "page.css")}
        for name, size in {**libraries(), **own}.items():
            print(f"{name:34} {size:>9,} bytes")
        return
    text = page(repeated(known, options.rows), shipped())
    print(f"{options.rows:,} rows, {len(text.encode()):,} bytes, {chromium()}")
    for kind, times in loads(text, options.rounds).items():
        print(f"{kind:16} ready after {statistics.median(times):.0f} ms (median; {min(times):.0f} to {max(times):.0f}, {len(times)} loads)")


if __name__ == "__main__":
    main()
