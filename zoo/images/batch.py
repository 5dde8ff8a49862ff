"""Many images at once, in memory: read from wherever they are, and preprocessed as a checkpoint's record says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.images.decoding import decode
from zoo.images.opening import open_source
from zoo.images.preprocess import preprocess
from zoo.images.preprocessed import check_preprocessed
from zoo.images.source import Source

if TYPE_CHECKING:
    from PIL.Image import Image

    from weights.record import Preprocessing

MOST = 1000
"""Images that are read from a source at most, spread over all of it: they lie in memory."""


def pictures(given: Any) -> Any:
    """Return the pictures of a folder or another source that `open_source` reads; whatever else is given is returned as it is."""
    if not isinstance(given, str | os.PathLike | Source):
        return given
    source = given if isinstance(given, Source) else open_source(given)
    step = max(1, -(-len(source) // MOST))
    found: list[Image] = [decode(source.read(index), source[index].key) for index in range(0, len(source), step)]
    return found


def batch(given: Any, preprocessing: Preprocessing, in_channels: int) -> Tensor:
    """Return images as one preprocessed batch.

    Args:
        given: a folder or another source; what `preprocess` takes; or a float tensor (N, C, H, W), preprocessed already.
        preprocessing: the record.
        in_channels: C of the network.

    Returns:
        float32 (N, C, H, W).

    Raises:
        ValueError: nothing is there, an image can't be used, or a tensor is not what the record gives.
    """
    given = pictures(given)
    if isinstance(given, Tensor) and given.is_floating_point():
        check_preprocessed(given, preprocessing, in_channels)
        return given
    if isinstance(given, list) and not isinstance(given, Tensor):
        return torch.cat([preprocess(one, preprocessing) for one in given])
    return preprocess(given, preprocessing)
