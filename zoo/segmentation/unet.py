"""U-Net: any network of the zoo as the way down, and a way up that joins each of its maps, to logits for every pixel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weights.arguments import python_scalar, whole
from zoo.extraction.features import features, pyramid
from zoo.extraction.taps import Places, trace
from zoo.kernels import plain
from zoo.networks.layers import conv_norm_act
from zoo.networks.model import Model, check_images

if TYPE_CHECKING:
    from weights import Checkpoint

NARROWEST = 16
"""Least channels of the map at the image's own size."""


class Up(nn.Module):
    """One step up: fewer channels, the size of the map beside it, that map joined, two 3x3 convolutions."""

    def __init__(self, below: int, beside: int, channels: int) -> None:
        """Build it for `below` channels from the step before, and `beside` ones of the map that is joined."""
        super().__init__()
        # At the smaller size, where it costs a quarter: a 1x1 convolution and a resizing can change places
        self.reduce = nn.Conv2d(below, channels, 1)
        self.convs = nn.Sequential(conv_norm_act(channels + beside, channels, 3), conv_norm_act(channels, channels, 3))

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        """Return (B, `channels`, H, W) for the map `beside`, (B, C, H, W), whatever the size of `x` is."""
        x = F.interpolate(self.reduce(x), size=beside.shape[2:], mode="bilinear", align_corners=False)
        return self.convs(torch.cat([x, beside], 1))


class UNet(nn.Module):
    """Ronneberger, Fischer & Brox 2015, with any convolutional network of the zoo as its contracting path.

    Maps of the encoder at strides 2 to 32 are joined on the way up, and at the image's own size its map of stride 1 (VGG's), or else
    the image. A step gives as many channels as the map that it joins has, as in the paper, and the last one half of those below it.
    Other than there, convolutions are padded, BatchNorm follows them, and a map is resized to the one that it is joined with, so that
    images of any size are taken that the encoder takes.

    The encoder's layers are the very modules of the network that is given, under the same names behind ``encoder.``, without those that
    only its head needs: training one trains the other. What `trained` loaded stays; the layers of the way up are new. It is in train or
    eval mode as the network is that is given.

    Attributes:
        encoder: the `Features` of the network, from fine to coarse.
        strides: of the maps that are joined, from fine to coarse; 1 is the encoder's own map or the image.
        checkpoint: the record of the encoder's weights, whose preprocessing `preprocess` applies; None for an untrained one.

    Examples:
        >>> import torch
        >>> from zoo import ResNet18, UNet
        >>> UNet(ResNet18(), num_classes=21)(torch.randn(2, 3, 64, 96)).shape
        torch.Size([2, 21, 64, 96])

    Source:
        https://arxiv.org/abs/1505.04597, Figure 1 and section 2; He et al.'s initialisation by section 3.
    """

    def __init__(self, encoder: Model, num_classes: int = 2) -> None:
        """Build it around a network.

        Args:
            encoder: any network of the zoo that has a `pyramid`, untrained or from `trained`; ``in_channels`` is its own. A fast one is
                taken as the plain network that it is.
            num_classes: channels of the output, one for each class, background included.

        Raises:
            TypeError: `encoder` is no network of the zoo, or `num_classes` no whole number.
            ValueError: the network has no maps at strides 4 to 32 (transformers and MLPs of tokens, networks for 32x32 images), or
                `num_classes` is not positive.
        """
        super().__init__()
        network: Any = plain(encoder) if isinstance(encoder, nn.Module) else encoder
        if not isinstance(network, Model):
            shown = f"the class {network.__name__}: build it first" if isinstance(network, type) else f"a {type(network).__name__}"
            raise TypeError(f"UNet() takes a network of the zoo as its encoder, such as trained(ResNet50), not {shown}")
        self.num_classes = whole("num_classes", python_scalar(num_classes))
        if self.num_classes < 1:
            raise ValueError(f"num_classes is 1 or more, got {num_classes}")
        pyramid(network)  # says what is missing
        places = Places(network, trace(network))
        if len(places.strides) < 2:
            raise ValueError(f"{type(network).__name__} has one map alone, and a U-Net joins maps of several strides")
        found = sorted(stride for stride in places.strides if not stride & (stride - 1) and stride <= 32)
        self.encoder = features(network, {f"stride{stride}": f"stride/{stride}" for stride in found})
        self.in_channels, self.input_size, self.min_size = network.in_channels, network.input_size, network.min_size
        self.fixed_size, self.size_multiple = network.fixed_size, network.size_multiple
        self.checkpoint: Checkpoint | None = network.checkpoint
        channels = [places.tap("", places.strides[stride]).channels or 0 for stride in found]
        *beside, below = [(width, width) for width in channels]
        if found[0] != 1:  # the image is joined as it is
            width = max(NARROWEST, channels[0] // 2)
            beside = [(network.in_channels, width), *beside]
        self.strides = tuple(found if found[0] == 1 else [1, *found])
        steps: list[Up] = []
        last = below[0]
        for joined, width in reversed(beside):
            steps.append(Up(last, joined, width))
            last = width
        self.decoder = nn.ModuleList(steps)
        self.classifier = nn.Conv2d(last, self.num_classes, 1)
        self.initialise()
        like = next(network.parameters())
        for part in (self.decoder, self.classifier):
            part.to(like.device, like.dtype)
        self.train(network.training)

    def initialise(self) -> None:
        """Draw the layers of the way up as in the paper's section 3: normally, with variance 2 / N for N numbers that a neuron reads."""
        for part in (self.decoder, self.classifier):
            for layer in part.modules():
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (B, `num_classes`, H, W) of preprocessed images (B, `in_channels`, H, W).

        Raises:
            ValueError: as in `Model.forward`: not four-dimensional, not floating point, other channels, or a size that the encoder does
                not take.
        """
        check_images(x, self, type(self).__name__)
        *maps, y = self.encoder(x).values()
        if len(maps) < len(self.decoder):
            maps = [x, *maps]
        for up, beside in zip(self.decoder, reversed(maps), strict=True):
            y = up(y, beside)
        return self.classifier(y)

    def preprocess(self, images: Any) -> Tensor:
        """Turn images into the batch that the encoder's checkpoint was measured with, cropped as its record says.

        Raises:
            ValueError: the encoder is untrained, or an image can't be used.
        """
        return self.encoder.preprocess(images)
