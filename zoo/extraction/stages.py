"""The maps of a network that detectors and segmenters read, under the names that their published weights have for its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from zoo.extraction.dilation import changed, changes
from zoo.extraction.features import LEVELS, Features, pyramid
from zoo.extraction.taps import Places, Trace, trace
from zoo.networks.model import Model

CONTAINER = "features"
"""What torchvision calls the body of networks that are one Sequential; its detectors leave that word out."""


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm whose statistics and parameters never change, as networks with few images in a batch are trained.

    It has no counter of batches, and stays in eval mode whatever is called.

    Source:
        Girshick et al., Detectron, and torchvision's detectors: https://github.com/pytorch/vision.
    """

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        """Build it for maps of `num_features` channels."""
        super().__init__(num_features, eps)
        self.num_batches_tracked = None
        self.training = False
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenBatchNorm2d:
        """Stay in eval mode."""
        del mode
        return super().train(False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)  # BatchNorm's own would add a counter


class Stages(Features):
    """Maps of a network as a list, from fine to coarse; `stages` makes it.

    The layers are the network's own. Where all of them lie in its ``features``, their names begin behind that, as torchvision's do.
    """

    unwrapped = False

    def __init__(self, network: Model, written: Trace, places: Places, named: Mapping[str, str]) -> None:
        """Build it of the places that `named` gives keys to."""
        super().__init__(network, written, places, named)
        if list(self._modules) == [CONTAINER]:
            inner: Any = self._modules.pop(CONTAINER)
            self._modules.update(inner._modules)
            self.unwrapped = True

    @property
    def features(self) -> Stages:
        """The container that the layers came out of, which is this module now."""
        if not self.unwrapped:
            raise AttributeError(CONTAINER)
        return self

    @property
    def widths(self) -> list[int]:
        """Channels of each map."""
        return [width or 0 for width in self.channels.values()]

    def forward(self, x: Tensor) -> list[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute the maps of preprocessed images (B, `in_channels`, H, W), each (B, C, H', W').

        Raises:
            ValueError: as in `Model.forward`.
        """
        return list(super().forward(x).values())


def stages(network: Model, at: tuple[str, ...] = tuple(LEVELS), output_stride: int | None = None) -> Stages:
    """Return some maps of a network as a module of its own layers.

    Args:
        network: any of the zoo's that has a `pyramid`; with `output_stride`, its layers are exchanged for dilated ones in place.
        at: levels of its pyramid, C2 to C5, whose strides are 4 to 32; a level that the network has not is left out. Or other taps, see
            `zoo.extraction.features.features`.
        output_stride: 8 or 16 dilates what lies behind, see `dilate`; C5 is the last map then.

    Raises:
        ValueError: the network has no pyramid, or can't have the output stride.
        UnknownTap: the network has no such place.
    """
    known = pyramid(network).taps
    if not set(at) & set(known) and set(at) <= set(LEVELS):
        raise ValueError(f"{type(network).__name__} has the levels {', '.join(known)}, and none of {', '.join(at)}")
    if output_stride is not None:
        dilated_like_torchvision(network, output_stride)
    written = trace(network)
    places = Places(network, written)
    named: dict[str, str] = {}
    for tap in at:
        if tap in known:
            named[tap] = places.resized(LEVELS[tap]) if network.first_patch is not None else known[tap].module
        elif tap not in LEVELS:
            named[tap] = next(iter(places.find(tap).values()))
    return Stages(network, written, places, named)


def dilated_like_torchvision(network: Model, output_stride: int) -> None:
    """Trade strides for dilation in place, as `dilate` does.

    In torchvision's MobileNetV3 the layer that loses its stride is dilated itself; in its ResNet, as in `dilate`, only what follows is.
    """
    for change in changes(network, output_stride):
        layer = changed(change)
        if change.loses_stride and type(network).family().__name__ == "MobileNetV3" and isinstance(layer, nn.Conv2d):
            rate = change.rate * change.window.stride[0]
            layer.dilation = (rate, rate)
            layer.padding = tuple(rate * (size // 2) for size in layer.kernel_size)
        network.set_submodule(change.name, layer)


def freeze_norms(module: nn.Module, eps: float | None = None) -> None:
    """Replace every BatchNorm inside by one that never changes, in place; parameters stay the same objects.

    Args:
        module: any.
        eps: added to the variances; None keeps each layer's own.
    """
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.BatchNorm2d) and not isinstance(layer, FrozenBatchNorm2d):
            frozen = FrozenBatchNorm2d(layer.num_features, layer.eps if eps is None else eps).to(layer.weight.device)
            for kind in ("weight", "bias"):
                getattr(frozen, kind).data = getattr(layer, kind).data
            for kind in ("running_mean", "running_var"):
                setattr(frozen, kind, getattr(layer, kind))
            module.set_submodule(name, frozen)


class FeaturePyramid(nn.Module):
    """A pyramid whose levels all have the same channels and all know what the coarsest knows.

    Source:
        Lin et al. 2016, section 3 and Figure 3: https://arxiv.org/abs/1612.03144; P6 and P7: Lin et al. 2017, section 4.
    """

    def __init__(self, in_channels: list[int], channels: int = 256, coarser: str = "pool", norm: bool = False) -> None:
        """Build it.

        Args:
            in_channels: of the maps that it reads, from fine to coarse.
            channels: of every level.
            coarser: what lies above the coarsest level: "pool" adds every other pixel of it, "p5" two strided convolutions of it, "c5"
                the same of the coarsest map that is read.
            norm: whether BatchNorm follows the convolutions, which then have no bias.
        """
        super().__init__()
        self.inner_blocks = nn.ModuleList(_unit(width, channels, 1, norm) for width in in_channels)
        self.layer_blocks = nn.ModuleList(_unit(channels, channels, 3, norm) for _ in in_channels)
        self.coarser = coarser
        if coarser != "pool":
            self.extra_blocks = nn.ModuleDict(
                {
                    "p6": nn.Conv2d(channels if coarser == "p5" else in_channels[-1], channels, 3, 2, 1),
                    "p7": nn.Conv2d(channels, channels, 3, 2, 1),
                }
            )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_uniform_(layer.weight, a=1)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the levels, from fine to coarse: one for each map, and those above."""
        beside = [block(x) for block, x in zip(self.inner_blocks, maps, strict=True)]
        joined = [beside[-1]]
        for x in reversed(beside[:-1]):
            joined.insert(0, x + F.interpolate(joined[0], size=x.shape[-2:], mode="nearest"))
        levels = [block(x) for block, x in zip(self.layer_blocks, joined, strict=True)]
        if self.coarser == "pool":
            return [*levels, F.max_pool2d(levels[-1], 1, 2)]
        p6 = self.extra_blocks["p6"](levels[-1] if self.coarser == "p5" else maps[-1])
        return [*levels, p6, self.extra_blocks["p7"](F.relu(p6))]


class PyramidBackbone(nn.Module):
    """A network up to its maps, and the `FeaturePyramid` on them."""

    def __init__(self, body: Stages, coarser: str = "pool", norm: bool = False) -> None:
        """Build it on a `body`; the rest as in `FeaturePyramid`."""
        super().__init__()
        self.body = body
        self.fpn = FeaturePyramid(body.widths, coarser=coarser, norm=norm)
        self.out_channels = 256

    def forward(self, x: Tensor) -> list[Tensor]:
        """Compute the levels of images (B, 3, H, W), from fine to coarse."""
        return self.fpn(self.body(x))


def _unit(in_channels: int, out_channels: int, kernel_size: int, norm: bool) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=not norm)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels)) if norm else nn.Sequential(conv)
