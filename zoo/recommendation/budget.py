"""What a network may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weights.arguments import unknown_keyword
from weights.record import PERMISSIVE
from zoo.pretrained.search import FREE


@dataclass(frozen=True, slots=True)
class Budget:
    """What a recommended checkpoint may cost at most; None allows anything.

    Example:
        >>> Budget(max_ms=20, license="permissive").over(ms=31.4, mb=14.2, license="MIT")
        ['31.4 ms, 20 allowed']

    Attributes:
        max_ms: milliseconds that one image takes through `fast(model)` on the device, at the checkpoint's own image size, decoding and
            preprocessing not counted; the middle of the measured times counts, not their spread. A time that could not be measured is over.
        max_mb: megabytes (10^6 bytes) of the checkpoint's file; of its tensors where nobody states the file's size.
        license: SPDX identifier in any case, "unstated", or "permissive" for every licence that allows every use.
    """

    max_ms: float | None = None
    max_mb: float | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_ms", "max_mb"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ValueError(f"{name} is a positive number, got {value!r}")
        if self.license is not None and not isinstance(self.license, str):
            raise ValueError(f'license is a name such as "MIT", or "permissive", got {self.license!r}')

    @classmethod
    def of(cls, told: Budget | Mapping[str, Any] | None) -> Budget:
        """Make one of a table, {"max_ms": 20}; None allows anything."""
        if isinstance(told, Budget):
            return told
        if told is not None and not isinstance(told, Mapping):
            raise TypeError(f'budget is a Budget or a table, {{"max_ms": 20, "max_mb": 50, "license": "permissive"}}, got {told!r}')
        known = [field.name for field in fields(cls)]
        for word in told or {}:
            if word not in known:
                raise unknown_keyword("budget", str(word), known, {"licence": "it is spelt license"})
        return cls(**(told or {}))

    def over(self, *, mb: float, license: str, ms: float | None = None) -> list[str]:
        """Say what of a checkpoint exceeds this; [] if nothing does.

        `ms` is None where it was not measured yet, and infinite where it could not be, which no limit allows.
        """
        found = []
        if ms is not None and self.max_ms is not None and ms > self.max_ms:
            found.append("its time could not be measured" if math.isinf(ms) else f"{_number(ms)} ms, {self.max_ms:g} allowed")
        if self.max_mb is not None and mb > self.max_mb:
            found.append(f"{_number(mb)} MB, {self.max_mb:g} allowed")
        if self.license is not None and not self._allows(license):
            found.append(f"licence {license}, {self.license} asked for")
        return found

    def excess(self, *, mb: float, license: str, ms: float | None = None) -> tuple[int, float]:
        """Order what exceeds this by how far it does: a licence that is not allowed counts first, then the largest ratio."""
        ratios = [1.0]
        if ms is not None and self.max_ms is not None:
            ratios.append(ms / self.max_ms)
        if self.max_mb is not None:
            ratios.append(mb / self.max_mb)
        return int(self.license is not None and not self._allows(license)), max(ratios)

    def _allows(self, license: str) -> bool:
        asked = (self.license or "").lower()
        return license in PERMISSIVE if asked == FREE else license.lower() == asked


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
