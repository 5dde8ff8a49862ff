"""Blocks that two or more families use; a block of one family lives in that family's file."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.kernels import activations

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {name: one.layer for name, one in activations.ACTIVATIONS.items() if name != "none"}
"""Activations by the name that a checkpoint's record uses; a factory makes a fresh, never in-place, module."""


def activation(name: str) -> nn.Module:
    """Make the activation `name`, one of `ACTIVATIONS`; ValueError lists them when there is none of that name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation {name!r}; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def conv3x3(in_channels: int, out_channels: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Make a 3x3 convolution that keeps the size at stride 1 and has no bias, for a BatchNorm follows it."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, groups=groups, bias=False)


def conv1x1(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """Make a 1x1 convolution without bias, for a BatchNorm follows it."""
    return nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)


class SqueezeExcitation(nn.Module):
    """Scale each channel by a gate computed from all channels' means (Hu et al. 2017, https://arxiv.org/abs/1709.01507).

    Layers are named as in torchvision and timm: `fc1` and `fc2` are 1x1 convolutions.
    """

    def __init__(self, channels: int, squeezed: int, activation: nn.Module | None = None, gate: nn.Module | None = None) -> None:
        """Build a gate for `channels`, through `squeezed` channels; ReLU and sigmoid unless other modules are given."""
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = activation or nn.ReLU()
        self.scale_activation = gate or nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, (B, C, H, W), times the gate."""
        gate = self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))
        return x * gate


def pad_same(x: Tensor, kernel_size: tuple[int, ...], stride: tuple[int, ...], value: float = 0.0) -> Tensor:
    """Pad images (B, C, H, W) as TensorFlow's SAME does: windows then give ceil(size / stride), the odd pixel goes right and below.

    At stride 2 and an even size this pads (0, 1) where the usual symmetric padding pads (1, 1): same shapes, other numbers.
    """
    padding: list[int] = []
    for axis in (1, 0):  # F.pad names the last axis first
        size, step, width = x.shape[2 + axis], stride[axis], kernel_size[axis]
        total = (-(-size // step) - 1) * step + width - size
        if width < step:  # else it is never negative, and a comparison would freeze this size into a trace
            total = max(total, 0)
        padding += [total // 2, total - total // 2]
    return F.pad(x, padding, value=value)


class Conv2dSame(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (B, C, H, W) to (B, C', ceil(H / stride), ceil(W / stride))."""
        reach = tuple((width - 1) * dilation + 1 for width, dilation in zip(self.kernel_size, self.dilation, strict=True))
        return self._conv_forward(pad_same(input, reach, self.stride), self.weight, self.bias)


class Conv2dEven(nn.Conv2d):
    """A convolution with the padding that SAME has on even sizes, on odd ones too: Keras's MobileNets pad so, in a layer of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (B, C, H, W) to (B, C', H // stride, W // stride)."""
        padding: list[int] = []
        for width, step in zip(reversed(self.kernel_size), reversed(self.stride), strict=True):
            total = width - step
            padding += [total // 2, total - total // 2]
        return self._conv_forward(F.pad(input, padding), self.weight, self.bias)


class MaxPoolSame(nn.MaxPool2d):
    """A 3x3 max pool with TensorFlow's SAME padding, which no maximum ever is."""

    def __init__(self, stride: int) -> None:
        """Build it; `stride` is the same both ways."""
        super().__init__(3, stride)
        self.window, self.step = (3, 3), (stride, stride)

    def forward(self, input: Tensor) -> Tensor:
        """Pool (B, C, H, W) to (B, C, ceil(H / stride), ceil(W / stride))."""
        padded = pad_same(input, self.window, self.step, float("-inf"))
        return F.max_pool2d(padded, self.window, self.step)


def conv2d(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1, bias: bool = False, padding: str = "symmetric"
) -> nn.Conv2d:
    """Make a convolution padded to keep the size at stride 1.

    `padding` is "symmetric" (PyTorch), "same" (TensorFlow), or "even": as "same", but where it is depthwise and has a stride it
    always pads as for an even size. Keras's MobileNetV1 does, and its MobileNetV3 when it is built for images of any size.
    """
    if padding not in ("symmetric", "same", "even"):
        allowed = '"even" (some of Keras\'s MobileNets), "symmetric" (PyTorch) or "same" (TensorFlow)'
        raise ValueError(f"padding is {allowed}, got {padding!r}")
    if padding == "symmetric" or stride == 1:  # at stride 1 and an odd kernel all are the same arithmetic
        return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=bias)
    kind = Conv2dEven if padding == "even" and groups > 1 else Conv2dSame
    return kind(in_channels, out_channels, kernel_size, stride, groups=groups, bias=bias)


def conv_norm_act(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    groups: int = 1,
    act: str | None = "relu",
    padding: str = "symmetric",
    norm_eps: float = 1e-5,
    norm_momentum: float = 0.1,
) -> nn.Sequential:
    """Make convolution, BatchNorm and activation, named 0, 1, 2 as in torchvision; without activation when `act` is None."""
    layers: list[nn.Module] = [
        conv2d(in_channels, out_channels, kernel_size, stride, groups, padding=padding),
        nn.BatchNorm2d(out_channels, eps=norm_eps, momentum=norm_momentum),
    ]
    if act is not None:
        layers.append(activation(act))
    return nn.Sequential(*layers)


class StochasticDepth(nn.Module):
    """Drop a residual branch for random images of the batch while training (Huang et al. 2016, https://arxiv.org/abs/1603.09382)."""

    def __init__(self, p: float) -> None:
        """Drop each image's branch with probability `p`, 0 <= p < 1, and scale the surviving ones by 1 / (1 - p)."""
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"stochastic depth drops with a probability 0 <= p < 1, got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, (B, C, H, W) or (B, L, C), with the dropped images zero."""
        if not self.training or self.p == 0:
            return x
        survival = 1 - self.p
        # One draw an image, as torchvision draws: the same seed trains the same network.
        kept = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(survival)
        return x * (kept / survival)

    def extra_repr(self) -> str:
        """Show the probability in the printed network."""
        return f"p={self.p}"


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise convolution, gate and linear 1x1 projection, beside a shortcut where the shape stays.

    Howard et al. 2019, Figure 4 (https://arxiv.org/abs/1905.02244); EfficientNet calls it MBConv.
    """

    def __init__(
        self,
        layer: Callable[..., nn.Sequential],
        in_channels: int,
        expanded: int,
        out_channels: int,
        kernel_size: int,
        stride: int,
        gate: nn.Module | None = None,
        stochastic_depth: float = 0.0,
    ) -> None:
        """Build the block of `layer`s, `conv_norm_act` with the network's options; `gate` sees the `expanded` channels."""
        super().__init__()
        steps: list[nn.Module] = []
        if expanded != in_channels:
            steps.append(layer(in_channels, expanded, 1))
        steps.append(layer(expanded, expanded, kernel_size, stride, groups=expanded))
        if gate is not None:
            steps.append(gate)
        steps.append(layer(expanded, out_channels, 1, act=None))
        self.block = nn.Sequential(*steps)
        self.stochastic_depth = StochasticDepth(stochastic_depth) if stride == 1 and in_channels == out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, `out_channels`, ceil(H / stride), ceil(W / stride))."""
        if self.stochastic_depth is None:
            return self.block(x)
        return x + self.stochastic_depth(self.block(x))


def divisible(channels: float, by: int = 8) -> int:
    """Round to the nearest multiple, but at most 10 % down: the widths that MobileNet's, EfficientNet's and RegNet's authors use."""
    rounded = max(by, int(channels + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * channels else rounded


class ConvNormReLU(nn.Module):
    """Convolution, BatchNorm and ReLU, named `conv` and `bn` as torchvision's GoogLeNet and InceptionV3 name them."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        """Build them for images of `in_channels`; the BatchNorm has Inception's eps of 0.001."""
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, `out_channels`, H', W')."""
        return self.relu(self.bn(self.conv(x)))


class PaddedShortcut(nn.Module):
    """Option A of He et al. 2015, section 4.1: every second pixel, new channels zero, no parameters."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.stride = in_channels, out_channels, 2
        before = (out_channels - in_channels) // 2
        self.padding = (0, 0, 0, 0, before, out_channels - in_channels - before)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.padding)


def imagenet_to_inception(x: Tensor) -> Tensor:
    """Turn images normalised with ImageNet's mean and deviation into images normalised to -1..1, which Inception's files read.

    Channel i is taken for the colour i % 3; a single channel is taken for grey, with the mean constants of the three colours.
    """
    if isinstance(x, torch.fx.Proxy):  # it looks at how many channels there are, so it is one operation to a symbolic trace
        return x.tracer.create_proxy("call_function", imagenet_to_inception, (x,), {})  # pyright: ignore[reportReturnType]
    constants = [((mean - 0.5) / 0.5, std / 0.5) for mean, std in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))]
    planes = x.split(1, dim=1)
    if len(planes) == 1:
        constants = [(sum(mean for mean, _ in constants) / 3, sum(std for _, std in constants) / 3)]
    return torch.cat([plane * std + mean for plane, (mean, std) in zip(planes, itertools.cycle(constants), strict=False)], 1)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of each pixel of a map."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, H, W)."""
        x = F.layer_norm(input.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Permute(nn.Module):
    """Reorder a tensor's axes: a module of its own, so that it has a place among a Sequential's numbers as in torchvision."""

    def __init__(self, *dims: int) -> None:
        """Put axis `dims[i]` at place i; ``Permute(0, 2, 3, 1)`` puts the channels of a map last."""
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with its axes in the new order."""
        return x.permute(self.dims)

    def extra_repr(self) -> str:
        """Show the order in the printed network."""
        return f"{self.dims}"


class SpaceToDepth(nn.Module):
    """Put the four pixels of each 2x2 square into one pixel's channels, in the order of Swin: a column, then the column on its right."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 4 C, ceil(H / 2), ceil(W / 2)); odd sides are padded with a zero below and on the right."""
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return torch.cat([x[:, :, row::2, column::2] for column in (0, 1) for row in (0, 1)], 1)


def pair_offsets(side: int, device: torch.device) -> Tensor:
    """Number the offsets of each pair of pixels of a square window, (N, N): rows of a table of (2 * `side` - 1) ** 2 biases.

    Source: Liu et al. 2021, section 3.2 (https://arxiv.org/abs/2103.14030).
    """
    place = torch.arange(side * side, device=device)
    y, x = place // side, place % side
    return (y[:, None] - y + side - 1) * (2 * side - 1) + x[:, None] - x + side - 1


class AvgPoolSame(nn.AvgPool2d):
    """A 3x3 average pool with TensorFlow's SAME padding whose zeros count, as NASNet's of stride 2 are computed by Keras and timm."""

    def __init__(self, stride: int) -> None:
        """Build it; `stride` is the same both ways."""
        super().__init__(3, stride)
        self.window, self.step = (3, 3), (stride, stride)

    def forward(self, input: Tensor) -> Tensor:
        """Pool (B, C, H, W) to (B, C, ceil(H / stride), ceil(W / stride))."""
        return F.avg_pool2d(pad_same(input, self.window, self.step), self.window, self.step)


class MaxPoolZero(MaxPoolSame):
    """A 3x3 max pool with TensorFlow's SAME padding whose zeros take part in the maximum, as Keras pads NASNet's in a layer of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Pool (B, C, H, W) to (B, C, ceil(H / stride), ceil(W / stride))."""
        return F.max_pool2d(pad_same(input, self.window, self.step), self.window, self.step)


GELUS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "gelu_tanh": partial(nn.GELU, approximate="tanh")}
"""GELU, and its approximation by a hyperbolic tangent, which JAX computes."""


class MLP(nn.Module):
    """Two dense layers over the last axis, with an activation and a dropout between them, named as in timm."""

    def __init__(self, channels: int, hidden: int, activation: Callable[[], nn.Module] = nn.GELU, dropout: float = 0.0) -> None:
        """Build them for `channels` in and out, with `hidden` ones between; `activation` makes the module behind the first."""
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.act = activation()
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, `channels`)."""
        return self.fc2(self.drop(self.act(self.fc1(x))))


class LayerScale(nn.Module):
    """Multiply each channel, the last axis, by a learnt factor (Touvron et al. 2021, https://arxiv.org/abs/2103.17239)."""

    def __init__(self, channels: int, start: float = 1e-6) -> None:
        """Build it for `channels`, with factors that begin at `start`."""
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), start))

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, `channels`)."""
        return x * self.gamma


class GroupNorm(nn.GroupNorm):
    """PyTorch's, without its check of sizes in Python, of which jit.trace warns (Wu & He 2018, https://arxiv.org/abs/1803.08494)."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, C, H, W), each group of an image's channels with mean 0 and deviation 1, scaled and shifted by channel."""
        return torch.group_norm(input, self.num_groups, self.weight, self.bias, self.eps, False)


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose kernels have mean 0 and deviation 1, each over what it reads (Qiao et al. 2019, section 3.1).

    Source: https://arxiv.org/abs/1903.10520, with BiT's eps of 1e-8 added to the variance.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (B, C, H, W) to (B, C', H', W')."""
        # Not by F.batch_norm, whose check of sizes jit.trace warns of
        kernels = torch.batch_norm(self.weight.flatten(1).unsqueeze(0), None, None, None, None, True, 0.0, 1e-8, False)
        return self._conv_forward(input, kernels.view_as(self.weight), self.bias)


class ZeroPaddedMaxPool2d(nn.MaxPool2d):
    """A 3x3 max pool with stride 2 whose padding is zero, which may be the maximum: nothing normalises before it."""

    def __init__(self) -> None:
        super().__init__(3, 2, padding=1)

    def forward(self, input: Tensor) -> Tensor:
        """Pool (B, C, H, W) to (B, C, ceil(H / 2), ceil(W / 2))."""
        return F.max_pool2d(F.pad(input, (1, 1, 1, 1)), 3, 2)
