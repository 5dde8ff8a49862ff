"""AdaIN: the port's names, the paper's equation, and pictures of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from weights import WeightsMismatch
from zoo.stylizing import AdaIN, stylize
from zoo.stylizing.adain import decoder, encoder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("adain")
    whole = nn.Sequential(*encoder(), nn.ReflectionPad2d(1), nn.Conv2d(512, 8, 3))  # the published file goes on behind relu4_1
    torch.save(whole.state_dict(), folder / "vgg_normalised.pth")
    torch.save(decoder().state_dict(), folder / "decoder.pth")
    return folder / "vgg_normalised.pth", folder / "decoder.pth"


def test_layers_are_numbered_as_in_the_port() -> None:
    weights = [[int(name.partition(".")[0]) for name in made.state_dict() if "weight" in name] for made in (encoder(), decoder())]
    assert weights == [[0, 2, 5, 9, 12, 16, 19, 22, 25, 29], [1, 5, 8, 11, 14, 18, 21, 25, 28]]


def test_a_picture_is_a_style(files: tuple[Path, Path]) -> None:
    style = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8))
    network = AdaIN(*files).style(style)
    x = 255 * torch.rand(1, 3, 32, 32)
    mapped: list[torch.Tensor] = []
    network.decoder.register_forward_pre_hook(lambda _, args: mapped.append(args[0]))
    with torch.no_grad():
        network(x)
        wanted = network.encoder(torch.from_numpy(np.asarray(style).copy()).permute(2, 0, 1)[None] / 255)
    for reduce in (torch.mean, torch.std):
        assert torch.allclose(reduce(mapped[0], dim=(2, 3)), reduce(wanted, dim=(2, 3)), atol=2e-2, rtol=2e-2)
    assert stylize(Image.new("RGB", (30, 21)), network).size == (30, 21)


def test_the_other_half_is_refused(files: tuple[Path, Path]) -> None:
    with pytest.raises(WeightsMismatch, match="is not this half of AdaIN"):
        AdaIN(files[1], files[1])
    with pytest.raises(FileNotFoundError, match=r"needs vgg_normalised\.pth and decoder\.pth"):
        AdaIN("none.pth", files[1])
