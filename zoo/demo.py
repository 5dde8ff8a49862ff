"""`zoo demo`: the main job, offline, on real photographs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zoo.bench import Timing, alternate
from zoo.model import CATALOGUE, Model
from zoo.predict import Prediction, predict
from zoo.trained import trained

if TYPE_CHECKING:
    from PIL.Image import Image

PHOTOGRAPHS = ("chelsea.png", "rocket.jpg", "coffee.png")
"""Photographs that scikit-image bundles, in the public domain or CC0; the first shows a cat, the last none of the ten classes."""


def photographs() -> list[Path]:
    """List the bundled photographs; FileNotFoundError says how to get them."""
    try:
        import skimage
    except ImportError:
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
    half = side // 2
    x, y = (width - half) // 2, (height - half) // 2
    return [*cut, ("close", whole.crop((x, y, x + half, y + half)))]


def classify(model: Model, files: Sequence[Path]) -> list[tuple[str, Image, list[Prediction]]]:
    """Classify every view of every file, in one batch."""
    shown = [(f"{file.stem}, {name}", view) for file in files for name, view in views(file)]
    found = predict(model, [view for _, view in shown], top=3)
    return [(title, view, row) for (title, view), row in zip(shown, found, strict=True)]


def load_times(name: str = "ResNet20", rounds: int = 7) -> list[Timing]:
    """Time `trained` beside constructing, `torch.load` and copying, which is torchvision's way, on the same weights."""
    cls = CATALOGUE[name]
    with tempfile.TemporaryDirectory(prefix="zoo-demo-") as folder:
        file = Path(folder) / "weights.pth"
        torch.save(trained(cls).state_dict(), file)

        def usual() -> Model:
            network = cls()
            network.load_state_dict(torch.load(file, weights_only=True))
            return network.eval()

        ways: dict[str, Callable[[], object]] = {"construct, torch.load, copy": usual, "trained, verified": lambda: trained(cls)}
        return alternate(ways, rounds)
