"""Layers that slide a window over a map, in float64 and by their definitions: convolutions of both conventions, and pools.

The fast path gathers patches and multiplies matrices; `definition` computes one channel with scipy.signal, which the executor
compares with the fast path in every layer of every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np

from weights.errors import LimitExceeded

Pads = tuple[int, int, int, int]
Pair = tuple[int, int]

PATCH_BYTES = 32 * 2**20
MAX_NUMBERS = 2**28
"""Of one map: 2 GiB. No network needs it, and a damaged file may ask for it."""


def pair(value: Any, default: int = 1) -> Pair:
    """Read (h, w), one number for both, or nothing."""
    if value is None:
        return default, default
    if isinstance(value, Integral):  # NumPy's are
        return int(value), int(value)
    height, width = value
    return int(height), int(width)


def fits(*sizes: int) -> None:
    """Raise LimitExceeded when a map of these sizes is larger than any that a network has."""
    if math.prod(max(int(size), 0) for size in sizes) > MAX_NUMBERS:
        raise LimitExceeded(f"a map of {' x '.join(map(str, sizes))} numbers is larger than any network's")


def resolve(pads: Any, size: Pair, kernel: Pair, stride: Pair, dilation: Pair = (1, 1)) -> Pads:
    """Turn "same_upper", "same_lower", "valid" or numbers into (top, left, bottom, right), for a map of `size`.

    SAME is TensorFlow's: as few pixels as give ceil(size / stride) outputs, the odd one behind ("upper") or in front ("lower").
    """
    if pads is None or pads == "valid":
        return 0, 0, 0, 0
    if isinstance(pads, str):
        if pads not in ("same_upper", "same_lower"):
            raise ValueError(f'pads are four numbers, "same_upper", "same_lower" or "valid", not {pads!r}')
        before: list[int] = []
        after: list[int] = []
        for axis in (0, 1):
            reach = (kernel[axis] - 1) * dilation[axis] + 1
            total = max((-(-size[axis] // stride[axis]) - 1) * stride[axis] + reach - size[axis], 0)
            small, large = total // 2, total - total // 2
            before.append(small if pads == "same_upper" else large)
            after.append(large if pads == "same_upper" else small)
        return before[0], before[1], after[0], after[1]
    top, left, bottom, right = pads
    return int(top), int(left), int(bottom), int(right)


def pad(x: np.ndarray, pads: Pads, value: float = 0.0) -> np.ndarray:
    """Pad the pixels of (B, C, H, W)."""
    top, left, bottom, right = pads
    if min(pads) < 0:
        raise ValueError(f"pads are no negative numbers, got {pads}")
    fits(*x.shape[:2], x.shape[2] + top + bottom, x.shape[3] + left + right)
    return np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=value) if any(pads) else x


def windows(x: np.ndarray, kernel: Pair, stride: Pair, dilation: Pair = (1, 1)) -> np.ndarray:
    """View (B, C, H, W) as (B, C, H', W', kh, kw): every window that fits."""
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    if min(*kernel, *stride, *dilation) < 1 or x.shape[2] < reach[0] or x.shape[3] < reach[1]:
        raise ValueError(f"a kernel of {kernel}, stride {stride}, dilation {dilation} does not fit a padded map of {x.shape[2:]}")
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(2, 3))  # type: ignore[call-overload]
    return view[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def convolve(x: np.ndarray, kernel: np.ndarray, stride: Pair, dilation: Pair, groups: int, backwards: bool) -> np.ndarray:
    """Slide a kernel over a padded map.

    Args:
        x: (B, C, H, W), padded.
        kernel: (O, C / groups, h, w).
        stride, dilation: (h, w).
        groups: blocks of channels that don't see each other.
        backwards: true convolution: the taps are read from the last to the first.
    """
    outs, ins, height, width = kernel.shape
    if x.shape[1] != ins * groups or outs % groups:
        raise ValueError(f"a kernel of {kernel.shape} in {groups} groups does not fit a map of {x.shape[1]} channels")
    view = windows(x, (height, width), stride, dilation)
    if backwards:
        view = view[..., ::-1, ::-1]
    batch, _, rows, columns = view.shape[:4]
    fits(batch, outs, rows, columns)
    out = np.zeros((batch, outs, rows, columns))
    if ins == 1:  # depthwise: nothing to multiply matrices for
        split = out.reshape(batch, groups, outs // groups, rows, columns)
        taps = kernel.reshape(groups, outs // groups, height, width)
        for i in range(height):
            for j in range(width):
                split += taps[None, :, :, i, j, None, None] * view[:, :, None, :, :, i, j]
        return out
    matrix = kernel.reshape(groups, outs // groups, -1)
    step = max(1, PATCH_BYTES // (8 * ins * groups * height * width * columns))
    for image in range(batch):
        for top in range(0, rows, step):
            part = view[image, :, top : top + step]
            patches = part.transpose(0, 3, 4, 1, 2).reshape(groups, ins * height * width, -1)
            out[image, :, top : top + step] = (matrix @ patches).reshape(outs, -1, columns)
    return out


def spread(x: np.ndarray, kernel: np.ndarray, stride: Pair, dilation: Pair, groups: int, backwards: bool) -> np.ndarray:
    """Do the transposed convolution, all of it: every input pixel lays the kernel, times itself, on the output.

    Args:
        x: (B, C, H, W).
        kernel: (C, O / groups, h, w).
        stride, dilation: (h, w), of the output.
        groups: blocks of channels that don't see each other.
        backwards: the transpose of a true convolution, which lays the kernel turned round.
    """
    ins, outs, height, width = kernel.shape
    batch, channels, rows, columns = x.shape
    if channels != ins or ins % groups:
        raise ValueError(f"a transposed kernel of {kernel.shape} in {groups} groups does not fit a map of {channels} channels")
    size = tuple((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip((rows, columns), stride, (height, width), dilation, strict=True))
    fits(batch, outs * groups, *size)
    out = np.zeros((batch, groups, outs, *size))
    taps = kernel.reshape(groups, ins // groups, outs, height, width)
    flat = x.reshape(batch, groups, ins // groups, rows * columns)
    for i in range(height):
        for j in range(width):
            laid = (taps[..., i, j].transpose(0, 2, 1) @ flat).reshape(batch, groups, outs, rows, columns)
            top = ((height - 1 - i) if backwards else i) * dilation[0]
            left = ((width - 1 - j) if backwards else j) * dilation[1]
            out[..., top : top + (rows - 1) * stride[0] + 1 : stride[0], left : left + (columns - 1) * stride[1] + 1 : stride[1]] += laid
    return out.reshape(batch, groups * outs, *size)


def definition(x: np.ndarray, kernel: np.ndarray, stride: Pair, dilation: Pair, backwards: bool, transposed: bool = False) -> np.ndarray:
    """Compute one output channel of one image as scipy.signal defines it.

    Args:
        x: (C, H, W), the input channels that this output channel sees, padded.
        kernel: (C, h, w).
        stride, dilation: (h, w).
        backwards: true convolution, scipy.signal.convolve; else scipy.signal.correlate2d.
        transposed: the transpose of the former.
    """
    from convert._guard import need

    signal = need("scipy.signal", "scipy")
    spaced = _with_zeros(kernel, dilation)
    if transposed:  # its definition: zeros between the pixels, then the other operation, to the full size
        x, backwards = _with_zeros(x, stride), not backwards
    mode = "full" if transposed else "valid"
    total = 0.0
    for plane, taps in zip(x, spaced, strict=True):
        total = total + (signal.convolve(plane, taps, mode, method="direct") if backwards else signal.correlate2d(plane, taps, mode))
    full = np.asarray(total)
    return full if transposed else full[:: stride[0], :: stride[1]]


def _with_zeros(maps: np.ndarray, step: Pair) -> np.ndarray:
    channels, height, width = maps.shape
    out = np.zeros((channels, (height - 1) * step[0] + 1, (width - 1) * step[1] + 1))
    out[:, :: step[0], :: step[1]] = maps
    return out


def pool(x: np.ndarray, attrs: Mapping[str, Any], average: bool) -> np.ndarray:
    """Pool (B, C, H, W) as `convert.graph.OPS` says.

    "ceil" keeps a last window that is cut off by the border, provided that it starts inside the map or the padding in front, as
    PyTorch, ONNX and Caffe all do ("caffe" is the same). An average counts no padding ("none"), or the padding that was asked for,
    and never the pixels that rounding up adds ("all", "caffe").
    """
    kernel = pair(attrs["kernel"])
    stride = pair(attrs.get("stride"))
    dilation = pair(attrs.get("dilation"))
    size: Pair = (x.shape[2], x.shape[3])
    top, left, bottom, right = resolve(attrs.get("pads"), size, kernel, stride, dilation)
    rounding, counted = attrs.get("rounding", "floor"), attrs.get("count_pad", "none")
    if rounding not in ("floor", "ceil", "caffe") or counted not in ("none", "all", "caffe") or min(stride) < 1:
        raise ValueError(f"no pool has rounding {rounding!r}, count_pad {counted!r} and stride {stride}")
    extra = [0, 0]
    if rounding != "floor":
        for axis, (before, after) in enumerate(((top, bottom), (left, right))):
            room = size[axis] + before + after - ((kernel[axis] - 1) * dilation[axis] + 1)
            steps = -(-room // stride[axis])
            if steps * stride[axis] >= size[axis] + before:
                steps -= 1
            extra[axis] = max(steps * stride[axis] - room, 0)
    padded: Pads = (top, left, bottom + extra[0], right + extra[1])
    view = windows(pad(x, padded, 0.0 if average else -np.inf), kernel, stride, dilation)
    if not average:
        out = np.full(view.shape[:4], -np.inf)
        for i in range(kernel[0]):
            for j in range(kernel[1]):
                np.maximum(out, view[..., i, j], out=out)
        return out
    total = sum(view[..., i, j] for i in range(kernel[0]) for j in range(kernel[1]))
    ones = np.ones((1, 1, *size))
    inside = pad(ones, padded) if counted == "none" else pad(pad(ones, (top, left, bottom, right), 1.0), (0, 0, extra[0], extra[1]))
    return np.asarray(total) / windows(inside, kernel, stride, dilation).sum((-1, -2))
