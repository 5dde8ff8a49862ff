"""Max and average pooling over windows, with an affine and an activation of the input on the way in, and of averages, as MetaFormers
(Yu et al. 2022) mix pixels, the way out: the pixel itself is subtracted, channels are scaled, and a map is added.

A lane owns a vector of channels and slides down `rows` output pixels: input rows that the next window covers again are combined
once and carried along, where the kernel exceeds the stride by one, or is 3 at stride 1.
"""

# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._activation import ACTIVATIONS, activate, affine
from zoo.kernels.ops._arguments import Drawing, launches, of
from zoo.kernels.ops._layout import DTYPES, NARROW, empty_map, per_channel, units, unreadable, vector_width
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
LARGEST_KERNEL = 16


def pooled_size(size: int, kernel: int, stride: int, before: int, after: int, ceil_mode: bool) -> int:
    """Return the output pixels along an axis by PyTorch's rule: rounded up, a last window that begins in the padding behind is dropped."""
    count = (size + before + after - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + before else count


def _out(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int] = (0, 0, 0, 0), ceil_mode: bool = False, **_: Any
) -> tuple[int, int]:
    (_, _, h, w), (top, bottom, left, right) = x.shape, padding
    return pooled_size(h, kernel[0], stride[0], top, bottom, ceil_mode), pooled_size(w, kernel[1], stride[1], left, right, ceil_mode)


def reference(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    less: Tensor | None = None,
    factor: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    pre_act: str = "none",
) -> Tensor:
    """Pool ``pre_act(x * scale + shift)`` over windows as PyTorch does; padding may differ from side to side.

    What comes out is ``(pooled - less) * factor + residual``, every part optional.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        scale: float32 (C,), a factor for each channel.
        shift: float32 (C,), added for each channel.
        less: map of the shape of the result, subtracted from averages.
        factor: float32 (C,), what is left is multiplied by; with `less`.
        residual: map of the shape of the result, added at the end; with `less`.
        kind: "max" (padding counts as -inf, NaN wins) or "avg".
        kernel: (height, width) of a window in pixels.
        stride: (down, right), pixels from window to window.
        padding: (top, bottom, left, right), pixels, each less than the kernel.
        ceil_mode: also keep a last window that reaches beyond the padding, if it begins within the image or the padding before it.
        count_include_pad: averages divide by the pixels of image and padding under the window, else by those of the image.
        pre_act: activation of the input, a name of `ACTIVATIONS`; it doesn't see the padding.

    Returns:
        Map (N, C, OH, OW) in the dtype of `x`. Computed in float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: `kind` is neither "max" nor "avg".
    """
    if kind not in ("max", "avg"):
        raise ValueError(f'kind is "max" or "avg", not {kind!r}')
    top, bottom, left, right = padding
    oh, ow = _out(x, kernel, stride, padding, ceil_mode)
    exact = torch.float32 if x.dtype in NARROW else torch.promote_types(x.dtype, torch.float32)
    y = ACTIVATIONS[pre_act](affine(x.to(exact), scale, shift))
    # Pixels beyond the padding that the last windows reach, or, below 0, that no window reaches.
    below = (oh - 1) * stride[0] + kernel[0] - x.shape[2] - top - bottom
    beside = (ow - 1) * stride[1] + kernel[1] - x.shape[3] - left - right
    if kind == "max":
        y = F.pad(y, (left, right + beside, top, bottom + below), value=float("-inf"))
        return F.max_pool2d(y, kernel, stride).to(x.dtype)
    total = F.avg_pool2d(F.pad(y, (left, right + beside, top, bottom + below)), kernel, stride, divisor_override=1)
    counted = y.new_ones(1, 1, *x.shape[2:])
    counted = F.pad(F.pad(counted, (left, right, top, bottom), value=float(count_include_pad)), (0, beside, 0, below))
    y = total / F.avg_pool2d(counted, kernel, stride, divisor_override=1)
    if less is not None:
        y = y - less.to(exact)
    if factor is not None:
        y = y * factor.to(exact)[:, None, None]
    return (y if residual is None else y + residual.to(exact)).to(x.dtype)


@of(reference)
def supports(x, scale, shift, less, factor, residual, kind, kernel, stride, padding, ceil_mode, pre_act, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    narrow = x.dtype in NARROW and kind == "max" and scale is None and shift is None and pre_act == "none"
    if x.dim() != 4 or (x.dtype not in DTYPES and not narrow):
        return "not a map of float32, bfloat16 or float16, nor a maximum of 8 bits"
    if kind not in ("max", "avg") or pre_act not in ACTIVATIONS:
        return "unknown kind or activation"
    if not per_channel(x, scale, shift, factor):
        return "scale, shift and factor are not float32, one for each channel"
    if (less is None and (factor is not None or residual is not None)) or (less is not None and kind != "avg"):
        return "a factor or a residual of what nothing was subtracted from, or a maximum that something is"
    if not 1 <= min(kernel) <= max(kernel) <= LARGEST_KERNEL or min(stride) < 1:
        return f"windows are not 1 to {LARGEST_KERNEL} pixels wide and high"
    if min(padding) < 0 or max(padding[:2]) >= max(kernel[0], 2) or max(padding[2:]) >= max(kernel[1], 2):
        return "windows that lie in the padding alone"
    if min(_out(x, kernel, stride, padding, ceil_mode)) < 1:
        return "the window is larger than the image"
    shape = (*x.shape[:2], *_out(x, kernel, stride, padding, ceil_mode))
    if any(more is not None and (tuple(more.shape) != shape or more.dtype not in DTYPES) for more in (less, residual)):
        return "what is subtracted or added is no map of the result's shape"
    return unreadable(x, less, residual)


@triton.jit
def _join(a, b, MAX: tl.constexpr):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL) if MAX else a + b


@triton.jit
def _across(x, at, row, col, height, width, step, alive, scale, shift, KW: tl.constexpr, V: tl.constexpr, HOW: tl.constexpr):
    """Combine the KW pixels of one input row from column `col` on; `at` is the image's first pixel's vector, `step` vectors a pixel."""
    MAX: tl.constexpr = HOW[0]
    PRE: tl.constexpr = HOW[1]
    INSIDE: tl.constexpr = HOW[2]
    CHANGED: tl.constexpr = HOW[3]
    nothing: tl.constexpr = float("-inf") if MAX else 0.0
    # What is changed on the way in starts from 0, which no activation turns into NaN, and becomes nothing afterwards.
    unseen: tl.constexpr = 0.0 if CHANGED else nothing
    lanes = tl.arange(0, V)[None, :]
    total = nothing
    for k in tl.static_range(KW):
        seen = alive if INSIDE else alive & (row >= 0) & (row < height) & (col + k >= 0) & (col + k < width)
        y = tl.load(x + ((at + (row * width + col + k) * step) * V + lanes), mask=seen, other=unseen).to(tl.float32)
        if scale is not None:
            y = y * scale
        if shift is not None:
            y = y + shift
        y = activate(y, PRE)
        if CHANGED and not INSIDE:
            y = tl.where(seen, y, nothing)
        total = y if k == 0 else _join(total, y, MAX)
    return total


@triton.jit
def _pool(
    x,
    scale,
    shift,
    less,
    factor,
    residual,
    out,
    lanes,
    groups_per_pixel,
    height,
    width,
    out_height,
    out_width,
    x_step,
    out_step,
    less_step,
    residual_step,
    WINDOW: tl.constexpr,
    HOW: tl.constexpr,
    INCLUDE: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    KH: tl.constexpr = WINDOW[0]
    KW: tl.constexpr = WINDOW[1]
    SH: tl.constexpr = WINDOW[2]
    MAX: tl.constexpr = HOW[0]
    INSIDE: tl.constexpr = HOW[2]
    # The overlap of windows that is carried: both rows of a 3 at stride 1, one row where only one is shared.
    CARRY: tl.constexpr = 0 if ROWS == 1 else 1 if KH == SH + 1 else 2 if KH == 3 and SH == 1 else 0
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    pixel = g // groups_per_pixel
    group = g - pixel * groups_per_pixel
    strip = pixel // out_width
    ow = pixel - strip * out_width
    strips = (out_height + ROWS - 1) // ROWS
    image = strip // strips
    first = (strip - image * strips) * ROWS
    c = group * V + tl.arange(0, V)[None, :]
    alive = g < lanes
    if scale is not None:
        scale = tl.load(scale + c, mask=alive)
    if shift is not None:
        shift = tl.load(shift + c, mask=alive)
    if factor is not None:
        factor = tl.load(factor + c, mask=alive)
    lane = tl.arange(0, V)[None, :]
    at = image * (height * width * x_step) + group
    begins = image * (out_height * out_width) + ow
    col = ow * WINDOW[3] - WINDOW[6]
    across = tl.minimum(col + KW, width + WINDOW[7]) - col if INCLUDE else tl.minimum(col + KW, width) - tl.maximum(col, 0)
    row = first * SH - WINDOW[4]
    if CARRY > 0:
        a = _across(x, at, row, col, height, width, x_step, alive, scale, shift, KW, V, HOW)
    if CARRY > 1:
        b = _across(x, at, row + 1, col, height, width, x_step, alive & (row + 1 < height), scale, shift, KW, V, HOW)
    for r in tl.static_range(ROWS):
        live = alive if ROWS == 1 else alive & (first + r < out_height)
        row = (first + r) * SH - WINDOW[4]
        if CARRY == 2:
            y = _join(a, b, MAX)
            a = b
            b = _across(x, at, row + 2, col, height, width, x_step, live, scale, shift, KW, V, HOW)
            y = _join(y, b, MAX)
        else:
            y = a if CARRY == 1 else _across(x, at, row, col, height, width, x_step, live, scale, shift, KW, V, HOW)
            for k in tl.static_range(1, KH):
                a = _across(x, at, row + k, col, height, width, x_step, live, scale, shift, KW, V, HOW)
                y = _join(y, a, MAX)
        if not MAX:
            if INSIDE:
                y = y * (1.0 / (KH * KW))
            else:
                down = tl.minimum(row + KH, height + WINDOW[5]) - row if INCLUDE else tl.minimum(row + KH, height) - tl.maximum(row, 0)
                y = y / tl.maximum(down * across, 1).to(tl.float32)
        place = begins + (first + r) * out_width
        if less is not None:
            y -= tl.load(less + ((place * less_step + group) * V + lane), mask=live, other=0.0).to(tl.float32)
        if factor is not None:
            y *= factor
        if residual is not None:
            y += tl.load(residual + ((place * residual_step + group) * V + lane), mask=live, other=0.0).to(tl.float32)
        tl.store(out + ((place * out_step + group) * V + lane), y.to(out.dtype.element_ty), mask=live)


@of(reference)
def configs(x, kernel, stride, padding, ceil_mode, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: vectors a program handles, output rows a lane handles, and warps."""
    vectors = x.shape[0] * math.prod(_out(x, kernel, stride, padding, ceil_mode)) * (x.shape[1] // vector_width(x.shape[1]))
    small = vectors < 132 * 1024
    if kernel[0] <= stride[0]:
        sizes = [(128, 1, 4), (64, 1, 2), (256, 1, 8)]
        if not small:
            sizes = [(256, 1, 4), (512, 1, 4), (128, 1, 4), (256, 1, 8), (256, 2, 4), (512, 1, 8)]
    elif small:
        sizes = [(128, 1, 4), (64, 1, 2), (128, 2, 4), (64, 2, 2), (64, 4, 2), (256, 1, 8)]
    else:
        sizes = [(128, 4, 4), (256, 4, 8), (256, 2, 4), (128, 8, 4), (256, 2, 8), (128, 2, 4), (256, 1, 4), (512, 1, 8)]
    return [{"block": block, "rows": rows, "warps": warps} for block, rows, warps in sizes]


@launches(reference, configs)
def launch(
    x,
    scale,
    shift,
    less,
    factor,
    residual,
    kind,
    kernel,
    stride,
    padding,
    ceil_mode,
    count_include_pad,
    pre_act,
    config,
    out: Tensor | None = None,
) -> Tensor:
    """Run the kernel; see `reference`. `out` may be a channel slice."""
    n, c, h, w = x.shape
    oh, ow = _out(x, kernel, stride, padding, ceil_mode)
    out = empty_map(n, c, oh, ow, x) if out is None else out
    if out.numel() == 0:
        return out
    v, groups, *steps = units(16 // x.element_size() if x.dtype in NARROW else 8, x, out, less, residual)
    lanes = n * triton.cdiv(oh, config["rows"]) * ow * groups
    inside = not any(padding) and (oh - 1) * stride[0] + kernel[0] <= h and (ow - 1) * stride[1] + kernel[1] <= w
    changed = scale is not None or shift is not None or pre_act != "none"
    _pool[(triton.cdiv(lanes, config["block"]),)](
        x, scale, shift, less, factor, residual, out, lanes, groups, h, w, oh, ow, *steps, WINDOW=(*kernel, *stride, *padding),
        HOW=(kind == "max", pre_act, inside, changed), INCLUDE=count_include_pad, V=v, ROWS=config["rows"], BLOCK=config["block"],
        num_warps=config["warps"], **overlap(x),
    )  # fmt: skip
    return out


@of(reference)
def cost(x, scale, shift, less, factor, residual, kernel, stride, padding, ceil_mode, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    pooled = x.shape[0] * x.shape[1] * math.prod(_out(x, kernel, stride, padding, ceil_mode))
    parts, more = (scale is not None) + (shift is not None), {id(part) for part in (less, residual) if part is not None}
    operations = pooled * (kernel[0] * kernel[1] + len(more) + (factor is not None)) + x.numel() * parts
    maps = x.numel() + pooled * (1 + len(more - {id(x)}))  # what is subtracted is most often what was pooled
    return operations, maps * x.element_size() + (parts + (factor is not None)) * 4 * x.shape[1]


def _case(name: str, shape: tuple[int, ...], kind: str, kernel: int, stride: int, pad: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "kind": kind, "kernel": (kernel,) * 2, "stride": (stride,) * 2, "padding": (pad,) * 4, **more}


# `wide`: x is a slice of a map this wide, beginning at channel 8; `affine`: scale and shift are given; `mixes`: of less (x itself where
# "itself" is among them), factor and residual.
CASES: list[dict[str, Any]] = [
    _case("stem", (2, 16, 9, 12), "max", 3, 2, 1),
    _case("stem, ceil", (1, 24, 7, 8), "max", 3, 2, ceil_mode=True),
    _case("vgg", (2, 8, 6, 7), "max", 2, 2),
    _case("branch", (1, 24, 7, 5), "max", 3, 1, 1, wide=40),
    _case("inception", (1, 16, 5, 7), "avg", 3, 1, 1),
    _case("padding not counted", (2, 12, 6, 5), "avg", 3, 1, 1, count_include_pad=False),
    _case("transition", (2, 40, 6, 4), "avg", 2, 2, affine=True, pre_act="relu", wide=64),
    _case("affine in padding", (1, 7, 5, 5), "max", 3, 2, 1, affine=True, pre_act="hardswish"),
    _case("average, ceil", (2, 5, 6, 7), "avg", 3, 2, 1, ceil_mode=True, affine=True, pre_act="sigmoid"),
    _case("one pixel", (3, 16, 1, 1), "max", 3, 2, 1),
    _case("window of one", (1, 8, 5, 4), "avg", 1, 2, pre_act="silu"),
    _case("whole image", (2, 16, 4, 4), "avg", 4, 1, pre_act="relu6"),
    {**_case("uneven", (1, 16, 6, 9), "avg", 2, 2, pre_act="gelu"), "kernel": (2, 3), "stride": (2, 1), "padding": (0, 1, 1, 2)},
    _case("mixer", (2, 16, 6, 7), "avg", 3, 1, 1, count_include_pad=False, mixes="less itself factor residual"),
    _case("mixer, a slice, another map", (1, 24, 5, 4), "avg", 3, 1, 1, wide=40, affine=True, pre_act="relu", mixes="less residual"),
    _case("difference of halves", (2, 5, 6, 4), "avg", 2, 2, mixes="less factor"),
    _case("batch 0", (0, 16, 8, 8), "max", 2, 2),
]
LARGE_CASES: list[dict[str, Any]] = [
    _case("resnet stem, batch 256", (256, 64, 112, 112), "max", 3, 2, 1),
    _case("vgg, batch 256", (256, 64, 224, 224), "max", 2, 2),
    _case("densenet transition 1, batch 256", (256, 256, 56, 56), "avg", 2, 2, affine=True, pre_act="relu"),
    _case("densenet transition 3, batch 256", (256, 1024, 14, 14), "avg", 2, 2, affine=True, pre_act="relu"),
    _case("densenet transition 2, batch 1", (1, 512, 28, 28), "avg", 2, 2, affine=True, pre_act="relu"),
    _case("googlenet branch, batch 256", (256, 480, 14, 14), "max", 3, 1, 1),
    _case("inception branch, batch 256", (256, 192, 35, 35), "avg", 3, 1, 1),
    _case("resnet stem, batch 1", (1, 64, 112, 112), "max", 3, 2, 1),
    _case("googlenet branch, batch 1", (1, 480, 14, 14), "max", 3, 1, 1),
    _case("poolformer stage 1, batch 64", (64, 64, 56, 56), "avg", 3, 1, 1, count_include_pad=False, mixes="less itself factor residual"),
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    args: dict[str, Any] = {"x": draw.map(case["shape"], case.get("wide", 0))}
    if case.get("affine"):
        args |= {part: draw.normal(case["shape"][1]) for part in ("scale", "shift")}
    args |= {key: value for key, value in case.items() if key not in ("name", "shape", "wide", "affine", "mixes")}
    mixes, x = case.get("mixes", "").split(), args["x"]
    made = (*x.shape[:2], *_out(**args))
    if "less" in mixes:
        args["less"] = x if "itself" in mixes else draw.map(made)
    if "factor" in mixes:
        args["factor"] = draw.normal(case["shape"][1])
    if "residual" in mixes:
        args["residual"] = draw.map(made)
    return args
