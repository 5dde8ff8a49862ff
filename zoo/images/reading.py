"""One image's file or bytes, opened by Pillow: the only place that lets it parse anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING

from weights.regular import open_regular
from zoo.images import kinds
from zoo.images.files import reason

if TYPE_CHECKING:
    from PIL.Image import Image

TOO_LARGE = "Scale the picture down, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it."


class BadImage(ValueError):
    """An image can't be used; the message names it, the reason and what to do."""


class NoSuchImage(BadImage, FileNotFoundError):
    """An image that was named is not there."""


@contextmanager
def opened_file(path: Path, name: str) -> Iterator[Image]:
    """Open an image's file, which must be a regular one: pipes and devices are never waited for.

    Args:
        path: of the file; links are followed.
        name: what messages call it.

    Raises:
        NoSuchImage: there is no such file.
        BadImage: it is a folder, a pipe or a device, can't be read, or `parsed` refuses what is in it.
    """
    try:
        file = os.fdopen(open_regular(path, follow=True), "rb")
    except FileNotFoundError:
        todo = "download it first" if "://" in name else "check the path" if path.is_absolute() else f"the path is relative to {Path.cwd()}"
        raise NoSuchImage(f"{name}: there is no such file; {todo}") from None
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        if os.path.isdir(path):  # noqa: PTH112  (it never raises)
            raise BadImage(f"{name}: it is a folder; give its files, for example sorted(Path(folder).glob('*.jpg'))") from error
        why = reason(error, "file") if isinstance(error, OSError) else f"it can't be opened ({error})"
        raise BadImage(f"{name}: {why}; name an image's file") from error
    with file:
        yield parsed(file, name)


def opened(data: bytes, name: str) -> Image:
    """Read the header of an image's bytes only; the pixels follow when they are asked for. Raises as `parsed`."""
    return parsed(BytesIO(data), name)


def parsed(file: IO[bytes], name: str) -> Image:
    """Let Pillow read the header of an image of one of the kinds in `kinds.KINDS`, and of no other.

    Raises:
        BadImage: it is empty, cut off or damaged, of another kind, or tells of too many pixels.
    """
    from PIL import Image, UnidentifiedImageError

    head = b""
    try:
        head = file.read(64)
        file.seek(0)
        return Image.open(file, formats=_formats(head))
    except UnidentifiedImageError:  # its own message holds an address, which no two runs share
        raise BadImage(f"{name}: {kinds.refusal(head) if head else 'the file is empty; get it again'}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(f"{name}: {error} {TOO_LARGE}") from None
    except Exception as error:  # a parser raises whatever it stumbles over
        raise BadImage(f"{name}: it can't be opened ({error}); it is cut off or damaged: get it again") from error


def _formats(head: bytes) -> tuple[str, ...]:
    kind = kinds.kind_of(head)
    if kind is None or kind.format != "HEIF" or kinds.missing(kind):
        return kinds.formats()
    import pillow_heif  # pyright: ignore[reportMissingImports]  # an extra

    pillow_heif.register_heif_opener()
    return (kind.format,)
