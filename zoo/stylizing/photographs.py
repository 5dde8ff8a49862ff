"""`stylize("photo.jpg", "embers")`: a photograph, painted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weights.arguments import forgiving, whole
from zoo.stylizing.named import USUAL
from zoo.stylizing.painting import as_batch, as_picture, coloured_as, paint, read
from zoo.stylizing.style_files import style_network

if TYPE_CHECKING:
    from PIL.Image import Image


@forgiving
def stylize(
    image: Any,
    style: str | os.PathLike[str] | nn.Module = USUAL,
    *,
    strength: float = 1.0,
    keep_colour: bool = False,
    side: int | None = None,
    strip: int | None = None,
    device: str | torch.device | None = None,
    fast: bool = False,
) -> Image:
    """Repaint a photograph in a style.

    The result has the photograph's size and, where it has one, its transparency; EXIF orientation is applied. Large pictures are painted
    in strips, with the same result as at once.

    Args:
        image: a path, a PIL image, or a uint8 array or tensor, as `predict` takes it.
        style: a name of `styles()`, the folder of a training, a file of a style network, or a network: one from `style_network`, which
            is loaded once for many pictures, or `AdaIN.style(picture)` for a style that nothing was trained for.
        strength: 0 to 1, the painting's share; the rest is the photograph.
        keep_colour: whether the painting gets the photograph's colours, and gives only its strokes.
        side: the longer side in pixels at which the network paints, smaller for broader strokes; the result is scaled back. None paints at
            the photograph's own size.
        strip: rows that are painted at a time, to need less memory; 0 paints all at once; None decides by the size.
        device: "cpu", "cuda" or "cuda:1"; None takes a network's own, and for a name or a path a GPU where there is one.
        fast: whether to find the quickest way of running the network, in half precision on a GPU, and take it. That takes up to minutes
            for each size, so it is for many pictures of one size; a painting differs by a level of 255 in the mean at most.

    Returns:
        An RGB picture; RGBA where the photograph has transparent pixels.

    Raises:
        BadImage: the image can't be used.
        UnknownWeights, WeightsError: the style can't be had.
        ValueError: an argument is out of its range.

    Example:
        >>> stylize("cat.jpg", "embers", keep_colour=True).save("painted.png")  # doctest: +SKIP

    Source:
        https://arxiv.org/abs/1603.08155; docs/stylize.md says where each style comes from.
    """
    _check(strength, side, strip)
    photograph, alpha = read(image)
    network = prepared(style, device)
    place = next(network.parameters()).device
    full = as_batch(photograph, place)
    x = full if side is None else as_batch(_scaled(photograph, side), place)
    y = paint(network, x, strip=0 if fast and strip is None else strip, quick=fast)
    if y.shape[1:] != full.shape[2:]:
        y = torch.nn.functional.interpolate(y[None], full.shape[2:], mode="bicubic", align_corners=False)[0]
    painted = finished(y, full[0], strength, keep_colour)
    if alpha is not None:
        painted.putalpha(alpha)
    return painted


def finished(painting: torch.Tensor, photograph: torch.Tensor, strength: float, keep_colour: bool) -> Image:
    """Mix a painting and its photograph, (3, H, W) of 0..255 each."""
    if keep_colour:
        painting = coloured_as(painting, photograph)
    return as_picture(photograph + strength * (painting.clamp(0, 255) - photograph))


def prepared(style: str | os.PathLike[str] | nn.Module, device: str | torch.device | None) -> nn.Module:
    """Return a style's network on the device where it is to paint.

    Raises:
        TypeError: it is neither a name, a path nor a module.
        ValueError: there is no such device here.
    """
    if isinstance(style, nn.Module):
        network = style
        here = next(network.parameters()).device
        wanted = torch.device(device) if device is not None else here
    elif isinstance(style, str | os.PathLike):
        network = style_network(style)
        here = torch.device("cpu")
        wanted = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    else:
        raise TypeError(f"style is a name, a path or a style network, not a {type(style).__name__}")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'there is no GPU here that PyTorch can use; leave device out, or say "cpu" instead of "{wanted}"')
    return network if wanted == here else network.to(wanted)


def _scaled(photograph: Image, side: int) -> Image:
    from PIL.Image import Resampling

    share = side / max(photograph.size)
    return photograph.resize([max(1, round(share * length)) for length in photograph.size], Resampling.LANCZOS)


def _check(strength: float, side: int | None, strip: int | None) -> None:
    if not isinstance(strength, int | float) or not 0 <= strength <= 1:
        raise ValueError(f"strength is 0 to 1, the painting's share, got {strength!r}")
    if side is not None:
        whole("side", side, 16)
    if strip is not None:
        whole("strip", strip, 0)
