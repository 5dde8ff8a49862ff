"""Pictures that the tests make, and networks that are told how long they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from zoo import ResNet20, trained
from zoo.networks.model import Model
from zoo.recommendation.latency import Latency

CLASSES = ("circle", "square", "stripes")


def picture(seed: int) -> Image.Image:
    drawn = np.random.default_rng(seed)
    y, x = np.mgrid[:32, :32]
    inside = ((y - 16) ** 2 + (x - 16) ** 2 < 80, (abs(y - 16) < 9) & (abs(x - 16) < 9), x % 8 < 4)[seed % 3]
    return Image.fromarray((drawn.normal(90, 30, (32, 32, 3)) + 70 * inside[..., None]).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 PNGs in three class folders."""
    root = tmp_path_factory.mktemp("photos")
    for seed in range(30):
        path = root / CLASSES[seed % 3] / f"{seed:03d}.png"
        path.parent.mkdir(exist_ok=True)
        picture(seed).save(path)
    return root


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test has computed, others needn't."""
    return tmp_path_factory.mktemp("recommendations")


@pytest.fixture(autouse=True)
def two_penalties(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "scoring" not in request.node.nodeid:
        monkeypatch.setattr("zoo.recommendation.scoring.PENALTIES", (0.1, 0.01))


@pytest.fixture
def candidate() -> Callable[..., Model]:
    """Make the shipped network under another tag, or one that sees nothing."""

    def make(tag: str, blind: bool = False, **facts: object) -> Model:
        model = trained(ResNet20)
        assert model.checkpoint is not None
        record = replace(model.checkpoint, tag=tag, **facts)
        if blind:
            with torch.no_grad():
                model.conv1.weight.zero_()
        model.checkpoint = record
        return model

    return make


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds by tag, instead of measured ones; 10 where none is said."""
    told: dict[str, float] = {}

    def measured(model: Model, device: torch.device, quick: bool) -> Latency:
        del device, quick
        assert model.checkpoint is not None
        ms = told.get(model.checkpoint.tag, 10.0)
        return Latency(ms, 0.9 * ms, 1.2 * ms, "told")

    monkeypatch.setattr("zoo.recommendation.run.measured", measured)
    return told
