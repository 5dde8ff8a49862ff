"""The algorithms: what `dream` computes, against both programs written down from their texts, with SciPy's zoom and NumPy's roll."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.zoo.dreaming.dreams import levels, picture
from zoo import features
from zoo.dreaming import dream, dreamer
from zoo.dreaming.dreamer import WAYS, Asked
from zoo.dreaming.octaves import centre, nearer, sizes, zoomed
from zoo.networks.model import Model

HALF = 0.5 + 1e-6
"""Levels by which a picture that is rounded may differ."""
Gradient = Callable[[np.ndarray], np.ndarray]


@pytest.fixture
def exactly(network: Model) -> Model:
    """The network in double precision, where no ReLU turns by the order of a sum."""
    return copy.deepcopy(network).double()


def gradient(network: Model, at: str, guide: np.ndarray | None = None) -> Gradient:
    """Compute what the network's gradient of normalised images (3, H, W) is, seeded with the map or with the guide's vectors."""
    taken = features(network, at)

    def of(x: np.ndarray) -> Tensor:
        return taken(torch.from_numpy(x)[None].double())[at][0]

    def found(x: np.ndarray) -> np.ndarray:
        leaf = torch.from_numpy(x)[None].double().requires_grad_()
        a = taken(leaf)[at]
        seed = a.detach().clone()
        if guide is not None:
            y = of(guide).detach().flatten(1)
            flat = seed[0].flatten(1)
            for place in range(flat.shape[1]):
                flat[:, place] = y[:, int((flat[:, place] @ y).argmax())]
            seed = flat.view_as(a)
        (g,) = torch.autograd.grad(a, leaf, seed)
        return g[0].numpy()

    return found


def asked(**how: Any) -> Asked:
    way = WAYS["original"]
    return Asked("original", way, how["octaves"], 1.4, how["steps"], 1.5, how["jitter"], how["seed"], None)


def original(network: Model, image: Image.Image, found: Gradient, how: dict[str, Any]) -> np.ndarray:
    """The program of 2015: its levels are 0 to 255 less the mean, with no division by a deviation, which is the network's affair here."""
    from scipy import ndimage

    record = network.checkpoint.preprocessing  # pyright: ignore[reportOptionalMemberAccess]
    mean, std = (np.array(v)[:, None, None] for v in (record.mean, record.std))
    octaves = [np.asarray(image).transpose(2, 0, 1).astype(np.float64)]
    for _ in range(how["octaves"] - 1):
        octaves.append(ndimage.zoom(octaves[-1], (1, 1 / 1.4, 1 / 1.4), order=1))
    rolls = asked(**how).offsets(how["octaves"], 0)
    detail = np.zeros_like(octaves[-1])
    src = detail
    for octave, base in enumerate(octaves[::-1]):
        h, w = base.shape[-2:]
        if octave:
            h1, w1 = detail.shape[-2:]
            detail = ndimage.zoom(detail, (1, h / h1, w / w1), order=1)
        src = base + detail
        for oy, ox in rolls[octave]:
            src = np.roll(np.roll(src, ox, -1), oy, -2)
            g = found((src / 255 - mean) / std) / (255 * std)
            src = src + 1.5 / np.abs(g).mean() * g
            src = np.clip(np.roll(np.roll(src, -ox, -1), -oy, -2), 0, 255)
        detail = src - base
    return src


@pytest.mark.reference
@pytest.mark.parametrize("guide", [None, picture(30, 26, seed=9)], ids=["alone", "guided"])
def test_the_program_of_2015_gives_the_same_picture(guide: Image.Image | None, exactly: Model) -> None:
    how: dict[str, Any] = {"octaves": 3, "steps": 3, "jitter": 9, "seed": 5}
    record = exactly.checkpoint.preprocessing  # pyright: ignore[reportOptionalMemberAccess]
    mean, std = (np.array(v)[:, None, None] for v in (record.mean, record.std))
    shown = None if guide is None else (np.asarray(guide).transpose(2, 0, 1) / 255 - mean) / std
    wanted = original(exactly, picture(), gradient(exactly, "layer2", shown), how)
    found = levels(dream(exactly, picture(), at="layer2", guide=guide, progress=False, **how)).transpose(2, 0, 1)
    assert np.abs(wanted - levels(picture()).transpose(2, 0, 1)).mean() > 5
    assert np.abs(found - wanted).max() < HALF


def test_deepdream_jl_gives_the_same_picture(exactly: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its text: middles enlarged to the whole, no rolls, nothing clipped in a step, everything on the way through a picture."""
    assert dreamer.SIDE == 224
    monkeypatch.setattr(dreamer, "SIDE", side := 64)
    record = exactly.checkpoint.preprocessing  # pyright: ignore[reportOptionalMemberAccess]
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (record.mean, record.std))
    image = picture(200, 150)

    def resized(x: Tensor, height: int, width: int) -> Tensor:
        """Lines between the centres of pixels, which a smaller picture doesn't average."""
        rows, columns = (
            ((torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5).clamp(0, old - 1)
            for new, old in ((height, x.shape[1]), (width, x.shape[2]))
        )
        for axis, at in ((1, rows), (2, columns)):
            low = at.floor().long()
            high = (low + 1).clamp(max=x.shape[axis] - 1)
            share = (at - low).view(-1, 1) if axis == 1 else at - low
            x = x.index_select(axis, low) * (1 - share) + x.index_select(axis, high) * share
        return x

    def through_a_picture(x: Tensor) -> Tensor:
        return (x * std + mean).clamp(0, 1)

    def zoom_image(x: Tensor, scale: float) -> Tensor:
        shown, inverse = through_a_picture(x), 1 / scale
        first, last = (min(max(math.ceil(side * (1 + way * inverse) / 2), 1), side) for way in (-1, 1))
        part = shown[:, first - 1 : last, first - 1 : last]
        return (resized(part, side, side) - mean) / std

    found = gradient(exactly, "layer2")
    levels_in = torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255
    octaves = [(resized(levels_in, side, side) - mean) / std]
    for _ in range(2):
        octaves.append(zoom_image(octaves[-1], 2.0))
    detail, out = torch.zeros_like(octaves[0]), octaves[0]
    for i, octave in enumerate(octaves[::-1]):
        detail = zoom_image(detail, 1.0) if i else detail
        out = octave + detail
        for _ in range(3):
            g = torch.from_numpy(found(out.numpy()))
            out = out + 0.03 * g / g.abs().mean()
        detail = out - octave
    wanted = 255 * resized(through_a_picture(out), 150, 200).numpy()
    dreamt = levels(dream(exactly, image, at="layer2", like="deepdream.jl", steps=3, progress=False)).transpose(2, 0, 1)
    assert dreamt.shape == (3, 150, 200)
    assert np.abs(wanted - levels(image).transpose(2, 0, 1)).mean() > 2
    assert np.abs(dreamt - wanted).max() < HALF


@pytest.mark.reference
def test_octaves_and_frames_are_resized_as_scipy_does() -> None:
    from scipy import ndimage

    x = np.random.default_rng(0).normal(size=(3, 41, 54))
    smaller = ndimage.zoom(x, (1, 1 / 1.4, 1 / 1.4), order=1)
    assert sizes(41, 54, 2, 1.4)[1] == smaller.shape[1:]
    np.testing.assert_allclose(zoomed(torch.from_numpy(x)[None], *smaller.shape[1:])[0].numpy(), smaller, atol=1e-12)
    s, (h, w) = 0.05, x.shape[1:]
    zoom = ndimage.affine_transform(x, [1, 1 - s, 1 - s], [0, h * s / 2, w * s / 2], order=1)
    np.testing.assert_allclose(nearer(torch.from_numpy(x)[None], s)[0].numpy(), zoom, atol=1e-12)


def test_the_middle_of_a_picture_of_deepdream_jl_has_a_pixel_more_at_its_beginning() -> None:
    x = torch.arange(224.0).view(1, 1, 1, 224).expand(1, 1, 224, 224)
    middle = centre(x, 2.0)
    assert middle.shape == x.shape
    assert (float(middle[0, 0, 0, 0]), float(middle[0, 0, 0, -1])) == (55, 167)


def test_a_guide_pulls_towards_itself(network: Model) -> None:
    """Towards the channels that a red picture has, a grey one turns as the gradient by the guide's own vectors says."""
    image, one, other = picture(), picture(64, 64, seed=4), picture(64, 64, seed=8)
    towards = [levels(dream(network, image, at="layer2", guide=guide, steps=3, progress=False)) for guide in (one, other)]
    assert np.abs(towards[0] - towards[1]).mean() > 1
