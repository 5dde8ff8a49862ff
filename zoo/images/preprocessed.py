"""Whether a tensor can be images that were preprocessed as a checkpoint's record says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weights.record import Preprocessing


class WrongInput(ValueError):
    """A tensor can't be a batch of preprocessed images for this model; the message says why and what to do."""


def check_preprocessed(x: Tensor, preprocessing: Preprocessing, in_channels: int) -> None:
    """Raise `WrongInput` when a tensor can't be images that were preprocessed as the record says.

    Two rules look at the values, in one pass over the tensor. Normalisation maps 0..1 to [low, high]; a value further outside than
    a quarter of that range is refused (resampling overshoots by less). And where the record makes dark pixels negative, a tensor
    within 0..1 is refused if all its values are whole 255ths, or if it nearly fills 0..1, unless undoing the record's
    normalisation gives whole 255ths, which proves it right. A flat image is never refused for lying within 0..1.

    Args:
        x: floating point, (B, C, H, W) or (C, H, W).
        preprocessing: the record.
        in_channels: C of the network.

    Raises:
        WrongInput: the axes or channels are others, a value is NaN or infinite, or one of the two rules holds.
    """
    shape, fix = tuple(x.shape), "model.preprocess(images) does all of it"
    if x.dim() not in (3, 4):
        raise WrongInput(f"expected preprocessed images (B, {in_channels}, H, W) or ({in_channels}, H, W), got shape {shape}")
    if shape[-3] != in_channels:
        if shape[-1] == in_channels:
            order = "0, 3, 1, 2" if x.dim() == 4 else "2, 0, 1"
            raise WrongInput(f"the channels of shape {shape} are last, and the network takes them first: x.permute({order})")
        raise WrongInput(f"the network takes {in_channels} channels, got shape {shape}; {fix}, from files or uint8 arrays")
    if not x.numel():
        return
    least, most = (value.item() for value in x.detach().aminmax())
    if not (abs(least) < float("inf") and abs(most) < float("inf")):
        raise WrongInput("the images hold NaN or infinite values; look for a division by zero or an overflow where they were made")
    low = min(-m / s for m, s in zip(preprocessing.mean, preprocessing.std, strict=True))
    high = max((1 - m) / s for m, s in zip(preprocessing.mean, preprocessing.std, strict=True))
    slack = (high - low) / 4
    values = f"the values reach from {least:.4g} to {most:.4g}, where this checkpoint's preprocessing gives {low:.4g} to {high:.4g}"
    recipe = f"Subtract mean {preprocessing.mean} and divide by std {preprocessing.std} of 0..1"
    if least < low - slack or most > high + slack:
        looks = "like 0..255" if least >= 0 and most <= 255 else "normalised twice, or for other weights"
        raise WrongInput(f"{values}: they look {looks}. {recipe}, once; {fix}")
    if low < -0.25 and 0 <= least < most <= 1 and _unnormalised(x.detach(), least, most, preprocessing):
        raise WrongInput(f"{values}: they look like 0..1, not normalised. {recipe}; {fix}")


def _unnormalised(x: Tensor, least: float, most: float, preprocessing: Preprocessing) -> bool:
    x = x.float()
    mean, std = (torch.tensor(values, device=x.device).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    if _whole_255ths(x * std + mean):
        return False
    return _whole_255ths(x) or (least < 0.05 and most > 0.95)


def _whole_255ths(x: Tensor) -> bool:
    steps = x * 255
    return bool((steps - steps.round()).abs().max() < 0.02)
