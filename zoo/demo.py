"""`zoo demo`: the main job, offline, on real photographs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.model import Model
from zoo.predict import Prediction, predict

if TYPE_CHECKING:
    from PIL.Image import Image

NO_CLASS = ("rocket", "coffee")
"""Photographs of what none of the network's ten classes is: it names the nearest."""
PHOTOGRAPHS = ("chelsea.png", "rocket.jpg", "coffee.png")
"""Photographs that scikit-image bundles, in the public domain or CC0; the first shows a cat, the last none of the ten classes."""


HEADING = "ResNet20 knows ten classes at 32x32 pixels; of whatever else a picture shows, it names the nearest of the ten"


def photographs(required: bool = True) -> list[Path]:
    """List the bundled photographs; where they are missing, FileNotFoundError says how to get them, or [] if they aren't required."""
    try:
        import skimage
    except ImportError:
        if not required:
            return []
        raise FileNotFoundError("the demo's photographs come with scikit-image: pip install 'kernelzoo[demo]', or name files") from None
    return [Path(str(skimage.__file__)).parent / "data" / name for name in PHOTOGRAPHS]


def views(file: Path) -> list[tuple[str, Image]]:
    """Open a picture and cut it: the whole, its left, middle and right (or top, middle and bottom) squares, and its centre close up."""
    from zoo.preprocess import open_image

    whole = open_image(file)
    width, height = whole.size
    side = min(width, height)
    along = [(0, 0), ((width - side) // 2, (height - side) // 2), (width - side, height - side)]
    names = ("left", "middle", "right") if width >= height else ("top", "middle", "bottom")
    cut = [("whole", whole)]
    if max(width, height) > 1.1 * side:
        cut += [(name, whole.crop((x, y, x + side, y + side))) for name, (x, y) in zip(names, along, strict=True)]
    if side < 2:
        return cut
    half = side // 2
    x, y = (width - half) // 2, (height - half) // 2
    return [*cut, ("close", whole.crop((x, y, x + half, y + half)))]


def classify(model: Model, files: Sequence[Path]) -> list[tuple[str, Image, list[Prediction]]]:
    """Classify every view of every file, in one batch."""
    shown = [(_title(file, name), view) for file in files for name, view in views(file)]
    found = predict(model, [view for _, view in shown], top=3)
    return [(title, view, row) for (title, view), row in zip(shown, found, strict=True)]


def _title(file: Path, view: str) -> str:
    return f"{file.stem}, {view}{' (none of the ten)' if file.stem in NO_CLASS else ''}"
