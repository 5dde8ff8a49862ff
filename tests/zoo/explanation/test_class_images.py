"""Class images: the spectrum they are made of, and a network whose purest picture is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from zoo import ResNet20, features
from zoo.explanation import CannotExplain, class_image
from zoo.explanation.class_images import climbed, coloured, in_phase, moved, planes
from zoo.networks.model import Model

CPU = torch.device("cpu")


def test_planes_are_real_and_their_spectrum_falls_as_one_over_the_frequency() -> None:
    side = 32
    made = planes(torch.randn(1, 3, side, side // 2 + 1, 2, generator=torch.Generator().manual_seed(0)), side)
    assert made.shape == (1, 3, side, side)
    assert made.dtype == torch.float32
    flat = planes(torch.ones(1, 3, side, side // 2 + 1, 2), side)
    found = torch.fft.rfft2(flat[0, 0], norm="ortho").abs()
    assert found[0, 4] / found[0, 8] == pytest.approx(2, rel=1e-3)
    assert found[3, 4] / found[6, 8] == pytest.approx(2, rel=1e-3)


def test_grey_stays_grey_and_colours_go_together() -> None:
    mixed = coloured(torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1))[0, :, 0, 0]
    assert mixed.min() > 0.5
    assert mixed.max() / mixed.min() < 1.05


def test_a_filter_of_stripes_gives_stripes_of_its_frequency_and_angle() -> None:
    side, period = 48, 8
    stripes = torch.cos(2 * torch.pi * torch.arange(16) / period)
    kernel = stripes[None, :].expand(16, 16)[None, None] / 256  # they stand: the image changes from left to right

    def score(picture: Tensor) -> Tensor:
        return F.conv2d(picture.mean(1, keepdim=True), kernel).square().mean()

    picture, curve = climbed(score, side, 40, 0, CPU)
    frequency = (torch.fft.fftfreq(side)[:, None] ** 2 + torch.fft.rfftfreq(side)[None] ** 2).sqrt()
    power = torch.fft.rfft2(picture[0].mean(0)).abs() * frequency  # what was learnt, without the weights that it began with
    row, column = divmod(int(power.argmax()), power.shape[1])
    assert abs(column - side / period) <= 1
    assert min(row, side - row) <= 1
    assert np.mean(curve[-10:]) > 5 * np.mean(curve[:10])


def test_movements_are_small_and_seeded() -> None:
    picture = torch.rand(1, 3, 32, 32)
    one, other = (moved(picture, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, picture)
    grey = torch.full((1, 3, 8, 8), 0.5)
    assert torch.allclose(moved(grey, torch.Generator().manual_seed(1)), grey)


def test_the_class_image_raises_its_logit_and_is_the_same_for_a_seed(small: Model, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in small.state_dict().items()}
    frog = class_image(small, "frog", steps=24)
    assert frog.label == "frog"
    assert frog.pixels.shape == (32, 32, 3)
    assert frog.pixels.dtype == np.uint8
    assert np.mean(frog.curve[-6:]) > np.mean(frog.curve[:6])
    assert small(small.preprocess(frog.pixels))[0, 6] > small(small.preprocess(np.full((32, 32, 3), 128, np.uint8)))[0, 6]
    assert np.array_equal(frog.pixels, class_image(small, "frog", steps=24).pixels)
    assert not np.array_equal(frog.pixels, class_image(small, "frog", steps=24, seed=1).pixels)
    assert all(torch.equal(before[name], value) for name, value in small.state_dict().items())
    with Image.open(frog.save(tmp_path / "frog.png")) as saved:
        assert np.array_equal(np.asarray(saved), frog.pixels)


def test_what_cannot_be_drawn_is_refused(small: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draws one target"):
        class_image(small, ["frog", "cat"])
    with pytest.raises(CannotExplain, match="no class 'frogg'"):
        class_image(small, "frogg")
    with pytest.raises(ValueError, match="needs a network with a checkpoint"):
        class_image(ResNet20(), 1)
    with pytest.raises(ValueError, match="steps is a whole number"):
        class_image(small, "frog", steps=0)
    with pytest.raises(ValueError, match=r"name it frog\.png"):
        class_image(small, "frog", steps=1).save(tmp_path / "frog.jpg")


def test_a_channels_image_raises_the_mean_of_its_map(small: Model) -> None:
    found = class_image(small, at="layer2", channel=5, steps=24)
    assert found.label == "channel 5 of layer2"
    tap = features(small, at=["layer2"])

    def mean(pixels: np.ndarray) -> float:
        with torch.inference_mode():
            return float(tap(small.preprocess(Image.fromarray(pixels)))["layer2"][0, 5].mean())

    grey = np.full_like(found.pixels, 128)
    assert mean(found.pixels) > mean(grey) + 0.1
    assert not np.array_equal(found.pixels, class_image(small, at="layer2", channel=6, steps=24).pixels)


def test_maco_learns_phases_alone(small: Model) -> None:
    side = 32
    one, other = (in_phase(torch.randn(1, 3, side, side // 2 + 1, generator=torch.Generator().manual_seed(n)), side) for n in (0, 1))
    mixing = torch.linalg.inv(coloured(torch.eye(3).view(3, 3, 1, 1))[..., 0, 0].T)
    spectra = [torch.fft.rfft2(torch.einsum("ij,bjhw->bihw", mixing, torch.logit(x))).abs()[..., 1:-1] for x in (one, other)]
    assert torch.allclose(spectra[0] / spectra[0].mean(), spectra[1] / spectra[1].mean(), rtol=1e-2, atol=1e-3)
    frog = class_image(small, "frog", steps=48, like="maco")
    assert np.mean(frog.curve[-6:]) > np.mean(frog.curve[:6]) + 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "draws a target, or a channel of a layer"),
        ({"target": "frog", "at": "layer2", "channel": 1}, "draws a target, or a channel of a layer"),
        ({"at": "layer2"}, "draws a target, or a channel of a layer"),
        ({"at": "layer2", "channel": 32}, "'layer2' has 32 channels, 0 to 31; got channel=32"),
        ({"at": "layer2", "channel": True}, "got channel=True"),
        ({"target": "frog", "like": "lucent"}, "like is 'lucid' or 'maco', got 'lucent'"),
        ({"at": "layr2", "channel": 1}, "layer2"),
    ],
)
def test_what_cannot_be_drawn_is_named(small: Model, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_image(small, steps=1, **how)


def test_what_nothing_excites_is_named() -> None:
    with pytest.raises(ValueError, match="nothing excites it"):
        climbed(lambda picture: (picture * 0).sum(), 16, 1, 0, CPU)
