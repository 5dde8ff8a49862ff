"""Chainer's names: links joined by slashes, W and b, avg_mean and avg_var of a BatchNorm. Kernels are OIHW and of cross-correlation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from convert.source import Shape, Source, Stored
from convert.steps import from_layout
from weights.errors import MalformedFile

LEAVES = {"W": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "avg_mean": "running_mean", "avg_var": "running_var"}
"""Chainer's words for PyTorch's leaves."""
MODEL = re.compile(r"^updater/model:[^/]+/")
"""Where a snapshot of a trainer has the model."""
COUNTER = re.compile(r"(^|/)N$")
"""How many batches a BatchNorm has seen."""
LARGEST_KERNEL = 11


def looks(shapes: Mapping[str, Shape]) -> bool:
    """Tell by the names; without a BatchNorm's, by slashes, W and kernels whose sides come last, which TensorFlow's kin has not."""
    if any(MODEL.match(name) or name.endswith(("/avg_mean", "/avg_var")) for name in shapes):
        return True
    kernels = [shape for name, shape in shapes.items() if name.endswith("/W") and len(shape) == 4]
    dense = [(name, shape) for name, shape in shapes.items() if name.endswith("/W") and len(shape) == 2]
    if (not kernels and not dense) or any("/" not in name or name.rpartition("/")[2] not in LEAVES for name in shapes):
        return False
    first = sum(shape[0] == shape[1] <= LARGEST_KERNEL for shape in kernels)
    last = sum(shape[2] == shape[3] <= LARGEST_KERNEL for shape in kernels)
    lengths = {name.removesuffix("/b"): shape for name, shape in shapes.items() if name.endswith("/b")}
    turned = any(lengths.get(name.removesuffix("/W")) == shape[1:] and shape[0] != shape[1] for name, shape in dense)
    return last >= first and not turned


def source(path: Path, format: str, tensors: Mapping[str, Stored], facts: Mapping[str, str], notes: Sequence[str]) -> Source:
    """Give each tensor a module and PyTorch's leaf; of a trainer's snapshot, the model's alone."""
    snapshot = any(MODEL.match(name) for name in tensors)
    left = [name for name in tensors if snapshot and not MODEL.match(name)]
    kept = _model({name: stored for name, stored in tensors.items() if name not in left and not COUNTER.search(name)})
    said = [*notes, *([f"left out {len(left)} arrays of the training's state"] if left else [])]
    heads = {name.split("/", 1)[0] for name in kept}
    if heads == {"predictor"}:  # what a Classifier calls the network that it trains
        kept = {name.removeprefix("predictor/"): stored for name, stored in kept.items()}
    found: dict[str, Stored] = {}
    origins: dict[str, str] = {}
    for name, stored in kept.items():
        module, _, leaf = name.rpartition("/")
        key = f"{module.replace('/', '.')}.{LEAVES[leaf]}" if module and leaf in LEAVES else name.replace("/", ".")
        bias = kept.get(f"{module}/b")
        if key in found:
            raise MalformedFile(f"the arrays {origins[key]!r:.100} and {name!r:.100} are both {key!r:.100}")
        origins[key] = name
        found[key] = _kernel(stored, bias) if leaf == "W" else stored
    return Source(path, format, "Chainer", found, facts=dict(facts), notes=said)


def _model(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Take a trainer's prefix off; two models in one snapshot may have the same names."""
    origins: dict[str, str] = {}
    for name in tensors:
        if (first := origins.setdefault(MODEL.sub("", name), name)) != name:
            raise MalformedFile(f"the arrays {first!r:.100} and {name!r:.100} are both {MODEL.sub('', name)!r:.100}")
    return {MODEL.sub("", name): stored for name, stored in tensors.items()}


def _kernel(stored: Stored, bias: Stored | None) -> Stored:
    """Say that a kernel is of cross-correlation, and turn a depthwise one, (M, C, h, w), which has as many biases as M times C."""
    shape = stored.stored_shape
    if not 3 <= len(shape) <= 5:
        return stored
    if len(shape) == 4 and bias is not None and bias.stored_shape == (shape[0] * shape[1],) and shape[1] > 1:
        return replace(stored, steps=from_layout("depthwise", "MCHW", shape), convention="correlation")
    return replace(stored, convention="correlation")
