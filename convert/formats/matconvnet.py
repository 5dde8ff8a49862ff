"""MatConvNet's .mat files: simplenn's and DagNN's networks, and weights in a cell or struct a layer, of MATLAB 5 to 7.3.

Kernels are (height, width, in, out) and of cross-correlation; dense layers are convolutions over the whole map. A BatchNorm keeps
moments: the mean, and the root of variance + eps, not the variance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert._guard import check, reading
from convert.core import COUNTER
from convert.formats import _hdf5, _mat5, _mat73, _matgraph, _matlayers
from convert.formats._mapped import mapped
from convert.formats._mat import Matrix, Value
from convert.source import Part, Shape, Source, Stored, laid_out
from convert.steps import Moment
from weights.errors import ConvertError, MalformedFile

SUFFIXES = (".mat",)
WRITES = True

MARK = b"MATLAB 5.0 MAT-file"
HDF5_MARK = b"MATLAB 7.3 MAT-file"
LAYOUTS = {"conv": "HWIO", "depthwise": "HWIO", "transposed": "HWOI"}


def sniff(path: Path, head: bytes) -> bool:
    """Tell a MAT file by what MATLAB and SciPy write at its beginning, or by its mark of version 5."""
    del path
    return head.startswith((MARK, HDF5_MARK)) or (len(head) > 128 and head[124:128] in (b"\0\1IM", b"\1\0MI") and head[:6] == b"MATLAB")


def read(path: Path) -> Source:
    """Open a MAT file.

    Raises:
        MalformedFile, LimitExceeded, UnsafeFormat: it is damaged, or claims more than it can hold.
    """
    with reading(path, "MAT file"):
        with path.open("rb") as file:
            head = file.read(4096)
        close: Any = None
        if _hdf5.sniff(path, head):
            values, opened = _mat73.variables(path)
            close, kind = opened.close, "7.3"
        else:
            values, kind = _mat5.variables(mapped(path)), "5"
        source = _matlayers.source(path, values)
        check(path, source.tensors.values(), path.stat().st_size)
    if not source.tensors:
        raise MalformedFile(f"{path} holds no tensors; its variables are: {', '.join(values)[:200] or 'none'}")
    source.facts["MAT version"] = kind
    if close is not None:
        source.close = close
    return source


def write(parts: Sequence[Part], path: Path, *, convention: str | None = None, metadata: Mapping[str, str]) -> None:
    """Write a network's layers as simplenn has them, names included, one tensor in memory at a time.

    A BatchNorm's moments are of the network's own dtype, as MatConvNet computes with; because float32 roots don't give every variance
    back, the variances stand beside them.

    Args:
        parts: the modules in order.
        path: the file; the same input gives the same bytes.
        convention: "convolution" writes flipped kernels, and says so in meta.
        metadata: kept in meta.kernelzoo.
    """
    notes: dict[str, Value] = {re.sub(r"\W", "_", key)[:60]: str(value) for key, value in sorted(metadata.items())}
    notes["kernel_convention"] = convention or "correlation"
    layers: list[Value] = [_layer(part, convention) for part in parts]
    with path.open("wb") as file:
        _mat5.write(file, {"layers": layers, "meta": {"kernelzoo": notes}})


def _layer(part: Part, convention: str | None) -> Value:
    leaves = {leaf: stored for leaf, stored in part.leaves.items() if leaf != COUNTER}
    layer: dict[str, Value] = {"name": part.name, "kind": part.kind}
    bias = leaves.get("bias")
    if part.kind == "norm":
        return layer | _norm(part, leaves)
    if part.kind not in ("conv", "depthwise", "transposed", "linear") or "weight" not in leaves:
        return layer | {"type": "custom", "leaves": {leaf: _matrix(stored) for leaf, stored in leaves.items()}}
    weight = leaves["weight"]
    kernel = _dense(part, weight) if len(weight.shape) == 2 else _kernel(part.kind, weight, convention == "convolution")
    layer["type"] = "convt" if part.kind == "transposed" else "conv"
    layer["weights"] = [kernel, _matrix(bias) if bias is not None else None]
    if part.groups > 1 and part.kind == "transposed":
        layer["numGroups"] = _number(part.groups)
    return layer


def _norm(part: Part, leaves: Mapping[str, Stored]) -> dict[str, Value]:
    mean, variance = leaves.get("running_mean"), leaves.get("running_var")
    if mean is None or variance is None:
        raise ConvertError(f"MatConvNet's bnorm has moments, and {part.name} has no running statistics")
    eps = _matgraph.EPS if part.eps is None else part.eps
    width, dtype = mean.shape[0], mean.dtype

    def moments() -> np.ndarray:
        return np.stack([mean.array(), Moment("std", eps).undo(variance.array())], axis=1)

    def constant(leaf: str, value: float) -> Value:
        found = leaves.get(leaf)
        return _matrix(found) if found is not None else Matrix(leaf, (width, 1), dtype, lambda: np.full((width, 1), value, dtype))

    weights: list[Value] = [constant("weight", 1), constant("bias", 0), Matrix(part.name, (width, 2), dtype, moments)]
    return {"type": "bnorm", "weights": weights, "epsilon": _number(eps), "variance": _matrix(variance)}


def _kernel(kind: str, weight: Stored, flipped: bool) -> Matrix:
    raw = laid_out(weight, kind, "DHW"[5 - len(weight.shape) :] + LAYOUTS[kind][2:], flipped=flipped)
    return Matrix(raw.origin, raw.shape, raw.dtype, raw.load)


def _dense(part: Part, weight: Stored) -> Matrix:
    """Write a dense weight (out, in) as the convolution over the whole map that it is in MatConvNet."""
    out, inputs = weight.shape[:2]
    channels, height, width = part.grid or (inputs, 1, 1)
    shape: Shape = (height, width, channels, out)
    return Matrix(weight.origin, shape, weight.dtype, lambda: weight.array().reshape(out, channels, height, width).transpose(2, 3, 1, 0))


def _matrix(stored: Stored) -> Matrix:
    shape = stored.shape if len(stored.shape) > 1 else (*stored.shape, *(1,) * (2 - len(stored.shape)))
    return Matrix(stored.origin, shape, stored.dtype, lambda: stored.array().reshape(shape))


def _number(value: float) -> Matrix:
    return Matrix("", (1, 1), np.dtype(np.float64), lambda: np.array([[value]], np.float64))
