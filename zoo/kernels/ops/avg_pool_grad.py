"""The way back through average pooling whose windows lie side by side: each gradient is spread over its window, once."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._layout import DTYPES, empty_map, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
MOST_TAPS = 64


def reference(gradient: Tensor, *, size: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """Compute the gradient of average pooling's input, where the stride is the kernel and nothing is padded.

    Args:
        gradient: of the output, a map (N, C, OH, OW), maybe a channel slice.
        size: (H, W) of the input in pixels: pixels behind the last window get zeros, a last window may reach beyond the image.
        kernel: (KH, KW) of a window in pixels.

    Returns:
        Map (N, C, H, W) in the dtype of `gradient`: that over the pixels of the image under the window, divided in float32 (float64 for
        float64) and rounded once.
    """
    (oh, ow), (h, w), (kh, kw) = gradient.shape[2:], size, kernel
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    down = torch.tensor([min(kh, h - row * kh) for row in range(oh)], device=wide.device)[:, None]
    across = torch.tensor([min(kw, w - column * kw) for column in range(ow)], device=wide.device)
    shared = (wide / (down * across)).repeat_interleave(kh, 2).repeat_interleave(kw, 3)
    out = wide.new_zeros(*gradient.shape[:2], max(h, oh * kh), max(w, ow * kw))
    out[:, :, : oh * kh, : ow * kw] = shared
    return out[:, :, :h, :w].to(gradient.dtype)


@of(reference)
def rival(gradient, size, kernel) -> Tensor:
    """Compute the same by PyTorch's own kernel, for a comparison of times."""
    x = empty_map(*gradient.shape[:2], *size, like=gradient)
    ceil = any(out * k > s for out, k, s in zip(gradient.shape[2:], kernel, size, strict=True))
    return torch.ops.aten.avg_pool2d_backward(gradient, x, [*kernel], [*kernel], [0, 0], ceil, True, None)


@of(reference)
def supports(gradient, size, kernel) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if gradient.dim() != 4 or gradient.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if min(kernel) < 1 or kernel[0] * kernel[1] > MOST_TAPS:
        return f"windows of none or of more than {MOST_TAPS} taps"
    if any(not s // k <= out <= -(-s // k) for out, k, s in zip(gradient.shape[2:], kernel, size, strict=True)):
        return "windows that don't lie side by side"
    return unreadable(gradient, small=gradient.shape[0] * gradient.shape[1] * size[0] * size[1] < 2**31 - 2**22)


@triton.jit
def _backward(
    gradient, out, lanes, groups, across, down, height, width, out_height, out_width, g_step, out_step,
    KH: tl.constexpr, KW: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A lane writes the KH x KW pixels of a window, zeros where none begins."""
    begin(OVERLAP)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    block = g // groups
    c = (g - block * groups) * V + tl.arange(0, V)[None, :]
    image = block // (across * down)
    a = (block // across) % down
    b = block % across
    alive = g < lanes
    there = alive & (a < out_height) & (b < out_width)
    pixel = (image * out_height + a) * out_width + b
    value = tl.load(gradient + (pixel * (g_step * V) + c), mask=there, other=0.0).to(tl.float32)
    pixels = tl.minimum(KH, height - a * KH) * tl.minimum(KW, width - b * KW)
    value = (value / pixels.to(tl.float32)).to(out.dtype.element_ty)
    for tap in tl.static_range(KH * KW):
        row = a * KH + tap // KW
        col = b * KW + tap % KW
        inside = alive & (row < height) & (col < width)
        tl.store(out + (((image * height + row) * width + col) * (out_step * V) + c), value, mask=inside)


@of(reference)
def configs(**_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: vectors a program handles, and its warps."""
    return named("block warps", ((128, 4), (256, 4), (64, 2), (256, 8), (512, 8), (64, 1)))


@launches(reference, configs)
def launch(gradient, size, kernel, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `reference`. `out` may be a channel slice."""
    (n, c, oh, ow), (h, w), (kh, kw) = gradient.shape, size, kernel
    out = empty_map(n, c, h, w, gradient) if out is None else out
    if out.numel() == 0:
        return out
    v, groups, *steps = units(min(8, 16 // gradient.element_size()), gradient, out)
    down, across = triton.cdiv(h, kh), triton.cdiv(w, kw)
    lanes = n * down * across * groups
    _backward[(triton.cdiv(lanes, config["block"]),)](
        gradient, out, lanes, groups, across, down, h, w, oh, ow, *steps, KH=kh, KW=kw, V=v, BLOCK=config["block"],
        num_warps=config["warps"], **overlap(gradient),
    )  # fmt: skip
    return out


@of(reference)
def cost(gradient, size, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    written = gradient.shape[0] * gradient.shape[1] * size[0] * size[1]
    return gradient.numel(), (gradient.numel() + written) * gradient.element_size()


CASES: list[dict[str, Any]] = [
    {"name": "transition", "shape": (2, 40, 3, 2), "size": (6, 4), "kernel": (2, 2), "wide": 64},
    {"name": "pixels left over", "shape": (1, 16, 3, 2), "size": (7, 5), "kernel": (2, 2)},
    {"name": "ceil", "shape": (2, 7, 4, 3), "size": (7, 5), "kernel": (2, 2)},
    {"name": "uneven", "shape": (1, 24, 2, 2), "size": (5, 8), "kernel": (2, 3)},
    {"name": "whole image", "shape": (3, 16, 1, 1), "size": (4, 4), "kernel": (4, 4)},
    {"name": "window of one", "shape": (1, 8, 3, 5), "size": (3, 5), "kernel": (1, 1)},
    {"name": "batch 0", "shape": (0, 16, 2, 2), "size": (4, 4), "kernel": (2, 2)},
]
"""`shape` (N, C, OH, OW) of the gradient; `wide`: it is a slice of a map this wide, from channel 8 on."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{n}x{c}@{px}, 2x2", "shape": (n, c, px // 2, px // 2), "size": (px, px), "kernel": (2, 2)}
    for n in (256, 32)
    for c, px in ((128, 56), (256, 28), (512, 14))
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    return {"gradient": Drawing(*how).map(case["shape"], case.get("wide", 0)), "size": case["size"], "kernel": case["kernel"]}
