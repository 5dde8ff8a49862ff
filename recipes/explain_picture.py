"""Draw docs/explain.png: three explanations of one photograph by EfficientNet-Lite0.

    pip install 'kernelzoo[demo]'
    python recipes/explain_picture.py docs/explain.png

The photograph is scikit-image's cat, Chelsea (CC0, by Stéfan van der Walt).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from zoo import EfficientNetLite0, explain, trained
from zoo.commands.demo import pictures
from zoo.explanation.sheet import drawn, row
from zoo.images.canvas import save

COLOURS = 256
"""Of the file: a page loads faster."""


def main() -> None:
    """Draw it."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("file", type=Path)
    given = asked.parse_args()
    cat = next(path for path in pictures(required=True) if "chelsea" in path.name)
    model = trained(EfficientNetLite0)
    shown = [explain(model, cat, name, "Egyptian cat") for name in ("gradcam", "occlusion", "lrp")]
    page = drawn([row(shown)])
    save(page.quantize(COLOURS, Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.FLOYDSTEINBERG), given.file)


if __name__ == "__main__":
    main()
