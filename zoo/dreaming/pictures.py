"""Pictures to dream on: upright, with their transparency and their colour profile."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zoo.images.preprocess import ORIENTATION, UPRIGHT, open_image
from zoo.images.reading import opened_file

if TYPE_CHECKING:
    from PIL.Image import Image

STRIP = 1024


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture to dream on.

    Attributes:
        levels: uint8 (3, H, W), red, green and blue, upright.
        alpha: its transparency, an upright picture of mode L; None where it has none.
        profile: the colour profile of its RGB numbers, if it brings one.
        name: what messages call it.
    """

    levels: Tensor
    alpha: Image | None
    profile: bytes | None
    name: str

    def like(self, levels: Tensor) -> Image:
        """Make a picture of other levels (3, H, W), with this one's transparency and profile."""
        from PIL import Image

        made = Image.fromarray(np.ascontiguousarray(levels.permute(1, 2, 0).cpu().numpy()))
        if self.alpha is not None:
            made.putalpha(self.alpha if self.alpha.size == made.size else self.alpha.resize(made.size))
        if self.profile:
            made.info["icc_profile"] = self.profile
        return made


def read(source: Any, name: str) -> Picture:
    """Read a picture as `zoo.images.preprocess.open_image` does, and its transparency beside it.

    What hides behind full transparency is white; what is partly transparent has its own colour.

    Raises:
        BadImage: it can't be used; the message says why.
    """
    from PIL import Image

    if isinstance(source, str | os.PathLike):
        with opened_file(Path(source), name) as image:
            return read(image, name)
    if not isinstance(source, Image.Image):  # an array or a tensor, or what open_image refuses
        planes = getattr(source, "ndim", 0) == 3 and 4 in (source.shape[0], source.shape[-1])
        if not planes or 3 in source.shape[::2]:
            return Picture(_levels(open_image(source, "RGB", name)), None, None, name)
        array = np.asarray(source)
        source = Image.fromarray(np.ascontiguousarray(array if array.shape[-1] == 4 else array.transpose(1, 2, 0)))
    profile = source.info.get("icc_profile") if source.mode in ("RGB", "RGBA", "P") else None
    shown = open_image(source, "RGB", name)
    if not source.has_transparency_data:
        return Picture(_levels(shown), None, profile, name)
    colours = source.convert("RGBA")
    turn = UPRIGHT.get(source.getexif().get(ORIENTATION, 1))
    colours = colours.transpose(Image.Transpose[turn]) if turn else colours
    alpha = colours.getchannel("A")
    shown.paste(colours.convert("RGB"), mask=alpha.point(lambda level: 255 if level else 0))
    return Picture(_levels(shown), alpha, profile, name)


def _levels(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def rounded(x: Tensor) -> Tensor:
    """Round pictures (B, 3, H, W) of levels to uint8, strip by strip."""
    made = torch.empty(x.shape, dtype=torch.uint8)
    for start in range(0, x.shape[2], STRIP):
        made[:, :, start : start + STRIP] = x[:, :, start : start + STRIP].round().clamp(0, 255).to("cpu", torch.uint8)
    return made
