"""Any picture as a style, without training: AdaIN (Huang & Belongie 2017), in the files of its PyTorch port.

Its weights are nobody's here: their authors state no licence, and they have 94 MB. Both files are read from where they lie.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from convert import formats, sandbox
from convert.formats._torch import as_tensor
from weights import WeightsMismatch
from weights.places import at_home
from zoo.stylizing.painting import as_batch, read

EPS = 1e-5
SIDE = 512
"""Shorter side in pixels that a style picture is reduced to: that is the scale of its strokes."""


def _conv(in_channels: int, out_channels: int) -> list[nn.Module]:
    return [nn.ReflectionPad2d(1), nn.Conv2d(in_channels, out_channels, 3), nn.ReLU()]


def encoder() -> nn.Sequential:
    """Build VGG19 up to relu4_1 as `vgg_normalised.pth` names its layers, a 1x1 convolution for the colours first."""
    pool = [nn.MaxPool2d(2, ceil_mode=True)]
    return nn.Sequential(
        nn.Conv2d(3, 3, 1), *_conv(3, 64), *_conv(64, 64), *pool, *_conv(64, 128), *_conv(128, 128), *pool,
        *_conv(128, 256), *_conv(256, 256), *_conv(256, 256), *_conv(256, 256), *pool, *_conv(256, 512),
    )  # fmt: skip


def decoder() -> nn.Sequential:
    """Build the way back as `decoder.pth` names its layers."""
    up = nn.Upsample(scale_factor=2, mode="nearest")
    return nn.Sequential(
        *_conv(512, 256), up, *_conv(256, 256), *_conv(256, 256), *_conv(256, 256), *_conv(256, 128), up,
        *_conv(128, 128), *_conv(128, 64), up, *_conv(64, 64), nn.ReflectionPad2d(1), nn.Conv2d(64, 3, 3),
    )  # fmt: skip


class Arbitrary(nn.Module):
    """AdaIN with one style picture's mean and standard deviation: a network for `stylize`.

    Attributes:
        multiple: of the sides in pixels.
    """

    mean: Tensor
    std: Tensor
    multiple = 8

    def __init__(self, parts: AdaIN, style: Tensor) -> None:
        """Measure a style picture, (1, 3, H, W) of 0..255."""
        super().__init__()
        self.encoder, self.decoder = parts.encoder, parts.decoder
        with torch.no_grad():
            std, mean = _moments(self.encoder(style / 255))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        """Paint photographs (B, 3, H, W) of 0..255. Source: https://arxiv.org/abs/1703.06868, equation 8."""
        content = self.encoder(x / 255)
        std, mean = _moments(content)
        return 255 * self.decoder((content - mean) / std * self.std + self.mean)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return standard deviation and mean of each channel, as the port computes them: with EPS under the root."""
    variance, mean = torch.var_mean(x, dim=(2, 3), keepdim=True)
    return (variance + EPS).sqrt(), mean


class AdaIN:
    """Arbitrary style transfer: `AdaIN(encoder_file, decoder_file).style("starry.jpg")` is a network for `stylize`.

    Source:
        https://arxiv.org/abs/1703.06868; the names of the layers are those of https://github.com/naoto0804/pytorch-AdaIN.

    Example:
        >>> adain = AdaIN("vgg_normalised.pth", "decoder.pth")  # doctest: +SKIP
        >>> stylize("photo.jpg", adain.style("starry.jpg"))  # doctest: +SKIP
    """

    def __init__(self, encoder_file: str | os.PathLike[str], decoder_file: str | os.PathLike[str]) -> None:
        """Load both halves.

        Args:
            encoder_file: vgg_normalised.pth, or any format that `convert` reads with its names.
            decoder_file: decoder.pth, likewise.

        Raises:
            FileNotFoundError: a file is not there.
            WeightsMismatch: a file holds other tensors.
        """
        self.encoder = _filled(encoder(), encoder_file, spare=True).eval()
        self.decoder = _filled(decoder(), decoder_file, spare=False).eval()

    def style(self, picture: Any) -> Arbitrary:
        """Return a network that paints in the style of a picture: a path, a PIL image or an array.

        Raises:
            BadImage: the picture can't be used.
        """
        image, _ = read(picture)
        scale = max(1.0, min(image.size) / SIDE)
        image = image.resize([round(side / scale) for side in image.size]) if scale > 1 else image
        return Arbitrary(self, as_batch(image, torch.device("cpu"))).eval()


def _filled(network: nn.Sequential, file: str | os.PathLike[str], spare: bool) -> nn.Sequential:
    """Fill a half of AdaIN; with `spare`, layers of the file behind the last one of the network are left out."""
    path = at_home(file)
    if not path.is_file():
        raise FileNotFoundError(f"'{path}' is no file; AdaIN needs vgg_normalised.pth and decoder.pth of pytorch-AdaIN")
    with sandbox.read(path, formats.sniff(path)) as opened:
        tensors: Mapping[str, Tensor] = {name: as_tensor(one.array()).contiguous().float() for name, one in opened.tensors.items()}
    wanted = network.state_dict()
    if spare:
        tensors = {name: value for name, value in tensors.items() if name in wanted or int(name.partition(".")[0]) < len(network)}
    wrong = [
        name for name in {**wanted, **tensors} if name not in wanted or name not in tensors or wanted[name].shape != tensors[name].shape
    ]
    if wrong:
        raise WeightsMismatch(f"{path} is not this half of AdaIN: {', '.join(sorted(wrong)[:5])} are missing or of other shapes")
    network.load_state_dict(dict(tensors))
    return network.requires_grad_(False)
