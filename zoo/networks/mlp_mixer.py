"""MLP-Mixer, ResMLP and gMLP: tokens of patches, and dense layers over places and over channels in turn; no attention, no convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.layers import GELUS, MLP
from zoo.networks.model import Model

TRUNCATED = 0.87962566103423978
"""Deviation of a normal distribution that is cut at twice its deviation of 1."""


class Patches(nn.Module):
    """Cut images (B, C, H, W) into patches and project each: tokens (B, L, `width`), row by row."""

    def __init__(self, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class MixerBlock(nn.Module):
    """An MLP over the places of each channel, then one over the channels of each place (Tolstikhin et al. 2021, equation 1)."""

    def __init__(self, width: int, length: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.mlp_tokens = MLP(length, width // 2, activation)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp_channels = MLP(width, width * 4, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Affine(nn.Module):
    """Scale and shift each channel, in place of a normalisation (Touvron et al. 2021, equation 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, 1, width))
        self.beta = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x + self.beta


class ResMLPBlock(nn.Module):
    """One dense layer over the places, then an MLP over the channels, with layer scales (Touvron et al. 2021, equations 2 and 3)."""

    def __init__(self, width: int, length: int, scale: float, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1 = Affine(width)
        self.linear_tokens = nn.Linear(length, length)
        self.norm2 = Affine(width)
        self.mlp_channels = MLP(width, width * 4, activation)
        self.ls1 = nn.Parameter(torch.full((width,), scale))
        self.ls2 = nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1 * self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ls2 * self.mlp_channels(self.norm2(x))


class SpatialGate(nn.Module):
    """Multiply one half of the channels by a dense layer over the places of the other half (Liu et al. 2021, section 2.1)."""

    def __init__(self, hidden: int, length: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden // 2)
        self.proj = nn.Linear(length, length)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = x.chunk(2, dim=-1)
        return kept * self.proj(self.norm(gate).transpose(1, 2)).transpose(1, 2)


class GatedMLP(nn.Module):
    """Two dense layers over the channels with a spatial gate between them, which leaves half of what is there."""

    def __init__(self, width: int, hidden: int, length: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = activation()
        self.gate = SpatialGate(hidden, length)
        self.fc2 = nn.Linear(hidden // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.gate(self.act(self.fc1(x))))


class GMLPBlock(nn.Module):
    """A gated MLP beside a shortcut, all that a block is (Liu et al. 2021, Figure 1)."""

    def __init__(self, width: int, length: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp_channels = GatedMLP(width, width * 6, length, activation)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp_channels(self.norm(x))


class MLPMixer(Model):
    """Tolstikhin et al. 2021, Table 1.

    Dense layers over the places have a weight for each pair of patches, so images are of `input_size` alone; a class of your own with
    another `input_size` is built for that size, and no weights of this one's fit it.
    """

    paper = "https://arxiv.org/abs/2105.01601"
    fixed_size = True
    first_layer = "stem.proj"
    classifiers = ("head",)

    depth: ClassVar[int]
    """Number of blocks."""
    width: ClassVar[int]
    """Channels of a token."""
    patch_size: ClassVar[int] = 16
    """Side of a patch in pixels."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, activation: str = "gelu") -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            activation: between dense layers, "gelu", or "gelu_tanh" as JAX approximates it: Google's own files need that.

        Raises:
            ValueError: another `activation`.
        """
        if activation not in GELUS:
            raise ValueError(f"activation is one of {', '.join(GELUS)}, got {activation!r}")
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        length = (self.input_size // self.patch_size) ** 2
        self.stem = Patches(in_channels, self.width, self.patch_size)
        self.blocks = nn.Sequential(*(self.block(length, GELUS[activation]) for _ in range(self.depth)))
        self.norm = self.last_norm()
        self.head = nn.Linear(self.width, num_classes)
        self.initialise()

    def block(self, length: int, activation: Callable[[], nn.Module]) -> nn.Module:
        """Make a block for `length` patches."""
        return MixerBlock(self.width, length, activation)

    def last_norm(self) -> nn.Module:
        """Make what is behind the blocks."""
        return nn.LayerNorm(self.width, eps=1e-6)

    def forward_body(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.stem(x)))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d):
            deviation = math.sqrt(1 / layer.weight[0].numel()) / TRUNCATED
            nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        elif not isinstance(layer, nn.Linear):
            return
        elif name == "head":
            nn.init.zeros_(layer.weight)
        elif name.endswith("gate.proj"):  # a gate is 1 everywhere at first
            nn.init.normal_(layer.weight, std=1e-6)
            nn.init.ones_(layer.bias)
            return
        else:
            nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.normal_(layer.bias, std=1e-6) if ".mlp_" in name else nn.init.zeros_(layer.bias)


class ResMLP(MLPMixer):
    """Touvron et al. 2021, Table 1: nothing is normalised, so a block's layers start as nearly nothing."""

    paper = "https://arxiv.org/abs/2105.03404"

    layer_scale: ClassVar[float] = 1e-6
    """What the layer scales start with: less in deeper networks."""

    def block(self, length: int, activation: Callable[[], nn.Module]) -> nn.Module:
        return ResMLPBlock(self.width, length, self.layer_scale, activation)

    def last_norm(self) -> nn.Module:
        return Affine(self.width)


class GMLP(MLPMixer):
    """Liu et al. 2021, Table 1, where it is called gMLP."""

    paper = "https://arxiv.org/abs/2105.08050"

    def block(self, length: int, activation: Callable[[], nn.Module]) -> nn.Module:
        return GMLPBlock(self.width, length, activation)
