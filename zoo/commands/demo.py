"""`zoo demo`: the main job, offline, on photographs that are free to use."""

from __future__ import annotations

from pathlib import Path

PICTURES = ("chelsea.png", "coffee.png", "camera.png", "motorcycle_left.png", "astronaut.png")
"""Of scikit-image's pictures: a cat, an espresso, a photographer and a motorcycle, which ImageNet has classes for, and an astronaut, for
which it has none."""


def pictures(required: bool = True) -> list[Path]:
    """List the bundled pictures; where they are missing, FileNotFoundError says how to get them, or [] if they aren't required."""
    try:
        import skimage
    except ImportError:
        if not required:
            return []
        raise FileNotFoundError("the demo's pictures come with scikit-image: pip install 'kernelzoo[demo]', or name files") from None
    return [Path(str(skimage.__file__)).parent / "data" / name for name in PICTURES]
