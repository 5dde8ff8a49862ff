"""Darknet's layers as PyTorch's: what each section of a .cfg computes.

Source: https://github.com/AlexeyAB/darknet, src/parser.c and the file of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from convert.formats._darknet_cfg import Section
from weights.errors import MalformedFile, UnsupportedFormat


class HardMish(nn.Module):
    """Darknet's hard_mish: x above 0, x²/2 + x down to -2, and 0 below."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it of every number."""
        return torch.where(x > 0, x, torch.where(x > -2, x * x / 2 + x, torch.zeros_like(x)))


class Loggy(nn.Module):
    """Darknet's loggy: 2 / (1 + exp(-x)) - 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it of every number."""
        return 2 * torch.sigmoid(x) - 1


class Ramp(nn.Module):
    """Darknet's ramp: 1.1 x above 0, and 0.1 x below."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it of every number."""
        return F.relu(x) + 0.1 * x


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky": lambda: nn.LeakyReLU(0.1),
    "linear": nn.Identity,
    "mish": nn.Mish,
    "swish": nn.SiLU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "relie": lambda: nn.LeakyReLU(0.01),
    "logistic": nn.Sigmoid,
    "loggy": Loggy,
    "ramp": Ramp,
    "tanh": nn.Tanh,
    "hardtan": nn.Hardtanh,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": lambda: nn.GELU(approximate="tanh"),
    "hard_mish": HardMish,
}
"""Darknet's words for activations. gelu is its approximation by tanh."""
UNUSUAL = ("antialiasing", "share_index", "binary", "xnor", "bin_output", "deform", "sway", "rotate", "stretch", "assisted_excitation")
"""Settings of a convolution that compute something that nobody here does."""
EPS = {"alexeyab": 1e-5, "pjreddie": 1e-12}
"""What is added to a variance under its root. pjreddie's adds 1e-6 to the root: (sqrt(v) + 1e-6)² = v + 2e-6 sqrt(v) + 1e-12, of which
`pjreddie_variance` is the rest."""


def pjreddie_variance(variance: Tensor) -> Tensor:
    """Return the variance with which PyTorch's BatchNorm computes what pjreddie's Darknet does; see `EPS`."""
    wide = variance.double()
    return (wide + 2e-6 * wide.clamp_min(0).sqrt()).to(variance.dtype)


def activation(name: str, section: Section) -> nn.Module:
    """Return an activation by Darknet's word for it.

    Raises:
        UnsupportedFormat: nobody here knows it.
    """
    if name not in ACTIVATIONS:
        raise UnsupportedFormat(
            f"section {section.index}, [{section.kind}], has the activation {name!r}; known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]()


class Convolution(nn.Module):
    """[convolutional]: a convolution with a bias, or with BatchNorm, and an activation."""

    def __init__(self, section: Section, batch_norm: str) -> None:
        """Build it as a section says; `batch_norm` is one of `EPS`."""
        super().__init__()
        if unusual := next((word for word in UNUSUAL if section.number(word)), None):
            raise UnsupportedFormat(f"section {section.index} is a convolution with {unusual}, which nobody here computes")
        size, normed = section.number("size", 1), bool(section.number("batch_normalize"))
        dilation = section.number("dilation", 1) if size > 1 else 1
        filters, groups = section.number("filters", 1), section.number("groups", 1)
        padding = section.padding * dilation
        shape = section.reads[0], filters, size, section.stride, padding, dilation, groups
        self.conv = nn.Conv2d(*shape, bias=not normed)
        if normed:
            self.norm = nn.BatchNorm2d(filters, eps=EPS[batch_norm])
        self.act = activation(section.settings.get("activation", "logistic"), section)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, filters, H', W')."""
        x = self.conv(x)
        return self.act(self.norm(x) if hasattr(self, "norm") else x)


class BatchNorm(nn.Module):
    """[batchnorm]: BatchNorm alone."""

    def __init__(self, section: Section, batch_norm: str) -> None:
        """Build it as a section says; `batch_norm` is one of `EPS`."""
        super().__init__()
        self.norm = nn.BatchNorm2d(section.reads[0], eps=EPS[batch_norm])

    def forward(self, x: Tensor) -> Tensor:
        """Return the map, normalised."""
        return self.norm(x)


class LocalMean(nn.Module):
    """[local_avgpool]: means over windows; what lies outside of the map does not count."""

    def __init__(self, size: int, stride: tuple[int, int], padding: int) -> None:
        """Build it with the window's side, its stride and the padding of both sides together, in cells."""
        super().__init__()
        self.size, self.stride, self.pads = size, stride, (padding // 2, padding - padding // 2) * 2

    def forward(self, x: Tensor) -> Tensor:
        """Return the means."""
        there = F.pad(torch.ones_like(x[:1, :1]), self.pads)
        return F.avg_pool2d(F.pad(x, self.pads), self.size, self.stride) / F.avg_pool2d(there, self.size, self.stride)


class Reorganise(nn.Module):
    """[reorg] in Darknet's own order of channels, which is not that of a space-to-depth.

    With c channels, stride s and c' = c / s², the input's numbers are read as (c', h s, w s). Output channel k of (c, h, w) has its row
    j and column i from channel k mod c', row j s + (k div c') div s, column i s + (k div c') mod s; then that is read as
    (c s², h / s, w / s).
    """

    def __init__(self, stride: int) -> None:
        """Build it with its stride."""
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, c s², h / s, w / s) of (B, c, h, w)."""
        s = self.stride
        batch, channels, height, width = x.shape
        x = x.reshape(batch, channels // s**2, height, s, width, s).permute(0, 3, 5, 1, 2, 4)
        return x.reshape(batch, channels * s**2, height // s, width // s)


class Join(nn.Module):
    """[route]: the chosen part of each map's channels, joined."""

    def __init__(self, section: Section, widths: Sequence[int]) -> None:
        """Build it as a section says, for maps of so many channels."""
        super().__init__()
        groups, which = section.number("groups", 1), section.number("group_id")
        if groups < 1 or not 0 <= which < groups or any(width % groups for width in widths):
            raise MalformedFile(f"section {section.index}, [route], takes part {which} of {groups} of {list(widths)} channels")
        self.parts = [(which * width // groups, (which + 1) * width // groups) for width in widths]
        self.whole = groups == 1

    def forward(self, *maps: Tensor) -> Tensor:
        """Return the parts of these maps, joined."""
        chosen = maps if self.whole else [each[:, start:stop] for each, (start, stop) in zip(maps, self.parts, strict=True)]
        return chosen[0] if len(chosen) == 1 else torch.cat(list(chosen), 1)


class Sum(nn.Module):
    """[shortcut]: the sum of maps, and an activation."""

    def __init__(self, section: Section) -> None:
        """Build it as a section says."""
        super().__init__()
        if section.settings.get("weights_type", "none") != "none":
            raise UnsupportedFormat(f"section {section.index} is a [shortcut] with weights, which nobody here computes")
        self.act = activation(section.settings.get("activation", "linear"), section)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """Return the sum."""
        for other in others:
            x = x + other
        return self.act(x)


class Scale(nn.Module):
    """[scale_channels] and [sam]: one map times another, of which the first may be a number a channel."""

    def __init__(self, section: Section) -> None:
        """Build it as a section says."""
        super().__init__()
        if section.number("scale_wh"):
            raise UnsupportedFormat(f"section {section.index} is a [scale_channels] with scale_wh, which nobody here computes")
        self.act = activation(section.settings.get("activation", "linear"), section)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product."""
        return self.act(x * other)


class Upsample(nn.Module):
    """[upsample]: every number repeated, times a factor."""

    def __init__(self, section: Section) -> None:
        """Build it as a section says."""
        super().__init__()
        self.factor, self.scale = section.number("stride", 2), float(section.settings.get("scale", 1))
        if self.factor < 1:
            raise UnsupportedFormat(f"section {section.index} is an [upsample] of stride {self.factor}, which nobody here computes")

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H f, W f)."""
        x = F.interpolate(x, scale_factor=float(self.factor), mode="nearest")
        return x if self.scale == 1 else x * self.scale


def maximum(section: Section) -> nn.Module:
    """Build a [maxpool]: its window begins `padding` // 2 before the map, and what lies outside never wins."""
    if section.number("maxpool_depth"):
        raise UnsupportedFormat(f"section {section.index} is a [maxpool] over channels, which nobody here computes")
    stride = section.stride
    size = section.number("size", stride[0])
    padding = section.number("padding", size - 1)
    if padding % 2 == 0 and padding <= size:
        return nn.MaxPool2d(size, stride, padding // 2)
    if (size, stride, padding) == (2, (2, 2), 1):
        return nn.MaxPool2d(2, 2, ceil_mode=True)  # the same for even and odd sides, and known to every engine
    first, last = padding // 2, padding - padding // 2
    return nn.Sequential(nn.ConstantPad2d((first, last, first, last), float("-inf")), nn.MaxPool2d(size, stride))


def layer(section: Section, maps: Sequence[tuple[int, int, int]], batch_norm: str) -> nn.Module:
    """Build what a section computes of the maps that it reads, whose channels, heights and widths are given.

    Raises:
        MalformedFile: the maps don't fit each other.
        UnsupportedFormat: nobody here knows such a section.
    """
    kind = section.kind
    if kind in ("route", "shortcut", "sam", "scale_channels"):
        alike = maps if kind in ("shortcut", "sam") else [each[1:] for each in maps] if kind == "route" else [each[:1] for each in maps]
        if len(set(alike)) > 1:
            raise MalformedFile(f"section {section.index}, [{kind}], joins maps of {', '.join(map(str, maps))} channels, rows and columns")
    stride = section.stride
    size = section.number("size", stride[0])
    known: dict[str, Callable[[], nn.Module]] = {
        "convolutional": lambda: Convolution(section, batch_norm),
        "batchnorm": lambda: BatchNorm(section, batch_norm),
        "maxpool": lambda: maximum(section),
        "local_avgpool": lambda: LocalMean(size, stride, section.number("padding", size - 1)),
        "avgpool": lambda: nn.AdaptiveAvgPool2d(1),
        "route": lambda: Join(section, [each[0] for each in maps]),
        "shortcut": lambda: Sum(section),
        "scale_channels": lambda: Scale(section),
        "sam": lambda: Scale(section),
        "upsample": lambda: Upsample(section),
        "reorg": lambda: Reorganise(_reorganised(section)),
        "dropout": lambda: nn.Dropout(float(section.settings.get("probability", 0.5))),
        "activation": lambda: activation(section.settings.get("activation", "linear"), section),
    }
    if kind not in known:
        raise UnsupportedFormat(f"section {section.index} is [{kind[:40]}]; detectors here have {', '.join(known)}, yolo and region")
    return known[kind]()


def _reorganised(section: Section) -> int:
    stride = section.number("stride", 1)
    if section.number("reverse") or section.number("extra") or section.number("flatten"):
        raise UnsupportedFormat(f"section {section.index} is a [reorg] with reverse, extra or flatten, which nobody here computes")
    if stride < 1 or section.reads[0] % stride**2:
        raise MalformedFile(f"section {section.index}, [reorg], divides {section.reads[0]} channels by {stride}²")
    return stride
