"""What a style network is trained by: how far a painting's features are from the photograph's, and its texture from the style picture's.

Each term is divided by what it is of photographs as they are, so that one pair of weights serves every loss network: style 1 is a
photograph that nobody painted, content 1 a painting that shows another photograph. It needs PyTorch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEAST = 1e-12
"""Where a term of photographs is smaller, it is divided by this."""


@dataclass(frozen=True)
class Taps:
    """Which maps of a network measure style and content, and what images it reads.

    Attributes:
        style: numbers of children of the network's `features`, after which maps are taken.
        content: the number of the one whose map is compared pixel by pixel.
        mean: of each channel in the network's own order, on the range 0..255.
        std: likewise.
        bgr: whether it reads blue first.
        smooth: whether maps are averaged over 2x2 pixels before they are compared: strided first convolutions see every second pixel, and
            a painting that is trained by them alone gets a checkerboard.
    """

    style: tuple[int, ...]
    content: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    bgr: bool = False
    smooth: bool = False


IMAGENET = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
TAPS = {
    "VGG16": Taps((3, 8, 15, 22), 8, *IMAGENET),  # relu1_2, relu2_2, relu3_3, relu4_3: Johnson et al. 2016
    "VGG19": Taps((1, 6, 11, 20), 6, *IMAGENET),  # relu1_1, relu2_1, relu3_1, relu4_1
    "SqueezeNet1_0": Taps((1, 4, 7, 9), 4, (104.0, 117.0, 123.0), (1.0, 1.0, 1.0), bgr=True),
    "EfficientNetLite0": Taps((1, 2, 3, 5), 2, (127.5, 127.5, 127.5), (127.5, 127.5, 127.5), smooth=True),
}
"""The networks that measure style here; SqueezeNet's numbers are those of its authors' Caffe file."""


class LossNetwork(nn.Module):
    """The front of a classifier as far as its last tap, with what it subtracts from images of 0..255; it learns nothing."""

    mean: Tensor
    std: Tensor

    def __init__(self, layers: Sequence[nn.Module], taps: Taps) -> None:
        """Keep the layers that are needed.

        Args:
            layers: of the network, in order.
            taps: see there.
        """
        super().__init__()
        self.taps, self.last = taps, max(*taps.style, taps.content)
        self.layers = nn.ModuleList(layers[: self.last + 1])
        self.register_buffer("mean", torch.tensor(taps.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(taps.std).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> LossNetwork:
        """Stay in eval mode: BatchNorm must not learn from paintings."""
        del mode
        return super().train(False)

    def forward(self, images: Tensor, content_only: bool = False) -> tuple[list[Tensor], Tensor]:
        """Return the maps that measure style, [] with `content_only`, and the map that measures content."""
        x = images.flip(1) if self.taps.bgr else images
        x = (x - self.mean) / self.std
        x = x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x  # as its weights lie there
        style: list[Tensor] = []
        content = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in self.taps.style and not content_only:
                style.append(x)
            if number == self.taps.content:
                content = x
                if content_only:
                    break
        return style, content


def gram(x: Tensor, smooth: bool = False) -> Tensor:
    """Return which channels are active together, (B, C, C), divided by C H W; in float32, for float16 overflows.

    Maps in bfloat16 are multiplied as they are, in parts whose sums are added in float32.

    Source: https://arxiv.org/abs/1603.08155, equation 3.
    """
    with torch.autocast(x.device.type, enabled=False):
        x = F.avg_pool2d(x, 2) if smooth else x
        if x.dtype is torch.bfloat16:
            return _HalfGram.apply(x)  # pyright: ignore[reportReturnType]
        flat = x.float().flatten(2)
        return flat @ flat.transpose(1, 2) / flat[0].numel()


class _HalfGram(torch.autograd.Function):
    """A Gram matrix of bfloat16 maps: read once, instead of widened, multiplied by few threads, and differentiated by both of its factors.

    A matrix of C by C is small work for a GPU, and its sum over all pixels a long one: parts of `PIXELS` keep all of it busy. Each part is
    rounded to bfloat16, and their sum is not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        batch, channels, height, width = x.shape
        flat = _parts(x)
        return (flat @ flat.transpose(1, 2)).view(batch, -1, channels, channels).sum(1, dtype=torch.float32) / (channels * height * width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        both = ((gradient + gradient.transpose(1, 2)) / x[0].numel()).to(x.dtype)
        flat = x.flatten(2)
        if x.is_contiguous(memory_format=torch.channels_last):  # and so is what is returned; `both` is its own transpose
            return (flat.transpose(1, 2) @ both).transpose(1, 2).unflatten(2, x.shape[2:])
        return (both @ flat).unflatten(2, x.shape[2:])


PIXELS = 4096
"""Pixels of a map that are multiplied at once."""


def _parts(x: Tensor) -> Tensor:
    """Return (B parts, C, pixels) of a map, without a copy in either order of its memory; in one part where it can't be divided."""
    flat = x.flatten(2)
    pixels = flat.shape[2]
    parts = pixels // PIXELS if pixels % PIXELS == 0 and pixels else 1
    return flat.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1) if parts > 1 else flat


def variation(images: Tensor) -> Tensor:
    """Return the mean square of the difference between neighbouring pixels."""
    return (images[..., 1:, :] - images[..., :-1, :]).square().mean() + (images[..., 1:] - images[..., :-1]).square().mean()


class StyleLoss(nn.Module):
    """The three terms of a painting's loss, each divided by its value of photographs.

    Attributes:
        targets: the style picture's Gram matrices.
        scales: what style terms, the content term and the variation are divided by; set by `measure`.
    """

    def __init__(self, network: LossNetwork, style: Sequence[Tensor]) -> None:
        """Measure the style picture.

        Args:
            network: see `LossNetwork`.
            style: the picture, at one or more sizes, (1, 3, H, W) of 0..255; Gram matrices are averaged over the sizes.
        """
        super().__init__()
        self.network = network
        with torch.no_grad():
            found = [[gram(x, network.taps.smooth) for x in network(picture)[0]] for picture in style]
        self.targets = [torch.stack(ones).mean(0) for ones in zip(*found, strict=True)]
        self.scales: tuple[list[float], float, float] = ([1.0] * len(self.targets), 1.0, 1.0)

    @torch.no_grad()
    def measure(self, photographs: Tensor) -> None:
        """Take the scales from several photographs, (B, 3, H, W), B at least 2: content is compared with the next photograph's."""
        maps, content = self.network(photographs)
        grams = [gram(x, self.network.taps.smooth) for x in maps]
        style = [max(LEAST, float(F.mse_loss(g, t.expand_as(g)))) for g, t in zip(grams, self.targets, strict=True)]
        other = max(LEAST, float(self._content(content, content.roll(1, 0))))
        self.scales = (style, other, max(LEAST, float(variation(photographs))))

    def forward(self, paintings: Tensor, photographs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return style, content and variation of paintings (B, 3, H, W) of photographs of the same shape."""
        with torch.no_grad():
            wanted = self.network(photographs, content_only=True)[1]
        maps, content = self.network(paintings)
        style, other, rough = self.scales
        grams = [gram(x, self.network.taps.smooth) for x in maps]
        terms = [F.mse_loss(g, t.expand_as(g)) / s for g, t, s in zip(grams, self.targets, style, strict=True)]
        return torch.stack(terms).mean(), self._content(content, wanted) / other, variation(paintings.float()) / rough

    def _content(self, x: Tensor, y: Tensor) -> Tensor:
        if self.network.taps.smooth:
            x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
        return F.mse_loss(x.float(), y.float())
