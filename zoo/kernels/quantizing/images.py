"""Images to calibrate on, and others to compare on: taken from what a caller has, and refused where they would say nothing."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from weights.callers import stacklevel
from zoo.kernels.errors import called

FEWEST = 32
"""Images to calibrate on, and images to compare on, at least."""
CALIBRATE = 300
"""Images to calibrate on at most: more of them hardly move a range, and each takes a run of the network."""
NOISE = 0.3
"""Correlation of neighbouring pixels below which an image is noise; photographs have 0.8 and more."""
NOISY = 0.05
"""Share of the images from which on they are taken for made up."""
ALIKE = 1e-3
"""Deviation between images, relative to that of all pixels, below which they are one image."""


@dataclass(frozen=True, slots=True)
class Images:
    """What a network is calibrated on and compared on.

    Attributes:
        calibration: float32 (N, C, H, W), preprocessed.
        check: float32 (M, C, H, W), preprocessed; none of them is in `calibration`.
        labels: the right class of each image of `check`, (M,); None where nobody knows.
        made_up: why they are no real images; "" where they are taken for real.
        digest: of all of it, in hexadecimal.
        check_digest: of the images that are compared on.
    """

    calibration: Tensor
    check: Tensor
    labels: Tensor | None
    made_up: str
    digest: str
    check_digest: str


def gather(network: nn.Module, calibration: Any, check: Any = None, labels: Any = None, size: tuple[int, ...] | None = None) -> Images:
    """Prepare a caller's images, and set some aside to compare on.

    Args:
        network: the network, whose checkpoint says how pictures are preprocessed and which values preprocessed ones have.
        calibration: a float tensor (N, C, H, W) or a list of float tensors (C, H, W) or (1, C, H, W), preprocessed; or pictures as
            `model.preprocess` takes them: a list of paths; or a folder or any other source that `zoo embed` reads.
        check: images to compare on, in the same forms; None takes half of `calibration`, by a fixed draw, or all but the first 300 drawn.
            Of copies one is kept, and a warning says how many were left out.
        labels: indices of the right classes, one for each image of `check`, or of `calibration` where that is divided.
        size: (C, H, W) that the network will be given; None takes the images'.

    Raises:
        ValueError: images of another size, layout or range, NaN, too few of them, all alike, the same in both, or other labels than
            images; the message says which.
    """
    pixels = _pixels(network, calibration, "calibration", size)
    size = tuple(pixels.shape[1:])
    if check is not None:
        compared = _pixels(network, check, "check", size)
        compared, known, others = _once(compared, _labels(labels, len(compared), "check"), "check", FEWEST)
        pixels, _, digests = _once(pixels, None, "calibration", FEWEST)
        if both := len(set(digests[:CALIBRATE]) & set(others)):
            raise ValueError(
                f"{both} of the {len(compared)} images to compare on are calibration images too, which prove nothing; leave copies out"
            )
        pixels = pixels[:CALIBRATE]
    else:
        halved = "; half of them are set aside to compare on"
        pixels, known, _ = _once(pixels, _labels(labels, len(pixels), "calibration"), "calibration", 2 * FEWEST, halved)
        order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))  # a folder is sorted by classes
        count = min(len(pixels) // 2, CALIBRATE)
        pixels, compared = pixels[order[:count]], pixels[order[count:]]
        known = None if known is None else known[order[count:]]
    for what, given in (("calibration", pixels), ("check", compared)):
        _differ(given, what)
    noise = max(_noisy(pixels), _noisy(compared))
    reason = f"neighbouring pixels of {100 * noise:.0f} % of the images are unrelated: they look like noise, not like photographs"
    return _images(pixels, compared, known, reason if noise > NOISY else "")


def _once(images: Tensor, labels: Tensor | None, what: str, least: int, more: str = "") -> tuple[Tensor, Tensor | None, list[str]]:
    """Leave copies of images out, and say so; return what is left, with its labels and digests.

    Raises:
        ValueError: fewer are left than `least`; `more` is what to say of that number.
    """
    fewest = f"and {least} are the fewest that say something{more}"
    if len(images) < least:
        raise ValueError(f"{what} has {len(images)} images, {fewest}")
    digests = [digest_of(image) for image in images]
    first = sorted({digest: index for index, digest in reversed([*enumerate(digests)])}.values())
    if len(first) < least:
        raise ValueError(f"only {len(first)} of the {len(images)} {what} images are different, {fewest}")
    if len(first) == len(images):
        return images, labels, digests
    said = f"{len(images) - len(first)} of the {len(images)} {what} images are copies of others: each counts once"
    warnings.warn(said, stacklevel=stacklevel())
    return images[first], None if labels is None else labels[first], [digests[index] for index in first]


def made_up(shape: tuple[int, ...]) -> Images:
    """Make images up, to measure speed on: they are never enough to prove anything."""
    from zoo.kernels.comparing.sample_images import natural_images

    calibration, check = (torch.cat([natural_images((16, *shape), torch.device("cpu"), seed + i) for i in (0, 1)]) for seed in (10, 20))
    return _images(calibration, check, None, "no real images were given: these are made up")


def digest_of(images: Tensor) -> str:
    """Return the BLAKE3 of pixels and shape, in hexadecimal."""
    digest = blake3(repr(tuple(images.shape)).encode())
    digest.update(images.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _images(calibration: Tensor, check: Tensor, labels: Tensor | None, reason: str) -> Images:
    parts = [digest_of(calibration), digest_of(check), "" if labels is None else repr(labels.tolist()), reason]
    return Images(calibration, check, labels, reason, blake3("\n".join(parts).encode()).hexdigest(), parts[1])


def _pixels(network: Any, given: Any, what: str, size: tuple[int, ...] | None) -> Tensor:
    """Return preprocessed images, float32 (N, C, H, W), of the size that is asked for."""
    if isinstance(given, list | tuple) and not given:
        raise ValueError(f"{what} holds no images: the list is empty")
    if isinstance(given, str) and not given.strip():
        raise ValueError(f"{what} names no folder: the path is empty")
    if isinstance(given, list | tuple) and all(isinstance(one, Tensor) and one.is_floating_point() for one in given):
        given = _stacked(given, what)
    ready = isinstance(given, Tensor) and given.is_floating_point()
    if not ready and not isinstance(given, str | os.PathLike | list | tuple | Tensor) and not hasattr(given, "__array__"):
        raise ValueError(f"{what} is a tensor (N, C, H, W), a list of images or a folder of them, got {given!r:.60}")
    reads: Any = getattr(network, "batch_of", None)
    known = getattr(network, "checkpoint", None) is not None
    if not ready and (reads is None or not (known or hasattr(network, "answer_by"))):
        raise ValueError(
            f"{called(network)} has no checkpoint that says how pictures are preprocessed; give {what} as a float tensor "
            "(N, C, H, W) that is preprocessed as the network's own input is"
        )
    try:
        images: Tensor = given if isinstance(given, Tensor) and ready else reads(given)
    except ValueError as error:
        if isinstance(given, str | os.PathLike):  # beside the images that a network answers there may be a picture of this name too
            raise ValueError(f"{what}, {os.fspath(given)}: {error}") from error
        raise
    _fits(network, images, what, size)
    if not images.isfinite().all():
        raise ValueError(f"the {what} images hold NaN or infinite values")
    if ready and hasattr(network, "answer_by") and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"the {what} images of a detector hold pixels between 0 and 1; these lie between {images.min():.3g} and {images.max():.3g}. "
            "Divide bytes by 255, or give the photographs themselves"
        )
    if ready and reads is not None and known and not hasattr(network, "answer_by") and _noisy(images) <= NOISY:  # of noise more is said
        try:
            reads(images)
        except ValueError as error:
            raise ValueError(f"the {what} images have another range than the network's input: {error}") from None
    return images.detach().to("cpu", torch.float32).contiguous()


def _stacked(given: Any, what: str) -> Tensor:
    single = [one[0] if one.dim() == 4 and one.shape[0] == 1 else one for one in given]
    shapes = list(dict.fromkeys(tuple(one.shape) for one in single))
    if len(shapes) > 1 or len(shapes[0]) != 3:
        said = " and ".join(map(str, shapes[:3]))
        raise ValueError(f"the {what} images are float tensors of one shape (C, H, W); these have {said}")
    return torch.stack(single)


def _fits(network: nn.Module, given: Tensor, what: str, size: tuple[int, ...] | None) -> None:
    """Refuse another layout or size than the network takes."""
    shape = tuple(given.shape)
    if given.dim() != 4:
        raise ValueError(f"{what} is a tensor of images (N, C, H, W), got shape {shape}")
    first = next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None)
    channels = size[0] if size else getattr(network, "in_channels", None) or (first.in_channels if first is not None else shape[1])
    if shape[1] != channels:
        if shape[3] == channels:
            raise ValueError(
                f"the channels of the {what} images, of shape {shape}, are last; the network takes them first: x.permute(0, 3, 1, 2)"
            )
        raise ValueError(f"the network takes {channels} channels, the {what} images have shape {shape}")
    side = getattr(network, "input_size", None)
    crop = getattr(getattr(getattr(network, "checkpoint", None), "preprocessing", None), "crop", None)
    if size is None and crop and hasattr(network, "batch_of") and not hasattr(network, "answer_by"):  # what its pictures are prepared to
        size = (channels, crop, crop)
    wanted = size or ((channels, side, side) if isinstance(side, int) and not getattr(network, "size_multiple", None) else None)
    if wanted and shape[1:] != tuple(wanted):
        said = "x".join(map(str, wanted))
        raise ValueError(
            f"the network is given images of {said} (channels, height, width), and the {what} images are {'x'.join(map(str, shape[1:]))}: "
            "preprocess them as the network's own input is; fast(..., example=x) states another size"
        )


def _labels(labels: Any, count: int, what: str) -> Tensor | None:
    if labels is None:
        return None
    try:
        found = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"labels are indices of classes, one for each image of {what}; got {labels!r:.60}") from error
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"labels are indices of classes, whole numbers in one row; got {found.dtype} of shape {tuple(found.shape)}")
    if len(found) != count:
        raise ValueError(f"there are {len(found)} labels for {count} images of {what}; give one for each")
    return found.long().cpu()


def _differ(images: Tensor, what: str) -> None:
    """Refuse images that are nearly one and the same, or flat."""
    spread, between = images.std().item(), images.std(0).mean().item()
    if between <= ALIKE * max(spread, 1e-12):
        raise ValueError(
            f"the {what} images are all alike: their pixels differ by {between:.1e} between images; give different photographs"
        )
    flat = images.flatten(2).std(2).amax(1) < 1e-6
    if flat.float().mean() > 0.5:
        raise ValueError(f"{int(flat.sum())} of the {len(images)} {what} images are of one colour; give photographs")


def _noisy(images: Tensor) -> float:
    """Return the share of images whose pixels say nothing of their right neighbours."""
    if images.shape[-1] < 2:
        return 0.0
    noisy = 0
    for image in images.double():
        centred = image - image.mean((1, 2), keepdim=True)
        left, right = centred[..., :-1], centred[..., 1:]
        spread = (left.square().sum() * right.square().sum()).sqrt().item()
        noisy += spread > 0 and (left * right).sum().item() < NOISE * spread
    return noisy / len(images)
