"""The images whose vectors point most nearly where another's does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weights.arguments import forgiving
from zoo.catalogue import CATALOGUE
from zoo.embedding.extracting import extractor
from zoo.embedding.reading import Embeddings, as_embeddings
from zoo.networks.fingerprint import state_digest
from zoo.networks.model import Model

BLOCK = 1 << 16
"""Rows that are compared at once."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An image that was found.

    Attributes:
        key: of the image.
        label: its class's name, or None.
        similarity: cosine of the angle between the vectors, -1..1.
        index: in the source.
    """

    key: str
    label: str | None
    similarity: float
    index: int


@forgiving
def nearest(
    embeddings: Embeddings | str | os.PathLike[str], model: Model, image: Any, k: int = 8, at: str | None = None
) -> list[Neighbour]:
    """Find the images most like another.

    Args:
        embeddings: what `read` returns, or the file that `embed` wrote.
        model: the network that they were computed with.
        image: what `model.preprocess` takes, one.
        k: how many; all if there are fewer.
        at: the tap; None where there is one.

    Returns:
        The most similar first; of equally similar ones the first in the source.

    Raises:
        ValueError: the model is another, there is no such tap, k is below 1, or the file's ending is none of embeddings.
        BadImage: the image can't be used.
        FileNotFoundError, DamagedEmbeddings: as `read`, of a file.
        TypeError: embeddings are neither.

    Example:
        >>> nearest("photos.parquet", trained(ResNet50), "dog.jpg")  # doctest: +SKIP
    """
    if k < 1:
        raise ValueError(f"k is how many neighbours, at least 1; got {k}")
    embeddings = as_embeddings(embeddings)
    tap = embeddings.tap(at)
    wanted, here = embeddings.about.get("weights"), state_digest(model)
    if wanted is not None and wanted != here:
        told = f"{embeddings.about.get('model')} {embeddings.about.get('tag')}"
        raise ValueError(
            f"{embeddings.path} was computed with {told} (weights {wanted[:12]}…), and this is {type(model).__name__} with weights "
            f"{here[:12]}…: vectors of two networks can't be compared"
        )
    taken = extractor(model, tap).eval()
    with torch.no_grad():
        x = model.preprocess(image)
        vector = taken(x.to(next(model.parameters()).dtype))[tap][0].float().cpu()
    similar = cosine(vector, embeddings.vectors[tap])
    order = np.argsort(-similar, kind="stable")[:k]
    return [Neighbour(embeddings.keys[i], embeddings.labels[i], float(similar[i]), int(embeddings.index[i])) for i in order]


def cosine(vector: Tensor, rows: np.ndarray) -> np.ndarray:
    """Return the cosine of the angle between a vector (D,) and each row of (N, D); 0 where one of them is zero."""
    direction = torch.nn.functional.normalize(vector, dim=0)
    found = np.empty(len(rows), np.float32)
    for start in range(0, len(rows), BLOCK):
        block = torch.from_numpy(np.array(rows[start : start + BLOCK], np.float32))
        found[start : start + BLOCK] = (torch.nn.functional.normalize(block, dim=1) @ direction).clamp(-1, 1).numpy()
    return found


def model_of(embeddings: Embeddings, model: str | None = None, weights: str | None = None) -> Model:
    """Build the network that embeddings say they were computed with, or the one that is named.

    Raises:
        ValueError: they don't say, and none is named.
        FileNotFoundError: the weights are no longer where they were.
    """
    from zoo.catalogue import model_class
    from zoo.pretrained.names import named
    from zoo.pretrained.trained import trained

    about = embeddings.about
    if model is not None:
        model, weights = named(model, weights)
    name = model or about.get("model")
    if name is None:
        raise ValueError(f"{embeddings.path} doesn't say which network it comes from; name it with --model")
    cls = CATALOGUE[name] if name in CATALOGUE else model_class(name)
    if cls.__name__ != about.get("model"):
        return trained(cls, weights)
    return trained(cls, _weights(embeddings) if weights is None else weights, **about.get("options", {}))


def _weights(embeddings: Embeddings) -> str | None:
    """Find the weights that embeddings say they were computed with: by their tag if they are registered, else where they were."""
    from weights import checkpoints

    about = embeddings.about
    tag, place = about.get("tag"), about.get("place")
    if place is None or tag in {known.tag for known in checkpoints(about["model"])}:
        return tag
    if "://" not in place and not Path(place).exists():
        raise FileNotFoundError(
            f"{embeddings.path} was computed with the weights of {place}, which is not there; say with --weights (weights=…) where "
            "they are now"
        )
    return place


def pictures(embeddings: Embeddings, found: Sequence[Neighbour], data: str | None = None) -> list[bytes | None]:
    """Read the neighbours' files again from where they were embedded from, or from `data`; None for one that is gone.

    Raises:
        FileNotFoundError, ValueError: the source can't be opened.
    """
    from zoo.images import open_source

    told: str = embeddings.about.get("source", "")
    if data is None and not told:
        raise ValueError(f"{embeddings.path} doesn't say where its images are; say it with --data (data=…)")
    try:
        opened = open_source(data if data is not None else told)
    except FileNotFoundError as error:
        if data is not None:
            raise
        seen = f", seen from {Path.cwd()}" if "://" not in told and not Path(told).is_absolute() else ""
        raise FileNotFoundError(
            f"{told}, which the images were embedded from, is not there{seen}; say with --data (data=…) where the images are now"
        ) from error
    files: list[bytes | None] = []
    for neighbour in found:
        there = neighbour.index < len(opened) and opened[neighbour.index].key == neighbour.key
        try:
            files.append(opened.read(neighbour.index) if there else None)
        except OSError:
            files.append(None)
    return files
