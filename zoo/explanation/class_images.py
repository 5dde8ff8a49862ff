"""Class images and feature visualisation: what excites a class or a channel most, found by climbing its number from noise."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weights.arguments import forgiving, whole
from zoo.explanation.program import Program
from zoo.explanation.run import Explainer

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = ((0.26, 0.09, 0.02), (0.27, 0.0, -0.05), (0.27, -0.09, 0.03))
"""A square root of the covariance of natural images' colours, as lucid has it: rows are red, green and blue."""
Like = Literal["lucid", "maco"]
START, RATE, PHASE_RATE = 0.01, 0.05, 0.1
"""Deviation of the first spectrum, and Adam's rates of spectra and of phases."""
STARTS = 16
"""First spectra that are tried where a channel gives no gradient, since none of its ReLUs is on."""
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
def class_image(
    model: Any,
    target: Any = None,
    steps: int = 256,
    size: int | None = None,
    seed: int = 0,
    at: str | None = None,
    channel: int | None = None,
    like: Like = "lucid",
) -> ClassImage:
    """Draw what a network takes for the purest picture of a class, or what excites a channel of a layer most.

    The image is a spectrum that falls as 1 / frequency, in colours as independent as those of photographs, and Adam climbs the target's
    logit, never its probability, or the mean of the channel's map. Each step moves, scales and turns the image a little, so that what is
    found does not hang on single pixels. The same seed gives the same bytes on the same machine.

    Example:
        >>> class_image(trained(ResNet20), "frog", steps=64).save("frog.png")
        >>> class_image(trained(ResNet20), at="layer2", channel=5, like="maco").save("channel.png")

    Args:
        model: what `trained` returns.
        target: as in `explain`, one; None with `at` and `channel`.
        steps: of Adam.
        size: side of the image in pixels; None is what the checkpoint crops to.
        seed: of the first spectrum and of the movements.
        at: the layer, named as in `features`.
        channel: its number there, from 0.
        like: "lucid" learns magnitudes and phases; "maco" phases alone, at the magnitudes 1 / frequency that photographs have, and so keeps
            deep networks from noise of high frequency. The paper's magnitudes are the mean of ImageNet's photographs.

    Returns:
        A `ClassImage`.

    Raises:
        CannotExplain: as in `explain`.
        UnknownTap: there is no such layer.
        ValueError: the target is a list, or not the one of target and channel that is given; there is no such channel, or nothing excites
            it; `steps` or `size` is no whole number of at least 1; an unknown `like`; or the model has no checkpoint.

    Source:
        Simonyan et al. 2013, eq. 1 (https://arxiv.org/abs/1312.6034); Olah et al. 2017, Feature Visualization, for spectrum, colours and
        movements (https://distill.pub/2017/feature-visualization); Fel et al. 2023, section 3, for phases alone
        (https://arxiv.org/abs/2306.06805).
    """
    if isinstance(target, list):
        raise ValueError("class_image() draws one target; call it for each")
    if (target is None) != (at is not None and channel is not None) or (at is None) != (channel is None):
        raise ValueError("class_image() draws a target, or a channel of a layer: class_image(model, at='layer2', channel=5)")
    if like not in get_args(Like):
        raise ValueError(f"like is 'lucid' or 'maco', got {like!r}")
    steps = whole("steps", steps)
    explainer = Explainer(model, "gradient", target)
    known = explainer.preprocessing
    if known is None or len(known.mean) != 3:
        raise ValueError("class_image() needs a network with a checkpoint for colour images, whose preprocessing says what white is")
    side = whole("size", size) if size is not None else known.crop or getattr(explainer.network, "input_size", 224)
    device = explainer.device
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (known.mean, known.std))
    label, number = _goal(explainer, torch.zeros(1, 3, side, side, device=device), at, channel)

    def score(picture: Tensor) -> Tensor:
        x = picture if known.channel_order == "rgb" else picture.flip(1)
        return number((x - mean) / std)

    pixels, curve = climbed(score, side, steps, seed, device, like)
    shown = (pixels[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return ClassImage(shown, label, curve)


def _goal(explainer: Explainer, blank: Tensor, at: str | None, channel: int | None) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Name what is climbed, and give the function that computes it of preprocessed images."""
    if at is None:
        goal = explainer.goals(blank)[0]
        return goal.label, lambda x: goal.score(explainer.program.head([x])).sum()
    with torch.inference_mode(False):
        inner = Program(explainer.network, at, explainer.device)
        with torch.no_grad():
            width = inner.tapped(blank).shape[1]
    if not isinstance(channel, int) or isinstance(channel, bool) or not 0 <= channel < width:
        raise ValueError(f"'{at}' has {width} channels, 0 to {width - 1}; got channel={channel!r}")
    return f"channel {channel} of {at}", lambda x: inner.tapped(x)[:, channel].mean()


def climbed(
    score: Callable[[Tensor], Tensor], side: int, steps: int, seed: int, device: torch.device, like: Like = "lucid"
) -> tuple[Tensor, tuple[float, ...]]:
    """Climb a number of pictures (1, 3, side, side) of 0..1 from noise: the last picture, and the number at each step."""
    generator = torch.Generator().manual_seed(seed)
    draw = painted if like == "lucid" else in_phase

    def begin() -> Tensor:
        if like == "lucid":
            return START * torch.randn(1, 3, side, side // 2 + 1, 2, generator=generator)
        return torch.pi * (2 * torch.rand(1, 3, side, side // 2 + 1, generator=generator) - 1)

    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(STARTS):
            learnt = begin().to(device).requires_grad_()
            (slope,) = torch.autograd.grad(score(draw(learnt, side)), learnt, allow_unused=True)
            if slope is not None and slope.any():
                break
        else:
            raise ValueError(f"nothing excites it: none of {STARTS} pictures of noise gives a gradient; choose another channel or class")
        climber = torch.optim.Adam([learnt], RATE if like == "lucid" else PHASE_RATE)
        curve: list[float] = []
        for _ in range(steps):
            value = score(moved(draw(learnt, side), generator))
            (slope,) = torch.autograd.grad(-value, learnt)
            learnt.grad = slope
            climber.step()
            curve.append(value.item())
        return draw(learnt.detach(), side), tuple(curve)


def in_phase(phases: Tensor, side: int) -> Tensor:
    """Turn phases (1, 3, side, side // 2 + 1) into pictures of 0..1 whose magnitudes fall as 1 / frequency, around grey."""
    made = planes(torch.stack([phases.cos(), phases.sin()], -1), side)
    made = made - made.mean((2, 3), keepdim=True)
    return torch.sigmoid(coloured(made / made.detach().std((2, 3), keepdim=True)))


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
