"""How far a narrower precision may be from float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOP1 = 0.98
"""Share of images whose most probable class has to stay, where a caller names nothing."""
ERROR = 0.1
"""Relative error up to which outputs that are no classes pass, where a caller names nothing: a cosine of about 0.995. At 0.16 k-NN
by embeddings of EfficientNet-Lite0 lost two points on CIFAR-10."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a certificate has to show.

    Attributes:
        top1: the least share, 0..1, of images whose top-1 class is float32's; None asks nothing of it.
        error: the largest relative error, ||ours - float32|| / ||float32|| over all images; None asks nothing of it.
    """

    top1: float | None = None
    error: float | None = None

    def __str__(self) -> str:
        asked = [] if self.top1 is None else [f"same top-1 of at least {self.top1:.4g}"]
        asked += [] if self.error is None else [f"relative error of at most {self.error:.4g}"]
        return " and ".join(asked) or "nothing"


def tolerance_of(value: Any, classifies: bool) -> Tolerance:
    """Return the tolerance that is meant.

    Args:
        value: None, a share of equal top-1 such as 0.98, a mapping with "top1", "error" or both, or a `Tolerance`.
        classifies: whether the network's output is a row of logits for each image.

    Raises:
        ValueError: a number is out of its range, a key is unknown, or classes are asked for where there are none.
    """
    if value is None:
        return Tolerance(top1=TOP1) if classifies else Tolerance(error=ERROR)
    if isinstance(value, Tolerance):
        found = value
    elif isinstance(value, Mapping):
        if unknown := [key for key in value if key not in ("top1", "error")] or not value:
            named = ", ".join(map(repr, unknown)) if isinstance(unknown, list) else "nothing"
            raise ValueError(f'tolerance names "top1", "error" or both, as {{"top1": 0.98, "error": 0.1}}; it names {named}')
        found = Tolerance(value.get("top1"), value.get("error"))
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'tolerance is a share of equal top-1 such as 0.98, or {{"top1": 0.98, "error": 0.1}}; got {value!r}')
    else:
        found = Tolerance(top1=float(value))
    for name, number, most in (("top1", found.top1, 1.0), ("error", found.error, 10.0)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= most):
            raise ValueError(f"the tolerance's {name} is a number from 0 to {most:g}, got {number!r}" + _percent(name, number))
    if found.top1 == 0:
        raise ValueError("a top1 of 0 asks for nothing, so that nothing would be proven; name the least share of equal top-1, such as 0.98")
    if found.top1 is None and found.error is None:
        raise ValueError('a tolerance names "top1", "error" or both; it names neither')
    if found.top1 is not None and not classifies:
        raise ValueError(
            'this network returns no row of logits for each image, so no share of equal top-1 can be asked; use tolerance={"error": 0.1}'
        )
    return found


def _percent(name: str, number: Any) -> str:
    percent = name == "top1" and isinstance(number, int | float) and 1 < number <= 100
    return f"; write {number:g} % as {number / 100:g}" if percent else ""


def allowed_error(certified: float, limit: float, asked: float | None) -> float:
    """Return up to which error a plan of another batch size passes: no further than was asked, or than what was certified is.

    Args:
        certified: the certified plan's error on the images that are kept.
        limit: what rounding in another order may make of it.
        asked: the largest error that was asked for; None where none was.
    """
    return limit if asked is None else min(limit, max(asked, certified))
