"""Sphinx builds the pages of this folder: `make docs`. They stay plain Markdown, so that a forge shows them as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    "Begin": ["tour", "proven"],
    "Tasks": [
        "predict",
        "detect",
        "segment",
        "explain",
        "dream",
        "stylize",
        "features",
        "embed",
        "finetune",
        "convert",
        "own-network",
        "gpu",
        "int8",
        "training",
        "airgap",
        "adding",
    ],
    "Coming from": ["from-torchvision", "from-timm", "from-transformers", "from-metalhead", "from-torch-jl"],
    "Tables": ["models", "formats", "api", "cli", "benchmarks", "benchmarks-h100"],
    "More": [
        "weights",
        "kernels",
        "design",
        "faults",
        "confined",
        "resnet20-cifar10",
        "notes/five-minutes",
        "notes/int8",
        "notes/any-network",
    ],
}
"""The pages under the headings of the navigation. A page that is missing here is a warning, and so an error."""


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the navigation at the end of the first page, which need not hold what only Sphinx understands."""
    del app
    if page == "index":
        for heading, pages in CONTENTS.items():
            source[0] += "\n".join(["", "", "```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```", ""])


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook in."""
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
