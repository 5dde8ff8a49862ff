"""Who called: warnings point at the line of a user's program, however many of our own functions lie between."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType

_HERE = Path(__file__).resolve().parents[1]
_OURS = tuple(str(_HERE / package) + "/" for package in ("weights", "zoo"))
_THROUGH = ("torch.nn.modules.module", "torch.utils._contextlib", "torch.autograd.grad_mode", contextlib.__name__)
"""Modules whose functions only hand a call on."""


def stacklevel() -> int:
    """Return the `stacklevel` with which `warnings.warn`, called where this is, names the line that called the package.

    Example:
        >>> import warnings
        >>> warnings.warn("runs unchanged", stacklevel=stacklevel())  # doctest: +SKIP
    """
    level, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while _hands_on(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def _hands_on(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS) or frame.f_globals.get("__name__") in _THROUGH
