"""Networks that repaint a photograph in one style, as their authors wrote and named them.

All read RGB of 0..255 without any normalisation and give the same, to be clamped. They are no classifiers and so no part of the catalogue.
Only their norms look further than a few pixels: given the norms' statistics, a picture can be computed strip by strip. So each network says
which of its layers work at the photograph's own size, where memory is spent; see `zoo.stylizing.strips`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from weights import Checkpoint


class Statistics(Protocol):
    """Decides with which mean and variance an instance norm works."""

    def of(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance, (C,) each, for a map (1, C, H, W) that a norm is about to read."""
        ...


class InstanceNorm(nn.InstanceNorm2d):
    """Instance norm with a factor and a shift a channel; `statistics` may say mean and variance instead of the map itself.

    Source: https://arxiv.org/abs/1607.08022, equation 2.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels, eps=eps, affine=True)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if statistics is None and torch.compiler.is_compiling():  # in words that a compiler joins with what is beside it
            variance, mean = torch.var_mean(x.float(), (2, 3), correction=0, keepdim=True)
            scale = self.weight.float().view(-1, 1, 1) * (variance + self.eps).rsqrt()
            return (x.float() * scale + (self.bias.float().view(-1, 1, 1) - mean * scale)).to(x.dtype)
        if statistics is None:
            return F.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)
        mean, variance = statistics.of(self, x)
        return F.batch_norm(x, mean, variance, self.weight, self.bias, eps=self.eps)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of one map, (1, C, H, W), in float32."""
    variance, mean = torch.var_mean(x.float(), dim=(0, 2, 3), correction=0)
    return mean, variance


class Step(NamedTuple):
    """A layer that sees a few pixels, the norm that follows it, and the activation behind that."""

    local: Callable[[Tensor], Tensor]
    norm: InstanceNorm | None
    activation: Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """Return what it is given."""
    return x


def walk(x: Tensor, steps: tuple[Step, ...], statistics: Statistics | None = None) -> Tensor:
    """Apply steps one after the other."""
    for local, norm, activation in steps:
        x = local(x)
        x = activation(x if norm is None else norm(x, statistics))
    return x


class StyleNetwork(nn.Module):
    """A network from a photograph to its painting, RGB of 0..255 both, (B, 3, H, W), in sides that are multiples of 4.

    Attributes:
        paper: link to its source.
        multiple: of the sides in pixels.
        checkpoint: the record of its weights; None of an untrained one.
    """

    paper: ClassVar[str]
    multiple: ClassVar[int] = 4
    checkpoint: Checkpoint | None = None

    def entering(self) -> tuple[Step, ...]:
        """Return the steps from the photograph to half its size."""
        raise NotImplementedError

    def middle(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        """Compute what lies between, at half and a quarter of the size."""
        raise NotImplementedError

    def leaving(self) -> tuple[Step, ...]:
        """Return the steps from half the size to the painting."""
        raise NotImplementedError

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        """Paint photographs (B, 3, H, W) of 0..255; what comes back may lie a little outside that range.

        Raises:
            ValueError: the sides are no multiples of 4, or another number of channels.
        """
        if x.ndim != 4 or x.shape[1] != 3 or x.shape[2] % self.multiple or x.shape[3] % self.multiple:
            raise ValueError(
                f"{type(self).__name__} takes RGB images (B, 3, H, W) with sides that are multiples of {self.multiple}, "
                f"got {tuple(x.shape)}; stylize() takes images of any size"
            )
        return walk(self.middle(walk(x, self.entering(), statistics), statistics), self.leaving(), statistics)


class _Reflected(torch.autograd.Function):
    """A reflected border whose gradient is the same each time: PyTorch's own adds it up on a GPU in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, border: int) -> Tensor:
        ctx.border = border
        return F.pad(x, (border,) * 4, mode="reflect")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), n = gradients, ctx.border
        for dim in (2, 3):
            side = gradient.shape[dim] - 2 * n
            inner = gradient.narrow(dim, n, side).clone()
            inner.narrow(dim, 1, n).add_(gradient.narrow(dim, 0, n).flip(dim))
            inner.narrow(dim, side - 1 - n, n).add_(gradient.narrow(dim, n + side, n).flip(dim))
            gradient = inner
        return gradient, None


def reflected(x: Tensor, border: int) -> Tensor:
    """Put a border of so many pixels around maps (B, C, H, W), which mirrors what is inside of their edge."""
    if x.requires_grad and not torch.compiler.is_compiling():
        return _Reflected.apply(x, border)  # pyright: ignore[reportReturnType]
    return F.pad(x, (border,) * 4, mode="reflect")


class Mirrored(nn.Conv2d):
    """A convolution whose border is reflected."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]: torch calls it `input`
        border = self.kernel_size[0] // 2
        return super().forward(reflected(x, border) if border else x)


class Conv(nn.Module):
    """A convolution whose border is reflected; the attribute is called as in pytorch/examples."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv2d = Mirrored(in_channels, out_channels, kernel, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2d(x)


class UpConv(Conv):
    """The same on a map that is doubled first, each pixel four times."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2d(F.interpolate(x, scale_factor=2, mode="nearest"))


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, without a ReLU behind the sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.in1 = Conv(channels, channels, 3), InstanceNorm(channels)
        self.conv2, self.in2 = Conv(channels, channels, 3), InstanceNorm(channels)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        y = F.relu(self.in1(self.conv1(x), statistics))
        return x + self.in2(self.conv2(y), statistics)


class Johnson(StyleNetwork):
    """The network of Johnson and others, 2016, with instance norm, as pytorch/examples writes and names it: its files load as they are.

    Example:
        >>> Johnson(channels=8)(torch.rand(1, 3, 64, 96) * 255).shape
        torch.Size([1, 3, 64, 96])

    Source:
        https://arxiv.org/abs/1603.08155, supplementary material, Table 1; https://arxiv.org/abs/1607.08022 for the norms.
    """

    paper = "https://arxiv.org/abs/1603.08155"

    def __init__(self, channels: int = 32) -> None:
        """Build it untrained.

        Args:
            channels: of the first map; the published networks have 32, 16 or 8. The following ones have 2 and 4 times as many.
        """
        super().__init__()
        c = self.channels = channels
        self.conv1, self.in1 = Conv(3, c, 9), InstanceNorm(c)
        self.conv2, self.in2 = Conv(c, 2 * c, 3, 2), InstanceNorm(2 * c)
        self.conv3, self.in3 = Conv(2 * c, 4 * c, 3, 2), InstanceNorm(4 * c)
        self.res1, self.res2, self.res3 = Residual(4 * c), Residual(4 * c), Residual(4 * c)
        self.res4, self.res5 = Residual(4 * c), Residual(4 * c)
        self.deconv1, self.in4 = UpConv(4 * c, 2 * c, 3), InstanceNorm(2 * c)
        self.deconv2, self.in5 = UpConv(2 * c, c, 3), InstanceNorm(c)
        self.deconv3 = Conv(c, 3, 9)

    def entering(self) -> tuple[Step, ...]:
        return Step(self.conv1, self.in1, F.relu), Step(self.conv2, None, same)

    def middle(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        x = F.relu(self.in2(x, statistics))
        x = F.relu(self.in3(self.conv3(x), statistics))
        for block in (self.res1, self.res2, self.res3, self.res4, self.res5):
            x = block(x, statistics)
        return F.relu(self.in4(self.deconv1(x), statistics))

    def leaving(self) -> tuple[Step, ...]:
        return Step(self.deconv2, self.in5, F.relu), Step(self.deconv3, None, same)


class SameConv(nn.Conv2d):
    """A convolution without bias that is padded with zeros as TensorFlow's "SAME" pads even sides: the odd pixel right and below."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]: as above
        total = self.kernel_size[0] - self.stride[0]
        return super().forward(F.pad(x, (total // 2, total - total // 2) * 2))


class SameUp(nn.ConvTranspose2d):
    """A transposed 3x3 convolution to exactly twice the size, as TensorFlow's "SAME" cuts it: a pixel right and below."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]: as above
        return super().forward(x)[:, :, : 2 * x.shape[2], : 2 * x.shape[3]]


class EngstromResidual(nn.Module):
    """Two 3x3 convolutions with zeros around them, beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = SameConv(channels, channels, 3), InstanceNorm(channels, 1e-3)
        self.conv2, self.norm2 = SameConv(channels, channels, 3), InstanceNorm(channels, 1e-3)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x), statistics))
        return x + self.norm2(self.conv2(y), statistics)


def tanh_range(x: Tensor) -> Tensor:
    """Bring logits to a little more than 0..255."""
    return 150 * torch.tanh(x) + 127.5


class Engstrom(StyleNetwork):
    """Engstrom's network of 2016: zeros around maps, transposed convolutions, norms without biases before them, tanh at the end.

    Source:
        https://github.com/lengstrom/fast-style-transfer, after https://arxiv.org/abs/1603.08155 and https://arxiv.org/abs/1607.08022.
    """

    paper = "https://github.com/lengstrom/fast-style-transfer"

    def __init__(self) -> None:
        """Build it untrained."""
        super().__init__()
        self.conv1, self.norm1 = SameConv(3, 32, 9), InstanceNorm(32, 1e-3)
        self.conv2, self.norm2 = SameConv(32, 64, 3, 2), InstanceNorm(64, 1e-3)
        self.conv3, self.norm3 = SameConv(64, 128, 3, 2), InstanceNorm(128, 1e-3)
        self.blocks = nn.ModuleList(EngstromResidual(128) for _ in range(5))
        self.up1, self.norm4 = SameUp(128, 64), InstanceNorm(64, 1e-3)
        self.up2, self.norm5 = SameUp(64, 32), InstanceNorm(32, 1e-3)
        self.conv4, self.norm6 = SameConv(32, 3, 9), InstanceNorm(3, 1e-3)

    def entering(self) -> tuple[Step, ...]:
        return Step(self.conv1, self.norm1, F.relu), Step(self.conv2, None, same)

    def middle(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        x = F.relu(self.norm2(x, statistics))
        x = F.relu(self.norm3(self.conv3(x), statistics))
        for block in self.blocks:
            x = block(x, statistics)
        return F.relu(self.norm4(self.up1(x), statistics))

    def leaving(self) -> tuple[Step, ...]:
        return Step(self.up2, self.norm5, F.relu), Step(self.conv4, self.norm6, tanh_range)


class Bottleneck(nn.Module):
    """MobileNetV2's block without widening: 1x1, depthwise 3x3 and 1x1, each with an instance norm."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.shortcut = stride == 1 and in_channels == out_channels
        self.conv1, self.in1 = nn.Conv2d(in_channels, in_channels, 1, bias=False), InstanceNorm(in_channels)
        self.conv2 = Mirrored(in_channels, in_channels, 3, stride, groups=in_channels, bias=False)
        self.in2 = InstanceNorm(in_channels)
        self.conv3, self.in3 = nn.Conv2d(in_channels, out_channels, 1, bias=False), InstanceNorm(out_channels)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        y = F.relu6(self.in1(self.conv1(x), statistics))
        y = F.relu6(self.in2(self.conv2(y), statistics))
        y = self.in3(self.conv3(y), statistics)
        return x + y if self.shortcut else y


class Doubled(nn.Module):
    """A bottleneck on a map that is doubled first."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = Bottleneck(in_channels, out_channels)

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        return F.relu(self.conv1(F.interpolate(x, scale_factor=2, mode="nearest"), statistics))


class MobileStyle(StyleNetwork):
    """Johnson's network with MobileNetV2's blocks in place of its convolutions: 0.24 M parameters.

    Source:
        https://github.com/mmalotin/pytorch-fast-neural-style-mobilenetV2, whose files load as they are.
    """

    paper = "https://github.com/mmalotin/pytorch-fast-neural-style-mobilenetV2"

    def __init__(self) -> None:
        """Build it untrained."""
        super().__init__()
        self.conv1 = Mirrored(3, 32, 9, bias=False)
        self.in1 = InstanceNorm(32)
        self.conv2, self.conv3 = Bottleneck(32, 64, 2), Bottleneck(64, 128, 2)
        self.res1, self.res2, self.res3 = Bottleneck(128, 128), Bottleneck(128, 128), Bottleneck(128, 128)
        self.res4, self.res5 = Bottleneck(128, 128), Bottleneck(128, 128)
        self.upconv1, self.upconv2 = Doubled(128, 64), Doubled(64, 32)
        self.conv4 = Mirrored(32, 3, 9, bias=False)

    def entering(self) -> tuple[Step, ...]:
        down = self.conv2
        return Step(self.conv1, self.in1, F.relu), Step(down.conv1, down.in1, F.relu6), Step(down.conv2, None, same)

    def middle(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        down = self.conv2
        x = down.in3(down.conv3(F.relu6(down.in2(x, statistics))), statistics)
        x = self.conv3(x, statistics)
        for block in (self.res1, self.res2, self.res3, self.res4, self.res5):
            x = block(x, statistics)
        return self.upconv1(x, statistics)

    def leaving(self) -> tuple[Step, ...]:
        up = self.upconv2.conv1

        def doubled(x: Tensor) -> Tensor:
            return up.conv1(F.interpolate(x, scale_factor=2, mode="nearest"))

        return (
            Step(doubled, up.in1, F.relu6),
            Step(up.conv2, up.in2, F.relu6),
            Step(up.conv3, up.in3, F.relu),
            Step(self.conv4, None, same),
        )
