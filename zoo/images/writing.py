"""Pictures as they are written: which kind of file a name asks for, what that kind would lose, and the file whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weights.whole import whole
from zoo.images.kinds import OPAQUE, WRITTEN
from zoo.images.reading import opened_file

if TYPE_CHECKING:
    from PIL.Image import Image

QUALITY = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"quality": 95}}


def writable_as(path: Path, transparent: bool) -> str:
    """Return Pillow's word for a file's kind.

    Raises:
        ValueError: its ending is no picture's, or it can't hold transparency that the picture has.
    """
    suffix = path.suffix.lower()
    if suffix not in WRITTEN:
        raise ValueError(f"'{path.name}' is no picture's name: it ends in {', '.join(WRITTEN)}; name it '{path.stem}.png'")
    if transparent and WRITTEN[suffix] in OPAQUE:
        raise ValueError(f"'{path.name}' would lose the picture's transparency, which {suffix} files don't hold; name it '{path.stem}.png'")
    return WRITTEN[suffix]


def check_picture(path: Path) -> None:
    """Look at a file's head; raises as `transparent` where it is no picture."""
    with opened_file(path, str(path)):
        pass


def transparent(path: Path) -> bool:
    """Tell whether a picture's file says that it may be transparent.

    Raises:
        BadImage: it is no picture, or can't be read; the message says why.
    """
    with opened_file(path, str(path)) as image:
        return image.has_transparency_data


def save(image: Image, path: Path) -> Path:
    """Write a picture, whole or not at all, with the colour profile that it has.

    Raises:
        ValueError: see `writable_as`.
        OSError: it can't be written; what was there is as it was.
    """
    kind = writable_as(path, image.mode == "RGBA")
    with whole(path) as unfinished:
        image.save(unfinished, kind, icc_profile=image.info.get("icc_profile"), **QUALITY.get(kind, {}))
    return path
