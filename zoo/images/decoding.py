"""Bytes to pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo.images.preprocess import open_image
from zoo.images.reading import opened

if TYPE_CHECKING:
    from PIL.Image import Image


def decode(data: bytes, name: str = "the image") -> Image:
    """Decode one image's bytes into the upright RGB picture that `zoo.images.preprocess.open_image` gives of its file.

    Raises:
        BadImage: the bytes are empty, cut off, no image, or of a kind that `open_image` refuses.
    """
    return open_image(opened(data, name), name=name)
