"""What one image costs each network on a CPU, as it was measured once; `docs/making/speeds.py` writes the table from a record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).parents[1] / "data" / "cpu.json"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Milliseconds for one image.

    Attributes:
        machine: on which it was measured, in words.
        date: of the measurements.
        plain: by network, as `trained` returns it.
        fast: by network, as `fast` makes it.
    """

    machine: str
    date: str
    plain: dict[str, float]
    fast: dict[str, float]

    @property
    def caption(self) -> str:
        """Say what the milliseconds are of."""
        return f"one image on {self.machine}, plain PyTorch, {self.date}"


@cache
def speeds() -> Speeds:
    """Read the table; what was not measured is not in it."""
    return Speeds(**json.loads(TABLE.read_text(encoding="utf-8")))
