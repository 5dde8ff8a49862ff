"""Swin and its second version: attention inside windows of a map, which every second block shifts, in four stages that halve the map."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weights.arguments import whole
from zoo.networks.layers import LayerNorm2d, SpaceToDepth, StochasticDepth, pair_offsets
from zoo.networks.model import Model

CLOSED = -100.0
"""What is added to the logits of pixels that only the cyclic shift made neighbours: the authors' number, behind which a softmax is zero."""


class WindowAttention(nn.Module):
    """Self-attention inside windows of `window` pixels, with a bias for each offset of two pixels (Liu et al. 2021, section 3.2).

    A map that windows don't divide is padded with zeros below and on the right. A side of a single window is not shifted.
    """

    def __init__(self, channels: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = self.projection(channels)
        self.proj = nn.Linear(channels, channels)
        self.add_position_bias()

    def projection(self, channels: int) -> nn.Linear:
        """Make the layer that gives queries, keys and values."""
        return nn.Linear(channels, 3 * channels)

    def add_position_bias(self) -> None:
        """Add the parameters of `offset_biases`."""
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * self.window - 1) ** 2, self.heads))

    def offset_biases(self) -> Tensor:
        """Return a bias for each offset and head, (offsets, heads)."""
        return self.relative_position_bias_table

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare queries (..., N, D) with keys: (..., N, N)."""
        return (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)

    def position_bias(self) -> Tensor:
        """Return the bias of each pair of a window's pixels, (heads, N, N)."""
        biases = self.offset_biases()
        return biases[pair_offsets(self.window, biases.device)].permute(2, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, H, W, C) of (B, H, W, C)."""
        _, height, width, channels = x.shape
        side = self.window
        rows, columns = (height + side - 1) // side, (width + side - 1) // side
        traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]  # where a branch would freeze this size
        if traced or rows * side != height or columns * side != width:
            x = F.pad(x, (0, 0, 0, columns * side - width, 0, rows * side - height))
        down, right = self.shift * (rows > 1), self.shift * (columns > 1)
        if self.shift:
            x = x.roll((-down, -right), (1, 2))
        x = x.reshape(-1, rows, side, columns, side, channels).transpose(2, 3).reshape(-1, side * side, channels)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        logits = self.logits(q, k) + self.position_bias()
        if self.shift:
            closed = self.closed(rows, columns, down, right, x)
            logits = (logits.unflatten(0, (-1, rows * columns)) + closed[:, None]).flatten(0, 1)
        x = self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x.reshape(-1, rows, columns, side, side, channels).transpose(2, 3).reshape(-1, rows * side, columns * side, channels)
        if self.shift:
            x = x.roll((down, right), (1, 2))
        return x[:, :height, :width]

    def closed(self, rows: int, columns: int, down: int, right: int, like: Tensor) -> Tensor:
        """Return what keeps apart pixels from both ends of the map (Figure 4): 0 or `CLOSED` for each window's pairs, (windows, N, N)."""
        part: list[Tensor] = []
        for count, shift in ((rows, down), (columns, right)):
            place = torch.arange(count * self.window, device=like.device)
            part.append((place >= count * self.window - shift).int())
        region = 2 * part[0][:, None] + part[1]
        region = region.reshape(rows, self.window, columns, self.window).transpose(1, 2).reshape(rows * columns, -1)
        return (region[:, None] != region[:, :, None]).to(like.dtype) * CLOSED


class QueryKeyValue(nn.Linear):
    """A dense layer for queries, keys and values whose bias leaves keys alone; the bias has a place for theirs, as torchvision's has."""

    def forward(self, input: Tensor) -> Tensor:
        query, _, value = self.bias.chunk(3)
        return F.linear(input, self.weight, torch.cat((query, torch.zeros_like(query), value)))


class CosineAttention(WindowAttention):
    """Window attention by cosines, with biases that a small network computes of offsets' logarithms (Liu et al. 2021b, section 3.3).

    The network's offsets are in units of the windows that it was trained with, of `trained_window` pixels.
    """

    def __init__(self, channels: int, heads: int, window: int, shift: int, trained_window: int) -> None:
        super().__init__(channels, heads, window, shift)
        self.trained_window = trained_window

    def projection(self, channels: int) -> nn.Linear:
        return QueryKeyValue(channels, 3 * channels)

    def add_position_bias(self) -> None:
        self.logit_scale = nn.Parameter(torch.full((self.heads, 1, 1), math.log(10)))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, self.heads, bias=False))

    def offset_biases(self) -> Tensor:
        offset = torch.arange(1 - self.window, self.window, dtype=torch.float32, device=self.logit_scale.device)
        offset = 8 * offset / max(self.trained_window - 1, 1)  # a window of one pixel has the offset 0 alone
        offset = offset.sign() * (offset.abs() + 1).log2() / 3
        pairs = torch.stack(torch.meshgrid(offset, offset, indexing="ij"), -1).flatten(0, 1)
        return 16 * self.cpb_mlp(pairs.to(self.logit_scale.dtype)).sigmoid()

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return cosine * self.logit_scale.clamp(max=math.log(100)).exp()


class Block(nn.Module):
    """Window attention and two dense layers, each beside a shortcut and behind a LayerNorm, in version 2 before one."""

    def __init__(self, channels: int, attention: WindowAttention, stochastic_depth: float, norm_last: bool) -> None:
        super().__init__()
        self.norm_last = norm_last
        self.norm1 = nn.LayerNorm(channels)
        self.attn = attention
        self.stochastic_depth1 = StochasticDepth(stochastic_depth)
        self.norm2 = nn.LayerNorm(channels)
        # torchvision's numbers: its 2 and 4 are dropouts
        layers = {"0": nn.Linear(channels, 4 * channels), "1": nn.GELU(), "3": nn.Linear(4 * channels, channels)}
        self.mlp = nn.Sequential()
        for name, layer in layers.items():
            self.mlp.add_module(name, layer)
        self.stochastic_depth2 = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W) of (B, C, H, W)."""
        x = x.permute(0, 2, 3, 1)
        if self.norm_last:
            x = x + self.stochastic_depth1(self.norm1(self.attn(x)))
            x = x + self.stochastic_depth2(self.norm2(self.mlp(x)))
        else:
            x = x + self.stochastic_depth1(self.attn(self.norm1(x)))
            x = x + self.stochastic_depth2(self.mlp(self.norm2(x)))
        return x.permute(0, 3, 1, 2)


class PatchMerging(nn.Module):
    """Four neighbours become one pixel of twice the channels; version 2 normalises behind the dense layer (section 3.1)."""

    def __init__(self, channels: int, norm_last: bool) -> None:
        super().__init__()
        self.norm_last = norm_last
        self.neighbours = SpaceToDepth()
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)
        self.norm = nn.LayerNorm((2 if norm_last else 4) * channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 2 C, ceil(H / 2), ceil(W / 2)) of (B, C, H, W)."""
        x = self.neighbours(x).permute(0, 2, 3, 1)
        x = self.norm(self.reduction(x)) if self.norm_last else self.reduction(self.norm(x))
        return x.permute(0, 3, 1, 2)


class Swin(Model):
    """Liu et al. 2021, section 3: widths double from stage to stage, and blocks and heads of each stage make the variant.

    Layers have torchvision's names. It takes images of any size from `min_size`.
    """

    paper = "https://arxiv.org/abs/2103.14030"
    min_size = 4
    first_layer = "features.0.0"
    classifiers = ("head",)

    width: ClassVar[int]
    """Channels of the first stage, C in section 3.3."""
    blocks: ClassVar[tuple[int, int, int, int]]
    """Blocks of each stage."""
    heads: ClassVar[tuple[int, int, int, int]]
    """Heads of each stage."""
    window: ClassVar[int] = 7
    """Side of a window in pixels of the map, M in section 3.2."""
    stochastic_depth: ClassVar[float]
    """Default probability of dropping the last block's branches."""
    norm_last: ClassVar[bool] = False
    """Whether a block normalises what attention and dense layers give rather than what they read."""

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        stochastic_depth: float | None = None,
        window: int | None = None,
        last_window: int | None = None,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            stochastic_depth: probability of dropping the last block's branches. It grows linearly from 0 at the first block. None
                is the variant's own.
            window: side of a window in pixels of the map. None is the variant's own.
            last_window: side of a window in the last stage, where checkpoints for larger windows have maps that are smaller than
                a window. None is `window`.

        Raises:
            ValueError: `stochastic_depth` is outside 0 <= p < 1, or a window has no pixel.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        usual = type(self).window if window is None else whole("window", window)
        last = usual if last_window is None else whole("last_window", last_window)
        deepest = type(self).stochastic_depth if stochastic_depth is None else stochastic_depth
        done, total, channels = 0, sum(self.blocks), self.width
        layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(in_channels, channels, 4, 4), nn.Identity(), LayerNorm2d(channels))]
        for count, heads in zip(self.blocks, self.heads, strict=True):
            if done:
                layers.append(PatchMerging(channels, self.norm_last))
                channels *= 2
            side = last if done + count == total else usual
            stage = nn.Sequential()
            for index in range(count):
                attention = self.attention(channels, heads, side, index % 2 * (side // 2), usual)
                stage.append(Block(channels, attention, deepest * done / (total - 1), self.norm_last))
                done += 1
            layers.append(stage)
        self.features = nn.Sequential(*layers)
        self.norm = LayerNorm2d(channels)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)
        self.initialise()

    def attention(self, channels: int, heads: int, window: int, shift: int, usual: int) -> WindowAttention:
        """Make the attention of a block; `usual` is the window of the stages before the last."""
        del usual
        return WindowAttention(channels, heads, window, shift)

    def forward_body(self, x: Tensor) -> Tensor:
        return self.norm(self.features(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, WindowAttention) and not isinstance(layer, CosineAttention):
            nn.init.trunc_normal_(layer.relative_position_bias_table, std=0.02)


class SwinV2(Swin):
    """Liu et al. 2021b, section 3: norms behind each branch, attention by cosines, and position biases that fit windows of any size."""

    paper = "https://arxiv.org/abs/2111.09883"
    input_size = 256
    window = 8
    norm_last = True

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        stochastic_depth: float | None = None,
        window: int | None = None,
        last_window: int | None = None,
        trained_window: int | None = None,
    ) -> None:
        """Build the network untrained, as `Swin` does.

        Args:
            num_classes, in_channels, stochastic_depth, window, last_window: as `Swin` takes them.
            trained_window: the window that the position biases were trained with, where that is another than `window`. In the last
                stage it is as much smaller or larger than the window as in the others. None is `window`.

        Raises:
            ValueError: `stochastic_depth` is outside 0 <= p < 1, or a window has no pixel.
        """
        self.trained_window = None if trained_window is None else whole("trained_window", trained_window)
        super().__init__(num_classes, in_channels, stochastic_depth, window, last_window)

    def attention(self, channels: int, heads: int, window: int, shift: int, usual: int) -> WindowAttention:
        trained = window if self.trained_window is None else window * self.trained_window // usual
        return CosineAttention(channels, heads, window, shift, trained)
