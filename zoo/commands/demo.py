"""`zoo demo`: the main job, offline, on pictures of what the embedded network knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.networks.model import Model
from zoo.prediction.predict import Prediction, predict

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = ("chelsea.png", "horse.png")
"""Those of scikit-image's pictures that show one of the network's ten classes, CC0: a photograph of a cat, a horse's silhouette."""
HEADING = "ResNet20 at 32x32 pixels knows airplane, automobile, bird, cat, deer, dog, frog, horse, ship and truck, and nothing else"


def pictures(required: bool = True) -> list[Path]:
    """List the bundled pictures; where they are missing, FileNotFoundError says how to get them, or [] if they aren't required."""
    try:
        import skimage
    except ImportError:
        if not required:
            return []
        raise FileNotFoundError("the demo's pictures come with scikit-image: pip install 'kernelzoo[demo]', or name files") from None
    return [Path(str(skimage.__file__)).parent / "data" / name for name in PICTURES]


def views(file: Path) -> list[tuple[str, Image]]:
    """Open a picture and cut it: the whole, and its left, middle and right (or top, middle and bottom) squares."""
    from zoo.images.preprocess import open_image

    whole = open_image(file)
    width, height = whole.size
    side = min(width, height)
    along = [(0, 0), ((width - side) // 2, (height - side) // 2), (width - side, height - side)]
    names = ("left", "middle", "right") if width >= height else ("top", "middle", "bottom")
    if max(width, height) <= 1.1 * side:
        return [("whole", whole)]
    return [("whole", whole), *((name, whole.crop((x, y, x + side, y + side))) for name, (x, y) in zip(names, along, strict=True))]


def classify(model: Model, files: Sequence[Path]) -> list[tuple[str, Image, list[Prediction]]]:
    """Classify every view of every file, in one batch."""
    shown = [(f"{file.stem}, {name}", view) for file in files for name, view in views(file)]
    found = predict(model, [view for _, view in shown], top=3)
    return [(title, view, row) for (title, view), row in zip(shown, found, strict=True)]
