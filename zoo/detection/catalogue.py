"""The detectors: one class line a variant, under its paper's link, with its published parameter count.

A new variant is a new line here; `make docs-pages` writes it into the table that `zoo list` and `trained("name")` read.
"""

from __future__ import annotations
