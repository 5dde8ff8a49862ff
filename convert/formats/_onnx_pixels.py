"""What a graph does to its pixels before the first layer, as a preparation of images."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.graph import Graph


def preparation(graph: Graph | None) -> dict[str, Any]:
    """Read mean and deviation from what the graph does to its pixels before the first layer."""
    if graph is None or not graph.nodes or graph.nodes[0].op != "input":
        return {}
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(place)
    scale, offset, order = np.ones(1), np.zeros(1), "rgb"
    node = graph.nodes[0]
    while len(after := readers.get(node.name, [])) == 1 and (node := graph.nodes[after[0]]).op in ("affine", "permute_channels"):
        if node.op == "affine":
            scale, offset = scale * node.attrs["scale"], offset * node.attrs["scale"] + node.attrs["offset"]
        else:
            order = {"rgb": "bgr", "bgr": "rgb"}[order] if tuple(node.attrs["order"]) == (2, 1, 0) else order
            scale, offset = (a[list(node.attrs["order"])] if a.size > 1 else a for a in (scale, offset))
    if not (np.isfinite(scale).all() and (scale > 0).all() and np.isfinite(offset).all()) or (scale == 1).all():
        return {}
    scale, offset = np.broadcast_arrays(scale, offset)
    most = 255 if scale.max() < 0.1 else 1
    return {
        "mean": tuple(float(n) for n in (0 - offset) / scale / most),
        "std": tuple(float(n) for n in 1 / scale / most),
        "range": f"0..{most}",
        "channel_order": order,
    }
