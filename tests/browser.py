"""Where a Chromium is, for tests of pages; of a distribution's packages, for none is downloaded."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """Return the program, ZOO_CHROMIUM's or the first that the shell finds; None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("ZOO_CHROMIUM", ""), *NAMES))), None)
