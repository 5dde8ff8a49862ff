"""Class images: what a network takes for the purest picture of a class, found by climbing its logit from noise."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weights.arguments import forgiving, whole
from zoo.explanation.run import Explainer

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = ((0.26, 0.09, 0.02), (0.27, 0.0, -0.05), (0.27, -0.09, 0.03))
"""A square root of the covariance of natural images' colours, as lucid has it: rows are red, green and blue."""
START, RATE = 0.01, 0.05
"""Deviation of the first spectrum, and Adam's rate."""
MOVED, SCALED, TURNED = 12, 0.1, 10.0
"""Each step looks at the image moved by so many pixels of 224, scaled by so much and turned by so many degrees, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassImage:
    """What `class_image` found.

    Attributes:
        pixels: uint8 (size, size, 3).
        label: of the target.
        curve: the target's number at each step, of the image as it was moved then.
    """

    pixels: np.ndarray
    label: str
    curve: tuple[float, ...]

    def picture(self) -> Image:
        """Return it as a PIL image."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save it as a PNG, whole or not at all; ValueError where the path doesn't end in .png."""
        from zoo.images.canvas import save

        path = Path(path)
        if path.suffix.lower() != ".png":
            raise ValueError(f"a class image is a PNG file, got {path.name}; name it {path.stem}.png")
        return save(self.picture(), path)


@forgiving
def class_image(model: Any, target: Any, steps: int = 256, size: int | None = None, seed: int = 0) -> ClassImage:
    """Draw what a network takes for the purest picture of a class.

    The image is a spectrum that falls as 1 / frequency, in colours as independent as those of photographs, and Adam climbs the target's
    logit, never its probability. Each step moves, scales and turns the image a little, so that what is found does not hang on single
    pixels. The same seed gives the same bytes on the same machine.

    Example:
        >>> class_image(trained(ResNet20), "frog", steps=64).save("frog.png")

    Args:
        model: what `trained` returns.
        target: as in `explain`, one.
        steps: of Adam.
        size: side of the image in pixels; None is what the checkpoint crops to.
        seed: of the first spectrum and of the movements.

    Returns:
        A `ClassImage`.

    Raises:
        CannotExplain: as in `explain`.
        ValueError: the target is a list, `steps` or `size` is no whole number of at least 1, or the model has no checkpoint.

    Source:
        Simonyan et al. 2013, eq. 1 (https://arxiv.org/abs/1312.6034); Olah et al. 2017, Feature Visualization, for spectrum, colours and
        movements (https://distill.pub/2017/feature-visualization).
    """
    if isinstance(target, list):
        raise ValueError("class_image() draws one target; call it for each")
    steps = whole("steps", steps)
    explainer = Explainer(model, "gradient", target)
    known = explainer.preprocessing
    if known is None or len(known.mean) != 3:
        raise ValueError("class_image() needs a network with a checkpoint for colour images, whose preprocessing says what white is")
    side = whole("size", size) if size is not None else known.crop or getattr(explainer.network, "input_size", 224)
    device = explainer.device
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (known.mean, known.std))
    goal = explainer.goals(torch.zeros(1, 3, side, side, device=device))[0]

    def score(picture: Tensor) -> Tensor:
        x = picture if known.channel_order == "rgb" else picture.flip(1)
        return goal.score(explainer.program.head([(x - mean) / std])).sum()

    pixels, curve = climbed(score, side, steps, seed, device)
    shown = (pixels[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return ClassImage(shown, goal.label, curve)


def climbed(score: Callable[[Tensor], Tensor], side: int, steps: int, seed: int, device: torch.device) -> tuple[Tensor, tuple[float, ...]]:
    """Climb a number of pictures (1, 3, side, side) of 0..1 from noise: the last picture, and the number at each step."""
    generator = torch.Generator().manual_seed(seed)
    start = START * torch.randn(1, 3, side, side // 2 + 1, 2, generator=generator)
    with torch.inference_mode(False), torch.enable_grad():
        spectrum = start.to(device).requires_grad_()
        climber = torch.optim.Adam([spectrum], RATE)
        curve: list[float] = []
        for _ in range(steps):
            value = score(moved(painted(spectrum, side), generator))
            (slope,) = torch.autograd.grad(-value, spectrum)
            spectrum.grad = slope
            climber.step()
            curve.append(value.item())
        return painted(spectrum.detach(), side), tuple(curve)


def painted(spectrum: Tensor, side: int) -> Tensor:
    """Turn spectra (1, 3, side, side // 2 + 1, 2) into pictures of 0..1."""
    return torch.sigmoid(coloured(planes(spectrum, side)))


def planes(spectrum: Tensor, side: int) -> Tensor:
    """Turn spectra into three independent planes, frequencies weighed by 1 / frequency, the lowest like the next."""
    down = torch.fft.fftfreq(side, device=spectrum.device)[:, None]
    across = torch.fft.rfftfreq(side, device=spectrum.device)[None]
    weight = 1 / (down**2 + across**2).sqrt().clamp(min=1 / side)
    return torch.fft.irfft2(torch.view_as_complex(spectrum.contiguous()) * weight, s=(side, side), norm="ortho") / 4


def coloured(independent: Tensor) -> Tensor:
    """Mix three independent planes into red, green and blue as natural images do."""
    root = torch.tensor(COLOURS, device=independent.device)
    return torch.einsum("rc,bchw->brhw", root / root.norm(dim=0).max(), independent)


def moved(picture: Tensor, generator: torch.Generator) -> Tensor:
    """Move, scale and turn a picture at random, grey around it."""
    across, down, scale, angle = (torch.rand(4, generator=generator) * 2 - 1).tolist()
    turn, size = np.deg2rad(TURNED * angle), 1 + SCALED * scale
    cos, sin = float(np.cos(turn)) / size, float(np.sin(turn)) / size
    shift = 2 * MOVED / 224
    where = torch.tensor([[[cos, -sin, shift * across], [sin, cos, shift * down]]], device=picture.device)
    grid = F.affine_grid(where, list(picture.shape), align_corners=False)
    return F.grid_sample(picture - 0.5, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + 0.5
