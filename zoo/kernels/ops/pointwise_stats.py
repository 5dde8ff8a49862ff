"""A 1x1 convolution that normalises and activates its input on the way in, and takes the statistics of its output on the way out."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._activation import ACTIVATIONS, SLOPES
from zoo.kernels.ops._arguments import Drawing, launches, named, of, partly
from zoo.kernels.ops._exchange import row_of
from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import DTYPES, empty_map, per_channel, units, unreadable
from zoo.kernels.ops._norm import join
from zoo.kernels.ops._overlap import followed_by_ours, overlap
from zoo.kernels.ops._pointwise_stats import forward_kernel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TILE = "BM BN BK warps stages blocks registers"
LOW = 1.07
"""Times what a pixel costs in a high tile that it costs in a low one (H200, 56 x 56 and 28 x 28 pixels of 256 images)."""
PACK: dict[str, Any] = {"weight": lambda weight: weight.flatten(1).contiguous()}


def normalised(x: Tensor, stats: Tensor | None, factor: Tensor | None, shift: Tensor | None, act: str) -> Tensor:
    """Return what the convolution sees of `x`, in float32 (float64 for float64), rounded to the dtype of `x` where it isn't `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if stats is None:
        return wide
    mean, inverse = stats[0].to(wide.dtype), stats[1].to(wide.dtype)
    slant = inverse if factor is None else inverse * factor.to(wide.dtype)
    z = (wide - mean[:, None, None]) * slant[:, None, None]
    z = ACTIVATIONS[act](z if shift is None else z + shift.to(wide.dtype)[:, None, None])
    return z.to(x.dtype).to(wide.dtype)


def reference(
    x: Tensor,
    weight: Tensor,
    stats: Tensor | None = None,
    factor: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    act: str = "none",
) -> tuple[Tensor, Tensor]:
    """Compute ``conv(act(norm(x)))`` and its statistics.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        weight: (K, C, 1, 1).
        stats: float32 (3, C), what `batch_norm_act` returns of `x`; None where the input is taken as it is, and without an activation.
        factor: the BatchNorm's weight (C,), or None for ones.
        shift: its bias (C,), or None for zeros.
        act: a name of `SLOPES`.

    Returns:
        The map (N, K, H, W) in the dtype of `x`, accumulated in float32; float32 (3, K) of its pixels: count, means and sums of squared
        deviations, those of the rounded map where nothing else is said.
    """
    z = normalised(x, stats, factor, shift, act)
    y = F.conv2d(z, weight.flatten(1)[:, :, None, None].to(z.dtype)).to(x.dtype)
    return y, row_of(y)[0] if y.numel() else z.new_zeros((3, weight.shape[0]))


@of(reference)
def rival(x, weight, stats, factor, shift, act) -> Any:
    """Compute the same by PyTorch's own operators, each a pass, for a comparison of times."""
    if stats is not None:
        x = ACTIVATIONS[act](F.batch_norm(x, stats[0], stats[1], factor, shift, False))
    y = F.conv2d(x, weight)
    return y, torch.batch_norm_stats(y, 1e-5) if y.is_cuda else y


@of(reference)
def supports(x, weight, stats, factor, shift, act) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not; the weight packed or not."""
    if x.dim() != 4 or x.dtype not in DTYPES or weight.dtype != x.dtype:
        return "no map and weight of one of float32, bfloat16 and float16"
    if weight.numel() != weight.shape[0] * x.shape[1]:
        return f"a weight {tuple(weight.shape)} is no 1x1 kernel over {x.shape[1]} channels"
    if act not in SLOPES or (stats is None and act != "none"):
        return f"activation {act}" if act not in SLOPES else "an activation without a BatchNorm"
    if stats is not None and (stats.shape != (3, x.shape[1]) or stats.dtype != torch.float32 or not stats.is_contiguous()):
        return "statistics are not three float32 for each channel"
    if not per_channel(x, factor, shift, dtypes=DTYPES):
        return "weight and bias of the BatchNorm are not one for each channel"
    wide = x.numel() // max(1, x.shape[1]) * weight.shape[0]
    return unreadable(x, small=max(wide, x.numel()) < 2**31 - 2**24)


def strange(gradient: Tensor, x: Tensor) -> str:
    """Return why kernels of the way back can't take a gradient beside the input `x`, "" where they can."""
    if gradient.dim() != 4 or gradient.dtype not in DTYPES or (gradient.shape[0], *gradient.shape[2:]) != (x.shape[0], *x.shape[2:]):
        return "a gradient of other pixels, or not of float32, bfloat16 or float16"
    return unreadable(gradient)


@of(reference)
def configs(x, weight, **_) -> list[dict[str, Any]]:
    """Return launch parameters, the best guess first: a tile's pixels, outputs and depth, warps, stages, programs, a thread's registers.

    Of half precision's tiles of 128 x 128 two programs fit, where a thread takes 128 registers; Triton 3.6 spills none, 3.9 a few. Lower
    tiles come first where their rounds leave fewer multiprocessors without work.
    """
    rows, outputs, inner = x.numel() // max(1, x.shape[1]), weight.shape[0], x.shape[1]
    if x.element_size() == 2:
        columns = 64 if outputs <= 64 else 128  # tensor cores multiply 64 rows of weights at a time
        deep = max(16, min(64, triton.next_power_of_2(inner)))
        all_of, across = max(16, triton.next_power_of_2(rows)), triton.cdiv(outputs, columns)
        high, low = min(128, all_of), min(64, all_of)
        tiles = [(high, columns, deep, 8, 3, 2, 128), (low, columns, deep, 4, 3, 3, 168)]
        wanted = sorted(tiles, key=lambda tile: _pixels(rows, tile[0], across, tile[5]) * (1.0 if tile[0] == high else LOW))
        wanted += [(high, columns, deep, 8, 4, 1, None), (low, columns, deep, 8, 3, 2, 128), (high, 64, deep, 8, 3, 2, 128)]
        wanted += [(high, columns, max(16, deep // 2), 8, 4, 2, 128)]
    else:
        bm, bn, bk = (max(16, min(most, triton.next_power_of_2(size))) for most, size in ((64, rows), (64, outputs), (16, inner)))
        wanted = [(bm, bn, bk, 8, 4, 2, None), (max(16, bm // 2), bn, bk, 4, 3, 3, None), (bm, max(16, bn // 2), bk, 8, 3, 3, None)]
        wanted += [(max(16, bm // 2), max(16, bn // 2), bk, 4, 4, 4, None), (bm, bn, bk, 8, 3, 2, None)]
    return named(TILE, wanted)


def _pixels(rows: int, height: int, across: int, programs: int) -> int:
    """Return how many pixels, those beyond the last counted, the busiest multiprocessor takes up, so many programs at once."""
    return triton.cdiv(triton.cdiv(rows, height) * across, programs * SMS) * programs * height


@launches(reference, configs, tuned=True)
def partial_product(x, weight, stats, factor, shift, act, config, out: Tensor) -> Tensor:
    """Write the map; return float32 (R, 3, K), the statistics of the programs' rows, for `_norm.join`."""
    rows, cout = x.numel() // x.shape[1], weight.shape[0]
    (v, cin_units, x_step), (vo, cout_units, out_step) = units(16, x), units(16, out)
    across = triton.cdiv(cout, config["BN"])
    parts = max(1, min(triton.cdiv(rows, config["BM"]), SMS * config["blocks"] // across))
    partials = torch.empty((parts, 3, cout), dtype=torch.float32, device=x.device)
    forward_kernel[(across, parts)](
        x, weight, stats, factor, shift, out, partials, rows, cin_units, cout_units, x_step, out_step, ACT=act, V=v, VO=vo,
        BM=config["BM"], BN=config["BN"], BK=config["BK"], WHOLE=rows % config["BM"] == 0, num_warps=config["warps"],
        num_stages=config["stages"], maxnreg=config["registers"], **overlap(x),
    )  # fmt: skip
    return partials


@partly(reference)
def launch(x, weight, out: tuple[Tensor, Tensor] | None = None, config: Any = None, **norm) -> tuple[Tensor, Tensor]:
    """Run the kernels; arguments as in `reference`, but the weight packed (K, C). The map of `out` may be a channel slice."""
    n, _, h, w = x.shape
    k = weight.shape[0]
    y, row = out or (empty_map(n, k, h, w, x), torch.empty((3, k), dtype=torch.float32, device=x.device))
    if x.numel() == 0:
        return y, row.zero_()
    with followed_by_ours(True):
        partials = partial_product(x, weight, out=y, config=config, **norm)
    join(partials, row, None, None, 0.0, 0.0, raw=True)
    return y, row


@of(reference)
def cost(x, weight, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); the weight packed or not."""
    pixels, cin, cout = x.numel() // max(1, x.shape[1]), x.shape[1], weight.shape[0]
    return 2 * pixels * cin * cout, x.element_size() * (pixels * (cin + cout) + cin * cout) + 12 * cout


CASES: list[dict[str, Any]] = [
    {"name": "plain", "shape": (2, 16, 5, 7), "outputs": 24},
    {"name": "norm, relu", "shape": (2, 32, 4, 5), "outputs": 16, "act": "relu"},
    {"name": "odd channels", "shape": (2, 7, 5, 5), "outputs": 9, "act": "relu6"},
    {"name": "slice", "shape": (1, 24, 5, 3), "outputs": 40, "act": "hardswish", "wide": 48},
    {"name": "1x1 image", "shape": (3, 40, 1, 1), "outputs": 8, "act": "silu"},
    {"name": "deep", "shape": (1, 144, 3, 3), "outputs": 16, "act": "relu6"},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "outputs": 8, "act": "relu"},
]
"""`shape` (N, C, H, W) of the input; `act`: a BatchNorm and this; `wide`: maps are slices of maps this wide."""

_REAL = ((96, 112, 16, "none"), (16, 112, 96, ""), (144, 56, 24, "relu6"), (24, 56, 144, ""), (576, 14, 96, "relu6"), (96, 14, 576, ""))
_REAL += ((64, 56, 256, "relu"), (256, 56, 64, ""), (512, 14, 2048, "relu"), (1024, 14, 256, ""), (256, 14, 1024, "relu"))
_REAL += ((160, 56, 128, "relu"), (512, 28, 128, "relu"), (896, 14, 128, "relu"))
LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{n}x{c}@{px} to {k} {act}".strip(), "shape": (n, c, px, px), "outputs": k, "act": act}
    for n in (256, 32)
    for c, px, k, act in _REAL
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, c, act = Drawing(*how), case["shape"][1], case.get("act", "")
    args: dict[str, Any] = {"x": draw.map(case["shape"], case.get("wide", 0))}
    args["weight"] = (draw.normal(case["outputs"], c, 1, 1) / c**0.5).to(draw.dtype)
    if act:
        args["stats"] = torch.stack([draw.normal(c), 0.5 + draw.normal(c).abs(), torch.zeros(c, device=draw.device)])
        args |= {"factor": 1 + 0.3 * draw.normal(c), "shift": draw.normal(c), "act": act}
    return args


def gradient_of(case: dict[str, Any], *how: Any) -> Tensor:
    """Return a gradient of a case's output, a slice where its input is one."""
    (n, _, h, w), outputs = case["shape"], case["outputs"]
    return Drawing(*how).map((n, outputs, h, w), case.get("wide", 0) and outputs + 16)
