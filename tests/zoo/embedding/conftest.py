"""Pictures that the tests make, and the shipped network on its plain kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo import ResNet20, trained
from zoo.networks.model import Model

CLASSES = ("circle", "square", "stripes")


def picture(seed: int) -> Image.Image:
    """Draw a shape on noise; the seed decides which, where and in what colours."""
    drawn = np.random.default_rng(seed)
    side = 40
    y, x = np.mgrid[:side, :side]
    cy, cx, r = [*drawn.uniform(14, 26, 2).tolist(), drawn.uniform(7, 12)]
    inside = ((y - cy) ** 2 + (x - cx) ** 2 < r * r, (abs(y - cy) < r) & (abs(x - cx) < r), (x + int(cx)) % 8 < 4)[seed % 3]
    pixels = drawn.normal(90, 12, (side, side, 3)) + inside[..., None] * drawn.uniform(80, 120, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 JPEGs in three class folders."""
    root = tmp_path_factory.mktemp("photos")
    for seed in range(120):
        path = root / CLASSES[seed % 3] / f"{seed:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        picture(seed).save(path, quality=95)
    return root


@pytest.fixture(scope="session")
def network() -> Model:
    return trained(ResNet20)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let parts of a few images stand for those of a thousand."""
    monkeypatch.setattr("zoo.embedding.plan.PART_ROWS", 32)
    monkeypatch.setattr("zoo.embedding.plan.CHUNK", 8)
