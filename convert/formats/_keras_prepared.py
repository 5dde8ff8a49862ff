"""What a Keras network does to its images before its first layer: Rescaling and Normalization are layers there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.graph import Graph
from convert.source import Stored

DEVIATIONS = (0.229, 0.224, 0.225)
"""The variances in the files of keras.applications' EfficientNets; they are deviations, and a layer behind takes their root again."""
MAX_CHANNELS = 16
"""More have no images."""


def prepared(graph: Graph | None, tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Tell how pixels, 0..255, are prepared in the network.

    Args:
        graph: of the file, if it has one.
        tensors: of the file. Weights alone show a Normalization too: EfficientNet's, behind a division by 255.

    Returns:
        mean and std on 0..1; {} where nothing is done, or what is done is not of this form.
    """
    if graph is None:
        return _normalised(tensors)
    scale, offset = np.ones(1), np.zeros(1)
    found = False
    for node in graph.nodes:
        if node.op == "input" and not found:
            continue
        if node.op != "affine":
            break
        found = True
        factor = np.asarray(node.attrs.get("scale", 1.0), np.float64).reshape(-1)
        scale, offset = scale * factor, offset * factor + np.asarray(node.attrs.get("offset", 0.0), np.float64).reshape(-1)
    if not found or not (np.isfinite(scale).all() and np.isfinite(offset).all() and (scale > 0).all()):
        return {}
    scale, offset = np.broadcast_arrays(scale, offset)
    if scale.size == 1:
        scale, offset = np.repeat(scale, 3), np.repeat(offset, 3)
    return _told(-offset / (255 * scale), 1 / (255 * scale))


def _normalised(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    name = next((name.removesuffix(".variance") for name in tensors if name.endswith(".variance")), None)
    if name is None or f"{name}.mean" not in tensors:
        return {}
    if not 0 < int(np.prod(tensors[f"{name}.mean"].shape)) == int(np.prod(tensors[f"{name}.variance"].shape)) <= MAX_CHANNELS:
        return {}
    mean, variance = (np.asarray(tensors[f"{name}.{leaf}"].array(), np.float64).reshape(-1) for leaf in ("mean", "variance"))
    if not (np.isfinite(mean).all() and np.isfinite(variance).all() and (variance > 0).all()):
        return {}
    deviations = mean.size == len(DEVIATIONS) and np.allclose(variance, DEVIATIONS, rtol=1e-5)
    return _told(mean, variance if deviations else np.sqrt(variance))


def _told(mean: np.ndarray, std: np.ndarray) -> dict[str, Any]:
    return {"mean": tuple(float(value) for value in mean), "std": tuple(float(value) for value in std)}
