"""How ONNX says where windows lie, and which constants differ from channel to channel only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from convert.formats._onnx_graph import Value
from convert.formats._onnx_proto import Operator

PADS = {"SAME_UPPER": "same_upper", "SAME_LOWER": "same_lower", "VALID": "valid"}


def pads_of(operator: Operator) -> tuple[int, ...] | str | None:
    """Read the padding; None where it is none of a map's."""
    auto = operator.attrs.get("auto_pad") or "NOTSET"
    if auto != "NOTSET":
        return PADS.get(auto)
    pads = tuple(operator.attrs.get("pads") or (0, 0, 0, 0))
    return pads if len(pads) == 4 and min(pads) >= 0 else None


def pair_of(operator: Operator, name: str) -> tuple[int, int] | None:
    """Read an attribute of height and width; None where it has another number of axes."""
    held = tuple(operator.attrs.get(name) or (1, 1))
    return (held[0], held[1]) if len(held) == 2 and min(held) > 0 else None


def slid(
    size: int | None, axis: int, kernel: int, stride: int, dilation: int, pads: tuple[int, ...] | str, ceil: bool = False
) -> int | None:
    """Tell how many windows fit."""
    if size is None:
        return None
    if isinstance(pads, str) and pads != "valid":
        return -(-size // stride)
    room = size + (0 if isinstance(pads, str) else pads[axis] + pads[axis + 2]) - (kernel - 1) * dilation - 1
    if not ceil:
        return max(room // stride + 1, 0)
    count = -(-room // stride) + 1
    before = 0 if isinstance(pads, str) else pads[axis]
    return max(count - 1 if (count - 1) * stride >= size + before else count, 0)


def side(x: Value, axis: int) -> int | None:
    """The height (0) or the width (1) of a map with its channels first."""
    return x.shape[2 + axis] if x.shape is not None and len(x.shape) == 4 else None


def per_channel(shape: Sequence[int], x: Value) -> int | None:
    """Tell how many numbers a constant has that differs from channel to channel only; 1 for a single number, None for another."""
    rank = len(x.shape) if x.shape is not None else 4 if x.layout in ("nchw", "nhwc") else 2
    if len(shape) > rank:
        return None
    full = (1,) * (rank - len(shape)) + tuple(shape)
    channel = x.axis("c")
    return math.prod(full) if channel is not None and all(n == 1 for axis, n in enumerate(full) if axis != channel) else None
