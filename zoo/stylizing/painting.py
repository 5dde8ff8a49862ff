"""Pictures of any size through a style network: in, painted, back to the size they had, transparency and colours as asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.images.preprocess import ORIENTATION, UPRIGHT, open_image
from zoo.images.reading import opened_file
from zoo.stylizing.networks import Statistics, StyleNetwork
from zoo.stylizing.quickly import quickest
from zoo.stylizing.strips import paint_in_strips

if TYPE_CHECKING:
    from PIL.Image import Image

LEAST = 16
"""Sides in pixels that a network is given at least: reflected borders need room."""
AT_ONCE = 64_000_000
"""Pixels times channels of the first map up to which a CPU paints a picture at once; beyond, in strips: 66 M, 1080p with
32 channels, took 1.9 GB at once and 1.2 GB in strips."""
NEEDED = 60
"""Bytes for each of them that a GPU must have free: 43 were measured on an H100."""
STRIP = 256
"""Rows of a strip, where nobody says."""
LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a pixel's brightness (ITU-R BT.601)."""


def read(source: Any, name: str | None = None) -> tuple[Image, Image | None]:
    """Read a picture upright, as RGB, and its transparency.

    Pixels that can't be seen at all are white; others have their own colour, not laid on anything.

    Returns:
        The RGB picture, and its alpha channel as "L", None where nothing is transparent.

    Raises:
        BadImage: as `zoo.images.preprocess.open_image`.
    """
    from PIL import Image

    picture = open_image(source, "RGB", name)
    opened: Any = source
    if isinstance(source, np.ndarray | Tensor):
        if source.ndim != 3 or 4 not in (source.shape[0], source.shape[2]):
            return picture, None
        array = source if isinstance(source, np.ndarray) else source.detach().cpu().numpy()
        opened = Image.fromarray(np.ascontiguousarray(array if array.shape[2] == 4 else array.transpose(1, 2, 0)))
    if isinstance(opened, Image.Image):
        return _apart(opened, picture)
    with opened_file(Path(opened), name or str(source)) as image:
        return _apart(image, picture)


def _apart(image: Image, flat: Image) -> tuple[Image, Image | None]:
    """Take alpha off an image whose other way to RGB, laid on white, was read before."""
    from PIL import Image
    from PIL.Image import Transpose

    if not image.has_transparency_data:
        return flat, None
    turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    full = image.convert("RGBA")
    full = full.transpose(Transpose[turn]) if turn else full
    alpha = full.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return flat, None
    seen = Image.composite(full.convert("RGB"), Image.new("RGB", full.size, "white"), alpha.point(lambda value: 255 if value else 0))
    return seen, alpha


def as_batch(picture: Image, device: torch.device) -> Tensor:
    """Return an RGB picture as float32 (1, 3, H, W) of 0..255."""
    pixels = torch.from_numpy(np.asarray(picture).copy()).to(device)
    return pixels.permute(2, 0, 1)[None].float()


def as_picture(x: Tensor) -> Image:
    """Return (3, H, W) of 0..255 as an RGB picture: clamped, and rounded to the nearest level."""
    from PIL import Image

    return Image.fromarray(x.clamp(0, 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy())


@torch.no_grad()
def paint(network: nn.Module, x: Tensor, *, strip: int | None = None, statistics: Statistics | None = None, quick: bool = False) -> Tensor:
    """Paint one picture of any size.

    Args:
        network: a style network, or another module from RGB of 0..255 to the same.
        x: (1, 3, H, W) of 0..255, float32, on the network's device.
        strip: rows that are painted at a time, 0 for all at once; None decides by the size, see `AT_ONCE`.
        statistics: of the norms; None takes the picture's own. They are not used in strips.
        quick: whether to take the quickest way, see `zoo.stylizing.quickly`; not for strips and given statistics.

    Returns:
        (3, H, W), float32, not clamped.
    """
    height, width = x.shape[2:]
    multiple = getattr(network, "multiple", 4)
    x = _grown(x, multiple)
    if strip is None:
        channels = getattr(network, "channels", 32)
        large = x.shape[2] * x.shape[3] * channels > _at_once(x.device)
        strip = STRIP if large and isinstance(network, StyleNetwork) and statistics is None else 0
    if strip and isinstance(network, StyleNetwork):
        out = torch.empty(x.shape[1:], dtype=torch.float32, device=x.device)
        paint_in_strips(network, lambda first, last: x[:, :, first:last], x.shape[2], strip, out)
    elif quick and statistics is None:
        out = quickest(network, x).run(x)[0].float()
    else:
        out = (network(x) if statistics is None else network(x, statistics))[0].float()
    return out[:, :height, :width]


def _at_once(device: torch.device) -> int:
    if device.type != "cuda":
        return AT_ONCE
    return torch.cuda.mem_get_info(device)[0] // NEEDED


def _grown(x: Tensor, multiple: int) -> Tensor:
    """Reflect a picture's right and lower edge until its sides are multiples and large enough for the reflections inside a network."""
    height, width = x.shape[2:]
    down, right = (max(LEAST, -(-side // multiple) * multiple) - side for side in (height, width))
    if not down and not right:
        return x
    mode = "reflect" if down < height and right < width else "replicate"
    return F.pad(x, (0, right, 0, down), mode=mode)


def coloured_as(painting: Tensor, photograph: Tensor) -> Tensor:
    """Give a painting the photograph's colours: its brightness stays, (3, H, W) each.

    Source: Gatys et al. 2016, https://arxiv.org/abs/1606.05897, section 3.2, luminance-only transfer.
    """
    luma = torch.tensor(LUMA, device=painting.device).view(3, 1, 1)
    return photograph + ((painting.clamp(0, 255) - photograph) * luma).sum(0, keepdim=True)
