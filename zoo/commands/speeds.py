"""What one image costs each network on a CPU, as `recipes/cpu_milliseconds.py` measured it on one machine."""

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
        date: of the last measurement.
        plain: by network, as `trained` returns it; a network that was not measured is not in it.
    """

    machine: str
    date: str
    plain: dict[str, float]

    @property
    def caption(self) -> str:
        """Say what the milliseconds are of."""
        return f"one image, plain float32, on {self.machine}, {self.date}"


def read(path: Path) -> Speeds:
    """Read a table."""
    return Speeds(**json.loads(path.read_text(encoding="utf-8")))


@cache
def speeds() -> Speeds:
    """Read the table that ships."""
    return read(TABLE)
