"""What happens to an image before the network sees it: in training by chance, in measuring exactly as the checkpoint's record says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weights import Preprocessing
from zoo.finetuning.chance import numpy_of, seed_of
from zoo.finetuning.settings import Settings
from zoo.images.preprocess import at_size, preprocess_named

if TYPE_CHECKING:
    from PIL.Image import Image

SMALL = 64
"""Side in pixels up to which images are padded and cropped; a random part of them would hold too little."""


def steps_for(steps: Preprocessing, input_size: int, size: int | None) -> Preprocessing:
    """Give a record's preprocessing a definite size: all images of a batch must end in the same.

    Args:
        steps: the record's.
        input_size: the network's, where the record has none.
        size: another crop, the shorter side scaled along.
    """
    return at_size(steps, size or steps.crop or steps.resize or input_size)


def kind_of(settings: Settings, steps: Preprocessing) -> str:
    """Say which augmentation "auto" is."""
    if settings.augment != "auto":
        return settings.augment
    return "pad" if (steps.crop or 0) <= SMALL else "resized"


def exact(image: Image, key: str, steps: Preprocessing) -> Tensor:
    """Resize and crop an image as its record says: uint8 (C, H, W), in the record's channel order."""
    channels = len(steps.mean)
    plain = replace(steps, mean=(0.0,) * channels, std=(1.0,) * channels)
    return preprocess_named([(key, image)], plain)[0].mul_(255).round_().to(torch.uint8)


def normalised(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Turn uint8 (B, C, H, W) into what the network reads, as `zoo.images.preprocess` does; mean and std are (C, 1, 1)."""
    return x.float().div_(255).sub_(mean).div_(std)


class Augment:
    """One image to uint8 (C, H, W) of the record's size, by chance; the same seed gives the same."""

    def __init__(self, settings: Settings, steps: Preprocessing) -> None:
        from torchvision.transforms import InterpolationMode, v2

        size = steps.crop or 0
        smooth = InterpolationMode(steps.interpolation)
        layers: list[Any] = []
        kind = kind_of(settings, steps)
        if kind == "resized":
            layers.append(v2.RandomResizedCrop(size, scale=(0.25, 1.0), interpolation=smooth))
        elif kind == "pad":
            layers.append(v2.RandomCrop(size, padding=max(1, size // 8)))
        if settings.flip:
            layers.append(v2.RandomHorizontalFlip())
        if settings.rotate:
            layers.append(v2.RandomRotation((-settings.rotate, settings.rotate), interpolation=InterpolationMode.BILINEAR))
        if settings.randaugment:
            layers.append(v2.RandAugment(magnitude=settings.randaugment))
        self._layers, self._steps, self._first = v2.Compose(layers) if layers else None, steps, kind != "resized"

    def __call__(self, image: Image, key: str, seed: int) -> Tensor:
        """Change `image` in the way that belongs to `seed`."""
        from PIL.Image import fromarray

        steps = self._steps
        if len(steps.mean) == 1:
            image = image.convert("L")
        if self._first:  # what is not resized by chance is resized as the record says
            pixels = exact(image, key, replace(steps, channel_order="rgb")).permute(1, 2, 0).numpy()
            image = fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
        torch.manual_seed(seed)
        if self._layers is not None:
            image = self._layers(image)
        pixels = np.array(image)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        if steps.channel_order == "bgr":
            pixels = pixels[..., ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def shifted(x: Tensor, fate: Tensor, flip: bool) -> Tensor:
    """Shift each image by up to an eighth of its side over zeros, and mirror half of them.

    Args:
        x: (B, C, H, W), normalised: the zeros are the mean colour.
        fate: (B, 3) numbers of 0..1, on the same device: down, right, mirrored.
        flip: whether any is mirrored.
    """
    count, _, height, width = x.shape
    pad = max(1, height // 8)
    padded = F.pad(x, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
    rows, columns = (torch.arange(side, device=x.device) for side in (height, width))
    down, right = (fate[:, :2] * (2 * pad + 1)).long().clamp_(max=2 * pad).unbind(1)
    rows = down[:, None] + rows
    columns = right[:, None] + columns
    if flip:
        columns = torch.where(fate[:, 2:] < 0.5, columns.flip(1), columns)
    place = torch.arange(count, device=x.device).view(-1, 1, 1)
    return padded[place, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def mixed(x: Tensor, places: slice, pairs: int, settings: Settings, step: int) -> tuple[Tensor, Tensor]:
    """Mix each image with its neighbour, by mixup (a weighted mean) or CutMix (a box of it).

    Torchvision's mix with one share a batch and the batch turned by one place: with two processes other images would meet than
    with one. Here neighbours 2i and 2i + 1 of the step's images meet, and each pair has its own share.

    Args:
        x: (B, C, H, W), B even.
        places: where these images are among the step's.
        pairs: pairs of the step, over all processes.
        settings: the two alphas.
        step: the numbers belong to it.

    Returns:
        The images, and for each the share (B,) of its own class.

    Sources: mixup, Zhang et al. 2017, https://arxiv.org/abs/1710.09412; CutMix, Yun et al. 2019, https://arxiv.org/abs/1905.04899.
    """
    chance = numpy_of(settings.seed, "mix", step)
    cut = settings.cutmix > 0 and (settings.mixup == 0 or bool(chance.random() < 0.5))
    alpha = settings.cutmix if cut else settings.mixup
    shares, centres = chance.beta(alpha, alpha, pairs).astype(np.float32), chance.random((pairs, 2))
    mine = slice(places.start // 2, places.stop // 2)
    share = torch.from_numpy(np.repeat(shares[mine], 2)).to(x.device, non_blocking=True)
    other = x.view(-1, 2, *x.shape[1:]).flip(1).reshape(x.shape)
    if not cut:
        part = share.view(-1, 1, 1, 1)
        return x * part + other * (1 - part), share
    height, width = x.shape[2:]
    half = np.sqrt(1 - shares[mine]) / 2
    edges = []
    for side, centre in ((height, centres[mine, 0]), (width, centres[mine, 1])):
        edges += [np.clip(np.round((centre + sign * half) * side), 0, side) for sign in (-1, 1)]
    top, bottom, left, right = (torch.from_numpy(np.repeat(edge, 2)).to(x.device, non_blocking=True).view(-1, 1, 1) for edge in edges)
    rows, columns = torch.arange(height, device=x.device).view(1, -1, 1), torch.arange(width, device=x.device).view(1, 1, -1)
    box = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    return torch.where(box.unsqueeze(1), other, x), 1 - box.float().mean((1, 2))


def seed_for(settings: Settings, epoch: int, position: int) -> int:
    """Return the seed of one image in one epoch."""
    return seed_of(settings.seed, "image", epoch, position)
