"""What `explain` returns: a map that keeps its scale, laid on the whole photograph, and drawn there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.explanation.maps import Explained
from zoo.explanation.sheet import drawn, overlaid, row, save_sheet

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False)
class Explanation(Explained):
    """Why a network gives one answer to one image.

    Attributes:
        raw: the method's map as it comes, unscaled: float32 (h, w), of a layer's cells or of the network's pixels.
        label: what is explained, "tabby", "dog (118 classes)", "tabby - tiger cat", "similarity".
        wnid: its WordNet id, None where it has none.
        probability: softmax of the logits, summed over the classes meant, 0..1; None of a difference, the cosine of a similarity.
        score: the number that is explained: a logit, a mean or a difference of logits, a cosine.
        method: as its authors write it, "Grad-CAM".
        at: the layer, or "input".
        error: how far the map is from what the method promises, by `error_of`; None where it promises nothing.
        error_of: what `error` is, in words; "" without.
        note: what else the method says, "black photograph as baseline, 64 steps".
        signed: whether negative values count, as evidence against the label.
        slope: whether values are slopes, of which the size says what matters, and not the sign.
        network: the network's name.
        name: what messages call the image.
        view: which part of the photograph the network saw.
        rows: where the map's rows lie in the network's image.
        columns: where its columns lie.
        image: what was given for the image.

    Example:
        >>> result = explain(trained(ResNet20), "cat.jpg")  # doctest: +SKIP
        >>> result.label, result.map.shape  # doctest: +SKIP
        ('cat', (480, 640))
        >>> result.save("why.png")  # doctest: +SKIP
    """

    def overlay(self) -> Image:
        """Return the photograph in its own size with the map over it, what was not seen dark, and a frame around what was.

        Weak parts show the photograph; colours are inferno's, for signed maps red for the label and blue against it.
        """
        return overlaid(self)

    def sheet(self) -> Image:
        """Return photograph and overlay side by side with the scale, the label, its probability, the method and its error."""
        return drawn([row([self])])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save `sheet` as a PNG, whole or not at all.

        Raises:
            ValueError: the path doesn't end in .png.
            OSError: it can't be written.
        """
        return save_sheet([[self]], path)
