"""The network that `embed` runs: from preprocessed images to one vector a tap."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from zoo.extraction.features import Features, features
from zoo.networks.model import Model


class Vectors(nn.Module):
    """Computes features and makes each a vector: of a map the mean over its positions."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.features, self.network_name = features, features.network_name
        self.in_channels, self.input_size = features.in_channels, features.input_size
        self.taps = tuple(features.taps)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Compute {tap: (B, D)} of preprocessed images (B, C, H, W)."""
        return {name: value.mean((2, 3)) if value.dim() == 4 else value.flatten(1) for name, value in self.features(x).items()}


def extractor(model: Model, at: str | Sequence[str]) -> Vectors:
    """Return the module that computes {tap: (B, D)} of images that the model's own preprocessing made.

    Raises:
        ValueError: the network has no such tap; the message names the nearest.
    """
    return Vectors(features(model, [at] if isinstance(at, str) else list(at)))
