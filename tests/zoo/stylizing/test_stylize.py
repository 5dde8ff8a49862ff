"""`stylize`: any size, transparency, orientation, strength and colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from zoo.images import BadImage
from zoo.stylizing import Johnson, stylize
from zoo.stylizing.learning import seeded
from zoo.stylizing.painting import LUMA, paint
from zoo.stylizing.quickly import quickest


class Negative(nn.Module):
    """Paints light dark, and demands what style networks demand of sides."""

    def __init__(self) -> None:
        super().__init__()
        self.white = nn.Parameter(torch.tensor(255.0))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] % 4 == 0
        assert x.shape[3] % 4 == 0
        assert min(x.shape[2:]) >= 16
        return self.white - x


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    draw = np.random.default_rng(0)
    return Image.fromarray(draw.integers(0, 256, (height, width, len(mode)), dtype=np.uint8), mode)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("size", [(1, 1), (3, 17), (31, 7), (40, 41), (64, 32)])
def test_a_painting_has_its_photographs_size(size: tuple[int, int]) -> None:
    photograph = picture(*size)
    painting = stylize(photograph, Negative())
    assert painting.size == size
    assert (pixels(painting) == 255 - pixels(photograph)).all()
    assert stylize(photograph, seeded(Johnson, 0, channels=2)).size == size


def test_transparency_stays_and_what_nobody_sees_is_white() -> None:
    photograph = picture(20, 24, "RGBA")
    alpha = np.full((24, 20), 255, np.uint8)
    alpha[:5], alpha[5:9] = 0, 100
    photograph.putalpha(Image.fromarray(alpha))
    painting = stylize(photograph, Negative())
    assert painting.mode == "RGBA"
    assert (np.asarray(painting)[..., 3] == alpha).all()
    assert (pixels(painting)[:5, :, :3] == 0).all()
    assert (pixels(painting)[5:, :, :3] == 255 - pixels(photograph)[5:, :, :3]).all()  # half seen, and not laid on white
    assert (pixels(stylize(np.asarray(photograph), Negative())) == pixels(painting)).all()
    opaque = picture(20, 24, "RGBA")
    opaque.putalpha(255)
    assert stylize(opaque, Negative()).mode == "RGB"


def test_a_photograph_that_lies_on_its_side_is_painted_upright(tmp_path: Path) -> None:
    photograph = picture(24, 16)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, mode in (("a.png", "RGB"), ("b.png", "RGBA")):
        image = photograph.convert(mode)
        if mode == "RGBA":
            image.putalpha(Image.fromarray(np.arange(16 * 24, dtype=np.uint8).reshape(16, 24)))
        image.save(tmp_path / name, exif=exif)
        painting = stylize(tmp_path / name, Negative())
        assert painting.size == (16, 24)
        upright = image.transpose(Image.Transpose.ROTATE_270)
        if mode == "RGBA":
            assert (np.asarray(painting.getchannel("A")) == np.asarray(upright.getchannel("A"))).all()
        else:
            assert (pixels(painting) == 255 - pixels(upright)).all()


def test_strength_is_the_paintings_share() -> None:
    photograph = picture(32, 32)
    assert (pixels(stylize(photograph, Negative(), strength=0)) == pixels(photograph)).all()
    half = pixels(stylize(photograph, Negative(), strength=0.5))
    assert np.abs(half - 127.5).max() <= 0.5


def test_kept_colours_are_the_photographs_and_the_brightness_is_the_paintings() -> None:
    photograph = Image.new("RGB", (32, 32), (120, 100, 140))
    painting = pixels(stylize(photograph, Negative(), keep_colour=True))[0, 0]
    assert np.abs((painting - painting.mean()) - np.array([0, -20, 20])).max() <= 1
    assert abs(painting @ np.array(LUMA) - (255 - np.array([120, 100, 140])) @ np.array(LUMA)) <= 1


def test_a_photograph_may_be_painted_smaller() -> None:
    seen: list[Any] = []
    network = Negative()
    network.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape[2:])))
    assert stylize(picture(64, 48), network, side=32).size == (64, 48)
    assert seen == [(24, 32)]


def test_large_pictures_are_painted_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    network = seeded(Johnson, 0, channels=4).eval()
    x = 255 * torch.rand(1, 3, 96, 32)
    whole = paint(network, x)
    calls: list[Any] = []
    network.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr("zoo.stylizing.painting.AT_ONCE", 96 * 32 * 4 - 1)
    monkeypatch.setattr("zoo.stylizing.painting.STRIP", 24)
    assert (paint(network, x) - whole).abs().max() < 0.01
    assert calls == []
    assert paint(network, x, strip=0).equal(whole)
    assert calls == [1]


def test_the_quickest_way_paints_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    network = seeded(Johnson, 0, channels=4).eval()
    x = 255 * torch.rand(1, 3, 32, 32)
    monkeypatch.setattr("zoo.stylizing.quickly._kernels", lambda network, x, dtype: lambda image: network(image) + 2)
    way = quickest(network, x)
    assert way.name == "float32"  # the other is two levels off
    with torch.no_grad():
        assert way.run(x).equal(network(x))

    def broken(*_: object) -> Any:
        raise RuntimeError("no engine")

    monkeypatch.setattr("zoo.stylizing.quickly._kernels", broken)
    assert quickest(seeded(Johnson, 1, channels=4).eval(), x).name == "float32"


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"strength": 1.5}, ValueError, "strength is 0 to 1, the painting's share, got 1.5"),
        ({"side": 3}, ValueError, "side is a whole number of at least 16, got 3"),
        ({"strip": -1}, ValueError, "strip is a whole number of at least 0, got -1"),
        ({"style": 7}, TypeError, "style is a name, a path or a style network, not a int"),
        ({"keep_color": True}, TypeError, "did you mean keep_colour"),
        ({"image": "none.jpg"}, BadImage, "none.jpg: there is no such file"),
    ],
)
def test_what_cannot_be_used_is_named(told: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        stylize(**{"image": picture(20, 20), "style": Negative(), **told})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match='there is no GPU here that PyTorch can use; leave device out, or say "cpu" instead of "cuda"'):
        stylize(picture(20, 20), Negative(), device="cuda")


@pytest.mark.gpu
def test_a_gpu_paints_what_a_cpu_does_in_every_way() -> None:
    network = seeded(Johnson, 0, channels=8).eval()
    photograph = picture(64, 48)
    right = pixels(stylize(photograph, network, device="cpu"))
    assert np.abs(pixels(stylize(photograph, network, device="cuda")) - right).max() <= 2
    assert np.abs(pixels(stylize(photograph, network, device="cuda", fast=True)) - right).mean() <= 1.5
