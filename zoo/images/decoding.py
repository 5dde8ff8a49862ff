"""Bytes to pictures."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from zoo.images.preprocess import TOO_LARGE, BadImage, open_image

if TYPE_CHECKING:
    from PIL.Image import Image


def decode(data: bytes, name: str = "the image") -> Image:
    """Decode one image's bytes into the upright RGB picture that `zoo.images.preprocess.open_image` gives of its file.

    Raises:
        BadImage: the bytes are empty, cut off, no image, or of a kind that `open_image` refuses.
    """
    return open_image(opened(data, name), name=name)


def opened(data: bytes, name: str) -> Image:
    """Read an image's header only; the pixels follow when they are asked for.

    Raises:
        BadImage: there is none, or it tells of too many pixels.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise BadImage(f"{name}: the file is empty; get it again")
    try:
        return Image.open(BytesIO(data))
    except UnidentifiedImageError:  # its own message holds an address, which no two runs share
        raise BadImage(f"{name}: the file is no image that Pillow can read; convert it to PNG or JPEG") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(f"{name}: {error} {TOO_LARGE}") from None
    except Exception as error:  # a parser raises whatever it stumbles over
        raise BadImage(f"{name}: it can't be opened ({error}); it is cut off or damaged: get it again") from error
