"""Photographs repainted in a style: `stylize` paints, `stylize_video` keeps films calm, `train_style` learns a style from one picture.

Nothing is loaded before it is asked for, so that the recipe of the styles that ship needs no more than PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.stylizing.adain import AdaIN
    from zoo.stylizing.named import styles
    from zoo.stylizing.networks import Engstrom, Johnson, MobileStyle, StyleNetwork
    from zoo.stylizing.photographs import stylize
    from zoo.stylizing.style_files import style_network
    from zoo.stylizing.training import StyleRun, StyleSettings, train_style
    from zoo.stylizing.video import stylize_video

__all__ = [
    "AdaIN",
    "Engstrom",
    "Johnson",
    "MobileStyle",
    "StyleNetwork",
    "StyleRun",
    "StyleSettings",
    "style_network",
    "styles",
    "stylize",
    "stylize_video",
    "train_style",
]

_PLACES = {
    "adain": "AdaIN",
    "named": "styles",
    "networks": "Engstrom Johnson MobileStyle StyleNetwork",
    "style_files": "style_network",
    "photographs": "stylize",
    "training": "StyleRun StyleSettings train_style",
    "video": "stylize_video",
}
_PLACE = {name: module for module, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name not in _PLACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_PLACE[name]}"), name)
    return found
