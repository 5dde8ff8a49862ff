"""Draw docs/see.jpg: a photograph, what explains its class, what the network dreams in it, and the photograph in a shipped style.

    pip install 'kernelzoo[demo]'
    python recipes/see_picture.py docs/see.jpg

The photograph is scikit-image's cat, Chelsea (CC0, by Stéfan van der Walt); the network is EfficientNet-Lite0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from zoo import EfficientNetLite0, dream, explain, stylize, trained
from zoo.commands.demo import pictures

GAP = 8


def main() -> None:
    """Draw it."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("file", type=Path)
    given = asked.parse_args()
    cat = Image.open(next(path for path in pictures(required=True) if "chelsea" in path.name)).convert("RGB")
    model = trained(EfficientNetLite0)
    shown = [
        cat,
        explain(model, cat, "gradcam", "Egyptian cat").overlay(),
        dream(model, cat, seed=0, progress=False),
        stylize(cat, "leadlight"),
    ]
    panels = [panel.convert("RGB").resize((cat.width * 3 // 4, cat.height * 3 // 4), Image.Resampling.LANCZOS) for panel in shown]
    width, height = panels[0].size
    page = Image.new("RGB", (2 * width + GAP, 2 * height + GAP), "white")
    for number, panel in enumerate(panels):
        page.paste(panel, (number % 2 * (width + GAP), number // 2 * (height + GAP)))
    page.save(given.file, quality=85, optimize=True)


if __name__ == "__main__":
    main()
