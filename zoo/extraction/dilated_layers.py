"""Layers that have lost their stride where PyTorch's own, with another stride, would compute something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pair = tuple[int, int]


class AtrousConv2d(nn.Conv2d):
    """A convolution that was padded as TensorFlow pads for its `stride`, at stride 1: where both look, they see the same pixels.

    `even` pads as for even sizes whatever the size, as `zoo.networks.layers.Conv2dEven` does.
    """

    def __init__(self, layer: nn.Conv2d, stride: Pair, dilation: int, even: bool) -> None:
        """Take the parameters of `layer`, whose stride was `stride`, for a map whose neighbours were `dilation` apart."""
        size = (layer.kernel_size[0], layer.kernel_size[1])
        super().__init__(layer.in_channels, layer.out_channels, size, 1, 0, dilation, layer.groups, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lost, self.even = stride, even

    @property
    def before(self) -> Pair:
        """Pixels padded before even sizes."""
        return _before(_pair(self.kernel_size), self.lost, _pair(self.dilation))

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (B, C, H, W) to (B, C', H, W)."""
        padding = _padding(input, self.kernel_size, self.lost, self.dilation, self.even)
        return self._conv_forward(F.pad(input, padding), self.weight, self.bias)


class AtrousMaxPool2d(nn.MaxPool2d):
    """A max pool that has lost its stride and keeps the size of the map; no maximum is ever taken of padding, unless it is zeros."""

    def __init__(self, size: Pair, lost: Pair, dilation: int, before: Pair | None, fill: float = float("-inf")) -> None:
        """Pool windows of `size`; `before` pixels of `fill` are above and left, None as TensorFlow's SAME does at the stride `lost`."""
        super().__init__(size, 1, 0, dilation)
        self.lost, self.explicit, self.fill = lost, before, fill

    @property
    def before(self) -> Pair:
        """Pixels padded before even sizes."""
        if self.explicit is not None:
            return self.explicit
        return _before(_pair(self.kernel_size), self.lost, _pair(self.dilation))

    def forward(self, input: Tensor) -> Tensor:
        """Pool (B, C, H, W) to the same size."""
        size, dilation = _pair(self.kernel_size), _pair(self.dilation)
        if self.explicit is not None:
            padding = _trailing(size, dilation, self.explicit)
        else:
            padding = _padding(input, size, self.lost, dilation, even=False)
        return F.max_pool2d(F.pad(input, padding, value=self.fill), size, 1, 0, dilation)


class AtrousAvgPool2d(nn.AvgPool2d):
    """An average pool with gaps between the pixels that it averages, at stride 1."""

    def __init__(self, size: Pair, dilation: int, before: Pair, keeps_size: bool, counts_padding: bool) -> None:
        """Average windows of `size` whose pixels are `dilation` apart; `keeps_size` pads below and right what the size needs."""
        super().__init__(size, 1, 0, count_include_pad=counts_padding)
        self.dilation, self.before, self.keeps_size = (dilation, dilation), before, keeps_size

    def forward(self, input: Tensor) -> Tensor:
        """Pool (B, C, H, W); to the same size where that is kept."""
        size = _pair(self.kernel_size)
        rows, columns = self.before
        padding = _trailing(size, self.dilation, self.before) if self.keeps_size else [columns, columns, rows, rows]
        channels = input.shape[1]
        # A convolution, for no average pool of PyTorch's has a dilation.
        total = F.conv2d(F.pad(input, padding), input.new_ones(channels, 1, *size), dilation=self.dilation, groups=channels)
        if self.count_include_pad and not self.keeps_size:
            return total / (size[0] * size[1])
        inside = F.pad(torch.ones_like(input[:1, :1]), padding)
        return total / F.conv2d(inside, input.new_ones(1, 1, *size), dilation=self.dilation)


class AtrousAvgPoolSame(nn.AvgPool2d):
    """An average pool that was padded as TensorFlow pads for its `stride` and counts the zeros, with gaps, at stride 1."""

    def __init__(self, size: Pair, lost: Pair, dilation: int) -> None:
        """Average windows of `size` whose pixels are `dilation` apart."""
        super().__init__(size, 1, 0)
        self.dilation, self.lost = (dilation, dilation), lost

    @property
    def before(self) -> Pair:
        """Pixels padded before even sizes."""
        return _before(_pair(self.kernel_size), self.lost, self.dilation)

    def forward(self, input: Tensor) -> Tensor:
        """Pool (B, C, H, W) to the same size."""
        size, channels = _pair(self.kernel_size), input.shape[1]
        padded = F.pad(input, _padding(input, size, self.lost, self.dilation, even=False))
        # A convolution, for no average pool of PyTorch's has a dilation.
        total = F.conv2d(padded, input.new_ones(channels, 1, *size), dilation=self.dilation, groups=channels)
        return total / (size[0] * size[1])


def _before(size: Pair, lost: Pair, dilation: Pair) -> Pair:
    rows, columns = (max(k - s, 0) // 2 * d for k, s, d in zip(size, lost, dilation, strict=True))
    return rows, columns


def _trailing(size: Pair, dilation: Pair, before: Pair) -> list[int]:
    """Return what F.pad needs to keep the size of a map, `before` of it above and left."""
    padding: list[int] = []
    for axis in (1, 0):  # F.pad names the last axis first
        padding += [before[axis], (size[axis] - 1) * dilation[axis] - before[axis]]
    return padding


def _padding(x: Tensor, size: Any, lost: Pair, dilation: Any, even: bool) -> list[int]:
    """Return the padding that keeps the size, and begins where TensorFlow's did at the stride `lost` for every `dilation`-th pixel."""
    padding: list[int] = []
    for axis in (1, 0):
        k, s, d = size[axis], lost[axis], dilation[axis]
        total = k - s
        if not even:
            length = -(-x.shape[2 + axis] // d)
            total = (-(-length // s) - 1) * s + k - length
        if k < s:  # else it is never negative, and a comparison would freeze this size into a trace
            total = max(total, 0)
        padding += [total // 2 * d, (k - 1) * d - total // 2 * d]
    return padding


def _pair(value: Any) -> Pair:
    return (value[0], value[1]) if isinstance(value, tuple | list) else (value, value)
