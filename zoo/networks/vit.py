"""Vision transformers: an image is a row of patches, and blocks of attention and dense layers pass over all of them.

Names are torchvision's, extended for what it lacks (`register_tokens`, `layer_scale_1`, `encoder.ln_pre`, `attention_pool`): so one block
serves ViT, DeiT, DINOv2, CLIP and SigLIP alike, and features have the same names in all. `convert.names.timm` knows timm's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weights.arguments import whole
from zoo.kernels.activations import QuickGELU
from zoo.networks.layers import GELUS, LayerScale, StochasticDepth
from zoo.networks.model import Model


class SwiGLU(nn.Module):
    """SiLU of the first half of the channels, times the second (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    **GELUS,
    "quick_gelu": QuickGELU,
    "swiglu": SwiGLU,
}

POOLS = {"class": ("class", "mean", "class_and_mean"), "attention": ("attention", "mean"), "teacher": ("teacher", "class")}
"""What classifiers may read, by what they read in the published variant."""


class Attention(nn.Module):
    """Self-attention of several heads, with the tensors of nn.MultiheadAttention, but every layer of it is called as a module."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, self.head_width))
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def mlp(width: int, hidden: int, activation: str, dropout: float) -> nn.Sequential:
    """Make the two dense layers of a block; a gated activation halves the channels between them."""
    read = hidden // 2 if activation == "swiglu" else hidden
    return nn.Sequential(
        nn.Linear(width, hidden), ACTIVATIONS[activation](), nn.Dropout(dropout), nn.Linear(read, width), nn.Dropout(dropout)
    )


class EncoderBlock(nn.Module):
    """Attention and dense layers, each behind its norm and beside a shortcut (Dosovitskiy et al. 2020, Figure 1)."""

    def __init__(self, network: type[ViT], activation: str, dropout: float, stochastic_depth: float) -> None:
        super().__init__()
        width, scale = network.width, network.layer_scale
        self.ln_1 = nn.LayerNorm(width, network.norm_eps)
        self.self_attention = Attention(width, network.attention_heads)
        self.dropout = nn.Dropout(dropout)
        self.layer_scale_1 = LayerScale(width, scale) if scale else nn.Identity()
        self.stochastic_depth_1 = StochasticDepth(stochastic_depth)
        self.ln_2 = nn.LayerNorm(width, network.norm_eps)
        self.mlp = mlp(width, network.mlp_width, activation, dropout)
        self.layer_scale_2 = LayerScale(width, scale) if scale else nn.Identity()
        self.stochastic_depth_2 = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.stochastic_depth_1(self.layer_scale_1(self.dropout(self.self_attention(self.ln_1(x)))))
        return x + self.stochastic_depth_2(self.layer_scale_2(self.mlp(self.ln_2(x))))


class Encoder(nn.Module):
    """Position embeddings and all blocks: patches (B, N, C) become tokens (B, special + N, C), normalised."""

    def __init__(self, network: type[ViT], patches: int, special: int, activation: str, dropout: float, stochastic_depth: float) -> None:
        super().__init__()
        self.special_positions = network.special_positions
        self.pos_embedding = nn.Parameter(torch.empty(1, patches + special * self.special_positions, network.width))
        self.dropout = nn.Dropout(dropout)
        self.ln_pre = nn.LayerNorm(network.width, network.norm_eps) if network.pre_norm else nn.Identity()
        rise = stochastic_depth / max(network.depth - 1, 1)
        self.layers = nn.Sequential(
            OrderedDict(
                (f"encoder_layer_{index}", EncoderBlock(network, activation, dropout, rise * index)) for index in range(network.depth)
            )
        )
        self.ln = nn.LayerNorm(network.width, network.norm_eps)

    def forward(self, patches: Tensor, special: list[Tensor]) -> Tensor:
        if self.special_positions:
            x = torch.cat([*special, patches], 1) + self.pos_embedding
        else:
            x = torch.cat([*special, patches + self.pos_embedding], 1)
        return self.ln(self.layers(self.ln_pre(self.dropout(x))))


class AttentionPool(nn.Module):
    """One learnt query that attends to all tokens, and dense layers beside a shortcut (Zhai et al. 2021, https://arxiv.org/abs/2106.04560)."""

    def __init__(self, network: type[ViT], activation: str) -> None:
        super().__init__()
        width = network.width
        self.split = (network.attention_heads, width // network.attention_heads)
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.ln = nn.LayerNorm(width, network.norm_eps)
        self.mlp = mlp(width, network.mlp_width, activation, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C) of tokens (B, L, C)."""
        query = self.q(self.latent.expand(x.shape[0], -1, -1)).unflatten(-1, self.split).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (2, *self.split)).permute(2, 0, 3, 1, 4).unbind(0)
        x = self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return (x + self.mlp(self.ln(x)))[:, 0]


class ViT(Model):
    """Dosovitskiy et al. 2020, Table 1, with what later papers add as class keywords.

    Position embeddings bind a network to one size of images. `image_size` builds it for another, and
    ``trained(ViT_B_16, path, image_size=384)`` resizes the embeddings of a checkpoint.
    """

    paper = "https://arxiv.org/abs/2010.11929"
    first_layer = "conv_proj"
    classifiers = ("heads.head",)
    fixed_size = True
    resizable = True

    patch: ClassVar[int]
    """Side of a patch in pixels."""
    depth: ClassVar[int]
    """Number of blocks."""
    attention_heads: ClassVar[int]
    width: ClassVar[int]
    """Channels of a token, D in the paper."""
    mlp_width: ClassVar[int]
    """Channels between the dense layers of a block."""
    activation: ClassVar[str] = "gelu"
    norm_eps: ClassVar[float] = 1e-6
    layer_scale: ClassVar[float] = 0.0
    """What each branch is multiplied by at first, by channel (Touvron et al. 2021, https://arxiv.org/abs/2103.17239); 0 for no scale."""
    class_read: ClassVar[bool] = True
    """Whether a class token is what the classifier reads; else attention pools all tokens."""
    distilled: ClassVar[bool] = False
    """Whether a second token and classifier are there for a teacher's answers (Touvron et al. 2020, section 4)."""
    registers: ClassVar[int] = 0
    """Tokens that stand for no patch and are read by no head (Darcet et al. 2023, https://arxiv.org/abs/2309.16588)."""
    special_positions: ClassVar[bool] = True
    """Whether tokens of no patch have position embeddings, too."""
    pre_norm: ClassVar[bool] = False
    """Whether a norm is before the blocks, too; then the convolution has no bias."""

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if "patch" in config:
            cls.size_multiple = cls.min_size = cls.patch

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        image_size: int | None = None,
        activation: str | None = None,
        pool: Literal["class", "attention", "teacher", "mean", "class_and_mean"] | None = None,
        norm_eps: float | None = None,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the classifier.
            in_channels: channels of the images.
            dropout: probability of dropping an element behind the position embeddings and behind every dense layer of the blocks.
            stochastic_depth: probability of dropping a branch of the last block, from 0 at the first in equal steps.
            image_size: side of the images in pixels, a multiple of the patch; None for the published one.
            activation: between the dense layers, by its name in `ACTIVATIONS` (big_vision's and transformers' SigLIP: "gelu_tanh");
                None is the variant's own.
            pool: what the classifier reads, a name in `POOLS`; None is the variant's own. "class": the class token. "attention": a pool
                by attention. "teacher": the mean of two classifiers, of the class token and of the distillation token; "class" leaves the
                second classifier out. "mean": the mean of the tokens of patches, without a class token, as I-JEPA and language models that
                see read them. "class_and_mean": the class token beside that mean, as transformers' classifiers of DINOv2 do.
            norm_eps: added to the variances of all norms (transformers' ViT and DeiT: 1e-12); None is the variant's own.

        Raises:
            ValueError: `image_size` is no multiple of the patch, or there is no such activation for dense layers of these widths or no such
                pool.
        """
        activation = type(self).activation if activation is None else activation
        if activation not in ACTIVATIONS or (activation == "swiglu") != (type(self).activation == "swiglu"):
            known = [name for name in ACTIVATIONS if (name == "swiglu") == (type(self).activation == "swiglu")]
            raise ValueError(f"{type(self).__name__}'s activation is one of {', '.join(known)}, got {activation!r}")
        own: Any = "teacher" if self.distilled else "class" if self.class_read else "attention"
        if pool not in (None, *POOLS[own]):
            raise ValueError(f"{type(self).__name__}'s pool is one of {', '.join(POOLS[own])}, got {pool!r}")
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.pool = pool or own
        vars(self)["class_read"] = self.pool not in ("attention", "mean")
        if image_size is not None:
            vars(self)["input_size"] = self.side(image_size)  # the class keeps the published one
        width = self.width
        if self.class_read:
            self.class_token = nn.Parameter(torch.empty(1, 1, width))
        if self.distilled:
            self.distillation_token = nn.Parameter(torch.empty(1, 1, width))
        if self.registers:
            self.register_tokens = nn.Parameter(torch.empty(1, self.registers, width))
        self.conv_proj = nn.Conv2d(in_channels, width, self.patch, self.patch, bias=not self.pre_norm)
        self.encoder = Encoder(type(self), (self.input_size // self.patch) ** 2, self.special, activation, dropout, stochastic_depth)
        if self.pool == "attention":
            self.attention_pool = AttentionPool(type(self), activation)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(2 * width if self.pool == "class_and_mean" else width, num_classes)))
        if self.pool == "teacher":
            self.heads.head_dist = nn.Linear(width, num_classes)
        if norm_eps is not None:
            vars(self)["norm_eps"] = norm_eps
            for norm in (module for module in self.modules() if isinstance(module, nn.LayerNorm)):
                norm.eps = norm_eps
        self.initialise()

    @classmethod
    def side(cls, image_size: int) -> int:
        """Return a side of images in pixels that the patch divides; ValueError names the nearest of another."""
        side = whole("image_size", image_size)
        if side % cls.patch:
            below = side // cls.patch * cls.patch
            near = f"{below} or {below + cls.patch}" if below else str(cls.patch)
            raise ValueError(f"{cls.__name__}'s image_size is a multiple of its patch of {cls.patch} pixels, got {side}; nearest: {near}")
        return side

    @property
    def special(self) -> int:
        """Number of tokens of no patch, which come first."""
        return self.class_read + self.distilled + self.registers

    @property
    def first_patch(self) -> int:
        """Index of the first token of a patch."""
        return self.special

    @property
    def read(self) -> tuple[slice, ...]:
        """Which tokens the head reads, each slice by its mean; none where it attends to all."""
        token, teachers, patches = slice(0, 1), slice(1, 2), slice(self.special, None)
        known = {"class": (token,), "teacher": (token, teachers), "mean": (patches,), "class_and_mean": (token, patches)}
        return known.get(self.pool, ())

    def forward_body(self, x: Tensor) -> Tensor:
        """Compute tokens (B, special + patches, `width`) of images: of class, distillation and registers first, then of rows of patches."""
        x = self.conv_proj(x)
        tokens = [getattr(self, name) for name in ("class_token", "distillation_token", "register_tokens") if hasattr(self, name)]
        special = [token.expand(x.shape[0], -1, -1) for token in tokens]
        return self.encoder(x.flatten(2).transpose(1, 2), special)

    def forward_head(self, x: Tensor) -> Tensor:
        if self.pool == "teacher":
            head, teachers = self.heads.children()
            return (head(x[:, 0]) + teachers(x[:, 1])) / 2
        if self.pool == "mean":
            return self.heads(x[:, self.special :].mean(1))
        if self.pool == "class_and_mean":
            return self.heads(torch.cat([x[:, 0], x[:, self.special :].mean(1)], 1))
        return self.heads(x[:, 0] if self.class_read else self.attention_pool(x))

    def fit_size(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Resize position embeddings of another square grid to this network's: bicubic with antialias, as timm does."""
        name = "encoder.pos_embedding"
        side, special = self.input_size // self.patch, self.special * self.special_positions
        if name not in state or state[name].dim() != 3:
            return state
        kept, grid = state[name][:, :special], state[name][:, special:]
        old = math.isqrt(grid.shape[1])
        if old == side or old**2 != grid.shape[1]:
            return state
        square = grid.float().reshape(1, old, old, -1).permute(0, 3, 1, 2)
        square = F.interpolate(square, (side, side), mode="bicubic", antialias=True).to(grid.dtype)
        return state | {name: torch.cat([kept, square.flatten(2).transpose(1, 2)], 1)}

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d):
            nn.init.trunc_normal_(layer.weight, std=(layer.weight[0].numel()) ** -0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, Attention):
            nn.init.xavier_uniform_(layer.in_proj_weight)
            nn.init.zeros_(layer.in_proj_bias)
            nn.init.zeros_(layer.out_proj.bias)
        elif isinstance(layer, nn.Linear) and name.startswith("heads"):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear) and ".mlp." in name:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
        elif isinstance(layer, Encoder):
            nn.init.normal_(layer.pos_embedding, std=0.02)
        elif layer is self and self.class_read:
            nn.init.zeros_(self.class_token)


class TruncatedStart(ViT):
    """A vision transformer whose fresh parameters are truncated normal of deviation 0.02, as DeiT's authors and those after them draw."""

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, Attention):
            nn.init.trunc_normal_(layer.in_proj_weight, std=0.02)
            nn.init.zeros_(layer.in_proj_bias)
        elif isinstance(layer, Encoder):
            nn.init.trunc_normal_(layer.pos_embedding, std=0.02)
        elif isinstance(layer, AttentionPool):
            nn.init.trunc_normal_(layer.latent, std=self.width**-0.5)
        elif layer is self:
            for token, deviation in (("class_token", 1e-6), ("distillation_token", 0.02), ("register_tokens", 1e-6)):
                if hasattr(self, token):
                    nn.init.trunc_normal_(getattr(self, token), std=deviation)


class DeiT(TruncatedStart):
    """Touvron et al. 2020, Table 1; `distilled` adds a token and a classifier for a teacher's answers: logits are the mean of both."""

    paper = "https://arxiv.org/abs/2012.12877"

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if cls.distilled:
            cls.classifiers = ("heads.head", "heads.head_dist")


class DeiT3(TruncatedStart):
    """Touvron et al. 2022: ViT with layer scales, and no position of the class token."""

    paper = "https://arxiv.org/abs/2204.07118"
    layer_scale = 1e-6
    special_positions = False


class DINOv2(TruncatedStart):
    """Oquab et al. 2023, Table 17, with registers or without (Darcet et al. 2023); the published files have no classifier."""

    paper = "https://arxiv.org/abs/2304.07193"
    layer_scale = 1e-5


class CLIP(TruncatedStart):
    """Radford et al. 2021, section 2.4: the image tower; its projection is the classifier, and its embedding what enters that."""

    paper = "https://arxiv.org/abs/2103.00020"
    pre_norm = True
    norm_eps = 1e-5


class SigLIP(TruncatedStart):
    """Zhai et al. 2023: the image tower, pooled by attention; the published files have no classifier."""

    paper = "https://arxiv.org/abs/2303.15343"
    class_read = False
