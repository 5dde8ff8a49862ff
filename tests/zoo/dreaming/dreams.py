"""What tests of dreams share: pictures, and small networks whose statistics are no defaults."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from zoo.networks.model import Model


def picture(width: int = 96, height: int = 80, seed: int = 0) -> Image.Image:
    """Draw soft blobs: what a photograph has, and noise has not."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def drawn(cls: type[Model], seed: int = 0, **options: Any) -> Model:
    """Build a network in eval mode whose BatchNorms have statistics to get wrong, and whose maps keep their size."""
    torch.manual_seed(seed)
    network = cls(**options).eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean = torch.randn_like(layer.running_mean) * 0.1  # pyright: ignore[reportArgumentType, reportCallIssue]
            layer.running_var = torch.rand_like(layer.running_var) + 0.5  # pyright: ignore[reportArgumentType, reportCallIssue]
            nn.init.uniform_(layer.weight, 0.8, 1.2)
            nn.init.normal_(layer.bias, 0, 0.1)
    return network


def levels(image: Any) -> np.ndarray:
    return np.asarray(image).astype(np.int64)
