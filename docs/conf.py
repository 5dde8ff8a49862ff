"""Sphinx builds the pages of this folder: `make docs`. They stay plain Markdown, so that a forge shows them as well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "kernelzoo"
author = "The kernelzoo authors"
copyright = "the kernelzoo authors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "kernelzoo"
html_copy_source = False
html_show_sphinx = False
exclude_patterns: list[str] = []
nitpicky = True
myst_heading_anchors = 4
"""Levels of headings that links may lead to, by the names that a forge gives them."""
highlight_language = "none"
pygments_dark_style = "monokai"

CONTENTS = {
    "Begin": ["install", "tour", "proven", "faq", "troubleshooting"],
    "Tasks": [
        "predict",
        "detect",
        "segment",
        "explain",
        "dream",
        "stylize",
        "features",
        "embed",
        "recommend",
        "finetune",
        "convert",
        "own-network",
        "gpu",
        "int8",
        "training",
        "recurrent",
        "airgap",
        "adding",
    ],
    "Coming from": ["from-torchvision", "from-timm", "from-keras", "from-transformers", "from-metalhead", "from-torch-jl"],
    "Tables": ["browse", "models", "formats", "api", "cli", "benchmarks"],
    "More": ["weights", "kernels", "design", "faults", "confined", "resnet20-cifar10"],
}
"""The pages under the headings of the navigation. A page that is missing here is a warning, and so an error; notes are left out of it."""
NOTES = "notes/"


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the navigation at the end of the first page, and mark notes as outside of it: pages need not hold what only Sphinx knows."""
    del app
    if page.startswith(NOTES):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"
    if page == "index":
        for heading, pages in CONTENTS.items():
            source[0] += "\n".join(["", "", "```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```", ""])


def widen(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Give pages room for tables and for code with comments in a column."""
    del app, page, template, tree
    context["metatags"] = f"{context.get('metatags', '')}<style>.main .content {{ width: 58em; max-width: 100%; }}</style>"


PAGE = "checkpoints.html"
"""The page of all checkpoints among the built ones: `zoo browse` makes the same."""
LINK = f'<p><a href="{PAGE}"><strong>Open the page here</strong></a></p>'


def add_link(app: Sphinx, page: str, source: list[str]) -> None:
    """Link to the page of all checkpoints, which is there only where the documents are built."""
    del app
    if page == "browse":
        source[0] = source[0].replace("<!-- page -->", LINK)


def add_page(app: Sphinx, error: Exception | None) -> None:
    """Write the page of all checkpoints beside the built ones."""
    if error is None and app.builder.format == "html":
        from zoo import __version__
        from zoo.browsing.measured import shipped
        from zoo.browsing.page import page
        from zoo.browsing.rows import rows

        (Path(app.outdir) / PAGE).write_text(page(rows(), shipped(), version=__version__), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook in."""
    app.connect("source-read", add_contents)
    app.connect("html-page-context", widen)
    app.connect("source-read", add_link)
    app.connect("build-finished", add_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
