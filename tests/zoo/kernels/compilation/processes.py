"""Whether a process has ended."""

from __future__ import annotations

import time
from pathlib import Path


def gone(number: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False
