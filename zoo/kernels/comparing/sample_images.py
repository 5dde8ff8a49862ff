"""Made-up images to check and time networks on: like photographs, and like nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def natural_images(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Make normalised images whose spectrum falls with the frequency, as photographs' does, crossed by edges.

    White noise would hardly excite the early layers' filters; a network's errors show where its activations are those of pictures.

    Args:
        shape: (N, C, H, W), or any other shape, which is filled with normal numbers.
        device: where to make them.
        seed: other images for another seed, the same for the same.

    Returns:
        float32, mean about 0 and deviation about 1.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if len(shape) != 4 or min(shape) == 0:
        return torch.randn(shape, generator=generator).to(device)
    n, c, h, w = shape
    distinct = min(n, 16)
    noise = torch.fft.rfft2(torch.randn(distinct, c, h, w, generator=generator))
    frequency = torch.hypot(torch.fft.fftfreq(h).view(-1, 1), torch.fft.rfftfreq(w).view(1, -1)).clamp_min(1 / max(h, w, 2))
    images = torch.fft.irfft2(noise / frequency, s=(h, w))
    position = torch.rand(distinct, 1, 1, 1, generator=generator) * w
    images = images / images.std().clamp_min(1e-6) + (torch.arange(w).view(1, 1, 1, -1) < position).float() - 0.5
    images = images.to(device)
    repeats = -(-n // distinct)
    return torch.cat([images.roll(7 * i, dims=3) for i in range(repeats)])[:n]


def noise_like(pictures: Tensor) -> Tensor:
    """Return what pictures are not: every pixel for itself, by a fixed seed; what holds no floating-point numbers stays."""
    if not pictures.is_floating_point():
        return pictures
    generator = torch.Generator(pictures.device).manual_seed(0)
    return torch.randn(pictures.shape, generator=generator, dtype=pictures.dtype, device=pictures.device)
